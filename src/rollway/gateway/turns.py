"""Turns of a session, and the trajectories that they form.

    session ─► turns: prompt ids, sampled ids, log-probs, and the id of the turn that each continues

A turn whose prompt continues another turn is its child. Each path from a first turn to a last turn
is a trajectory. Turns that several paths share are trained on in one of them only. A parent is
always added before its child, so no path has a cycle.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from rollway.errors import RolloutError
from rollway.gateway.messages import link
from rollway.rollout.completion import Completion
from rollway.rollout.sequence import Fork, SequenceBuilder, TokenSequence
from rollway.rollout.trajectory import Rollout, Span

if TYPE_CHECKING:
    from rollway.rollout.experts import RoutedExperts

PARENT_MISSING = "the turn it continues is not recorded in this session"
_SHORT_IDS = 20_000


def new_id() -> str:
    return uuid.uuid4().hex


class Turn(msgspec.Struct):
    """An assistant turn."""

    session: str
    """First, because the store compares the beginning of a record with it."""
    model: str
    history: str
    """The digest of the messages up to and including this turn; see `messages.chain`."""
    new_ids: list[int]
    """The part of its prompt after the parent's prompt and completion; without a parent, all of
    it. With whole prompts, a session would grow with the square of its turns."""
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    version: int | None
    worker_id: int | None
    parent: str | None = None
    """The id of the turn that it continues."""
    forked: str = ""
    """Why it does not continue the turn before it in the history, if there was one."""
    routed_experts: dict[str, str | int | list[int] | None] | None = None
    """The experts after the last row of its parent."""
    id: str = msgspec.field(default_factory=new_id)

    def experts(self) -> RoutedExperts | None:
        """Return the experts of this turn, decoded; None if they were not recorded."""
        if self.routed_experts is None:
            return None
        from rollway.rollout.experts import decode

        return decode(self.routed_experts)

    def rollout(self, prompt: list[int]) -> Rollout:
        """Return this turn as a rollout of the whole prompt."""
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
        """Raise for values that no sampled turn has: once in the file, such a turn would break the
        trajectories of its whole session."""
        if len(self.logprobs) != len(self.token_ids):
            raise RolloutError(f"{len(self.token_ids)} tokens have {len(self.logprobs)} log-probs.")
        if not math.isfinite(sum(self.logprobs)):  # one sum is fast, and every turn is checked
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
    """Whether it was deleted. Then nothing more is recorded in it."""
    _index: dict[str, int] = field(default_factory=dict)
    _by_history: dict[str, int] = field(default_factory=dict)

    def __contains__(self, turn: str) -> bool:
        return turn in self._index

    @property
    def is_short(self) -> bool:
        """Whether building all of its trajectories takes a few milliseconds at most. Each turn may
        end a trajectory of its own, which repeats the ids before it."""
        count = len(self.turns)
        if count * count > _SHORT_IDS:  # do not look at them
            return False
        ids = sum(1 + len(turn.new_ids) + len(turn.token_ids) for turn in self.turns)
        has_experts = any(turn.routed_experts is not None for turn in self.turns)
        return count * ids <= _SHORT_IDS and not has_experts

    def add(self, turn: Turn) -> None:
        """Append a turn. If its parent is missing it becomes a root, and `forked` says so."""
        if turn.id in self._index:
            raise ValueError(f"The session already has the turn {turn.id}.")
        if turn.parent is not None and turn.parent not in self._index:
            turn.parent, turn.forked = None, turn.forked or PARENT_MISSING
        position = len(self.turns)
        self.turns.append(turn)
        self._index[turn.id] = position
        # With equal texts, the newest turn counts: the client has just read that one.
        self._by_history[turn.history] = position

    def latest(self, digests: Sequence[str]) -> tuple[str, int] | None:
        """Return the last recorded turn of a history, and the number of messages up to it."""
        for count in range(len(digests), 0, -1):
            position = self._by_history.get(digests[count - 1])
            if position is not None:
                return self.turns[position].id, count
        return None

    def ids(self, turn: str) -> list[int]:
        """Return the prompt and completion of a turn."""
        tokens: list[int] = []
        for position in self._path(self._index[turn]):
            tokens += self.turns[position].new_ids
            tokens += self.turns[position].token_ids
        return tokens

    def find_experts_end(self, turn: str | None) -> int:
        """Return the position after the last recorded experts of a turn and its parents."""
        while turn is not None:
            parent = self.turns[self._index[turn]]
            if (experts := parent.experts()) is not None:
                return experts.end
            turn = parent.parent
        return 0

    def trajectories(self, start: int = 0) -> Iterator[TokenSequence]:
        """Yield a sequence for each turn that no other turn continues, from number `start` on. Each
        is built when it is due."""
        owner: dict[int, int] = {}  # turn -> the first trajectory that contains it
        for number, leaf in enumerate(self._list_leaves()):
            path = self._path(leaf)
            if number >= start:
                yield self._build_sequence(path, owner)
            for position in reversed(path):
                if position in owner:
                    break  # an earlier trajectory owns the turns before it as well
                owner[position] = number

    def count_trajectories(self) -> int:
        return len(self._list_leaves())

    def _list_leaves(self) -> list[int]:
        """Return the positions of the turns that no other turn continues."""
        turns = list(self.turns)  # another thread may add to them
        parents = {turn.parent for turn in turns}
        return [position for position, turn in enumerate(turns) if turn.id not in parents]

    def _path(self, position: int) -> list[int]:
        """Return the positions from the first turn to this one."""
        path = [position]
        while (parent := self.turns[path[-1]].parent) is not None:
            path.append(self._index[parent])
        return path[::-1]

    def _build_sequence(self, path: list[int], owner: Mapping[int, int]) -> TokenSequence:
        """Build the sequence of a path. Turns that an earlier trajectory owns become its prompt, so
        that they are trained on once."""
        shared = [position for position in path if position in owner]
        fork = None
        before: list[int] = []
        if shared:
            before = self.ids(self.turns[shared[-1]].id)
            fork = Fork(
                owner[shared[-1]],
                len(before),
                "another trajectory of this session continues the same turn",
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
        """Return the experts that each turn of a path adds to those before it."""
        parts: list[RoutedExperts] = []
        for position in path:
            experts = self.turns[position].experts()
            if experts is not None:
                parts.append(experts.since(parts[-1].end) if parts else experts)
        return parts


@dataclass(slots=True)
class PendingTurn:
    """The parts of a turn that are known before its answer arrives."""

    model: str
    session: Session
    history: str
    """The digest of the messages before the turn."""
    new_ids: list[int]
    with_experts: bool
    parent: str | None = None
    forked: str = ""

    def complete(
        self, completion: Completion, version: int | None, message: Mapping[str, Any] | None
    ) -> Turn:
        """Return the turn with its answer; `message` is None for a text completion."""
        return Turn(
            session=self.session.name,
            model=self.model,
            history=self.history if message is None else link(self.history, message),
            new_ids=self.new_ids,
            token_ids=completion.token_ids,
            logprobs=completion.logprobs or [],
            finish_reason=completion.finish_reason,
            version=version,
            worker_id=completion.worker_id,
            parent=self.parent,
            forked=self.forked,
            routed_experts=self._read_experts(completion),
        )

    def _read_experts(self, completion: Completion) -> dict[str, Any] | None:
        """Return the experts that this turn adds to those of its parent. The engine reports the
        whole prompt each time, but earlier tokens keep their first record."""
        if not self.with_experts or not completion.token_ids:
            return None
        from rollway.rollout.experts import join_whole, read_capture

        before = 0 if self.parent is None else len(self.session.ids(self.parent))
        tokens = before + len(self.new_ids) + len(completion.token_ids)
        routed = join_whole([read_capture(completion.routed_experts)], tokens)
        return routed.since(self.session.find_experts_end(self.parent)).as_json()
