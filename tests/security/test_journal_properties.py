"""Arbitrary turns, deletes, full disks, crashes, damage and compactions, against a model."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rollway.errors import RollwayError
from rollway.gateway import recorder as recorder_module
from rollway.gateway.entries import decode, encode
from rollway.gateway.journal import JournalFull
from rollway.gateway.recorder import Recorder, Session, Turn
from rollway.gateway.turns import Forgotten, Lost
from tests.security.disks import Crash, FaultyDisk, kill, make_turn
from tests.soak import examples

_NAMES = st.sampled_from(["a", "b", "c"])
_SHARED_MEMORY = Path("/dev/shm")
_ROOT = str(_SHARED_MEMORY) if _SHARED_MEMORY.is_dir() else None


@dataclass
class Known:
    """A turn: its session, all tokens up to its end, and its parent."""

    session: str
    tokens: list[int]
    parent: str | None


def _decode_lines(lines: Iterable[bytes]) -> Iterator[Turn | Forgotten | Lost]:
    for line in lines:
        with contextlib.suppress(RollwayError, ValueError):
            yield decode(line)


class JournalMachine(RuleBasedStateMachine):
    """The model is `known`. Turns that may or may not be in the file are in `unsure`."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(dir=_ROOT))
        self.path = self.directory / "journal.jsonl"
        self.faults = FaultyDisk()
        self.known: dict[str, Known] = {}
        self.unsure: dict[str, Known] = {}
        self.held: list[Session] = []
        self.numbers = count(1)  # deterministic in every run
        self.recorder = Recorder(self.path, disk=self.faults.as_disk())

    def teardown(self) -> None:
        kill(self.recorder)
        shutil.rmtree(self.directory)

    # --- actions of clients ----------------------------------------------------------------------

    @rule(name=_NAMES, choice=st.integers(0, 9), amount=st.integers(1, 2))
    def add(self, name: str, choice: int, amount: int) -> None:
        self._add(self.recorder.open(name), choice, amount)

    @rule(name=_NAMES)
    def hold(self, name: str) -> None:
        """Begin a request that ends later."""
        self.held.append(self.recorder.open(name))

    @rule(choice=st.integers(0, 9))
    def end_held(self, choice: int) -> None:
        if self.held:
            self._add(self.held.pop(), choice, 1)

    @rule(name=_NAMES)
    def forget(self, name: str) -> None:
        ours = [key for key, known in self.known.items() if known.session == name]
        try:
            gone = self.recorder.forget(name)
        except JournalFull:
            assert name in self.recorder.sessions
            return
        except Crash:
            for key in ours:
                self.unsure[key] = self.known.pop(key)
            self._reopen()
            return
        assert gone or not ours
        for key in ours:
            del self.known[key]

    def _make_turn(self, session: str, parent: str | None) -> Turn:
        number = next(self.numbers)
        tokens = {"new_ids": [2 * number], "token_ids": [2 * number + 1]}
        return make_turn(
            session, parent, id=f"turn {number}", history=f"history {number}", **tokens
        )

    def _add(self, session: Session, choice: int, amount: int) -> None:
        ours = [key for key, known in self.known.items() if known.session == session.name]
        parent = ours[choice % len(ours)] if ours and choice else None
        before = self.known[parent].tokens if parent else []
        turns = [self._make_turn(session.name, parent) for _ in range(amount)]
        new = {
            turn.id: Known(session.name, [*before, *turn.new_ids, *turn.token_ids], parent)
            for turn in turns
        }
        was_gone, healthy = session.gone, self.faults == FaultyDisk()
        try:
            recorded = self.recorder.add_all(session, turns)
        except JournalFull:
            assert not any(key in session for key in new) and not healthy
            if "truncate" in self.faults.failing:  # one of the lines may stay in the file
                self.unsure |= new
        except Crash:
            self.unsure |= new
            self._reopen()
        else:
            assert recorded is not was_gone
            if recorded:
                self.known |= new

    # --- faults of the disk ----------------------------------------------------------------------

    @rule(free_bytes=st.one_of(st.none(), st.integers(0, 600)))
    def fill(self, free_bytes: int | None) -> None:
        self.faults.free_bytes = free_bytes

    @rule(calls=st.sets(st.sampled_from(["truncate", "replace"])))
    def fail(self, calls: set[str]) -> None:
        self.faults.failing = calls

    @rule(after=st.integers(1, 900))
    def die_in_a_write(self, after: int) -> None:
        self.faults.crash_after = after

    @rule()
    def die_in_a_compaction(self) -> None:
        self.faults.crash_at_replace = True

    @rule()
    def die(self) -> None:
        self._reopen()

    @rule()
    def restart(self) -> None:
        try:
            self.recorder.close()
        except Crash:
            kill(self.recorder)
        self._start()

    @rule()
    def compact(self) -> None:
        try:
            self.recorder.compact()
        except OSError:
            pass
        except Crash:
            self._reopen()

    @rule(place=st.integers(0), byte=st.integers(0, 255), cut=st.booleans())
    def damage(self, place: int, byte: int, cut: bool) -> None:
        """Change a byte or cut the end of the file while no gateway runs."""
        kill(self.recorder)
        content = self.path.read_bytes()
        if content:
            place %= len(content)
            changed = content[:place] + (b"" if cut else bytes([byte]) + content[place + 1 :])
            self.path.write_bytes(changed)
            self._lose(content, changed)
        self._start()

    def _lose(self, before: bytes, after: bytes) -> None:
        missing = Counter(before.split(b"\n")[:-1]) - Counter(after.split(b"\n")[:-1])
        lost = set()
        for entry in _decode_lines(missing):
            if isinstance(entry, Turn):
                lost.add(entry.id)
            elif isinstance(entry, Forgotten):  # its deleted turns may return
                self.unsure |= self._list_turns(before, entry.session)
        for key, known in list(self.known.items()):  # parents come before children
            if key in lost or known.parent in lost:
                lost.add(key)
                del self.known[key]

    def _list_turns(self, content: bytes, session: str) -> dict[str, Known]:
        turns: dict[str, Known] = {}
        for entry in _decode_lines(content.split(b"\n")):
            if isinstance(entry, Turn) and entry.session == session:
                before = turns[entry.parent].tokens if entry.parent in turns else []
                tokens = [*before, *entry.new_ids, *entry.token_ids]
                turns[entry.id] = Known(session, tokens, entry.parent)
        return turns

    def _reopen(self) -> None:
        kill(self.recorder)
        self._start()

    def _start(self) -> None:
        self.held.clear()
        self.faults.crash_after = None
        self.faults.crash_at_replace = False
        self.recorder = Recorder(self.path, disk=self.faults.as_disk())

    # --- invariants ------------------------------------------------------------------------------

    @invariant()
    def every_acknowledged_turn_is_in_one_place(self) -> None:
        places = Counter(
            (turn.id, name)
            for name, session in self.recorder.sessions.items()
            for turn in session.turns
        )
        assert all(count == 1 for count in places.values())
        expected = {(key, known.session) for key, known in self.known.items()}
        assert expected <= set(places)
        for key, _ in set(places) - expected:
            assert key in self.unsure

    @invariant()
    def no_two_conversations_are_joined(self) -> None:
        every = {**self.unsure, **self.known}
        legal = [known.tokens for known in every.values()]
        for name, session in self.recorder.sessions.items():
            sampled: Counter[int] = Counter()
            for sequence in session.trajectories():
                assert sequence.token_ids in legal
                pairs = zip(sequence.token_ids, sequence.loss_mask, strict=True)
                sampled.update(token for token, bit in pairs if bit)
            assert all(count == 1 for count in sampled.values())
            ours = {known.tokens[-1] for known in self.known.values() if known.session == name}
            assert ours <= set(sampled)


