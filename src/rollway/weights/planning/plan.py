"""Plan transfers: which box of which source tensor goes into which box of which target tensor.

    sources   ranks of a trainer, with the boxes they hold
       │      units: Hugging Face tensors that share source tensors (q, k, v; gate, up)
       │      recipes: one for all units of equal geometry, found by intersecting boxes
       ▼
    plan      recipes, the names of the units of each, and which source serves which units

Every element that a receiver needs is written exactly once, or the plan is refused. Bytes beyond
the need move only where the plan gives a reason (tests/unit/weights/test_plan_properties.py).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from rollway.errors import UsageError
from rollway.weights.layout import Box, find_overlap, place_at
from rollway.weights.planning.recipe import Costs, Missing, UnitTarget, check_fits, make_steps
from rollway.weights.planning.sources import Holding, ResidentTensor, Source
from rollway.weights.planning.targets import Parts, TargetPart, Targets
from rollway.weights.planning.transfers import Plan, Recipe, Total, Unit


def plan(
    sources: Sequence[Source],
    receivers: Sequence[str],
    targets: Targets,
    costs: Costs | None = None,
) -> Plan:
    """Find where every element that a receiver needs comes from, and how it is moved.

    Parameters:
        sources: the ranks that can be read.
        receivers: the names of the ranks that receive, in the order of the parts in `targets`.
        targets: which part of which tensor goes into which parameter.
        costs: speeds of the machines, for the choice of methods.

    Raises `UsageError` if an element has no source or would be written twice, if dtypes differ, or
    if a name is used twice.
    """
    _check_names("source", [source.name for source in sources])
    _check_names("receiver", list(receivers))
    _check_targets(receivers, targets)
    finder = _RecipeFinder(sources, receivers, targets, costs or Costs())
    for names, holders in _group_units(sources, targets):
        finder.add(names, holders)
    recipes = list(finder.recipes.values())
    totals = _share_out(recipes, sources, receivers)
    return Plan([source.name for source in sources], list(totals), recipes, totals)


def _check_names(kind: str, names: list[str]) -> None:
    if not names:
        raise UsageError(f"A plan needs at least one {kind}.", f"Give a {kind}.")
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UsageError(
            f"Two of the plan's {kind}s are called {twice}.", "Give each its own name."
        )


def _check_targets(receivers: Sequence[str], targets: Targets) -> None:
    """Refuse targets that write an element twice, or beyond their parameter."""
    writers: dict[str, list[tuple[str, Parts]]] = {}
    for name, several in targets.items():
        for target in several:
            if len(target.parts) != len(receivers):
                raise UsageError(
                    f"{name} has parts for {len(target.parts)} ranks, but the plan has "
                    f"{len(receivers)} receivers.",
                    "Describe the same ranks in both.",
                )
            writers.setdefault(target.target, []).append((name, target.parts))
    seen: set[tuple[int, ...]] = set()
    for parameter, mine in writers.items():
        # Equal layers share the very same parts, so one of them is checked for all.
        key = tuple(id(parts) for _, parts in mine)
        if key in seen:
            continue
        seen.add(key)
        for number, receiver in enumerate(receivers):
            _check_parameter(parameter, receiver, [(n, parts[number]) for n, parts in mine])


def _check_parameter(
    parameter: str, receiver: str, parts: list[tuple[str, TargetPart | None]]
) -> None:
    boxes = []
    for name, part in parts:
        if part is None or not part.box.elements:
            continue
        box = place_at(part.at, Box.whole(part.box.shape))
        if len(part.at) != len(part.shape) or box.intersect(Box.whole(part.shape)) != box:
            raise UsageError(
                f"{name} does not fit into {parameter} of {receiver}: {list(part.box.shape)} at "
                f"{list(part.at)} of {list(part.shape)}.",
                "Check the shapes of the receiver's parameters.",
            )
        boxes.append(box)
    if twice := find_overlap(boxes):
        common = twice[0].intersect(twice[1]) or twice[0]
        raise UsageError(
            f"{parameter} of {receiver} would be written twice at {list(common.start)} to "
            f"{list(common.stop)}.",
            "Give it targets that do not overlap.",
        )


Holder = tuple[int, str, ResidentTensor]
"""The number of a source, and one of its tensors with its name."""


def _group_units(
    sources: Sequence[Source], targets: Targets
) -> Iterable[tuple[list[str], list[Holder]]]:
    """Return the units: needed tensors that share source tensors, and who holds these.

    Units are found by union-find: `leader` maps a tensor to another one of its unit, and the leader
    of a unit to itself."""
    leader: dict[str, str] = {}

    def find_leader(name: str) -> str:
        while (above := leader[name]) != name:
            leader[name] = name = leader[above]  # halves the path for the next lookup
        return name

    def join(names: tuple[str, ...]) -> str | None:
        """Put the needed ones of these tensors into one unit; return one of them."""
        needed = [name for name in names if name in targets]
        for name in needed:
            leader.setdefault(name, name)
            leader[find_leader(name)] = find_leader(needed[0])
        return needed[0] if needed else None

    first: dict[tuple[str, ...], str | None] = {}
    holders: list[tuple[str, Holder]] = []
    for number, source in enumerate(sources):
        for tensor, offer in source.offers.items():
            names = offer.names
            if names not in first:  # ranks of one tensor-parallel group hold the same names
                first[names] = join(names)
            if (name := first[names]) is not None:
                holders.append((name, (number, tensor, offer)))

    units: dict[str, tuple[list[str], list[Holder]]] = {}
    for name, several in targets.items():
        if name not in leader:
            box = next((part.box for target in several for part in target.parts if part), None)
            if box is None:
                continue
            raise _report_missing(name, box)
        units.setdefault(find_leader(name), ([], []))[0].append(name)
    for name, holder in holders:
        units[find_leader(name)][1].append(holder)
    return units.values()


def _report_missing(name: str, box: Box) -> UsageError:
    return UsageError(
        f"No source holds {name} at {list(box.start)} to {list(box.stop)}.",
        "Check that every rank of the trainer is among the sources.",
    )


@dataclass(slots=True)
class _RecipeFinder:
    """Finds the recipe of each unit; units of equal geometry share one."""

    sources: Sequence[Source]
    receivers: Sequence[str]
    targets: Targets
    costs: Costs
    recipes: dict[Any, Recipe] = field(default_factory=dict)
    numbers: dict[Holding, int] = field(default_factory=dict)
    numbers_by_id: dict[int, int] = field(default_factory=dict)
    """The same by identity: hashing a holding for each of 100,000 tensors is slow."""

    def add(self, names: list[str], holders: list[Holder]) -> None:
        """Add the unit of these Hugging Face tensors to its recipe."""
        index = {name: number for number, name in enumerate(names)}
        # Holders with the same holding of the same tensors can replace each other.
        alike: dict[tuple[int, ...], list[Holder]] = {}
        last: tuple[str, ...] = ()
        for holder in holders:
            offer = holder[2]
            if offer.names is not last:
                last, places = offer.names, [index.get(name, -1) for name in offer.names]
            alike.setdefault((self._number(offer.holding), *places), []).append(holder)
        parameters: dict[str, int] = {}
        targets = [
            (number, parameters.setdefault(target.target, len(parameters)), target)
            for number, name in enumerate(names)
            for target in self.targets[name]
        ]
        # The key has the identity of `parts` instead of its value, which would be hashed for every
        # unit.
        key = (
            tuple([(kind, *[holder[0] for holder in same]) for kind, same in alike.items()]),
            tuple([(number, to, t.dtype, id(t.parts)) for number, to, t in targets]),
        )
        recipe = self.recipes.get(key)  # hashed once: a key may have hundreds of ranks
        if recipe is None:
            recipe = self.recipes[key] = self._find(names, list(alike.values()), index, targets)
        tensors = tuple([tuple([name for _, name, _ in same]) for same in alike.values()])
        recipe.units.append(Unit(tensors, tuple(parameters)))

    def _number(self, holding: Holding) -> int:
        number = self.numbers_by_id.get(id(holding))
        if number is None:
            number = self.numbers.setdefault(holding, len(self.numbers))
            self.numbers_by_id[id(holding)] = number
        return number

    def _find(
        self,
        names: list[str],
        groups: list[list[Holder]],
        index: dict[str, int],
        targets: list[UnitTarget],
    ) -> Recipe:
        holdings = [self._renumber(same[0], index) for same in groups]
        for tensor, _, target in targets:
            for holding, same in zip(holdings, groups, strict=True):
                if any(held.tensor == tensor for held in holding.held):
                    _check_dtype(names[tensor], holding.dtype, target.dtype, same[0][1])
        ranks = tuple(tuple(rank for rank, _, _ in same) for same in groups)
        steps = []
        for number in range(len(self.receivers)):
            try:
                steps.append(make_steps(number, holdings, targets, self.costs))
            except Missing as error:
                raise _report_missing(names[error.tensor], error.box) from error
        return Recipe(steps, ranks)

    def _renumber(self, holder: Holder, index: dict[str, int]) -> Holding:
        """Return the holding with the unit's numbers for its tensors (-1: not needed)."""
        rank, name, offer = holder
        numbers = [index.get(name, -1) for name in offer.names]
        held = tuple(replace(h, tensor=numbers[h.tensor]) for h in offer.holding.held)
        holding = replace(offer.holding, held=held)
        check_fits(holding, f"{name} of {self.sources[rank].name}")
        return holding


