"""Check that boxes cover a tensor exactly once, and choose which replica publishes a tensor.

Both ends of a transfer rely on the check. A missing element would be served from the version
before; an element with two sources would depend on which of them was written last.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import islice
from zlib import crc32

from rollway.errors import UsageError
from rollway.weights.layout import Box, Shape


def publishing_replica(name: str, replicas: int) -> int:
    """Return which replica of a tensor publishes it.

    All ranks get the same answer without asking each other, and tensors are spread over the
    replicas."""
    return crc32(name.encode()) % replicas


def check_covered(name: str, shape: Shape, boxes: Iterable[Box]) -> None:
    """Raise `UsageError` unless the boxes cover a tensor of this shape exactly once."""
    fault = _find_fault(shape, tuple(boxes))
    if fault:
        raise UsageError(f"{name} {fault[0]}", fault[1])


# Without the tensor's name: the layers of a model are sharded alike, so most calls are repeats.
@lru_cache(maxsize=65536)
def _find_fault(shape: Shape, boxes: tuple[Box, ...]) -> tuple[str, str] | None:
    """Return the fault and its fix, or None."""
    whole = Box.whole(shape)
    for box in boxes:
        if len(box.start) != len(shape) or (shape and box.intersect(whole) != box):
            return (
                f"has the shape {list(shape)}; {_show(box)} is outside of it.",
                "Check the shapes and positions that the ranks report.",
            )
    twice = find_overlap(boxes)
    if twice:
        return (
            f"is claimed twice: {_show(twice[0])} and {_show(twice[1])}.",
            "Check the names and positions: two tensors have this name, or two ranks have the "
            "same position.",
        )
    covered, expected = sum(box.elements for box in boxes), math.prod(shape)
    if covered != expected:
        return (
            f"is not whole: {covered} of its {expected} elements have a source.",
            "Include every rank and every tensor of the trainer.",
        )
    return None


def find_overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Return the first two boxes that have an element in common."""
    if len(boxes) < 2:
        return None
    if not boxes[0].start:
        return boxes[0], boxes[1]
    # Sweep along the axis on which the boxes overlap least. Along another axis, each column of a
    # matrix would be compared with all other columns: quadratic, which a hostile sidecar could use.
    axis = min(range(len(boxes[0].start)), key=lambda a: _crowding(boxes, a))
    ordered = sorted(boxes, key=lambda box: (box.start[axis], box.start))
    for i, box in enumerate(ordered):
        for other in islice(ordered, i + 1, None):
            if other.start[axis] >= box.stop[axis]:
                break
            if box.intersect(other):
                return box, other
    return None


def _crowding(boxes: Sequence[Box], axis: int) -> float:
    """Return how many boxes share a coordinate of an axis, on average."""
    first = min(box.start[axis] for box in boxes)
    last = max(box.stop[axis] for box in boxes)
    return sum(box.stop[axis] - box.start[axis] for box in boxes) / max(1, last - first)


def _show(box: Box) -> str:
    return "[" + ", ".join(f"{a}:{b}" for a, b in zip(box.start, box.stop, strict=True)) + "]"
