"""What a gateway adds to the record of its stack: sessions, turns, and forks by their reason."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rollway.gateway.recorder import Recorder
from rollway.observe.record import Recorder as RunRecorder

SECONDS = 2.0


@asynccontextmanager
async def record_counts(
    sessions: Recorder, run: RunRecorder | None, seconds: float = SECONDS
) -> AsyncIterator[None]:
    """Record the counts every few seconds and at the end of the block, if they have changed."""
    if run is None:
        yield
        return
    counts = _Counts(sessions, run)

    async def repeat() -> None:
        while True:
            await asyncio.sleep(seconds)
            counts.note()

    task = asyncio.create_task(repeat())
    try:
        yield
    finally:
        task.cancel()
        counts.note()


class _Counts:
    def __init__(self, sessions: Recorder, run: RunRecorder) -> None:
        self._sessions = sessions
        self._run = run
        self._noted = (-1, 0)
        self._forks: Counter[str] = Counter()

    def note(self) -> None:
        present = len(self._sessions.sessions), self._sessions.turns
        if present != self._noted:
            self._noted = present
            self._run.write("gateway", sessions=present[0], turns=present[1])
        forks = Counter(dict(self._sessions.forks))
        for reason, count in (forks - self._forks).items():
            self._run.write("forks", reason=reason, count=count)
        self._forks = forks
