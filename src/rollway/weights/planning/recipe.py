"""Find which boxes go where between the few tensors of one unit, without their names.

A unit is a set of Hugging Face tensors that share source tensors: q, k and v, which a trainer
holds fused, or gate and up of one expert. All layers have the same units, so the recipe of a unit
is computed once, by intersecting boxes, and used for every layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rollway.errors import UsageError
from rollway.weights.layout import ELEMENT_BYTES, Box, Placed, Shape, place_at, swap_last
from rollway.weights.planning.costs import Choice, Costs, Load, choose
from rollway.weights.planning.sources import Holding
from rollway.weights.planning.targets import Parts, TargetPart


@dataclass(frozen=True, slots=True)
class UnitTarget:
    """A target of the unit, with numbers instead of names for its tensor and its parameter."""

    tensor: int
    target: int
    dtype: str
    parts: Parts


@dataclass(frozen=True, slots=True)
class Step:
    """Everything that one receiver reads from one holding."""

    holding: int
    cuts: tuple[Placed, ...]
    """Boxes of the source's tensor, and where they go in the target of number `tensor`."""
    extents: tuple[Shape, ...]  # `Placed.extent` of every cut, computed once for all units
    needed: int
    choice: Choice


class Missing(Exception):
    """No source holds `box` of the unit's tensor number `tensor`."""

    def __init__(self, tensor: int, box: Box) -> None:
        super().__init__(tensor, box)
        self.tensor = tensor
        self.box = box


def steps_for(
    receiver: int,
    holdings: Sequence[Holding],
    order: Sequence[int],
    targets: Sequence[UnitTarget],
    costs: Costs,
) -> tuple[Step, ...]:
    """Return what this receiver reads; `order` lists the holdings by preference."""
    cuts: dict[int, list[Placed]] = {}
    shapes: dict[int, Shape] = {}
    for target in targets:
        part = target.parts[receiver]
        if part is None:
            continue
        shapes[target.target] = part.shape
        for number, cut in _cover(target, part, holdings, order):
            cuts.setdefault(number, []).append(cut)
    return tuple(
        _make_step(number, holdings[number], coalesce(cuts[number]), shapes, costs)
        for number in sorted(cuts)
    )


def _cover(
    target: UnitTarget, part: TargetPart, holdings: Sequence[Holding], order: Sequence[int]
) -> Iterator[tuple[int, Placed]]:
    """Cover the part with boxes of one holding after the other, until nothing is left of it."""
    left = [part.box] if part.box.elements else []
    for number in order:
        for held in holdings[number].held:
            if not left:
                return
            if held.tensor != target.tensor:
                continue
            uncovered = []
            for box in left:
                common = box.intersect(held.box)
                if common is None:
                    uncovered.append(box)
                    continue
                yield number, _connect(target.target, part, held, common)
                uncovered.extend(subtract(box, common))
            left = uncovered
    if left:
        raise Missing(target.tensor, left[0])


def _connect(target: int, part: TargetPart, held: Placed, common: Box) -> Placed:
    """Translate `common`, in Hugging Face coordinates, to a box of the source and its target."""
    inside = common.relative_to(held.box.start)
    if held.transposed:
        inside = Box(swap_last(inside.start), swap_last(inside.stop))
    source = place_at(held.at, inside)
    at = place_at(part.at, common.relative_to(part.box.start)).start
    return Placed(source, at, held.transposed, target)


def landing(at: Shape, extent: Shape) -> Box:
    """Return the box of this extent that starts at `at`."""
    return place_at(at, Box.whole(extent))


def subtract(box: Box, hole: Box) -> list[Box]:
    """Return `box` without `hole`, which is inside it, as boxes that do not overlap."""
    left = []
    start, stop = list(box.start), list(box.stop)
    # On each axis, split off the parts before and after the hole, then continue with the rest.
    for axis in range(len(start)):
        for first, last in ((start[axis], hole.start[axis]), (hole.stop[axis], stop[axis])):
            if first < last:
                left.append(
                    Box(
                        (*start[:axis], first, *start[axis + 1 :]),
                        (*stop[:axis], last, *stop[axis + 1 :]),
                    )
                )
        start[axis], stop[axis] = hole.start[axis], hole.stop[axis]
    return left


def coalesce(cuts: list[Placed]) -> tuple[Placed, ...]:
    """Join cuts that are neighbours at both ends, and sort them by the source's memory."""
    current = sorted(cuts, key=lambda cut: (cut.tensor, cut.box.start))
    while True:  # joined rows may become neighbours of other joined rows
        joined: list[Placed] = []
        for cut in current:
            both = _join(joined[-1], cut) if joined else None
            if both is None:
                joined.append(cut)
            else:
                joined[-1] = both
        if len(joined) == len(current):
            return tuple(sorted(joined, key=lambda cut: cut.box.start))
        current = joined


def _join(first: Placed, second: Placed) -> Placed | None:
    """Return one cut for two if the second begins where the first ends, in source and target."""
    if first.tensor != second.tensor or first.transposed or second.transposed:
        return None
    source_step = [b - a for a, b in zip(first.box.start, second.box.start, strict=True)]
    target_step = [b - a for a, b in zip(first.at, second.at, strict=True)]
    axes = [axis for axis, by in enumerate(source_step) if by]
    if len(axes) != 1:
        return None
    axis = axes[0]
    from_end = axis - len(source_step)  # dimensions correspond to each other from the last one
    mine, other = list(first.box.shape), list(second.box.shape)
    if -from_end > len(target_step) or source_step[axis] != mine[axis]:
        return None
    expected = [0] * len(target_step)
    expected[from_end] = mine[axis]
    mine[axis] = other[axis] = 0
    if target_step != expected or mine != other:
        return None
    return Placed(Box(first.box.start, second.box.stop), first.at, False, first.tensor)


def _make_step(
    number: int,
    holding: Holding,
    cuts: tuple[Placed, ...],
    shapes: dict[int, Shape],
    costs: Costs,
) -> Step:
    size = ELEMENT_BYTES[holding.dtype]
    needed = blocks = landings = 0
    extents = tuple(cut.extent for cut in cuts)
    for cut, extent in zip(cuts, extents, strict=True):
        elements = cut.box.elements
        here, there = run(cut.box.shape, holding.shape), run(extent, shapes[cut.tensor])
        needed += elements * size
        blocks += elements // (1 if cut.transposed else min(here, there))
        landings += elements // there
    whole = math.prod(holding.shape) * size
    transposed = any(cut.transposed for cut in cuts)
    load = Load(needed, whole, len(cuts), blocks, landings, transposed)
    return Step(number, cuts, extents, needed, choose(load, costs))


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
