"""A session's trajectories in pages: a long session has more than one answer should hold."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

import msgspec

from rollway.errors import UsageError
from rollway.gateway.recorder import Session

LIMIT = 256
_MOST = 4096
_PAGE_TOKENS = 2_000_000
"""A page ends before it has more, unless a single trajectory does."""


def bounds(query: Mapping[str, str]) -> tuple[int, int]:
    """Return offset and limit of a request."""
    values = []
    for name, default, least, most in (("offset", 0, 0, 2**31), ("limit", LIMIT, 1, _MOST)):
        text = query.get(name, str(default))
        if not (text.isascii() and text.isdigit() and len(text) <= 10):
            raise UsageError(f"{name} must be a whole number.")
        if not least <= int(text) <= most:
            raise UsageError(f"{name} must be from {least} to {most}.")
        values.append(int(text))
    return values[0], values[1]


def page(session: Session, name: str, offset: int, limit: int) -> bytes:
    """Return one page as JSON. Runs in a thread, while the session may grow."""
    shown: list[dict[str, Any]] = []
    tokens, total = 0, session.count_trajectories()
    for sequence in islice(session.each_trajectory(offset), limit):
        tokens += len(sequence.token_ids)
        if shown and tokens > _PAGE_TOKENS:
            break
        shown.append(sequence.as_json())
    end = offset + len(shown)
    return msgspec.json.encode(
        {
            "session": name,
            "turns": len(session.turns),
            "lost": session.lost,
            "trajectories": shown,
            "offset": offset,
            "total": total,
            "next": end if shown and end < total else None,
        }
    )
