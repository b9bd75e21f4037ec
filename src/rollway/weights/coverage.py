"""Whether boxes make up a whole tensor: every element once, none twice. And who tells a replica.

Both ends of a transfer rely on it: what is missing would be served from the version before, and
what two sources claim would depend on who came last.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import islice
from zlib import crc32

from rollway.errors import UsageError
from rollway.weights.layout import Box, Shape


def owner(name: str, replicas: int) -> int:
    """Which of the replicas of a tensor publishes it: spread out, and the same on every rank."""
    return crc32(name.encode()) % replicas


def check_covered(name: str, shape: Shape, boxes: Iterable[Box]) -> None:
    """Raise unless the boxes cover a tensor of this shape exactly once."""
    fault = _fault(shape, tuple(boxes))
    if fault:
        raise UsageError(f"{name} {fault[0]}", fault[1])


@lru_cache(maxsize=65536)
def _fault(shape: Shape, boxes: tuple[Box, ...]) -> tuple[str, str] | None:
    """What is wrong, and a hint; without names, because many tensors are cut alike."""
    whole = Box.whole(shape)
    for box in boxes:
        if len(box.start) != len(shape) or (shape and box.cut(whole) != box):
            return f"has the shape {list(shape)}; {_words(box)} lies outside.", ""
    twice = _overlap(boxes)
    if twice:
        return (
            f"is claimed twice: {_words(twice[0])} and {_words(twice[1])}.",
            "Two tensors are mapped to it, or two ranks say that they are at the same position.",
        )
    found, wanted = sum(box.elements for box in boxes), math.prod(shape)
    if found != wanted:
        return (
            f"is not whole: {found} of its {wanted} elements have a source.",
            "A rank or a tensor is missing.",
        )
    return None


def _overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """The first two boxes that have something in common.

    They are compared along the axis on which they overlap least: along another one, each of the
    columns of a matrix would be compared with all others."""
    if len(boxes) < 2:
        return None
    if not boxes[0].start:
        return boxes[0], boxes[1]
    axis = min(range(len(boxes[0].start)), key=lambda a: _crowding(boxes, a))
    ordered = sorted(boxes, key=lambda box: (box.start[axis], box.start))
    for i, box in enumerate(ordered):
        for other in islice(ordered, i + 1, None):
            if other.start[axis] >= box.stop[axis]:
                break
            if box.cut(other):
                return box, other
    return None


def _crowding(boxes: Sequence[Box], axis: int) -> float:
    """How many boxes lie at one place of an axis, on average."""
    first = min(box.start[axis] for box in boxes)
    last = max(box.stop[axis] for box in boxes)
    return sum(box.stop[axis] - box.start[axis] for box in boxes) / max(1, last - first)


def _words(box: Box) -> str:
    return "[" + ", ".join(f"{a}:{b}" for a, b in zip(box.start, box.stop, strict=True)) + "]"