@pytest.fixture(autouse=True)
def no_background(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compact only when the test requests it."""
    monkeypatch.setattr(recorder_module._Background, "schedule", lambda self, delay: None)


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("no_background")
class TestJournal(JournalMachine.TestCase):  # type: ignore[misc]
    settings = settings(
        max_examples=examples(500),
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


# --- the file format -----------------------------------------------------------------------------

_IDS = st.sampled_from(["a", "b", "c", "d", ""])


@st.composite
def _draw_entry(draw: st.DrawFn) -> bytes:
    """Draw a well-formed line of a journal, whose values need not make sense."""
    name = draw(st.sampled_from(["s", "t", "ü", ""]))
    kind = draw(st.integers(0, 9))
    if kind == 0:
        return encode(Forgotten(name))
    if kind == 1:
        return encode(Lost(name, draw(st.integers(-5, 2**40))))
    parent = draw(st.one_of(st.none(), _IDS))
    new = make_turn(name, parent, id=draw(_IDS), history="h", new_ids=[1], token_ids=[2])
    numbers = st.integers(-1, 2**66)
    if draw(st.integers(0, 4)) == 0:
        new.token_ids = draw(st.lists(numbers, max_size=3))
    if draw(st.integers(0, 4)) == 0:
        shape = draw(st.lists(numbers, max_size=4))
        data = draw(st.sampled_from(["", "AA==", "AAAA", "?"]))
        new.routed_experts = {"data": data, "shape": shape, "start": draw(st.integers(-1, 3))}
    if kind < 4:  # the previous format
        fields = msgspec.to_builtins(new)
        del fields["id"], fields["type"]
        fields["parent"] = draw(st.one_of(st.none(), st.integers(-2, 6), st.just("x")))
        return msgspec.json.encode(fields) + b"\n"
    return encode(new)


@st.composite
def _draw_file(draw: st.DrawFn) -> bytes:
    """Draw lines, then change a few bytes anywhere."""
    parts = st.one_of(_draw_entry(), _draw_entry(), _draw_entry(), st.binary(max_size=40))
    content = bytearray(b"".join(draw(st.lists(parts, max_size=12))))
    for _ in range(draw(st.integers(0, 3))):
        if content:
            place = draw(st.integers(0, len(content) - 1))
            length = draw(st.integers(0, 30))
            content[place : place + length] = draw(st.binary(max_size=8))
    return bytes(content)


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(dir=_ROOT))
    yield directory
    shutil.rmtree(directory)


def _summarise(recorder: Recorder) -> Any:
    return {
        name: (session.lost, [msgspec.to_builtins(turn) for turn in session.turns])
        for name, session in recorder.sessions.items()
    }


@pytest.mark.timeout(600)
@settings(max_examples=examples(3000), deadline=None, suppress_health_check=list(HealthCheck))
@given(content=_draw_file())
def test_arbitrary_files_do_not_break_the_reader(fuzzed: Path, content: bytes) -> None:
    path = fuzzed / "journal.jsonl"
    path.write_bytes(content)
    recorder = Recorder(path)
    try:
        for session in recorder.sessions.values():
            try:
                trajectories = session.trajectories()
            except RollwayError as error:
                pytest.fail(f"the reader accepted a session that cannot be served: {error}")
            assert len(trajectories) == session.count_trajectories()
            msgspec.json.encode([sequence.as_json() for sequence in trajectories])
            for turn in session.turns:
                session.ids(turn.id)
        before = _summarise(recorder)
        recorder.compact()
        assert recorder.add(recorder.open("s"), make_turn("s", id="after"))
    finally:
        kill(recorder)
    again = Recorder(path)
    try:
        assert again.sessions["s"].turns[-1].id == "after" and again.lost == 0
        after = _summarise(again)
        after["s"][1].pop()
        if not any(after["s"]):
            before.setdefault("s", after["s"])
        assert after == before
    finally:
        kill(again)
