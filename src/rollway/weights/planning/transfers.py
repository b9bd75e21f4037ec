"""A plan as its users see it: what each receiver takes, from whom, which way, and how much.

A plan holds recipes and names, never rows and never a list of all copies: those of one receiver
are made one by one while they are read.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rollway.errors import UsageError
from rollway.weights.layout import Box, Shape
from rollway.weights.planning.costs import Method
from rollway.weights.planning.fanout import Tree
from rollway.weights.planning.recipe import Step


@dataclass(frozen=True, slots=True)
class Copy:
    """`box` of a source's tensor, to `at` of a target; its extent there is `shape`."""

    source: str
    tensor: str
    box: Box
    target: str
    at: Shape
    shape: Shape
    transposed: bool


@dataclass(frozen=True, slots=True)
class Transfer:
    """All that a receiver takes from one source tensor, which goes one way."""

    source: str
    tensor: str
    method: Method
    staged: bool
    reason: str
    needed: int
    moved: int
    copies: tuple[Copy, ...]


@dataclass(slots=True)
class Total:
    """Sums over transfers; those of a plan are the sums over its receivers."""

    needed: int = 0
    moved: int = 0
    descriptors: int = 0
    blocks: int = 0
    seconds: float = 0.0
    """As the cost model has it, one transfer after the other."""
    methods: dict[str, int] = field(default_factory=dict)
    """Bytes on the wire, by method."""
    reasons: dict[str, int] = field(default_factory=dict)
    """Bytes that move without being needed, by why."""
    sources: dict[str, int] = field(default_factory=dict)
    """Bytes on the wire, by source."""

    @property
    def ratio(self) -> float:
        return self.moved / self.needed if self.needed else 1.0

    def add(self, step: Step, count: int) -> None:
        choice = step.choice
        self.needed += step.needed * count
        self.moved += choice.moved * count
        self.descriptors += choice.descriptors * count
        self.blocks += choice.blocks * count
        self.seconds += choice.seconds * count
        self.methods[choice.method] = self.methods.get(choice.method, 0) + choice.moved * count
        if extra := choice.moved - step.needed:
            self.reasons[choice.reason] = self.reasons.get(choice.reason, 0) + extra * count

    def add_source(self, name: str, count: int) -> None:
        self.sources[name] = self.sources.get(name, 0) + count

    def as_json(self) -> dict[str, Any]:
        return {
            "bytes_needed": self.needed,
            "bytes_moved": self.moved,
            "bytes_ratio": round(self.ratio, 6),
            "descriptors": self.descriptors,
            "blocks": self.blocks,
            "estimated_seconds": round(self.seconds, 6),
            "bytes_by_method": dict(self.methods),
            "bytes_by_source": dict(self.sources),
            "bytes_beyond_need": dict(self.reasons),
        }


@dataclass(frozen=True, slots=True)
class Holders:
    """Which of the ranks that hold the same serves which units: each up to its `upto`."""

    places: tuple[int, ...]
    """Among the ranks that have the holding."""
    upto: tuple[int, ...]

    def of(self, unit: int) -> int:
        return self.places[bisect_right(self.upto, unit)]


@dataclass(frozen=True, slots=True)
class Unit:
    """The names that a recipe lacks."""

    tensors: tuple[tuple[str, ...], ...]
    """Of the sources, by holding and by who has it."""
    targets: tuple[str, ...]


@dataclass(slots=True)
class Recipe:
    """What all receivers do for every one of these units."""

    steps: list[tuple[Step, ...]]
    """By receiver."""
    ranks: tuple[tuple[int, ...], ...]
    """Who has which holding."""
    units: list[Unit] = field(default_factory=list)
    holders: dict[tuple[int, int], Holders] = field(default_factory=dict)
    """By receiver and step."""


@dataclass(slots=True)
class Plan:
    """Made by `plan`; the copies of a receiver are expanded while they are read."""

    sources: list[str]
    receivers: list[str]
    recipes: list[Recipe]
    totals: dict[str, Total]
    """By receiver."""
    fanout: Tree | None = None
    """How further engines of the same layout get what this one has, rank from like rank."""

    def transfers(self, receiver: str) -> Iterator[Transfer]:
        number = self._number(receiver)
        for recipe in self.recipes:
            for k, unit in enumerate(recipe.units):
                for place, step in enumerate(recipe.steps[number]):
                    holder = recipe.holders[number, place].of(k)
                    source = self.sources[recipe.ranks[step.holding][holder]]
                    tensor = unit.tensors[step.holding][holder]
                    yield _transfer(step, source, tensor, unit.targets)

    def copies(self, receiver: str) -> Iterator[Copy]:
        for transfer in self.transfers(receiver):
            yield from transfer.copies

    @property
    def total(self) -> Total:
        """Over all receivers; the seconds are those of the slowest, since they go side by side."""
        whole = Total()
        for one in self.totals.values():
            whole.needed += one.needed
            whole.moved += one.moved
            whole.descriptors += one.descriptors
            whole.blocks += one.blocks
            whole.seconds = max(whole.seconds, one.seconds)
            for mine, its in (
                (whole.methods, one.methods),
                (whole.reasons, one.reasons),
                (whole.sources, one.sources),
            ):
                for key, count in its.items():
                    mine[key] = mine.get(key, 0) + count
        return whole

    def as_json(self) -> dict[str, Any]:
        shown: dict[str, Any] = {
            "total": self.total.as_json(),
            "receivers": {name: total.as_json() for name, total in self.totals.items()},
            "recipes": len(self.recipes),
        }
        if self.fanout is not None:
            shown["fanout"] = self.fanout.as_json()
        return shown

    def _number(self, receiver: str) -> int:
        if receiver not in self.receivers:
            raise UsageError(
                f"The plan has no receiver {receiver}.", f"It has {', '.join(self.receivers[:8])}."
            )
        return self.receivers.index(receiver)


def _transfer(step: Step, source: str, tensor: str, targets: tuple[str, ...]) -> Transfer:
    copies = tuple(
        Copy(source, tensor, cut.box, targets[cut.target], cut.at, cut.shape, cut.transposed)
        for cut in step.cuts
    )
    choice = step.choice
    return Transfer(
        source,
        tensor,
        choice.method,
        choice.staged,
        choice.reason,
        step.needed,
        choice.moved,
        copies,
    )
