"""Find which boxes go where between the few tensors of one unit, and how they are moved.

A unit is a set of Hugging Face tensors that share source tensors: q, k and v, which a trainer
holds fused, or gate and up of one expert. All layers have the same units, so the recipe of a unit
is computed once, by intersecting boxes and without names, and used for every layer. What a receiver
reads of one source tensor moves by the cheapest of four methods:

    range     contiguous at both ends: one descriptor
    strided   rows are apart at either end: every block is an operation on the wire
    packed    the source first copies the needed bytes into one contiguous run
    whole     the receiver reads the source's whole tensor, and copies the needed part out of it
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from rollway.errors import UsageError
from rollway.weights.layout import (
    ELEMENT_BYTES,
    Box,
    Placed,
    Shape,
    join_neighbours,
    place_at,
    swap_last,
)
from rollway.weights.planning.sources import Holding
from rollway.weights.planning.targets import Target, TargetPart


class Method(StrEnum):
    RANGE = "range"
    STRIDED = "strided"
    PACKED = "packed"
    WHOLE = "whole"


@dataclass(frozen=True, slots=True)
class Costs:
    """Speeds of the machines, which decide between the methods."""

    wire_gb_per_s: float = 50.0  # Network of one receiver; the default is a NIC of 400 Gb/s
    block_seconds: float = 2.6e-6
    """One operation on the wire, alone or as part of a strided descriptor."""
    pack_gb_per_s: float = 8.0  # Copying at the source; 0 if the source can only be read
    unpack_gb_per_s: float = 8.0  # Copying at the receiver, from a staging buffer into place

    def __post_init__(self) -> None:
        if self.wire_gb_per_s <= 0 or self.unpack_gb_per_s <= 0:
            raise UsageError(
                "The wire and the receiver's memory must have a speed above 0.", "Give GB/s."
            )
        if self.block_seconds < 0 or self.pack_gb_per_s < 0:
            raise UsageError("Costs cannot be negative.", "Use 0 for an operation that is free.")


@dataclass(frozen=True, slots=True)
class Load:
    """What one receiver needs of one source tensor, in the numbers that decide the method."""

    needed: int  # Bytes that the receiver needs
    whole: int  # Bytes of the source's whole tensor
    cuts: int
    blocks: int  # Runs that are contiguous at both ends
    landings: int  # Runs that are contiguous in the target alone
    transposed: bool = False

    @property
    def strided(self) -> bool:
        return self.transposed or self.blocks > self.cuts


@dataclass(frozen=True, slots=True)
class Choice:
    """A method with its estimated cost."""

    method: Method
    seconds: float
    moved: int  # Bytes on the wire
    descriptors: int
    blocks: int  # Operations on the wire
    staged: bool  # Whether the receiver copies the bytes into place from a staging buffer
    reason: str = ""


UnitTarget = tuple[int, int, Target]
"""A target, with the numbers of its tensor and of its parameter in the unit."""


@dataclass(frozen=True, slots=True)
class Step:
    """Everything that one receiver reads from one holding."""

    holding: int
    cuts: tuple[Placed, ...]
    """Boxes of the source's tensor, and where they go in the target of number `tensor`."""
    needed: int
    choice: Choice


@dataclass
class Missing(Exception):
    """No source holds `box` of the unit's tensor number `tensor`."""

    tensor: int
    box: Box


def make_steps(
    receiver: int,
    holdings: Sequence[Holding],
    targets: Sequence[UnitTarget],
    costs: Costs,
) -> tuple[Step, ...]:
    """Return what this receiver reads."""
    cuts: dict[int, list[Placed]] = {}
    shapes: dict[int, Shape] = {}
    for tensor, parameter, target in targets:
        part = target.parts[receiver]
        if part is not None:
            shapes[parameter] = part.shape
            for number, held, common in _cover(tensor, part.box, holdings):
                cut = _connect(parameter, part, held, common)
                cuts.setdefault(number, []).append(cut)
    return tuple(
        _make_step(number, holdings[number], _coalesce(cuts[number]), shapes, costs)
        for number in sorted(cuts)
    )


def _cover(
    tensor: int, needed: Box, holdings: Sequence[Holding]
) -> Iterator[tuple[int, Placed, Box]]:
    """Cover a box with boxes of one holding after the other, until nothing is left of it."""
    left = [needed] if needed.elements else []
    for number, holding in enumerate(holdings):
        for held in holding.held:
            if not left:
                return
            if held.tensor != tensor:
                continue
            uncovered = []
            for box in left:
                common = box.intersect(held.box)
                if common is None:
                    uncovered.append(box)
                    continue
                yield number, held, common
                uncovered.extend(_subtract(box, common))
            left = uncovered
    if left:
        raise Missing(tensor, left[0])


def _connect(parameter: int, part: TargetPart, held: Placed, common: Box) -> Placed:
    """Translate `common`, in Hugging Face coordinates, to a box of the source and its target."""
    inside = common.relative_to(held.box.start)
    if held.transposed:
        inside = Box(swap_last(inside.start), swap_last(inside.stop))
    source = place_at(held.at, inside)
    at = place_at(part.at, common.relative_to(part.box.start)).start
    return Placed(source, at, held.transposed, parameter)


