"""Who is told about one refit: the caller's observer, the driver's record, a trace."""

from __future__ import annotations

from collections.abc import Awaitable

from rollway.fleet.discovery import Worker
from rollway.fleet.history import DriverHistory
from rollway.fleet.refit import Refit
from rollway.fleet.report import RefitReport
from rollway.fleet.traces import RefitTrace
from rollway.fleet.worker_refit import Observer
from rollway.observe.traces import Tracer


class RefitRecording:
    """Passes on the steps of one refit, and its end."""

    def __init__(
        self,
        version: int,
        observer: Observer | None,
        history: DriverHistory | None,
        tracer: Tracer | None,
    ) -> None:
        self._version, self._observer, self._history = version, observer, history
        self._trace = None if tracer is None else RefitTrace(tracer, version)

    @property
    def observer(self) -> Observer | None:
        """What the refit calls before each step; None if nobody listens."""
        if self._history is None and self._trace is None:
            return self._observer
        return self._observe

    async def _observe(self, step: str, worker: Worker) -> None:
        if self._history is not None:
            self._history.note_step(self._version, step, worker)
        if self._trace is not None:
            self._trace.note_step(step, worker)
        if self._observer is not None:
            await self._observer(step, worker)

    async def follow(self, refit: Refit, work: Awaitable[RefitReport]) -> RefitReport:
        """Wait for the refit; record and trace it, however it ends."""
        if self._trace is not None:
            work = self._trace.follow(refit, work)
        return await (work if self._history is None else self._history.follow_refit(refit, work))
