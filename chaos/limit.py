"""Ends a run of chaos early, with its report: after a time, or at a signal.

    SIGTERM, Ctrl-C, or time is over ─► the refit in progress ends ─► report, exit
    a second signal                  ─► the run is cancelled, without a report

A command that is cut off prints nothing, and a worker on a GPU takes minutes to restart. So a run
that is over its limit does not wait until the fleet has recovered, and starts no further round.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Iterator

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Limit:
    """Says whether a run must end. It counts from its creation, so the stack's start is included.

    Example:
        limit = Limit(seconds=400)
        with limit.obey_signals():
            while not limit.is_over:
                await run_round()
    """

    def __init__(self, seconds: float | None = None) -> None:
        """Start to count; without `seconds`, only a signal ends the run."""
        self._seconds = seconds
        self._began = time.monotonic()
        self._signal = ""

    @property
    def is_over(self) -> bool:
        return bool(self.reason)

    @property
    def reason(self) -> str:
        """Why the run must end, as a few words; "" if it need not."""
        if self._signal:
            return self._signal
        is_late = self._seconds is not None and time.monotonic() - self._began > self._seconds
        return f"{self._seconds:g} s have passed" if is_late else ""

    @contextlib.contextmanager
    def obey_signals(self) -> Iterator[None]:
        """Let the first SIGTERM or Ctrl-C end the run; the next one has its usual effect."""
        loop = asyncio.get_running_loop()

        def note(number: signal.Signals) -> None:
            self._signal = number.name
            stop_listening()

        def stop_listening() -> None:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

        for number in _SIGNALS:
            loop.add_signal_handler(number, note, number)
        try:
            yield
        finally:
            stop_listening()