def _subtract(box: Box, hole: Box) -> list[Box]:
    """Return `box` without `hole`, which is inside it, as boxes that do not overlap."""
    parts = []
    # On each axis, split off the parts before and after the hole, then continue with the rest.
    for axis, (start, stop) in enumerate(zip(hole.start, hole.stop, strict=True)):
        for first, last in ((box.start[axis], start), (stop, box.stop[axis])):
            if first < last:
                parts.append(box.narrow(axis, first, last))
        box = box.narrow(axis, start, stop)
    return parts


def _coalesce(cuts: list[Placed]) -> tuple[Placed, ...]:
    """Join cuts that are neighbours at both ends, and sort them by the source's memory."""
    cuts = sorted(cuts, key=lambda cut: (cut.tensor, cut.box.start))
    while len(joined := join_neighbours(cuts)) < len(cuts):
        cuts = joined  # joined rows may become neighbours of other joined rows
    return tuple(sorted(cuts, key=lambda cut: cut.box.start))


def _make_step(
    number: int,
    holding: Holding,
    cuts: tuple[Placed, ...],
    shapes: dict[int, Shape],
    costs: Costs,
) -> Step:
    size = ELEMENT_BYTES[holding.dtype]
    needed = blocks = landings = 0
    for cut in cuts:
        elements = cut.box.elements
        here, there = run(cut.box.shape, holding.shape), run(cut.extent, shapes[cut.tensor])
        needed += elements * size
        blocks += elements // (1 if cut.transposed else min(here, there))
        landings += elements // there
    whole = math.prod(holding.shape) * size
    transposed = any(cut.transposed for cut in cuts)
    load = Load(needed, whole, len(cuts), blocks, landings, transposed)
    return Step(number, cuts, needed, choose(load, costs))


def run(extent: Shape, shape: Shape) -> int:
    """Return how many elements of a box of this extent are contiguous in a tensor of `shape`."""
    elements = 1
    for size, full in zip(reversed(extent), reversed(shape), strict=True):
        elements *= size
        if size != full:
            break
    return elements


def check_fits(holding: Holding, name: str) -> None:
    """Raise `UsageError` if a piece of a source reaches beyond the source's tensor."""
    fix = "Check the pieces that this rank publishes."
    if holding.dtype not in ELEMENT_BYTES:
        raise UsageError(f"{name} has the unknown dtype {holding.dtype}.", "Use a plain dtype.")
    for held in holding.held:
        dimensions = len(held.box.start)
        if not dimensions <= len(held.at) == len(holding.shape):
            raise UsageError(
                f"{name} has {len(holding.shape)} dimensions, its piece has others.", fix
            )
        if held.transposed and dimensions < 2:
            raise UsageError(
                f"A piece of {name} has {dimensions} dimensions, and is transposed.", fix
            )
        box = held.destination
        if box.intersect(Box.whole(holding.shape)) != box:
            raise UsageError(
                f"A piece at {list(box.start)} to {list(box.stop)} does not fit into "
                f"{name}, which is {list(holding.shape)}.",
                fix,
            )


# --- the cheapest method ---------------------------------------------------------------------


def choose(load: Load, costs: Costs) -> Choice:
    """Return the cheapest method; of equal ones, the method that moves and copies less."""
    choices = list(_list_choices(load, costs))
    best = min(choices, key=lambda choice: (choice.seconds, choice.moved, choice.staged))
    return replace(best, reason=_explain(best, choices, load))


def _list_choices(load: Load, costs: Costs) -> Iterator[Choice]:
    on_wire = _seconds(load.needed, costs.wire_gb_per_s)
    unpack = _seconds(load.needed, costs.unpack_gb_per_s)
    if not load.transposed:
        method = Method.STRIDED if load.strided else Method.RANGE
        seconds = on_wire + load.blocks * costs.block_seconds
        yield Choice(method, seconds, load.needed, load.cuts, load.blocks, staged=False)
    if costs.pack_gb_per_s:
        # Packed bytes are read straight into place if every cut is one run there.
        staged = load.landings > load.cuts
        blocks = 1 if staged else load.cuts
        seconds = on_wire + blocks * costs.block_seconds + (unpack if staged else 0.0)
        seconds += _seconds(load.needed, costs.pack_gb_per_s)
        yield Choice(Method.PACKED, seconds, load.needed, blocks, blocks, staged)
    # Moving more bytes than needed is only for strided loads: a microsecond is not worth it.
    if load.whole == load.needed or load.strided:
        seconds = _seconds(load.whole, costs.wire_gb_per_s) + costs.block_seconds + unpack
        yield Choice(Method.WHOLE, seconds, load.whole, 1, 1, staged=True)


def _explain(best: Choice, choices: list[Choice], load: Load) -> str:
    if best.method is Method.RANGE:
        return "contiguous on both ends"
    blocks = f"{load.blocks} blocks of {load.needed // load.blocks} B"
    cut = "transposed" if load.transposed else blocks
    ordered = sorted(choices, key=lambda choice: choice.seconds)
    times = ", ".join(f"{choice.method} {choice.seconds * 1e3:.3g} ms" for choice in ordered)
    extra = best.moved - load.needed
    return f"{cut}: {times}; {extra} B more than needed" if extra else f"{cut}: {times}"


def _seconds(nbytes: int, gb_per_s: float) -> float:
    return nbytes / (gb_per_s * 1e9)
