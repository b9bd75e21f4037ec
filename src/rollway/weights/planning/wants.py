"""What the ranks of an engine want, told once for all tensors of equal geometry.

A flat list of `Need`s grows with tensors times ranks: more than a million for a large mixture of
experts. A `Want` is one Hugging Face tensor on its way into one parameter, with what each rank
takes of it; tensors of equal geometry hold the very same `parts`, so the planner sees at once
that layer 60 is cut as layer 0 was. `wants_of_needs` makes them from plain needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rollway.errors import UsageError
from rollway.weights.layout import Box, Need, Shape


class Described(Protocol):
    """Anything that knows a tensor's dtype and shape, such as the header of a weight file."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> Shape: ...


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """A tensor as one rank holds it in memory, row after row."""

    dtype: str
    shape: Shape


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank takes of a tensor, and where this starts in its parameter of `shape`.

    A parameter may have more dimensions, in front: experts are stacked there."""

    box: Box
    at: Shape
    shape: Shape


Parts = tuple[Part | None, ...]
"""By rank of the engine; None for one that takes nothing."""


@dataclass(frozen=True, slots=True)
class Want:
    """A Hugging Face tensor that goes into the parameter `target` of an engine's ranks."""

    target: str
    dtype: str
    parts: Parts


Wants = Mapping[str, Sequence[Want]]
"""By the name of the Hugging Face tensor; two wants when it goes into two parameters."""


def needs_of(wants: Wants, rank: int) -> list[Need]:
    """The same as plain needs of one rank."""
    return [
        Need(name, part.box, want.target, part.at)
        for name, several in wants.items()
        for want in several
        if (part := want.parts[rank]) is not None
    ]


def wants_of_needs(
    needs: Sequence[Sequence[Need]], tensors: Sequence[Mapping[str, Described]]
) -> dict[str, list[Want]]:
    """For receivers that say what they need one by one; `tensors` are their own, by rank."""
    shared: dict[Parts, Parts] = {}
    wants: dict[str, list[Want]] = {}
    for rank, (mine, local) in enumerate(zip(needs, tensors, strict=True)):
        for need in mine:
            target = local.get(need.target)
            if target is None:
                raise UsageError(f"Receiver {rank} has no tensor {need.target} to put needs into.")
            part = Part(need.box, need.at, target.shape)
            parts = tuple(part if r == rank else None for r in range(len(needs)))
            want = Want(need.target, target.dtype, shared.setdefault(parts, parts))
            wants.setdefault(need.name, []).append(want)
    return wants


def hf_slices(
    headers: Mapping[str, Described], cuts: Mapping[str, Box | None]
) -> dict[str, list[Want]]:
    """For one receiver that takes a box of some tensors, or nothing of them, and the others as
    they are. A box keeps its tensor's name."""
    shared: dict[Box, Parts] = {}
    wants = {}
    for name, tensor in headers.items():
        box = cuts[name] if name in cuts else Box.whole(tensor.shape)
        if box is not None:
            part = Part(box, (0,) * len(box.shape), box.shape)
            wants[name] = [Want(name, tensor.dtype, shared.setdefault(box, (part,)))]
    return wants


def hf_target(headers: Mapping[str, Described], receivers: int = 1) -> dict[str, list[Want]]:
    """For receivers that each take every Hugging Face tensor as it is."""
    shared: dict[Shape, Parts] = {}
    wants = {}
    for name, tensor in headers.items():
        parts = shared.get(tensor.shape)
        if parts is None:
            part = Part(Box.whole(tensor.shape), (0,) * len(tensor.shape), tensor.shape)
            parts = shared[tensor.shape] = (part,) * receivers
        wants[name] = [Want(name, tensor.dtype, parts)]
    return wants
