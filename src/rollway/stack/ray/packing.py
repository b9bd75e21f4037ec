"""Pack replicas into nodes: whole numbers only, nothing of Ray and nothing of a spec.

    capacities  how many ranks each node can still take:          [8, 8, 3]
    shapes      replicas, with the even splits of their ranks:    16 = 1x16, 2x8, 4x4, 8x2, 16x1
    pack()      the nodes of each replica:                        [[0, 1], [2]]

All ranks of a stack need the same CPUs and GPUs, so a node is one number. Nodes with the same
number are the same to the search, which therefore works on a histogram: how many nodes have room
for how many ranks. It places the largest replicas first, each on the node that it fills best, and
backtracks where that fails. Histograms that have failed are not tried again.

Packing is hard in general (bin packing), so the search has a budget. Within it the answer is exact:
None means that no even split fits. Beyond it `SearchLimit` is raised, which does not happen for
stacks of some dozen nodes (tests compare with brute force), nor for larger ones that are not made
for it.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

BUDGET = 200_000
"""Placements of one replica that a search may try: about two seconds."""
_SHORT_BUDGET = 5_000


@dataclass(frozen=True, slots=True)
class Shape:
    """A replica: its ranks, and the splits that are allowed, as (nodes, ranks on each)."""

    ranks: int
    splits: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class _Choice:
    """One way to place one replica: on so many nodes of each capacity."""

    ranks_per_node: int
    counts: tuple[tuple[int, int], ...]
    """(capacity, number of nodes)"""


class SearchLimit(Exception):
    """The search gave up before it had tried everything."""


def list_splits(ranks: int, engine_ranks: int) -> tuple[tuple[int, int], ...]:
    """List the even splits of a replica over nodes, the smallest number of nodes first.

    `engine_ranks` are the ranks of one data-parallel engine: vLLM puts whole engines on a node, or
    one engine on several nodes, never parts of two engines on one node."""
    splits = []
    for nodes in range(1, ranks + 1):
        here, rest = divmod(ranks, nodes)
        if rest == 0 and (here % engine_ranks == 0 or engine_ranks % here == 0):
            splits.append((nodes, here))
    return tuple(splits)


def pack(
    capacities: Sequence[int],
    shapes: Sequence[Shape],
    *,
    is_narrow: bool = False,
    budget: int = BUDGET,
) -> list[list[int]] | None:
    """Return the nodes of each replica, as positions in `capacities`; None if they do not fit.

    A narrow packing splits no replica further than it would have to if it were alone."""
    if is_narrow:
        shapes = [Shape(shape.ranks, shape.splits[:1]) for shape in _fit_alone(capacities, shapes)]
    order = sorted(range(len(shapes)), key=lambda i: (-shapes[i].ranks, shapes[i].splits, i))
    choices = _search(capacities, [shapes[i] for i in order], budget)
    if choices is None:
        return None
    places = _assign_nodes(capacities, choices)
    return [nodes for _, nodes in sorted(zip(order, places, strict=True))]


def _fit_alone(capacities: Sequence[int], shapes: Sequence[Shape]) -> Iterator[Shape]:
    """Yield the shapes with those splits for which the empty nodes would suffice."""
    ordered = sorted(capacities)
    for shape in shapes:
        fitting = tuple(
            (nodes, here)
            for nodes, here in shape.splits
            if len(ordered) - bisect.bisect_left(ordered, here) >= nodes
        )
        yield Shape(shape.ranks, fitting)


def _search(
    capacities: Sequence[int], shapes: Sequence[Shape], budget: int
) -> list[_Choice] | None:
    """Search in two orders: one packs tightly, one keeps many nodes open for wide replicas.

    A short run of either finds what there is to find in ordinary clusters. Only then one of them
    may use the whole budget."""
    for spread_wide, limit in ((False, _SHORT_BUDGET), (True, _SHORT_BUDGET), (True, budget)):
        try:
            return _Search(capacities, shapes, spread_wide).run(min(limit, budget) + len(shapes))
        except SearchLimit:
            continue
    raise SearchLimit


class _Search:
    """A depth-first search, one replica per level."""

    def __init__(
        self, capacities: Sequence[int], shapes: Sequence[Shape], spread_wide: bool
    ) -> None:
        self._shapes = shapes
        self._spread_wide = spread_wide
        self._histogram: dict[int, int] = {}
        for capacity in capacities:
            self._histogram[capacity] = self._histogram.get(capacity, 0) + 1
        self._sorted = sorted(self._histogram)  # the keys; updated with the histogram
        self._free = sum(capacities)
        self._needed = [0] * (len(shapes) + 1)  # ranks from this level on
        self._equal = [0] * (len(shapes) + 1)  # replicas of this shape from this level on
        for level in reversed(range(len(shapes))):
            self._needed[level] = self._needed[level + 1] + shapes[level].ranks
            is_same = level + 1 < len(shapes) and shapes[level + 1] == shapes[level]
            self._equal[level] = 1 + (self._equal[level + 1] if is_same else 0)
        self._failed: set[tuple[int, tuple[tuple[int, int], ...]]] = set()

    def run(self, budget: int) -> list[_Choice] | None:
        """Return a choice for each replica; None if there is none. Iterative: a stack may have
        more replicas than Python has levels of recursion."""
        if not self._shapes:
            return []
        chosen: list[_Choice] = []
        levels = [self._list_choices(0)]
        while levels:
            choice = next(levels[-1], None)
            if choice is None:
                levels.pop()
                self._failed.add((len(levels), self._make_key()))
                if chosen:
                    self._apply(chosen.pop(), -1)
                continue
            budget -= 1
            if budget < 0:
                raise SearchLimit
            self._apply(choice, 1)
            chosen.append(choice)
            level = len(chosen)
            if level == len(self._shapes):
                return chosen
            if self._failed and (level, self._make_key()) in self._failed:
                self._apply(chosen.pop(), -1)
            else:
                levels.append(self._list_choices(level))
        return None

    def _make_key(self) -> tuple[tuple[int, int], ...]:
        return tuple((capacity, self._histogram[capacity]) for capacity in self._sorted)

    def _apply(self, choice: _Choice, sign: int) -> None:
        """Place a replica, or take it back with sign -1."""
        for capacity, count in choice.counts:
            self._add(capacity, -sign * count)
            self._add(capacity - choice.ranks_per_node, sign * count)
            self._free -= sign * count * choice.ranks_per_node

    def _add(self, capacity: int, count: int) -> None:
        before = self._histogram.get(capacity, 0)
        after = self._histogram[capacity] = before + count
        if before == 0:
            bisect.insort(self._sorted, capacity)
        elif after == 0:
            del self._sorted[bisect.bisect_left(self._sorted, capacity)]

    def _list_choices(self, level: int) -> Iterator[_Choice]:
        """Yield the ways to place a replica, the best first; none if the rest cannot fit."""
        shape = self._shapes[level]
        if self._free < self._needed[level] or not shape.splits:
            return
        if not self._has_room_for_equals(level):
            return
        for nodes, here in shape.splits:
            position = bisect.bisect_left(self._sorted, here)
            fitting = self._sorted[position:]
            if nodes > 1 and self._spread_wide:
                fitting.reverse()
            available = [self._histogram[capacity] for capacity in fitting]
            for counts in _list_counts(available, nodes):
                yield _Choice(here, tuple((fitting[i], count) for i, count in counts))

    def _has_room_for_equals(self, level: int) -> bool:
        """Return whether the replicas of this shape would fit if there were no others."""
        shape, replicas = self._shapes[level], self._equal[level]
        if len(shape.splits) == 1:
            nodes, here = shape.splits[0]
            # Each replica uses a node once, so a node counts at most once per replica.
            slots = sum(min(c // here, replicas) * self._histogram[c] for c in self._sorted)
            return slots >= replicas * nodes
        most = max(here for _, here in shape.splits) * replicas
        room = sum(min(capacity, most) * self._histogram[capacity] for capacity in self._sorted)
        return room >= replicas * shape.ranks


def _list_counts(available: Sequence[int], total: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yield all ways to take `total` things from classes of `available` ones, as (class, number);
    those that take most of the first classes come first."""
    rooms = [0] * (len(available) + 1)  # things in the classes from here on
    for i in reversed(range(len(available))):
        rooms[i] = rooms[i + 1] + available[i]
    if rooms[0] < total:
        return
    counts: list[tuple[int, int]] = []
    position, missing = 0, total
    while True:
        while missing:
            count = min(available[position], missing)
            if count:
                counts.append((position, count))
                missing -= count
            position += 1
        yield tuple(counts)
        # Step back to the last class that can give one to the classes after it.
        while counts:
            position, count = counts.pop()
            missing += count
            if missing - (count - 1) <= rooms[position + 1]:
                if count > 1:
                    counts.append((position, count - 1))
                missing -= count - 1
                position += 1
                break
        else:
            return


def _assign_nodes(capacities: Sequence[int], choices: Sequence[_Choice]) -> list[list[int]]:
    """Turn choices of capacities into nodes, the first ones first."""
    nodes: dict[int, list[int]] = {}
    for node, capacity in enumerate(capacities):
        nodes.setdefault(capacity, []).append(node)  # ascending, so each list is a heap
    assigned = []
    for choice in choices:
        moves = [
            (heapq.heappop(nodes[capacity]), capacity - choice.ranks_per_node)
            for capacity, count in choice.counts
            for _ in range(count)
        ]
        for node, left in moves:
            heapq.heappush(nodes.setdefault(left, []), node)
        assigned.append(sorted(node for node, _ in moves))
    return assigned
