"""Describe where the elements of a sharded model are stored.

A `Shard` is the part of one of its own tensors that a trainer's rank holds. A `Placed` box is a
block of one tensor that is stored inside another one. Every layout a trainer can have (sharded,
fused, interleaved, padded) is a list of placed boxes, so planning is the intersection of boxes.
This module does not import torch: a planner may run on a machine without a trainer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

ELEMENT_BYTES = {
    **{"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2},
    **{"U16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "BOOL": 1},
}
"""Keys are the dtype names of safetensors files."""

Shape = tuple[int, ...]


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
class Placed:
    """A box of one tensor, and the position `at` where it starts in another tensor.

    The other tensor may have more dimensions in front (experts are stacked there); the box is one
    element thick in these. If `transposed`, its last two dimensions are swapped there."""

    box: Box
    at: Shape
    transposed: bool = False
    tensor: int = 0
    """The number of the tensor that is meant, where a list has boxes of several tensors."""

    @property
    def extent(self) -> Shape:
        """The shape that the box has in the other tensor."""
        return self.destination.shape

    @property
    def destination(self) -> Box:
        """The box that this one fills in the other tensor."""
        shape = swap_last(self.box.shape) if self.transposed else self.box.shape
        # A box that was cut out of a stack has more dimensions than its target, one thick.
        extra = max(0, len(shape) - len(self.at))
        return place_at(self.at, Box.whole(shape[extra:]))


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of the Hugging Face tensor `name`, and where it starts in a rank's tensor `source`.

    It is a `Placed` box with the names of both tensors."""

    name: str
    box: Box
    source: str
    at: Shape
    transposed: bool = False


def place_at(at: Shape, box: Box) -> Box:
    """Move `box` by `at`; dimensions that it lacks are added in front, one element thick."""
    missing = len(at) - len(box.start)
    return Box((0,) * missing + box.start, (1,) * missing + box.stop).shift(at)


def swap_last(shape: Shape) -> Shape:
    """Return `shape` with its last two dimensions swapped."""
    return (*shape[:-2], shape[-1], shape[-2])
