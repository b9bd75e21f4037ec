"""The conversations of a gateway, from its journal: by session, token by token with the version.

    journal ── new lines since the last look ──► where each session's turns are ──► one session

Only places are kept in memory, of the newest sessions; the turns of one are read when a page asks.
The journal is read and never locked: a gateway may write it meanwhile, and compaction replaces it,
which begins the reading anew.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollway.gateway import entries
from rollway.gateway.access import has_scope
from rollway.gateway.turns import Forgotten, Turn
from rollway.observe.dash.fields import get_text

MOST_SESSIONS = 500
_MOST_TURNS, _MOST_TOKENS, _MOST_PROMPT = 200, 20_000, 2_000
_LARGEST_LINE = 16 << 20


@dataclass(slots=True)
class _Session:
    """Where the turns of a session are, and what they come to."""

    places: list[tuple[int, int]] = field(default_factory=list)
    turns: int = 0
    tokens: int = 0
    forks: int = 0
    versions: set[int] = field(default_factory=set)


class Conversations:
    """Reads one journal. All calls may block; one thread at a time reads.

    A gateway shows the sessions of a token to nobody without one: they are left out unless
    `shows_all`."""

    def __init__(self, path: Path, *, shows_all: bool = True) -> None:
        self.path = path
        self._shows_all = shows_all
        self._lock = threading.Lock()
        self._reset()

    def _reset(self) -> None:
        self._inode = 0
        self._place = 0
        self._sessions: dict[str, _Session] = {}
        self._count = 0
        self.has_hidden = False

    def list_sessions(self) -> dict[str, Any]:
        """List the newest sessions, the one with the newest turn first."""
        with self._lock:
            self._read_on()
            rows = [
                {
                    "name": get_text(name, 300),
                    "turns": session.turns,
                    "tokens": session.tokens,
                    "forks": session.forks,
                    "versions": sorted(session.versions)[-20:],
                }
                for name, session in reversed(self._sessions.items())
            ]
            return {"sessions": rows, "left_out": max(0, self._count - len(rows))}

    def read_session(self, name: str) -> dict[str, Any] | None:
        """Return the turns of a session with their tokens; None if it is not one of the newest."""
        with self._lock:
            self._read_on()
            match = next(
                (each for key, each in self._sessions.items() if get_text(key, 300) == name), None
            )
            if match is None:
                return None
            turns, tokens = [], 0
            for place in match.places:
                turn = self._read_turn(*place)
                if turn is None:
                    continue
                if tokens >= _MOST_TOKENS:
                    break
                turns.append(_describe(turn, _MOST_TOKENS - tokens))
                tokens += len(turn.token_ids)
            return {"name": name, "turns": turns, "left_out": match.turns - len(turns)}

    def _read_on(self) -> None:
        """Take the lines that are new; a torn last line counts once it ends."""
        handle = self._open()
        if handle is None:
            self._reset()
            return
        with os.fdopen(handle, "rb") as file:
            status = os.fstat(handle)
            if status.st_ino != self._inode or status.st_size < self._place:
                self._reset()
                self._inode = status.st_ino
            file.seek(self._place)
            while line := file.readline(_LARGEST_LINE):
                end = self._place + len(line)
                is_whole = line.endswith(b"\n")
                while not is_whole and (rest := file.readline(_LARGEST_LINE)):
                    end, line, is_whole = end + len(rest), b"", rest.endswith(b"\n")
                if not is_whole:
                    return
                self._take(line.removesuffix(b"\n"), self._place)
                self._place = end

    def _open(self) -> int | None:
        try:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            handle = os.open(self.path, flags)
        except OSError:
            return None
        if stat.S_ISREG(os.fstat(handle).st_mode):
            return handle
        os.close(handle)
        return None

    def _take(self, line: bytes, place: int) -> None:
        try:
            entry = entries.decode(line)
        except entries.REFUSED:
            return
        if isinstance(entry, Forgotten):
            self._sessions.pop(entry.session, None)
        elif isinstance(entry, Turn) and has_scope(entry.session) and not self._shows_all:
            self.has_hidden = True
        elif isinstance(entry, Turn):
            session = self._sessions.pop(entry.session, None)
            if session is None:
                self._count += 1
                session = _Session()
            self._sessions[entry.session] = session  # now the newest
            session.turns += 1
            session.tokens += len(entry.token_ids)
            session.forks += bool(entry.forked)
            if len(session.places) < _MOST_TURNS:
                session.places.append((place, len(line)))
            if entry.version is not None and len(session.versions) < 1_000:
                session.versions.add(entry.version)
            if len(self._sessions) > MOST_SESSIONS:
                self._sessions.pop(next(iter(self._sessions)))

    def _read_turn(self, place: int, length: int) -> Turn | None:
        handle = self._open()
        if handle is None:
            return None
        try:
            if os.fstat(handle).st_ino != self._inode:  # compacted since
                return None
            entry = entries.decode(os.pread(handle, length, place))
        except (OSError, *entries.REFUSED):
            return None
        finally:
            os.close(handle)
        return entry if isinstance(entry, Turn) else None


def _describe(turn: Turn, most: int) -> dict[str, Any]:
    """Return a turn for the page: every sampled token with its log-prob, the prompt's ids."""
    ids = turn.token_ids[:most]
    logprobs: Sequence[float | None] = turn.logprobs
    if len(turn.logprobs) != len(turn.token_ids):
        logprobs = [None] * len(turn.token_ids)
    return {
        "id": get_text(turn.id, 64),
        "parent": get_text(turn.parent or "", 64),
        "model": get_text(turn.model, 200),
        "version": turn.version,
        "worker": "" if turn.worker_id is None else str(turn.worker_id),
        "finish": get_text(turn.finish_reason, 40),
        "forked": get_text(turn.forked, 300),
        # Ids may exceed what a browser's numbers hold.
        "prompt": [str(token) for token in turn.new_ids[:_MOST_PROMPT]],
        "prompt_tokens": len(turn.new_ids),
        "tokens": [
            (str(token), None if logprob is None else round(logprob, 4))
            for token, logprob in zip(ids, logprobs, strict=False)
        ],
        "sampled": len(turn.token_ids),
    }
