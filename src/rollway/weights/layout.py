"""Describe where the elements of a sharded model are stored.

A `Shard` is the part of one of its own tensors that a trainer's rank holds. A `Piece` is a block of
a Hugging Face tensor that is stored in it. Every layout that a trainer can have (sharded, fused,
interleaved, padded) is a list of pieces, so to divide and to join tensors is to intersect boxes.

Both ends of a transfer check that boxes cover a tensor exactly once. A missing element would be
served from the version before; an element with two sources would depend on which of them was
written last. This module does not import torch: a planner may run on a machine without a trainer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache
from itertools import islice
from zlib import crc32

from rollway.errors import UsageError

ELEMENT_BYTES = {
    **{"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2},
    **{"U16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "BOOL": 1},
}
"""Keys are the dtype names of safetensors files."""

Shape = tuple[int, ...]
# Names of vLLM's fused kernels and of their scales: weights that a trainer has quantised.
_KERNEL_NAMES = re.compile(r"(w13_weight|w2_weight|weight_scale(_inv)?|_scale_inv)$")


def is_kernel_layout(name: str, dtype: str) -> bool:
    """Return whether a tensor is quantised, or laid out for a kernel. The engine makes its own
    scales and layouts, so it would be quantised twice."""
    return bool(_KERNEL_NAMES.search(name)) or dtype.startswith("F8")


class Role(StrEnum):
    """How a trainer's tensor is sharded over its ranks, and which tensors are fused in it."""

    QKV_COLUMN = "qkv_column"
    GATED_MLP_COLUMN = "gated_mlp_column"
    COLUMN = "column"
    ROW = "row"
    VOCAB_PARALLEL = "vocab_parallel"
    REPLICATED = "replicated"
    EXPERT_COLUMN = "expert_column"
    EXPERT_ROW = "expert_row"


@dataclass(frozen=True, slots=True)
class Box:
    """A block of a tensor: from `start` up to (not including) `stop`, in every dimension."""

    start: Shape
    stop: Shape

    @classmethod
    def whole(cls, shape: Shape) -> Box:
        return cls((0,) * len(shape), shape)

    @property
    def shape(self) -> Shape:
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index that selects this box from a tensor or an array."""
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """Return the intersection with `other`, or None if it is empty."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(start, stop) if all(a < b for a, b in zip(start, stop, strict=True)) else None

    def narrow(self, axis: int, start: int, stop: int) -> Box:
        """Return this box with other bounds on one axis."""
        return Box(
            (*self.start[:axis], start, *self.start[axis + 1 :]),
            (*self.stop[:axis], stop, *self.stop[axis + 1 :]),
        )

    def shift(self, by: Shape) -> Box:
        return Box(
            tuple(a + d for a, d in zip(self.start, by, strict=True)),
            tuple(b + d for b, d in zip(self.stop, by, strict=True)),
        )

    def relative_to(self, origin: Shape) -> Box:
        """Return this box in coordinates that begin at `origin`."""
        return self.shift(tuple(-a for a in origin))


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a tensor that one rank holds: `box`, in the coordinates of the whole tensor."""

    name: str
    dtype: str
    shape: Shape  # The shape of the whole tensor in the trainer's own layout, all ranks joined
    box: Box
    role: Role = Role.REPLICATED


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a Hugging Face tensor that is stored in one of a rank's own tensors."""

    name: str
    shape: Shape  # The shape of the whole Hugging Face tensor
    box: Box
    at: Shape
    """Where it starts in the rank's tensor."""
    transposed: bool = False
    """Whether its two dimensions are swapped there."""

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index that selects it from the rank's tensor."""
        extent = self.box.shape[::-1] if self.transposed else self.box.shape
        return tuple(slice(a, a + n) for a, n in zip(self.at, extent, strict=True))


@dataclass(frozen=True)
class Slices:
    """The boxes that a rank of an engine receives, of tensors that the ranks divide.

    Empty: all tensors whole."""

    boxes: Mapping[str, Box | None] = field(default_factory=dict)
    """By tensor; None where this rank holds nothing of it."""
    shapes: Mapping[str, Shape] = field(default_factory=dict)  # Of the whole tensors
    parameters: Mapping[str, str] = field(default_factory=dict)
    """The engine's parameter that each tensor is loaded into."""

    def keep_whole_pieces(self, pieces: Mapping[str, list[Box]]) -> Slices:
        """Keep the slices that consist of whole pieces, which have digests of their own.

        The tensors of one parameter stay all sliced or all whole, because they are verified
        together."""
        unaligned = {
            self.parameters[name]
            for name, box in self.boxes.items()
            if box is not None
            and not all(piece.intersect(box) in (None, piece) for piece in pieces.get(name, []))
        }
        return self.without(unaligned)

    def without(self, parameters: set[str]) -> Slices:
        """Return the slices of all other parameters."""
        boxes = {n: box for n, box in self.boxes.items() if self.parameters[n] not in parameters}
        return replace(self, boxes=boxes)


def publishes(name: str, replica: int, replicas: int) -> bool:
    """Return whether this replica of a tensor is the one that publishes it.

    All ranks agree without asking each other, and tensors are spread over the replicas."""
    return crc32(name.encode()) % replicas == replica


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
    # matrix would be compared with all other columns: quadratic, which hostile shards could use.
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
