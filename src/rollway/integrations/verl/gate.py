"""Where requests wait while the engines cannot take them."""

from __future__ import annotations

import asyncio


class Gate:
    """Open, shut, or shut and turning away; whoever waits hears of every change."""

    def __init__(self) -> None:
        self._open, self._rejects = True, False
        self._changed = asyncio.Event()

    def open(self) -> None:
        self._turn(is_open=True, rejects=False)

    def shut(self, *, rejects: bool | None = None) -> None:
        """`rejects`: whether requests are turned away and do not wait; None leaves it as it was."""
        self._turn(is_open=False, rejects=self._rejects if rejects is None else rejects)

    async def admits(self) -> bool:
        """Wait until the gate is open; False where it turns requests away. The answer holds until
        the caller awaits something else."""
        while not self._open:
            if self._rejects:
                return False
            await self._changed.wait()
        return True

    def _turn(self, *, is_open: bool, rejects: bool) -> None:
        self._open, self._rejects = is_open, rejects
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
