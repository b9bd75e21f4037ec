"""Encode and decode the lines of the journal.

    {"sum":"5f1c9a0e","entry":{"type":"turn","session":"episode-17","id":…,"parent":…,…}}

The checksum (CRC-32 of the entry) detects damaged lines. An unreadable line costs its turn and that
turn's descendants, but no other. Journals of earlier versions have no checksums and name a parent
by its position in the session; such positions count only up to the first unreadable line.
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
REFUSED = (msgspec.MsgspecError, ValueError, TypeError, RecursionError, RollwayError)
_MANY = 2**31


class _Line(msgspec.Struct):
    sum: str
    entry: msgspec.Raw


_line_decoder = msgspec.json.Decoder(_Line)
_entry_decoder: msgspec.json.Decoder[Entry] = msgspec.json.Decoder(Entry)


def encode(entry: Entry) -> bytes:
    """Encode an entry as a line."""
    body = msgspec.json.encode(entry)
    if len(body) > MAX_LINE - 100:
        raise JournalFull("The turn is too long to be recorded.", "Use a shorter context.")
    return b'{"sum":"%08x","entry":%b}\n' % (zlib.crc32(body), body)


def guess_session(raw: bytes) -> str | None:
    """Return the session that a damaged line seems to belong to. Use it only for reports."""
    match = _SESSION.search(raw, 0, 8192)
    if match is None:
        return None
    try:
        return msgspec.json.decode(b'"%b"' % match[1], type=str)
    except (msgspec.MsgspecError, ValueError):
        return None


@dataclass(slots=True)
class Loaded:
    """The content of a journal."""

    sessions: dict[str, Session] = field(default_factory=dict)
    lost: int = 0
    """The number of unusable lines."""
    damaged: set[str] = field(default_factory=set)
    """Sessions with missing turns."""
    places: list[tuple[int, int]] = field(default_factory=list)
    """The positions of unusable lines."""
    forgotten: set[str] = field(default_factory=set)
    """Deleted sessions whose text is still in the file."""
    old: bool = False
    """Whether it has lines of an earlier version."""


def load(journal: Journal) -> Loaded:
    """Read a journal. Unreadable lines are counted, never raised."""
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
    """Positions below this are certain; those after a damaged line are not."""


@dataclass(slots=True)
class _Reader:
    loaded: Loaded = field(default_factory=Loaded)
    _unusable: dict[str | None, list[tuple[int, int]]] = field(default_factory=dict)
    _suspected: Counter[str] = field(default_factory=Counter)
    _damage: int = 0
    _positions: dict[str, _Positions] = field(default_factory=dict)
    _seen: Counter[str] = field(default_factory=Counter)

    def read(self, line: Line) -> None:
        """Add a line, or put it aside if it is unusable."""
        try:
            if line.raw is None:
                raise RolloutError("The line is too long.")
            old = line.raw.startswith(_OLD)
            entry = self._decode_old(line.raw) if old else decode(line.raw)
        except REFUSED:
            self._damage += 1
            self._put_aside(line, guess_session(line.raw or b""))
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
            session.lost = min(session.lost, _MANY)  # `Lost` entries cannot hold more
        places = [place for part in self._unusable.values() for place in part]
        self.loaded.places = sorted(places)
        return self.loaded

    def _session(self, name: str) -> Session:
        return self.loaded.sessions.setdefault(name, Session(name))

    def _add(self, line: Line, turn: Turn, old: bool) -> None:
        session = self._session(turn.session)
        try:
            session.check(turn)
        except REFUSED:
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
        # The id must be the same at every start, because newer turns may refer to it.
        fields |= {"type": "turn", "parent": None, "id": f"{digest}-{self._seen[digest]}"}
        turn = msgspec.convert(fields, Turn)
        self._seen[digest] += 1
        if parent is not None:
            turn.parent = self._find_id(turn.session, parent) or f"position {parent}"
        else:
            self._find_id(turn.session, 0)
        return turn

    def _find_id(self, session: str, position: int) -> str | None:
        """Return the id of the turn at a position, if that is certain."""
        positions = self._positions.setdefault(session, _Positions(0))
        if positions.damage != self._damage:
            positions.damage = self._damage
            positions.trusted = min(positions.trusted, len(positions.ids))
        if 0 <= position < min(positions.trusted, len(positions.ids)):
            return positions.ids[position]
        return None


def decode(raw: bytes) -> Entry:
    """Return the entry of a line; raise one of `REFUSED` for a damaged one."""
    line = _line_decoder.decode(raw)
    if line.sum != f"{zlib.crc32(line.entry):08x}":
        raise RolloutError("The checksum is wrong.")
    entry = _entry_decoder.decode(line.entry)
    if isinstance(entry, Lost) and not 0 < entry.turns <= _MANY:
        raise RolloutError("The count is wrong.")
    return entry
