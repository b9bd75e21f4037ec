"""What goes where between a few tensors that are tied together, without their names.

A unit is a set of Hugging Face tensors that share source tensors: q, k and v, which a trainer
holds fused, or gate and up of one expert. All layers have the same unit, so its recipe, found here
by intersecting boxes, is computed once and used for each of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rollway.errors import UsageError
from rollway.weights.layout import ELEMENT_BYTES, Box, Shape
from rollway.weights.planning.costs import Choice, Costs, Load, choose
from rollway.weights.planning.holdings import Held, Holding
from rollway.weights.planning.wants import Part, Parts


@dataclass(frozen=True, slots=True)
class Wanted:
    """A want of the unit, by the numbers of its tensor and of its target."""

    tensor: int
    target: int
    dtype: str
    parts: Parts


@dataclass(frozen=True, slots=True)
class Cut:
    """A box of the source's tensor that goes to `at` of target number `target`.

    `shape` is its extent there; where it is `transposed`, the last two are swapped."""

    target: int
    box: Box
    at: Shape
    shape: Shape
    target_shape: Shape
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """All that one receiver takes from one holding."""

    holding: int
    cuts: tuple[Cut, ...]
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
    wanted: Sequence[Wanted],
    costs: Costs,
) -> tuple[Step, ...]:
    """What this receiver takes, from the holdings in their `order` of preference."""
    cuts: dict[int, list[Cut]] = {}
    for want in wanted:
        part = want.parts[receiver]
        if part is None:
            continue
        for holding, cut in _cover(want, part, holdings, order):
            cuts.setdefault(holding, []).append(cut)
    return tuple(
        _step(number, holdings[number], coalesced(cuts[number]), costs) for number in sorted(cuts)
    )


def _cover(
    want: Wanted, part: Part, holdings: Sequence[Holding], order: Sequence[int]
) -> Iterator[tuple[int, Cut]]:
    """Cut the part out of one holding after the other, until nothing of it is left."""
    left = [part.box] if part.box.elements else []
    for number in order:
        for held in holdings[number].held:
            if not left:
                return
            if held.tensor != want.tensor:
                continue
            still = []
            for box in left:
                common = box.cut(held.box)
                if common is None:
                    still.append(box)
                    continue
                yield number, _cut(want.target, part, held, common)
                still.extend(minus(box, common))
            left = still
    if left:
        raise Missing(want.tensor, left[0])


def _cut(target: int, part: Part, held: Held, common: Box) -> Cut:
    inside = common.seen_from(held.box.start)
    if held.transposed:
        inside = Box(_swapped(inside.start), _swapped(inside.stop))
    source = _behind(held.at, inside)
    landed = _behind(part.at, common.seen_from(part.box.start))
    return Cut(target, source, landed.start, landed.shape, part.shape, held.transposed)


def _swapped(shape: Shape) -> Shape:
    return (*shape[:-2], shape[-1], shape[-2])


def _behind(at: Shape, box: Box) -> Box:
    """`box`, moved to `at`, which may have more dimensions in front: there it is one thick."""
    more = len(at) - len(box.start)
    return Box((0,) * more + box.start, (1,) * more + box.stop).moved(at)


def landing(at: Shape, extent: Shape) -> Box:
    """Where something of this extent lies when it starts at `at`."""
    return _behind(at, Box.whole(extent))


def minus(box: Box, hole: Box) -> list[Box]:
    """What is left of `box` without `hole`, which lies inside it, as boxes that do not overlap."""
    left = []
    start, stop = list(box.start), list(box.stop)
    for axis in range(len(start)):
        if start[axis] < hole.start[axis]:
            left.append(_with(start, stop, axis, start[axis], hole.start[axis]))
        if hole.stop[axis] < stop[axis]:
            left.append(_with(start, stop, axis, hole.stop[axis], stop[axis]))
        start[axis], stop[axis] = hole.start[axis], hole.stop[axis]
    return left


def _with(start: list[int], stop: list[int], axis: int, first: int, last: int) -> Box:
    return Box((*start[:axis], first, *start[axis + 1 :]), (*stop[:axis], last, *stop[axis + 1 :]))


def coalesced(cuts: list[Cut]) -> tuple[Cut, ...]:
    """Neighbours at both ends become one; the rest is in the order of the source's memory."""
    found = sorted(cuts, key=lambda cut: (cut.target, cut.box.start))
    while True:
        joined: list[Cut] = []
        for cut in found:
            both = _joined(joined[-1], cut) if joined else None
            if both is None:
                joined.append(cut)
            else:
                joined[-1] = both
        if len(joined) == len(found):
            return tuple(sorted(joined, key=lambda cut: cut.box.start))
        found = joined