def _check_dtype(name: str, held: str, needed: str, source: str) -> None:
    if held != needed:
        raise UsageError(
            f"{name} is {held} in the source ({source}) and {needed} in the receiver.",
            "Offer it in the dtype that the receiver has: a plan moves bytes, it does not cast.",
        )


def _share_out(
    recipes: Sequence[Recipe], sources: Sequence[Source], receivers: Sequence[str]
) -> dict[str, Total]:
    """Choose the least busy of the sources that hold the same."""
    steps = [
        (recipe, number, place)
        for recipe in recipes
        for number in range(len(receivers))
        for place in range(len(recipe.steps[number]))
    ]
    # Steps without a choice come first, so that the others can avoid the sources they load.
    steps.sort(key=lambda step: len(step[0].ranks[step[0].steps[step[1]][step[2]].holding]))
    totals = {receiver: Total() for receiver in receivers}
    busy = [0] * len(sources)
    for recipe, number, place in steps:
        step, count = recipe.steps[number][place], len(recipe.units)
        ranks = recipe.ranks[step.holding]
        shares = _balance(count, step.choice.moved, [busy[rank] for rank in ranks])
        recipe.holders[number, place] = tuple(accumulate(shares))
        total = totals[receivers[number]]
        total.add(step, count)
        for rank, share in zip(ranks, shares, strict=True):
            if share:
                busy[rank] += share * step.choice.moved
                total.sources[sources[rank].name] += share * step.choice.moved
    return totals


def _balance(units: int, size: int, busy: list[int]) -> list[int]:
    """Return how many of equal units each source serves, so that all become about equally busy."""
    if len(busy) == 1:
        return [units]
    shares = [0] * len(busy)
    heap = [(load, number) for number, load in enumerate(busy)]
    heapq.heapify(heap)
    for _ in range(units):
        load, number = heap[0]
        shares[number] += 1
        heapq.heapreplace(heap, (load + size, number))
    return shares
