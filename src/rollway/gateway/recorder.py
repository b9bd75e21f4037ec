"""What was sampled in each session, kept in memory and in a journal.

    session ─► turns: prompt ids, sampled ids, log-probs, spans, and where in the history each is

A turn whose prompt goes on from another turn is its child. Each path from a first turn to a last
one is a trajectory; what several paths share is trained on in one of them only. The journal is one
file of JSON lines, written before the client has its answer: a gateway that is killed and started
again knows all that a client was told.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rollway.errors import UsageError
from rollway.rollout.sequence import Fork, SequenceBuilder, TokenSequence
from rollway.rollout.trajectory import Rollout, Span

if TYPE_CHECKING:
    from rollway.rollout.experts import RoutedExperts

log = logging.getLogger(__name__)


class Turn(msgspec.Struct):
    """One assistant turn."""

    session: str
    model: str
    history: str
    """Digest of the messages up to and with this turn, as `messages.chain` makes it."""
    new_ids: list[int]
    """What its prompt has beyond prompt and completion of its parent: all of it without one. Kept
    whole, a long session would grow with the square of its turns."""
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    version: int | None
    worker_id: int | None
    parent: int | None = None
    """Which turn of the session it goes on from."""
    forked: str = ""
    """Why it does not go on from the turn before it in the history, if there was one."""
    routed_experts: dict[str, Any] | None = None
    """From where the record of its parent ends."""

    def experts(self) -> RoutedExperts | None:
        if self.routed_experts is None:
            return None
        from rollway.rollout.experts import decode

        return decode(self.routed_experts)

    def rollout(self, before: list[int]) -> Rollout:
        spans = (Span(0, len(self.token_ids), self.version, self.worker_id),)
        return Rollout(
            before + self.new_ids,
            self.token_ids,
            self.logprobs,
            self.finish_reason,  # type: ignore[arg-type]
            spans if self.token_ids else (),
            0,
            self.experts(),
        )


@dataclass(slots=True)
class Session:
    """The turns of one session, in the order in which they ended."""

    turns: list[Turn] = field(default_factory=list)
    _by_history: dict[str, int] = field(default_factory=dict)

    def add(self, turn: Turn) -> None:
        # The newest turn with the same words: that is the one the client has just read.
        self._by_history[turn.history] = len(self.turns)
        self.turns.append(turn)

    def latest(self, digests: list[str]) -> tuple[int, int] | None:
        """The turn that the longest beginning of a history ends with, and how many messages that
        beginning has."""
        for count in range(len(digests), 0, -1):
            turn = self._by_history.get(digests[count - 1])
            if turn is not None:
                return turn, count
        return None

    def ids(self, index: int) -> list[int]:
        """Prompt and completion of a turn."""
        found: list[int] = []
        for one in reversed(list(self._path(index))):
            found += self.turns[one].new_ids
            found += self.turns[one].token_ids
        return found

    def experts_end(self, index: int | None) -> int:
        """Up to which position the record of a turn goes, its parents' included."""
        experts = None if index is None else self.turns[index].experts()
        return 0 if experts is None else experts.end

    def trajectories(self) -> list[TokenSequence]:
        """One sequence for each turn that no other goes on from."""
        parents = {turn.parent for turn in self.turns}
        leaves = [index for index in range(len(self.turns)) if index not in parents]
        taken: dict[int, int] = {}
        found: list[TokenSequence] = []
        for leaf in leaves:
            path = list(reversed(list(self._path(leaf))))
            sequence = self._sequence(path, taken)
            found.append(sequence)
            taken |= {index: len(found) - 1 for index in path if index not in taken}
        return found

    def _path(self, index: int | None) -> Iterator[int]:
        while index is not None:
            yield index
            index = self.turns[index].parent

    def _sequence(self, path: list[int], taken: Mapping[int, int]) -> TokenSequence:
        shared = [index for index in path if index in taken]
        fork = None
        if shared:
            fork = Fork(
                taken[shared[-1]],
                len(self.ids(shared[-1])),
                "another trajectory of this session goes on from the same turn",
            )
        elif self.turns[path[0]].forked:
            fork = Fork(0, 0, self.turns[path[0]].forked)
        builder = SequenceBuilder(forked_from=fork)
        if shared:
            known = [self.turns[index].experts() for index in shared]
            builder.begin(self.ids(shared[-1]), [part for part in known if part is not None])
        for index in path[len(shared) :]:
            builder.add(self.turns[index].rollout(builder.token_ids))
        return builder.sequence()


class Recorder:
    """All sessions, and their journal."""

    def __init__(self, journal: Path | None) -> None:
        self.sessions: dict[str, Session] = {}
        self._journal = journal
        self._file: Any = None
        self._lock: Any = None
        if journal is not None:
            self._load(journal)

    def session(self, name: str) -> Session:
        return self.sessions.setdefault(name, Session())

    def add(self, turn: Turn) -> None:
        """Into the journal first."""
        self._write(msgspec.json.encode(turn))
        self.session(turn.session).add(turn)

    def forget(self, name: str) -> bool:
        if self.sessions.pop(name, None) is None:
            return False
        self._write(msgspec.json.encode({"forgotten": name}))
        return True

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
            self._lock.close()

    def _load(self, journal: Path) -> None:
        """Read what an earlier gateway wrote, and leave out what was forgotten."""
        try:
            journal.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = journal.with_suffix(".lock").open("ab")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if journal.exists():
                self._read(journal)
                self._compact(journal)
            self._file = journal.open("ab", buffering=0)
        except BlockingIOError as error:
            raise UsageError(
                f"Another gateway uses the journal {journal}.",
                "Two would overwrite each other's: give one of them another file with --journal.",
            ) from error
        except OSError as error:
            raise UsageError(
                f"The journal {journal} cannot be used: {error.strerror}.",
                "Give another file with --journal.",
            ) from error

    def _read(self, journal: Path) -> None:
        for number, line in enumerate(journal.read_bytes().splitlines(), start=1):
            try:
                entry = json.loads(line)
                if "forgotten" in entry:
                    self.sessions.pop(entry["forgotten"], None)
                else:
                    turn = msgspec.convert(entry, Turn)
                    self.session(turn.session).add(turn)
            except (ValueError, TypeError, msgspec.ValidationError) as error:
                # A line that was being written when the machine went down: its client never had
                # an answer.
                log.warning("line %d of %s is not a turn: %s", number, journal, error)

    def _compact(self, journal: Path) -> None:
        scratch = journal.with_suffix(".new")
        with scratch.open("wb") as file:
            for session in self.sessions.values():
                for turn in session.turns:
                    file.write(msgspec.json.encode(turn) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(journal)

    def _write(self, line: bytes) -> None:
        if self._file is not None:
            self._file.write(line + b"\n")