def _joined(first: Cut, second: Cut) -> Cut | None:
    """One cut for two, when the second begins where the first ends, here as well as there."""
    if first.target != second.target or first.transposed or second.transposed:
        return None
    moved = [b - a for a, b in zip(first.box.start, second.box.start, strict=True)]
    landed = [b - a for a, b in zip(first.at, second.at, strict=True)]
    axes = [axis for axis, by in enumerate(moved) if by]
    if len(axes) != 1:
        return None
    from_end = axes[0] - len(moved)
    extents = list(first.box.shape)
    if -from_end > len(landed) or moved[axes[0]] != extents[axes[0]]:
        return None
    expected = [0] * len(landed)
    expected[from_end] = extents[axes[0]]
    other = list(second.box.shape)
    total = extents[axes[0]] + other[axes[0]]
    extents[axes[0]] = other[axes[0]] = 0
    if landed != expected or extents != other:
        return None
    shape = list(first.shape)
    shape[from_end] = total
    box = Box(first.box.start, second.box.stop)
    return Cut(first.target, box, first.at, tuple(shape), first.target_shape)


def _step(number: int, holding: Holding, cuts: tuple[Cut, ...], costs: Costs) -> Step:
    size = ELEMENT_BYTES[holding.dtype]
    needed = blocks = landings = 0
    for cut in cuts:
        elements = cut.box.elements
        here, there = run(cut.box.shape, holding.shape), run(cut.shape, cut.target_shape)
        needed += elements * size
        blocks += elements // (1 if cut.transposed else min(here, there))
        landings += elements // there
    whole = math.prod(holding.shape) * size
    transposed = any(cut.transposed for cut in cuts)
    load = Load(needed, whole, len(cuts), blocks, landings, transposed)
    return Step(number, cuts, needed, choose(load, costs))


def run(extent: Shape, shape: Shape) -> int:
    """How many elements of a box of this extent follow each other in a tensor of this shape."""
    elements = 1
    for size, full in zip(reversed(extent), reversed(shape), strict=True):
        elements *= size
        if size != full:
            break
    return elements


def check_fits(holding: Holding, name: str) -> None:
    """Refuse a source whose pieces reach beyond the tensor they are said to lie in."""
    if holding.dtype not in ELEMENT_BYTES:
        raise UsageError(f"{name} has the dtype {holding.dtype}, which is not known.")
    for held in holding.held:
        dimensions = len(held.box.start)
        if not dimensions <= len(held.at) == len(holding.shape):
            raise UsageError(f"{name} has {len(holding.shape)} dimensions, its piece has others.")
        if held.transposed and dimensions < 2:
            raise UsageError(f"A piece of {name} has {dimensions} dimensions, and is transposed.")
        extent = _swapped(held.box.shape) if held.transposed else held.box.shape
        landed = landing(held.at, extent)
        if landed.cut(Box.whole(holding.shape)) != landed:
            raise UsageError(
                f"A piece at {list(landed.start)} to {list(landed.stop)} does not fit into "
                f"{name}, which is {list(holding.shape)}."
            )


def overlap(places: list[Box]) -> Box | None:
    """Elements that two of these boxes share, found by going along the first dimension."""
    active: list[Box] = []
    for box in sorted(places, key=lambda box: box.start):
        active = [other for other in active if other.stop[:1] > box.start[:1] or not box.start]
        for other in active:
            if common := box.cut(other):
                return common
        active.append(box)
    return None
