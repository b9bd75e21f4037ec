"""The span of a refit, with a child per worker and below it one per step.

A worker that takes orders tells its last steps at once, so that only their begin is heard. The
seconds are the report's: a step begins where it was heard, or where the one before it ended.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable
from typing import Any

from rollway.errors import RefitError
from rollway.fleet.discovery import Worker
from rollway.fleet.refit import Refit
from rollway.fleet.report import RefitReport, WorkerReport
from rollway.observe.traces import Tracer, TraceSpan

_STEPS = (
    ("preflight", "preflight_seconds"),
    ("pause", "pause_seconds"),
    ("load", "update_seconds"),
    ("open", "resume_seconds"),
)
_WAITS = ("preflight", "pause")
"""Steps that may follow a wait for other workers."""


class RefitTrace:
    """One refit while it runs."""

    def __init__(self, tracer: Tracer, version: int) -> None:
        self._tracer = tracer
        self._version = version
        self._heard: dict[int, dict[str, int]] = {}
        """When each worker began a step, in nanoseconds since 1970."""

    def note_step(self, step: str, worker: Worker) -> None:
        self._heard.setdefault(worker.instance_id, {}).setdefault(step, time.time_ns())

    async def follow(self, refit: Refit, work: Awaitable[RefitReport]) -> RefitReport:
        """Wait for the refit in a span."""
        span = self._tracer.begin("rollway.refit")
        try:
            report = await work
        except BaseException as error:
            workers = [worker.report for worker in refit.workers.values()]
            if isinstance(error, RefitError):
                workers = error.report.workers
            self._finish(span, refit.mode, workers, error)
            raise
        if report.workers:  # otherwise nobody was behind
            self._finish(span, report.mode, report.workers, None)
        return report

    def _finish(
        self, span: TraceSpan, mode: str, workers: list[WorkerReport], error: BaseException | None
    ) -> None:
        for worker in workers:
            self._add_worker(span, worker)
        attributes: dict[str, Any] = {
            "rollway.version": self._version,
            "rollway.mode": mode,
            "rollway.workers": len(workers),
            "rollway.paused_seconds": max((w.paused_seconds for w in workers), default=0.0),
        }
        span.finish(attributes, error=error)

    def _add_worker(self, refit: TraceSpan, report: WorkerReport) -> None:
        heard = self._heard.get(report.instance_id, {})
        began = min(heard.values(), default=refit.began)
        place, steps = began, []
        for step, field in _STEPS:
            seconds = getattr(report, field)
            if not seconds:
                continue
            if step in _WAITS:
                place = max(place, heard.get(step, place))
            steps.append((step, place, place + int(seconds * 1e9)))
            place = steps[-1][2]
        attributes: dict[str, Any] = {
            "rollway.worker": str(report.instance_id),
            "rollway.version": report.version,
            "rollway.state": report.state,
            "rollway.proof": report.proof,
            "rollway.paused_seconds": report.paused_seconds,
            **{f"rollway.seconds.{name}": seconds for name, seconds in report.steps.items()},
        }
        worker = refit.add_child(
            "rollway.refit.worker", began, place, attributes, error=report.error
        )
        for step, first, last in steps:
            worker.add_child(f"rollway.refit.{step}", first, last, {})
