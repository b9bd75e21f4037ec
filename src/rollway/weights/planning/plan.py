"""Planning: which box of which source tensor goes into which box of which target tensor.

    sources   ranks of a trainer, with the pieces they offer
       │      units: Hugging Face tensors that share source tensors (q, k, v; gate, up)
       │      recipes: one for all units of equal geometry, found by intersecting boxes
       ▼
    plan      recipes, the names of the units that each is for, and who serves which of them

Every element that a receiver wants is written exactly once, or the plan is refused; bytes beyond
what is needed move only where the plan says why (tests/unit/weights/test_plan_properties.py).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from rollway.errors import UsageError
from rollway.weights.layout import Box
from rollway.weights.planning.costs import Costs
from rollway.weights.planning.fanout import Tree
from rollway.weights.planning.holdings import ANYWHERE, Holding, Place, Resident, Source
from rollway.weights.planning.recipe import (
    Missing,
    Wanted,
    check_fits,
    landing,
    overlap,
    steps_for,
)
from rollway.weights.planning.transfers import Holders, Plan, Recipe, Total, Unit
from rollway.weights.planning.wants import Part, Parts, Wants


@dataclass(frozen=True, slots=True)
class Receiver:
    """A rank that takes what it wants."""

    name: str
    place: Place = ANYWHERE


def plan(
    sources: Sequence[Source],
    receivers: Sequence[Receiver],
    wants: Wants,
    costs: Costs | None = None,
    *,
    fanout: Tree | None = None,
) -> Plan:
    """Find for every element that a receiver wants where it comes from, and how it travels."""
    _check_names(sources, receivers)
    _check_targets(receivers, wants)
    cookbook = _Cookbook(sources, receivers, wants, costs or Costs())
    for names, holders in _units(sources, wants):
        cookbook.add(names, holders)
    recipes = list(cookbook.recipes.values())
    totals = _share_out(recipes, sources, receivers)
    return Plan(
        [source.name for source in sources],
        [receiver.name for receiver in receivers],
        recipes,
        totals,
        fanout,
    )


def _check_names(sources: Sequence[Source], receivers: Sequence[Receiver]) -> None:
    for what, names in (
        ("source", [source.name for source in sources]),
        ("receiver", [receiver.name for receiver in receivers]),
    ):
        if not names:
            raise UsageError(f"A plan needs at least one {what}.")
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise UsageError(f"Two of the plan's {what}s are called {twice}.")


def _check_targets(receivers: Sequence[Receiver], wants: Wants) -> None:
    """Refuse wants that write an element twice, or beyond their parameter."""
    writers: dict[str, list[tuple[str, Parts]]] = {}
    for name, several in wants.items():
        for want in several:
            if len(want.parts) != len(receivers):
                raise UsageError(
                    f"{name} is wanted by {len(want.parts)} ranks, the plan has {len(receivers)}."
                )
            writers.setdefault(want.target, []).append((name, want.parts))
    seen: set[tuple[int, ...]] = set()
    for target, mine in writers.items():
        # Equal layers hold the very same parts, so one of them is looked at for all.
        key = tuple(id(parts) for _, parts in mine)
        if key in seen:
            continue
        seen.add(key)
        for number, receiver in enumerate(receivers):
            _check_target(target, receiver.name, [(n, parts[number]) for n, parts in mine])


def _check_target(target: str, receiver: str, parts: list[tuple[str, Part | None]]) -> None:
    places = []
    for name, part in parts:
        if part is None or not part.box.elements:
            continue
        place = landing(part.at, part.box.shape)
        if len(part.at) != len(part.shape) or place.cut(Box.whole(part.shape)) != place:
            raise UsageError(
                f"{name} does not fit into {target} of {receiver}: {list(part.box.shape)} at "
                f"{list(part.at)} of {list(part.shape)}."
            )
        places.append(place)
    if twice := overlap(places):
        raise UsageError(
            f"{target} of {receiver} would be written twice at {list(twice.start)} to "
            f"{list(twice.stop)}.",
            "Two of its needs overlap.",
        )


Holder = tuple[int, str, Resident]
"""A source by its number, and one of its tensors."""


def _units(sources: Sequence[Source], wants: Wants) -> Iterable[tuple[list[str], list[Holder]]]:
    """Wanted tensors that share source tensors, directly or through others, and who holds them."""
    leader: dict[str, str] = {}

    def lead(name: str) -> str:
        while (above := leader[name]) != name:
            leader[name] = name = leader[above]
        return name

    def joined(names: tuple[str, ...]) -> str | None:
        """Let one tensor lead all of these that are wanted; None when none is."""
        wanted = [name for name in names if name in wants]
        for name in wanted:
            leader.setdefault(name, name)
            leader[lead(name)] = lead(wanted[0])
        return wanted[0] if wanted else None

    first: dict[tuple[str, ...], str | None] = {}
    holders: list[tuple[str, Holder]] = []
    for number, source in enumerate(sources):
        for tensor, offer in source.offers.items():
            names = offer.names
            if names not in first:  # tensor ranks hold parts of the same
                first[names] = joined(names)
            if (name := first[names]) is not None:
                holders.append((name, (number, tensor, offer)))

    units: dict[str, tuple[list[str], list[Holder]]] = {}
    for name, several in wants.items():
        if name not in leader:
            box = next((part.box for want in several for part in want.parts if part), None)
            if box is None:
                continue
            raise _missing(name, box)
        units.setdefault(lead(name), ([], []))[0].append(name)
    for name, holder in holders:
        units[lead(name)][1].append(holder)
    return units.values()


def _missing(name: str, box: Box) -> UsageError:
    return UsageError(
        f"No source holds {name} at {list(box.start)} to {list(box.stop)}.",
        "Check that every rank of the trainer is among the sources.",
    )


class _Cookbook:
    """Recipes, by what makes two units alike."""

    def __init__(
        self, sources: Sequence[Source], receivers: Sequence[Receiver], wants: Wants, costs: Costs
    ) -> None:
        self.sources = sources
        self.receivers = receivers
        self.wants = wants
        self.costs = costs
        self.recipes: dict[Any, Recipe] = {}
        self.numbers: dict[Holding, int] = {}
        self.numbers_by_id: dict[int, int] = {}
        """The same; equal tensors have the very same holding, which need not be hashed again."""

    def add(self, names: list[str], holders: list[Holder]) -> None:
        index = {name: number for number, name in enumerate(names)}
        alike: dict[tuple[int, ...], list[Holder]] = {}
        last: tuple[str, ...] = ()
        for holder in holders:
            offer = holder[2]
            if offer.names is not last:
                last, places = offer.names, [index.get(name, -1) for name in offer.names]
            alike.setdefault((self._number(offer.holding), *places), []).append(holder)
        targets: dict[str, int] = {}
        wanted = [
            (number, targets.setdefault(want.target, len(targets)), want.dtype, want.parts)
            for number, name in enumerate(names)
            for want in self.wants[name]
        ]
        key = (
            tuple([(kind, *[holder[0] for holder in same]) for kind, same in alike.items()]),
            tuple([(tensor, target, dtype, id(parts)) for tensor, target, dtype, parts in wanted]),
        )
        recipe = self.recipes.get(key)
        if recipe is None:
            groups = list(alike.values())
            recipe = self.recipes[key] = self._recipe(names, groups, index, wanted)
        recipe.units.append(
            Unit(
                tuple([tuple([name for _, name, _ in same]) for same in alike.values()]),
                tuple(targets),
            )
        )

    def _number(self, holding: Holding) -> int:
        number = self.numbers_by_id.get(id(holding))
        if number is None:
            number = self.numbers.setdefault(holding, len(self.numbers))
            self.numbers_by_id[id(holding)] = number
        return number

    def _recipe(
        self,
        names: list[str],
        groups: list[list[Holder]],
        index: dict[str, int],
        wanted: list[tuple[int, int, str, Parts]],
    ) -> Recipe:
        holdings = [self._holding(same[0], index) for same in groups]
        wants = [Wanted(*want) for want in wanted]
        for want in wants:
            for holding, same in zip(holdings, groups, strict=True):
                if any(h.tensor == want.tensor for h in holding.held):
                    _check_dtype(names[want.tensor], holding.dtype, want.dtype, same[0][1])
        ranks = tuple(tuple(rank for rank, _, _ in same) for same in groups)
        steps = []
        for number, receiver in enumerate(self.receivers):
            far = [-max(self._nearness(receiver, rank) for rank in same) for same in ranks]
            order = sorted(range(len(ranks)), key=far.__getitem__)
            try:
                steps.append(steps_for(number, holdings, order, wants, self.costs))
            except Missing as error:
                raise _missing(names[error.tensor], error.box) from error
        return Recipe(steps, ranks)

    def _holding(self, holder: Holder, index: dict[str, int]) -> Holding:
        """With the numbers that the unit gives to its tensors."""
        rank, name, offer = holder
        numbers = [index.get(name, -1) for name in offer.names]
        held = tuple(replace(one, tensor=numbers[one.tensor]) for one in offer.holding.held)
        holding = replace(offer.holding, held=held)
        check_fits(holding, f"{name} of {self.sources[rank].name}")
        return holding

    def _nearness(self, receiver: Receiver, rank: int) -> int:
        return receiver.place.nearness(self.sources[rank].place)


def _check_dtype(name: str, held: str, wanted: str, source: str) -> None:
    if held != wanted:
        raise UsageError(
            f"{name} is {held} in the source ({source}) and {wanted} in the receiver.",
            "Offer it in the dtype that the receiver has: a plan moves bytes, it does not cast.",
        )


def _share_out(
    recipes: Sequence[Recipe], sources: Sequence[Source], receivers: Sequence[Receiver]
) -> dict[str, Total]:
    """Choose among sources that hold the same: the nearest, and of these the least busy."""
    asked = [
        (_nearest(receiver, recipe.ranks[step.holding], sources), recipe, number, place)
        for recipe in recipes
        for number, receiver in enumerate(receivers)
        for place, step in enumerate(recipe.steps[number])
    ]
    asked.sort(key=lambda one: len(one[0]))  # those without a choice are busy first
    totals = [Total() for _ in receivers]
    busy = [0] * len(sources)
    for places, recipe, number, place in asked:
        step, count = recipe.steps[number][place], len(recipe.units)
        ranks = [recipe.ranks[step.holding][one] for one in places]
        shares = _shares(count, step.choice.moved, [busy[rank] for rank in ranks])
        recipe.holders[number, place] = Holders(places, tuple(accumulate(shares)))
        totals[number].add(step, count)
        for rank, share in zip(ranks, shares, strict=True):
            if share:
                busy[rank] += share * step.choice.moved
                totals[number].add_source(sources[rank].name, share * step.choice.moved)
    return {receiver.name: total for receiver, total in zip(receivers, totals, strict=True)}


def _nearest(
    receiver: Receiver, ranks: tuple[int, ...], sources: Sequence[Source]
) -> tuple[int, ...]:
    """The places in `ranks` of those that are nearest to the receiver."""
    near = [receiver.place.nearness(sources[rank].place) for rank in ranks]
    return tuple(place for place, one in enumerate(near) if one == max(near))


def _shares(units: int, size: int, busy: list[int]) -> list[int]:
    """How many of equal units each source serves, so that all end up about equally busy."""
    if len(busy) == 1:
        return [units]
    shares = [0] * len(busy)
    heap = [(bytes_, number) for number, bytes_ in enumerate(busy)]
    heapq.heapify(heap)
    for _ in range(units):
        bytes_, number = heap[0]
        shares[number] += 1
        heapq.heapreplace(heap, (bytes_ + size, number))
    return shares
