"""The result of planning: what each receiver reads, from which source, by which method.

All units of equal geometry share one `Recipe`, in which tensors and ranks have numbers instead of
names; a `Unit` adds the names. So a plan stays small: it has no list of all copies.
`Plan.transfers` expands the transfers of one receiver while the caller iterates.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rollway.errors import UsageError
from rollway.weights.layout import Placed
from rollway.weights.planning.recipe import Step


@dataclass(frozen=True, slots=True)
class Transfer:
    """Everything that a receiver reads from one source tensor, by one method."""

    source: str
    tensor: str
    targets: tuple[str, ...]  # The names of the receiver's tensors
    step: Step

    def copies(self) -> Iterator[tuple[str, Placed]]:
        """Yield boxes of the source's tensor, after the name of the target that they go into."""
        for cut in self.step.cuts:
            yield self.targets[cut.tensor], cut


@dataclass(slots=True)
class Total:
    """Sums over the transfers of one receiver, or of all."""

    needed: int = 0
    moved: int = 0
    descriptors: int = 0
    blocks: int = 0
    seconds: float = 0.0  # Estimated by the cost model, for transfers one after another
    methods: Counter[str] = field(default_factory=Counter)  # Bytes on the wire, by method
    reasons: Counter[str] = field(default_factory=Counter)
    """Bytes that are moved but not needed, by reason."""
    sources: Counter[str] = field(default_factory=Counter)  # Bytes on the wire, by source

    @property
    def ratio(self) -> float:
        return self.moved / self.needed if self.needed else 1.0

    def add(self, step: Step, count: int) -> None:
        """Add a step that `count` units share."""
        choice = step.choice
        self.needed += step.needed * count
        self.moved += choice.moved * count
        self.descriptors += choice.descriptors * count
        self.blocks += choice.blocks * count
        self.seconds += choice.seconds * count
        self.methods[choice.method] += choice.moved * count
        if extra := choice.moved - step.needed:
            self.reasons[choice.reason] += extra * count

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
class Unit:
    """The names of one unit's tensors, which its recipe only numbers."""

    tensors: tuple[tuple[str, ...], ...]
    """The names of the sources' tensors, by holding, then by the rank that has it."""
    targets: tuple[str, ...]  # The names of the receivers' tensors


@dataclass(slots=True)
class Recipe:
    """The steps of every receiver, the same for each of `units`."""

    steps: list[tuple[Step, ...]]  # One entry per receiver
    ranks: tuple[tuple[int, ...], ...]  # The ranks that have each holding
    units: list[Unit] = field(default_factory=list)
    holders: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    """By receiver and step: rank i of those that have the holding serves the units from number
    `holders[i - 1]` up to (not including) `holders[i]`."""


@dataclass(slots=True)
class Plan:
    """What every receiver reads; `planning.plan.plan` creates it."""

    sources: list[str]
    receivers: list[str]
    recipes: list[Recipe]
    totals: dict[str, Total]  # By receiver

    def transfers(self, receiver: str) -> Iterator[Transfer]:
        """Yield the transfers of one receiver; raise `UsageError` for an unknown one."""
        if receiver not in self.receivers:
            raise UsageError(
                f"The plan has no receiver {receiver}.", f"It has {', '.join(self.receivers[:8])}."
            )
        number = self.receivers.index(receiver)
        for recipe in self.recipes:
            for unit_number, unit in enumerate(recipe.units):
                for step_number, step in enumerate(recipe.steps[number]):
                    holder = bisect_right(recipe.holders[number, step_number], unit_number)
                    source = self.sources[recipe.ranks[step.holding][holder]]
                    tensor = unit.tensors[step.holding][holder]
                    yield Transfer(source, tensor, unit.targets, step)

    @property
    def total(self) -> Total:
        """The sum over all receivers. They run at once, so `seconds` is that of the slowest."""
        grand_total = Total()
        for total in self.totals.values():
            grand_total.needed += total.needed
            grand_total.moved += total.moved
            grand_total.descriptors += total.descriptors
            grand_total.blocks += total.blocks
            grand_total.seconds = max(grand_total.seconds, total.seconds)
            grand_total.methods.update(total.methods)
            grand_total.reasons.update(total.reasons)
            grand_total.sources.update(total.sources)
        return grand_total

    def as_json(self) -> dict[str, Any]:
        return {
            "total": self.total.as_json(),
            "receivers": {name: total.as_json() for name, total in self.totals.items()},
            "recipes": len(self.recipes),
        }
