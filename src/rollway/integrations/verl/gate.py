"""A gate that holds requests back while the engines cannot serve them."""

from __future__ import annotations

import asyncio


class Gate:
    """Open, shut, or shut and rejecting. Waiting requests see every change."""

    def __init__(self) -> None:
        self._open, self._rejects = True, False
        self._changed = asyncio.Event()

    def open(self) -> None:
        self._set(is_open=True, rejects=False)

    def shut(self, *, rejects: bool | None = None) -> None:
        """`rejects`: whether requests are rejected instead of waiting; None changes nothing."""
        self._set(is_open=False, rejects=self._rejects if rejects is None else rejects)

    async def admit(self) -> bool:
        """Wait until the gate is open; return False if it rejects requests. The result holds until
        the caller awaits something else."""
        while not self._open:
            if self._rejects:
                return False
            await self._changed.wait()
        return True

    def _set(self, *, is_open: bool, rejects: bool) -> None:
        self._open, self._rejects = is_open, rejects
        # A new event for each change: a waiter rechecks, even if the gate opens and shuts at once.
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
