"""Returns a session's trajectories in pages, because a long session is too large for one answer."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

import msgspec

from rollway.errors import UsageError
from rollway.gateway.access import Caller
from rollway.gateway.recorder import Session
from rollway.gateway.replies import Refused
from rollway.gateway.threads import Threads

LIMIT = 256
_MOST = 4096
_SECONDS = 300.0
_WHAT = "Building the trajectories"
_PAGE_TOKENS = 2_000_000
"""A page ends before it exceeds this, unless a single trajectory does."""


class Workers:
    """Threads that build pages. Operators have their own, and an agent uses one at a time, so no
    agent delays the trainer."""

    def __init__(self) -> None:
        self._operators = Threads(2, seconds=_SECONDS)
        self._agents = Threads(2, seconds=_SECONDS)
        # At most one per token.
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def run(self, caller: Caller, work: Callable[[], bytes]) -> bytes:
        """Return the page that `work` builds."""
        if caller.operator:
            return await self._operators.run(work, _WHAT)
        lock = self._locks[caller.scope]
        try:
            async with asyncio.timeout(self._agents.wait_seconds):
                await lock.acquire()
        except TimeoutError:
            raise Refused(
                503, "This token has too many requests for trajectories.", "Try again later.",
                kind="overloaded",
            ) from None  # fmt: skip
        try:
            return await self._agents.run(work, _WHAT)
        finally:
            lock.release()


def bounds(query: Mapping[str, str]) -> tuple[int, int]:
    """Return the offset and limit of a request."""
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
    """Return a page as JSON. It runs in a thread while the session may grow."""
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
