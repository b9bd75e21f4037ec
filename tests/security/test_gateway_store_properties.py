"""Arbitrary turns, deletes, kills, restarts and damage, against a model."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import tempfile
from collections import Counter, deque
from collections.abc import Coroutine
from contextlib import closing
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rollway.errors import RollwayError
from rollway.gateway.store import SessionStore, StoreDamaged
from rollway.gateway.turns import Session, Turn
from tests.security.stores import copy_as_killed, make_turn, read_files
from tests.soak import examples

T = TypeVar("T")
_FOREIGN = [
    "CREATE TABLE more (a)",
    "CREATE VIEW shown AS SELECT * FROM turns",
    "CREATE TRIGGER t BEFORE DELETE ON turns BEGIN SELECT RAISE (IGNORE); END",
    "DROP INDEX by_session",
]
_NAMES = st.sampled_from(["session a", "session b", "session c"])
_SHARED_MEMORY = Path("/dev/shm")
_ROOT = str(_SHARED_MEMORY) if _SHARED_MEMORY.is_dir() else None


@dataclass
class Known:
    """A turn: its session, and all tokens up to its end."""

    session: str
    tokens: list[int]


class StoreMachine(RuleBasedStateMachine):
    """The model is `known`."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(dir=_ROOT))
        self.path = self.directory / "store" / "gateway.sqlite"
        self.known: dict[str, Known] = {}
        self.ever: dict[str, Known] = {}
        """With those that were deleted."""
        self.before: deque[frozenset[str]] = deque(maxlen=2)
        """The turns before each of the last two commits."""
        self.held: list[Session] = []
        self.numbers = count(1)  # deterministic in every run
        self.loop = asyncio.new_event_loop()
        self.store = SessionStore(self.path)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    def teardown(self) -> None:
        self.store.close()
        self.loop.close()
        shutil.rmtree(self.directory)

    @rule(name=_NAMES, choice=st.integers(0, 9), size=st.sampled_from([1, 2_000]))
    def add(self, name: str, choice: int, size: int) -> None:
        self._add(self.run(self.store.open(name)), choice, size)

    @rule(name=_NAMES)
    def hold(self, name: str) -> None:
        """Begin a request that ends later."""
        self.held.append(self.run(self.store.open(name)))

    @rule(choice=st.integers(0, 9))
    def end_held(self, choice: int) -> None:
        if self.held:
            self._add(self.held.pop(), choice, 1)

    @rule(name=_NAMES)
    def delete(self, name: str) -> None:
        ours = [key for key, known in self.known.items() if known.session == name]
        assert self.run(self.store.delete(name)) or not ours
        if ours:
            self.before.append(frozenset(self.known))
        for key in ours:
            del self.known[key]

    @rule()
    def kill(self) -> None:
        killed = copy_as_killed(self.path)
        self.store.close()
        shutil.rmtree(self.path.parent)
        killed.parent.rename(self.path.parent)
        self._start()

    @rule()
    def restart(self) -> None:
        self.store.close()
        content, deleted = read_files(self.path), {"session a", "session b", "session c"}
        deleted -= {known.session for known in self.known.values()}
        assert not any(name.encode() in content for name in deleted)
        self._start()

    @rule(suffix=st.sampled_from(["", "-wal"]), place=st.integers(0), byte=st.integers(0, 255))
    def damage(self, suffix: str, place: int, byte: int) -> None:
        """Change a byte of a copy: it is refused, or no turn is different. What the log's last
        two commits changed may be missing, as if they had failed."""
        copy = copy_as_killed(self.path)
        file = copy.with_name(f"gateway.sqlite{suffix}")
        content = bytearray(file.read_bytes())
        if content:
            content[place % len(content)] = byte
        file.write_bytes(content)
        before = copy.read_bytes()
        try:
            store = SessionStore(copy)
        except RollwayError:
            assert copy.read_bytes() == before and file.read_bytes() == content
            return
        turns: dict[str, Turn] = {}
        try:
            for name in store.sessions:
                turns |= {turn.id: turn for turn in self.run(store.open(name)).turns}
            assert turns.keys() in (self.known.keys(), *(self.before if suffix else ()))
            for turn in turns.values():
                assert turn.session == self.ever[turn.id].session
                assert turn.token_ids[-1] == self.ever[turn.id].tokens[-1]
        except StoreDamaged:
            pass
        finally:
            store.close()

    @rule(statement=st.sampled_from(_FOREIGN))
    def add_foreign(self, statement: str) -> None:
        """Add what no gateway has to a copy: it is refused, whatever is in its log."""
        copy = copy_as_killed(self.path)
        with closing(sqlite3.connect(copy)) as other:
            other.execute(statement)
        with pytest.raises(StoreDamaged, match="tables"):
            SessionStore(copy)

    def _make_turn(self, session: str, parent: str | None, size: int) -> Turn:
        number = next(self.numbers)
        tokens = {"new_ids": [2 * number], "token_ids": [2 * number + 1]}
        return make_turn(session, parent, id=f"turn {number}", model="m" * size, **tokens)

    def _add(self, session: Session, choice: int, size: int) -> None:
        ours = [key for key, known in self.known.items() if known.session == session.name]
        parent = ours[choice % len(ours)] if ours and choice else None
        before = self.known[parent].tokens if parent else []
        new = self._make_turn(session.name, parent, size)
        was_gone = session.gone
        assert self.run(self.store.record(session, [new])) is not was_gone
        if not was_gone:
            self.before.append(frozenset(self.known))
            tokens = [*before, *new.new_ids, *new.token_ids]
            self.known[new.id] = self.ever[new.id] = Known(session.name, tokens)

    def _start(self) -> None:
        self.held.clear()
        self.store = SessionStore(self.path)

    @invariant()
    def every_acknowledged_turn_is_in_one_place(self) -> None:
        expected: Counter[str] = Counter(known.session for known in self.known.values())
        assert self.store.sessions == expected
        for name in self.store.sessions:
            session = self.run(self.store.open(name))
            assert {turn.id for turn in session.turns} == {
                key for key, known in self.known.items() if known.session == name
            }

    @invariant()
    def no_two_conversations_are_joined(self) -> None:
        legal = [known.tokens for known in self.known.values()]
        for name in self.store.sessions:
            sampled: Counter[int] = Counter()
            for sequence in self.run(self.store.open(name)).trajectories():
                assert sequence.token_ids in legal
                pairs = zip(sequence.token_ids, sequence.loss_mask, strict=True)
                sampled.update(token for token, bit in pairs if bit)
            assert sampled == {
                known.tokens[-1]: 1 for known in self.known.values() if known.session == name
            }


@pytest.mark.timeout(600)
class TestStore(StoreMachine.TestCase):  # type: ignore[misc]
    settings = settings(
        max_examples=examples(200),
        stateful_step_count=30,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
