"""Who gives a version to whom, when many engines want the same one.

trainer ──► r0 ──► r1, r2        the trainer serves the roots; whoever has the version
            r1 ──► r3, r4        serves `arity` others, so that with every level more
            r2 ──► r5, r6        of them can give
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rollway.errors import UsageError


@dataclass(frozen=True, slots=True)
class Edge:
    """`receiver` takes from `source`; None is the trainer."""

    source: str | None
    receiver: str


@dataclass(frozen=True, slots=True)
class Tree:
    """Edges by level; those of one level can go at the same time, after all levels before."""

    levels: tuple[tuple[Edge, ...], ...]

    def source_of(self, receiver: str) -> str | None:
        for edge in self.edges():
            if edge.receiver == receiver:
                return edge.source
        raise UsageError(f"{receiver} is not part of the fan-out.")

    def edges(self) -> Iterator[Edge]:
        for level in self.levels:
            yield from level

    def as_json(self) -> dict[str, Any]:
        return {
            "depth": len(self.levels),
            "levels": [
                [{"source": edge.source, "receiver": edge.receiver} for edge in level]
                for level in self.levels
            ],
        }


def tree(receivers: Sequence[str], arity: int = 2, roots: int = 1) -> Tree:
    """The trainer serves the first `roots`; every other one is served by one that came before."""
    if arity < 1 or roots < 1:
        raise UsageError(f"A fan-out of arity {arity} with {roots} roots reaches nobody.")
    if len(set(receivers)) != len(receivers):
        raise UsageError("A receiver stands in the fan-out twice.")
    levels = []
    level = tuple(Edge(None, name) for name in receivers[:roots])
    waiting = list(receivers[roots:])
    while level:
        levels.append(level)
        givers = [edge.receiver for edge in level]
        # One each before a second one: the last level is rarely full.
        turns = [giver for _ in range(arity) for giver in givers]
        level = tuple(Edge(giver, name) for giver, name in zip(turns, waiting, strict=False))
        waiting = waiting[len(level) :]
    return Tree(tuple(levels))
