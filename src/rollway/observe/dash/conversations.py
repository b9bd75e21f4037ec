"""The conversations of a gateway, from its store: by session, token by token with the version.

The store is only read, while a gateway may write to it.
"""

from __future__ import annotations

import os
import sqlite3
import stat
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from rollway.gateway.store import StoreDamaged, decode
from rollway.gateway.tokens import has_scope
from rollway.gateway.turns import Turn
from rollway.observe.read import clean_text

MOST_SESSIONS = 500
_MOST_TURNS, _MOST_TOKENS, _MOST_PROMPT = 200, 20_000, 2_000
_LIST = """
SELECT name, count(*), sum(tokens), sum(forked), group_concat(DISTINCT version), id
FROM sessions JOIN turns ON session = id GROUP BY id ORDER BY max(number) DESC
"""
_READ = "SELECT turn, crc FROM turns WHERE session = ? ORDER BY number LIMIT ?"


class Conversations:
    """Reads the store of one gateway. All calls may block.

    A gateway shows the sessions of a token to nobody without one: they are left out unless
    `shows_all`."""

    def __init__(self, path: Path, *, shows_all: bool = True) -> None:
        self.path = path
        self._shows_all = shows_all
        self.has_hidden = False

    def list_sessions(self) -> dict[str, Any]:
        """List the newest sessions, the one with the newest turn first."""
        sessions = self._list()
        rows = [
            {
                "name": clean_text(name),
                "turns": turns,
                "tokens": tokens,
                "forks": forks,
                "versions": sorted(map(int, versions.split(",") if versions else ()))[-20:],
            }
            for name, turns, tokens, forks, versions, _ in sessions[:MOST_SESSIONS]
        ]
        return {"sessions": rows, "left_out": len(sessions) - len(rows)}

    def read_session(self, name: str) -> dict[str, Any] | None:
        """Return the turns of a session with their tokens; None if it is not one of the newest."""
        newest = self._list()[:MOST_SESSIONS]
        match = next((row for row in newest if clean_text(row[0]) == name), None)
        if match is None:
            return None
        turns: list[dict[str, Any]] = []
        tokens = 0
        for raw, crc in self._query(_READ, match[-1], _MOST_TURNS):
            if tokens >= _MOST_TOKENS:
                break
            try:
                turn = decode(raw, crc, self.path)
            except (StoreDamaged, msgspec.MsgspecError):
                continue
            turns.append(_describe(turn, _MOST_TOKENS - tokens))
            tokens += len(turn.token_ids)
        return {"name": name, "turns": turns, "left_out": match[1] - len(turns)}

    def _list(self) -> list[Any]:
        rows = self._query(_LIST)
        shown = [row for row in rows if self._shows_all or not has_scope(row[0])]
        self.has_hidden = len(shown) < len(rows)
        return shown

    def _query(self, query: str, *values: object) -> list[Any]:
        """Return the rows of a query; none without a store of this version and this user."""
        try:
            status = self.path.lstat()
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
                return []
            uri = f"file:{quote(str(self.path.absolute()))}?mode=ro"
            with closing(sqlite3.connect(uri, uri=True)) as db:
                return db.execute(query, values).fetchall()
        except (OSError, sqlite3.Error):
            return []


def _describe(turn: Turn, most: int) -> dict[str, Any]:
    """Return a turn for the page: every sampled token with its log-prob, the prompt's ids."""
    ids = turn.token_ids[:most]
    return {
        "id": clean_text(turn.id),
        "parent": clean_text(turn.parent or ""),
        "model": clean_text(turn.model),
        "version": turn.version,
        "worker": "" if turn.worker_id is None else str(turn.worker_id),
        "finish": clean_text(turn.finish_reason),
        "forked": clean_text(turn.forked),
        # Ids may exceed what a browser's numbers hold.
        "prompt": [str(token) for token in turn.new_ids[:_MOST_PROMPT]],
        "prompt_tokens": len(turn.new_ids),
        "tokens": [
            (str(token), round(logprob, 4))
            for token, logprob in zip(ids, turn.logprobs, strict=False)
        ],
        "sampled": len(turn.token_ids),
    }
