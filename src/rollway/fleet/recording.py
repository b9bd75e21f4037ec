"""What is recorded of a fleet: a driver's record with refits, joins, leaves and versions; the span
of a refit; the caller's observer.

A worker that takes orders tells its last steps at once, so that only their begin is heard. The
seconds of a span are the report's: a step begins where it was heard, or where the one before it
ended.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

from rollway.errors import RefitError
from rollway.fleet.refit import Observer, Refit
from rollway.fleet.report import RefitReport, WorkerReport
from rollway.fleet.updates import FromDisk, Offered, Update
from rollway.fleet.workers import Changes, Worker
from rollway.observe import steps
from rollway.observe.metrics_endpoint import serve_if_asked
from rollway.observe.record import Recorder
from rollway.observe.tally import RolloutTally
from rollway.observe.traces import Tracer, TraceSpan
from rollway.versions import FleetVersions

_RECORDED_AS = {"update": "load"}
"""Steps that the record names otherwise."""
_SPANS = (
    ("preflight", "preflight_seconds"),
    ("pause", "pause_seconds"),
    ("load", "update_seconds"),
    ("open", "resume_seconds"),
)
_WAITS = ("preflight", "pause")
"""Steps that may follow a wait for other workers."""


class DriverHistory:
    """The record of one process that uses a stack. Its file appears with its first entry."""

    def __init__(self, directory: Path, stack: str, run: str) -> None:
        self.recorder = Recorder(directory, "driver", stack=stack, run=run)
        self.tally = RolloutTally(self.recorder)
        self._workers: dict[str, list[dict[str, Any]]] = {}
        """The workers of each model as they were recorded last."""
        steps.register(self.recorder, self.tally)
        serve_if_asked(directory.parent)

    def close(self) -> None:
        steps.unregister(self.recorder)
        self.tally.flush()
        self.recorder.close()

    def note_step(self, version: int, step: str, worker: Worker) -> None:
        """Record that a worker begins a step of a refit."""
        name = _RECORDED_AS.get(step, step)
        self.recorder.write("step", refit=version, worker=str(worker.instance_id), step=name)

    def note_refit(
        self, update: Update, report: RefitReport, began: float, failure: BaseException | None
    ) -> None:
        """Record a refit that has ended."""
        transport, size = _describe_update(update)
        outcome = "ok" if failure is None else "failed"
        if isinstance(failure, asyncio.CancelledError):
            outcome = "cancelled"
        self.recorder.write(
            "refit",
            began=began,
            transport=transport,
            bytes=size,
            report=report.as_json(),
            outcome=outcome,
            error=None if failure is None else str(failure) or type(failure).__name__,
        )
        steps.note_paused(report.paused_seconds)

    def note_adapters(self, counts: dict[str, int]) -> None:
        """Record how many versions of each adapter the workers hold."""
        self.recorder.write("adapters", versions=counts)

    def note_changes(self, changes: Changes) -> None:
        """Record workers that have joined or left."""
        for event, workers in (("leave", changes.left), ("join", changes.joined)):
            for worker in workers:
                self.recorder.event(event, worker.admin_url, instance=str(worker.instance_id))

    def note_workers(
        self, model: str | None, workers: Sequence[Worker], versions: FleetVersions
    ) -> None:
        """Record the workers with their versions, if one has changed. Their names are with the
        supervisors that started them; readers put both together."""
        rows = [
            {
                "name": "",
                "instance": str(worker.instance_id),
                "role": worker.role,
                "state": "ready" if worker.error is None else "silent",
                "version": versions.by_worker.get(worker.instance_id),
                "model": worker.model or model,
            }
            for worker in workers
        ]
        if rows != self._workers.get(model or ""):
            self._workers[model or ""] = rows
            every = [row for rows in self._workers.values() for row in rows]
            self.recorder.write("workers", workers=every)


class RefitRecording:
    """One refit, from now on: its entries in the driver's record, its span, and whoever else
    listens."""

    def __init__(
        self,
        version: int,
        observer: Observer | None,
        history: DriverHistory | None,
        tracer: Tracer | None,
    ) -> None:
        self._version, self._observer, self._history = version, observer, history
        self._span = None if tracer is None else tracer.begin("rollway.refit")
        self._began = time.time()
        self._heard: dict[int, dict[str, int]] = {}
        """When each worker began a step, in nanoseconds since 1970."""

    async def note_step(self, step: str, worker: Worker) -> None:
        """Note that a worker begins a step."""
        self._heard.setdefault(worker.instance_id, {}).setdefault(step, time.time_ns())
        if self._history is not None:
            self._history.note_step(self._version, step, worker)
        if self._observer is not None:
            await self._observer(step, worker)

    async def follow(self, refit: Refit, work: Awaitable[RefitReport]) -> RefitReport:
        """Wait for the refit; record and trace it, however it ends."""
        try:
            report = await work
        except BaseException as error:
            report = error.report if isinstance(error, RefitError) else refit.make_report()
            self._finish(refit.update, report, error)
            raise
        if report.workers:  # otherwise nobody was behind
            self._finish(refit.update, report, None)
        return report

    def _finish(self, update: Update, report: RefitReport, error: BaseException | None) -> None:
        if self._span is not None:
            for worker in report.workers:
                self._add_worker(self._span, worker)
            attributes: dict[str, Any] = {
                "rollway.version": self._version,
                "rollway.mode": report.mode,
                "rollway.workers": len(report.workers),
                "rollway.paused_seconds": max(
                    (worker.paused_seconds for worker in report.workers), default=0.0
                ),
            }
            self._span.finish(attributes, error=error)
        if self._history is not None:
            self._history.note_refit(update, report, self._began, error)

    def _add_worker(self, refit: TraceSpan, report: WorkerReport) -> None:
        heard = self._heard.get(report.instance_id, {})
        began = min(heard.values(), default=refit.began)
        place, steps = began, []
        for step, field in _SPANS:
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


def _describe_update(update: Update) -> tuple[str | None, int | None]:
    """Return how the weights came, and how many bytes they have."""
    if isinstance(update, Offered):
        return update.offer.transport, update.offer.nbytes
    if isinstance(update, FromDisk):
        return "checkpoint", None if update.checkpoint is None else update.checkpoint.nbytes
    return None, None
