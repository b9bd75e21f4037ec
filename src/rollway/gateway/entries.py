"""Lines of the journal, as they are written and read.

    {"sum":"5f1c9a0e","entry":{"type":"turn","session":"episode-17","id":…,"parent":…,…}}

The sum (CRC-32 of the entry) tells a damaged line from a whole one. A line that cannot be read
costs its turn and the turns that go on from it, and no other. Journals of earlier versions have no
sums and name a parent by its position in the session: their positions count only up to the first
line that cannot be read.
"""

from __future__ import annotations

import hashlib
import re
import sys
import zlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rollway.errors import RolloutError, RollwayError
from rollway.gateway.journal import MAX_LINE, Journal, JournalFull, Line
from rollway.gateway.turns import Forgotten, Lost, Session, Turn

Entry = Turn | Forgotten | Lost

_SESSION = re.compile(rb'"session":"((?:[^"\\]|\\.){0,2048})"')
_OLD = (b'{"session":', b'{"forgotten":')
_REFUSED = (msgspec.MsgspecError, ValueError, TypeError, RecursionError, RollwayError)
_MANY = 2**31


class _Line(msgspec.Struct):
    sum: str
    entry: msgspec.Raw


_line_decoder = msgspec.json.Decoder(_Line)
_entry_decoder: msgspec.json.Decoder[Entry] = msgspec.json.Decoder(Entry)


def encode(entry: Entry) -> bytes:
    """Return an entry as a line."""
    body = msgspec.json.encode(entry)
    if len(body) > MAX_LINE - 100:
        raise JournalFull("The turn is too long to be recorded.", "Use a shorter context.")
    return b'{"sum":"%08x","entry":%b}\n' % (zlib.crc32(body), body)


def named_session(raw: bytes) -> str | None:
    """Return the session that a damaged line seems to be of. Good for a report only."""
    match = _SESSION.search(raw, 0, 8192)
    if match is None:
        return None
    try:
        return msgspec.json.decode(b'"%b"' % match[1], type=str)
    except (msgspec.MsgspecError, ValueError):
        return None


@dataclass(slots=True)
class Loaded:
    """What a journal holds."""

    sessions: dict[str, Session] = field(default_factory=dict)
    lost: int = 0
    """How many lines could not be used."""
    damaged: set[str] = field(default_factory=set)
    """Sessions that miss turns."""
    places: list[tuple[int, int]] = field(default_factory=list)
    """Where lines are that could not be used."""
    forgotten: set[str] = field(default_factory=set)
    """Sessions whose text is still in the file although they were deleted."""
    old: bool = False
    """Whether lines of an earlier version are among them."""


def load(journal: Journal) -> Loaded:
    """Read a journal. What cannot be read is counted, never raised."""
    reader = _Reader()
    for line in journal.lines():
        if line.whole:
            reader.read(line)
        else:
            journal.drop_torn(line)
    return reader.finish()


@dataclass(slots=True)
class _Positions:
    """The turns of a session in a journal of an earlier version, by position."""

    damage: int
    ids: list[str | None] = field(default_factory=list)
    trusted: int = sys.maxsize
    """Positions below this one are known; those after a damaged line are not."""


@dataclass(slots=True)
class _Reader:
    loaded: Loaded = field(default_factory=Loaded)
    _unusable: dict[str | None, list[tuple[int, int]]] = field(default_factory=dict)
    _suspected: Counter[str] = field(default_factory=Counter)
    _damage: int = 0
    _positions: dict[str, _Positions] = field(default_factory=dict)
    _seen: Counter[str] = field(default_factory=Counter)

    def read(self, line: Line) -> None:
        """Take in a line, or put it aside."""
        try:
            if line.raw is None:
                raise RolloutError("The line is too long.")
            old = line.raw.startswith(_OLD)
            entry = self._decode_old(line.raw) if old else _decode(line.raw)
        except _REFUSED:
            self._damage += 1
            self._put_aside(line, named_session(line.raw or b""))
            return
        if isinstance(entry, Turn):
            self._add(line, entry, old)
        elif isinstance(entry, Forgotten):
            self._forget(entry.session)
        else:
            session = self._session(entry.session)
            session.lost = min(session.lost + entry.turns, _MANY)
            self.loaded.damaged.add(entry.session)

    def finish(self) -> Loaded:
        for name, count in self._suspected.items():
            if name in self.loaded.sessions:
                self.loaded.sessions[name].lost += count
                self.loaded.damaged.add(name)
        for session in self.loaded.sessions.values():
            session.lost = min(session.lost, _MANY)  # more could not be written down again
        places = [place for part in self._unusable.values() for place in part]
        self.loaded.places = sorted(places)
        return self.loaded

    def _session(self, name: str) -> Session:
        return self.loaded.sessions.setdefault(name, Session(name))

    def _add(self, line: Line, turn: Turn, old: bool) -> None:
        session = self._session(turn.session)
        try:
            session.check(turn)
        except _REFUSED:
            session.lost += 1
            self.loaded.damaged.add(turn.session)
            self._put_aside(line, turn.session, known=True)
        else:
            session.add(turn)
            session.size += len(encode(turn)) if old else line.end - line.start
        if old:
            self._positions[turn.session].ids.append(turn.id if turn.id in session else None)

    def _put_aside(self, line: Line, session: str | None, *, known: bool = False) -> None:
        self.loaded.lost += 1
        self._unusable.setdefault(session, []).append((line.start, line.end))
        if session is not None and not known:
            self._suspected[session] += 1

    def _forget(self, name: str) -> None:
        self.loaded.sessions.pop(name, None)
        self.loaded.damaged.discard(name)
        self.loaded.forgotten.add(name)
        self._unusable.pop(name, None)
        self._suspected.pop(name, None)
        self._positions[name] = _Positions(self._damage)

    def _decode_old(self, raw: bytes) -> Turn | Forgotten:
        """Read a line of an earlier version, whose parents are positions."""
        fields: dict[str, Any] = msgspec.json.decode(raw, type=dict[str, Any])
        self.loaded.old = True
        if "forgotten" in fields:
            return msgspec.convert({"type": "forgotten", "session": fields["forgotten"]}, Forgotten)
        parent = msgspec.convert(fields.get("parent"), int | None)
        digest = hashlib.sha256(raw).hexdigest()[:32]
        # The same at every start, for turns of this version may go on from it.
        fields |= {"type": "turn", "parent": None, "id": f"{digest}-{self._seen[digest]}"}
        turn = msgspec.convert(fields, Turn)
        self._seen[digest] += 1
        if parent is not None:
            turn.parent = self._known(turn.session, parent) or f"position {parent}"
        else:
            self._known(turn.session, 0)
        return turn

    def _known(self, session: str, position: int) -> str | None:
        """Return the id of the turn at a position, where that is certain."""
        positions = self._positions.setdefault(session, _Positions(0))
        if positions.damage != self._damage:
            positions.damage = self._damage
            positions.trusted = min(positions.trusted, len(positions.ids))
        if 0 <= position < min(positions.trusted, len(positions.ids)):
            return positions.ids[position]
        return None


def _decode(raw: bytes) -> Entry:
    line = _line_decoder.decode(raw)
    if line.sum != f"{zlib.crc32(line.entry):08x}":
        raise RolloutError("The sum is wrong.")
    entry = _entry_decoder.decode(line.entry)
    if isinstance(entry, Lost) and not 0 < entry.turns <= _MANY:
        raise RolloutError("The count is wrong.")
    return entry
