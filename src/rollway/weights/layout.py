"""Where the elements of a sharded model lie: tensors, boxes of them, and who holds which.

Three words carry the rest of this package. A `Shard` is what one rank of a trainer holds of one of
its own tensors. A `Piece` is a box of a Hugging Face tensor that lies inside a shard: every layout
a trainer can have (cut, fused, interleaved, padded) is a list of pieces. A `Need` is a box of a
Hugging Face tensor that one rank of an engine wants. Planning intersects pieces with needs, so
nothing here ever counts rows. No torch: a planner may run where no trainer is installed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

ELEMENT_BYTES = {
    **{"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2},
    **{"U16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "BOOL": 1},
}
"""By the names that safetensors files use."""

Shape = tuple[int, ...]


class Role(StrEnum):
    """How a trainer's tensor is cut over its ranks, and what is fused in it."""

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
    """A block of a tensor: from `start` up to `stop`, in every dimension."""

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

    def cut(self, other: Box) -> Box | None:
        """What both have in common; None when that is nothing."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(start, stop) if all(a < b for a, b in zip(start, stop, strict=True)) else None

    def moved(self, by: Shape) -> Box:
        return Box(
            tuple(a + d for a, d in zip(self.start, by, strict=True)),
            tuple(b + d for b, d in zip(self.stop, by, strict=True)),
        )

    def seen_from(self, origin: Shape) -> Box:
        return self.moved(tuple(-a for a in origin))


@dataclass(frozen=True, slots=True)
class Shard:
    """What one rank holds of a tensor: `box`, in the coordinates of the whole tensor."""

    name: str
    dtype: str
    shape: Shape
    """Of the whole tensor, as the trainer's own layout has it when its ranks are joined."""
    box: Box
    role: Role = Role.REPLICATED


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a Hugging Face tensor, and where it starts inside a rank's local tensor.

    Both boxes have the same extents, except that those of a `transposed` one are swapped."""

    name: str
    box: Box
    source: str
    at: Shape
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class Need:
    """A box of a Hugging Face tensor, and where a receiver's own tensor wants it."""

    name: str
    box: Box
    target: str
    at: Shape
