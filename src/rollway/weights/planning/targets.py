"""Describe what the ranks of an engine receive.

A `Target` says that one Hugging Face tensor goes into one parameter, and which part of it each rank
receives. Tensors of equal geometry share the very same `parts` object. So the planner recognises by
identity that layer 60 is sharded like layer 0; a flat list of boxes would have more than a million
entries for a large mixture of experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rollway.weights.layout import Box, Shape


class TensorInfo(Protocol):
    """Anything with a dtype and a shape, for example the header of a weight file."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> Shape: ...


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """A contiguous tensor in one rank's memory."""

    dtype: str
    shape: Shape


@dataclass(frozen=True, slots=True)
class TargetPart:
    """The box of a tensor that one rank receives, and where it starts in a parameter of `shape`.

    The parameter may have more dimensions in front: experts are stacked there."""

    box: Box
    at: Shape
    shape: Shape


Parts = tuple[TargetPart | None, ...]
"""One entry per rank of the engine; None for a rank that receives nothing."""


@dataclass(frozen=True, slots=True)
class Target:
    """A Hugging Face tensor that goes into the parameter `target` of an engine's ranks."""

    target: str
    dtype: str
    parts: Parts


Targets = Mapping[str, Sequence[Target]]
"""By the name of the Hugging Face tensor; two entries if it goes into two parameters."""


def hf_slices(
    headers: Mapping[str, TensorInfo], cuts: Mapping[str, Box | None], receivers: int = 1
) -> dict[str, list[Target]]:
    """Describe receivers that get the boxes `cuts` of some tensors (None: nothing), and all other
    tensors whole. A box keeps the name of its tensor."""
    shared: dict[Box, Parts] = {}
    targets = {}
    for name, tensor in headers.items():
        box = cuts[name] if name in cuts else Box.whole(tensor.shape)
        if box is None:
            continue
        parts = shared.get(box)
        if parts is None:
            part = TargetPart(box, (0,) * len(box.start), box.shape)
            parts = shared[box] = (part,) * receivers
        targets[name] = [Target(name, tensor.dtype, parts)]
    return targets


def hf_target(headers: Mapping[str, TensorInfo], receivers: int = 1) -> dict[str, list[Target]]:
    """Describe receivers that each get every Hugging Face tensor whole."""
    return hf_slices(headers, {}, receivers)
