"""The conversations of a gateway, from its store: by session, token by token with the version.

The store is only read, while a gateway may write to it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rollway.gateway import store
from rollway.gateway.tokens import has_scope
from rollway.gateway.turns import Turn
from rollway.observe.read import clean_text

T = TypeVar("T")

MOST_SESSIONS = 500
_MOST_TURNS, _MOST_TOKENS, _MOST_PROMPT, _MOST_TEXT = 200, 20_000, 2_000, 2_000
_LIST = """
SELECT name, count(*), sum(tokens), sum(forked), group_concat(DISTINCT version), id
FROM sessions JOIN turns ON session = id GROUP BY id ORDER BY max(number) DESC
"""
_READ = "SELECT turn, crc FROM turns WHERE session = ? ORDER BY number LIMIT ?"


class Conversations:
    """Reads the store of one gateway. All calls may block. They raise RollwayError with the cause
    and the fix if the file is not a store of this version and this user, or is damaged.

    A gateway shows the sessions of a token to nobody without one: they are left out unless
    `shows_all`."""

    def __init__(self, path: Path, *, shows_all: bool = True) -> None:
        self.path = path
        self._shows_all = shows_all
        self.has_hidden = False

    def check(self) -> None:
        """Raise if there is no store, or it cannot be read."""
        with store.explain(self.path):
            self.path.lstat()
        self._read(lambda _: None, None)

    def list_sessions(self) -> dict[str, Any]:
        """List the newest sessions, the one with the newest turn first."""
        return self._read(self._list_newest, {"sessions": [], "left_out": 0})

    def read_session(self, name: str) -> dict[str, Any] | None:
        """Return the turns of a session with their tokens; None if it is not one of the newest."""
        return self._read(lambda db: self._read_turns(db, name), None)

    def _list_newest(self, db: sqlite3.Connection) -> dict[str, Any]:
        sessions = self._list(db)
        rows = [
            {
                "name": _clean(name),
                "turns": turns,
                "tokens": tokens,
                "forks": forks,
                "versions": sorted(map(int, versions.split(",") if versions else ()))[-20:],
            }
            for name, turns, tokens, forks, versions, _ in sessions[:MOST_SESSIONS]
        ]
        return {"sessions": rows, "left_out": len(sessions) - len(rows)}

    def _read_turns(self, db: sqlite3.Connection, name: str) -> dict[str, Any] | None:
        newest = self._list(db)[:MOST_SESSIONS]
        match = next((row for row in newest if _clean(row[0]) == name), None)
        if match is None:
            return None
        turns: list[dict[str, Any]] = []
        tokens = 0
        # One at a time: a turn may have megabytes.
        for raw, crc in db.execute(_READ, (match[-1], _MOST_TURNS)):
            if tokens >= _MOST_TOKENS:
                break
            with suppress(store.StoreDamaged, *store.DAMAGE):
                turn = store.decode(raw, crc, self.path)
                if turn.session == match[0]:
                    turns.append(_describe(turn, _MOST_TOKENS - tokens))
                    tokens += len(turn.token_ids)
        return {"name": name, "turns": turns, "left_out": match[1] - len(turns)}

    def _list(self, db: sqlite3.Connection) -> list[Any]:
        rows = db.execute(_LIST).fetchall()
        shown = [row for row in rows if self._shows_all or not has_scope(row[0])]
        self.has_hidden = len(shown) < len(rows)
        return shown

    def _read(self, read: Callable[[sqlite3.Connection], T], nothing: T) -> T:
        """Return what `read` finds in one state of the store; `nothing` if no gateway has recorded
        into it yet."""
        with store.explain(self.path):
            store.check_owner(self.path)
            if self.path.exists() and store.has_content(self.path):
                with closing(store.connect(self.path, "ro")) as db:
                    # An error would quote a name that is damaged, also one that is hidden.
                    db.text_factory = partial(str, encoding="utf-8", errors="replace")
                    db.execute("BEGIN")
                    if store.has_tables(db, self.path):
                        return read(db)
        return nothing


def _clean(text: str) -> str:
    return clean_text(text[:_MOST_TEXT])


def _describe(turn: Turn, most: int) -> dict[str, Any]:
    """Return a turn for the page: every sampled token with its log-prob, the prompt's ids."""
    ids = turn.token_ids[:most]
    return {
        "id": _clean(turn.id),
        "parent": _clean(turn.parent or ""),
        "model": _clean(turn.model),
        "version": turn.version,
        "worker": "" if turn.worker_id is None else str(turn.worker_id),
        "finish": _clean(turn.finish_reason),
        "forked": _clean(turn.forked),
        # Ids may exceed what a browser's numbers hold.
        "prompt": [str(token) for token in turn.new_ids[:_MOST_PROMPT]],
        "prompt_tokens": len(turn.new_ids),
        "tokens": [
            (str(token), round(logprob, 4))
            for token, logprob in zip(ids, turn.logprobs, strict=False)
        ],
        "sampled": len(turn.token_ids),
    }
