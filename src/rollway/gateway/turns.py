"""Turns of a session, and the trajectories that they make up.

    session ─► turns: prompt ids, sampled ids, log-probs, and the id of the turn each goes on from

A turn whose prompt goes on from another turn is its child. Each path from a first turn to a last
one is a trajectory; what several paths share is trained on in one of them only. A parent is always
added before its child, so no path has a cycle.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from rollway.errors import RolloutError
from rollway.rollout.sequence import Fork, SequenceBuilder, TokenSequence
from rollway.rollout.trajectory import Rollout, Span

if TYPE_CHECKING:
    from rollway.rollout.experts import RoutedExperts

PARENT_MISSING = "the turn it goes on from is not recorded in this session"


def new_id() -> str:
    return uuid.uuid4().hex


class Turn(msgspec.Struct, tag_field="type", tag="turn"):
    """One assistant turn."""

    session: str
    model: str
    history: str
    """Digest of the messages up to and with this turn, as `messages.chain` computes it."""
    new_ids: list[int]
    """What its prompt has beyond prompt and completion of its parent: all of it without one. Kept
    whole, a long session would grow with the square of its turns."""
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    version: int | None
    worker_id: int | None
    parent: str | None = None
    """The id of the turn that it goes on from."""
    forked: str = ""
    """Why it does not go on from the turn before it in the history, if there was one."""
    routed_experts: dict[str, str | int | list[int] | None] | None = None
    """From where the record of its parent ends."""
    id: str = msgspec.field(default_factory=new_id)

    def experts(self) -> RoutedExperts | None:
        if self.routed_experts is None:
            return None
        from rollway.rollout.experts import decode

        return decode(self.routed_experts)

    def rollout(self, prompt: list[int]) -> Rollout:
        """Return what was sampled after a whole prompt."""
        spans = (Span(0, len(self.token_ids), self.version, self.worker_id),)
        return Rollout(
            prompt,
            self.token_ids,
            self.logprobs,
            self.finish_reason,  # type: ignore[arg-type]
            spans if self.token_ids else (),
            0,
            self.experts(),
        )

    def check(self) -> None:
        """Refuse values that no sampled turn has, so that one bad turn in a file cannot break the
        trajectories of its whole session."""
        if len(self.logprobs) != len(self.token_ids):
            raise RolloutError(f"{len(self.token_ids)} tokens have {len(self.logprobs)} log-probs.")
        if not math.isfinite(sum(self.logprobs)):  # as fast as it gets: each turn comes by here
            raise RolloutError("A log-prob is not a finite number.")
        for ids in (self.new_ids, self.token_ids):
            if ids and not 0 <= min(ids) <= max(ids) < 2**63:
                raise RolloutError("A token id is negative or too large.")
        if not self.id:
            raise RolloutError("The id is empty.")
        self.experts()


@dataclass(slots=True, weakref_slot=True)
class Session:
    """The turns of one session, in the order in which they ended.

    Turns are only ever appended, so a thread may read while another adds.
    """

    name: str = ""
    turns: list[Turn] = field(default_factory=list)
    gone: bool = False
    """Whether it was forgotten. Nothing is recorded in it any more."""
    lost: int = 0
    """How many of its turns could not be read from the journal."""
    size: int = 0
    """Bytes of its turns in the journal."""
    _index: dict[str, int] = field(default_factory=dict)
    _by_history: dict[str, int] = field(default_factory=dict)

    def __contains__(self, turn: str) -> bool:
        return turn in self._index

    def add(self, turn: Turn) -> None:
        """Append a turn. One whose parent is not here becomes a root, and `forked` says so."""
        if turn.id in self._index:
            raise ValueError(f"The session has the turn {turn.id} already.")
        if turn.parent is not None and turn.parent not in self._index:
            turn.parent, turn.forked = None, turn.forked or PARENT_MISSING
        position = len(self.turns)
        self.turns.append(turn)
        self._index[turn.id] = position
        # The newest turn with the same words: that is the one the client has just read.
        self._by_history[turn.history] = position

    def latest(self, digests: Sequence[str]) -> tuple[str, int] | None:
        """Return the id of the turn that the longest beginning of a history ends with, and how
        many messages that beginning has."""
        for count in range(len(digests), 0, -1):
            position = self._by_history.get(digests[count - 1])
            if position is not None:
                return self.turns[position].id, count
        return None

    def ids(self, turn: str) -> list[int]:
        """Return prompt and completion of a turn."""
        tokens: list[int] = []
        for position in self._path(self._index[turn]):
            tokens += self.turns[position].new_ids
            tokens += self.turns[position].token_ids
        return tokens

    def experts_end(self, turn: str | None) -> int:
        """Return the position up to which the record of a turn goes, its parents' included."""
        experts = self._last_experts(turn)
        return 0 if experts is None else experts.end

    def trajectories(self) -> list[TokenSequence]:
        """Build one sequence for each turn that no other goes on from."""
        return list(self.each_trajectory())

    def each_trajectory(self, start: int = 0) -> Iterator[TokenSequence]:
        """Build the same sequences one at a time, from the sequence `start` on: a caller that has
        enough need not build the rest."""
        turns = list(self.turns)
        parents = {turn.parent for turn in turns}
        leaves = [position for position, turn in enumerate(turns) if turn.id not in parents]
        taken: dict[int, int] = {}
        for number, leaf in enumerate(leaves):
            path = self._path(leaf)
            if number >= start:
                yield self._sequence(path, taken)
            for position in reversed(path):
                if position in taken:
                    break  # and all before it as well
                taken[position] = number

    def count_trajectories(self) -> int:
        turns = list(self.turns)
        parents = {turn.parent for turn in turns}
        return sum(turn.id not in parents for turn in turns)

    def _last_experts(self, turn: str | None) -> RoutedExperts | None:
        while turn is not None:
            parent = self.turns[self._index[turn]]
            experts = parent.experts()
            if experts is not None:
                return experts
            turn = parent.parent
        return None

    def _path(self, position: int) -> list[int]:
        """Return the positions from the first turn to this one."""
        path = [position]
        while (parent := self.turns[path[-1]].parent) is not None:
            path.append(self._index[parent])
        return path[::-1]

    def _sequence(self, path: list[int], taken: Mapping[int, int]) -> TokenSequence:
        shared = [position for position in path if position in taken]
        fork = None
        before: list[int] = []
        if shared:
            before = self.ids(self.turns[shared[-1]].id)
            fork = Fork(
                taken[shared[-1]],
                len(before),
                "another trajectory of this session goes on from the same turn",
            )
        elif self.turns[path[0]].forked:
            fork = Fork(0, 0, self.turns[path[0]].forked)
        builder = SequenceBuilder(forked_from=fork)
        if shared:
            builder.begin(before, self._experts(shared))
        for position in path[len(shared) :]:
            turn = self.turns[position]
            builder.begin(turn.new_ids)
            builder.add(turn.rollout(builder.token_ids))
        return builder.sequence()

    def _experts(self, path: list[int]) -> list[RoutedExperts]:
        """Return what each turn of a path adds to the record of the turns before it."""
        parts: list[RoutedExperts] = []
        for position in path:
            experts = self.turns[position].experts()
            if experts is not None:
                parts.append(experts.since(parts[-1].end) if parts else experts)
        return parts

    def check(self, turn: Turn) -> None:
        """Refuse a turn that was read from a file and cannot follow its parent here."""
        turn.check()
        if turn.id in self._index:
            raise RolloutError("The session has a turn of this id already.")
        if turn.parent is not None and turn.parent not in self._index:
            raise RolloutError(f"Its parent `{turn.parent[:64]}` is not there.")
        experts = turn.experts()
        before = self._last_experts(turn.parent)
        if experts is not None and before is not None:
            from rollway.rollout.experts import join  # needs numpy

            join(before, experts.since(before.end))


class Forgotten(msgspec.Struct, tag_field="type", tag="forgotten"):
    """A session was deleted: its turns before this entry no longer count."""

    session: str


class Lost(msgspec.Struct, tag_field="type", tag="lost"):
    """So many turns of a session could not be read. Compaction leaves this in their place."""

    session: str
    turns: int
