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
from rollway.fleet.discovery import Worker
from rollway.fleet.membership import Membership
from rollway.fleet.refit import Refit
from rollway.fleet.report import RefitReport, WorkerReport
from rollway.fleet.updates import FromDisk, Offered, Update
from rollway.fleet.worker_refit import Observer
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

    async def follow_refit(self, refit: Refit, work: Awaitable[RefitReport]) -> RefitReport:
        """Wait for a refit and record it, however it ends."""
        began, clock = time.time(), time.monotonic()
        try:
            report = await work
        except BaseException as error:
            is_cancelled = isinstance(error, asyncio.CancelledError)
            partial = _make_report(refit, time.monotonic() - clock)
            report = error.report if isinstance(error, RefitError) else partial
            outcome = "cancelled" if is_cancelled else "failed"
            self._note_refit(refit, report, began, outcome, str(error) or type(error).__name__)
            raise
        if report.workers:  # otherwise nobody was behind
            self._note_refit(refit, report, began, "ok", None)
        return report

    def _note_refit(
        self, refit: Refit, report: RefitReport, began: float, outcome: str, error: str | None
    ) -> None:
        transport, size = _describe_update(refit.plan.update)
        self.recorder.write(
            "refit",
            began=began,
            transport=transport,
            bytes=size,
            report=report.as_json(),
            outcome=outcome,
            error=error,
        )
        steps.note_paused(report.paused_seconds)

    def note_adapters(self, counts: dict[str, int]) -> None:
        """Record how many versions of each adapter the workers hold."""
        self.recorder.write("adapters", versions=counts)

    def follow_membership(
        self, model: str | None, membership: Membership, versions: FleetVersions
    ) -> None:
        """Record workers that join or leave from now on."""
        present = {worker.instance_id for worker in membership.known}

        async def note_join(worker: Worker) -> None:
            if worker.instance_id not in present:
                self._note_worker("join", worker)
                self.note_workers(model, membership.known, versions)

        async def note_leave(worker: Worker) -> None:
            present.discard(worker.instance_id)
            self._note_worker("leave", worker)
            self.note_workers(model, membership.known, versions)

        membership.on_join(note_join)
        membership.on_leave(note_leave)

    def _note_worker(self, event: str, worker: Worker) -> None:
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


def _make_report(refit: Refit, seconds: float) -> RefitReport:
    """Return the report of a refit that has none, because it was cancelled or refused."""
    workers = [worker.report for worker in refit.workers.values()]
    paused = max((worker.paused_seconds for worker in workers), default=0.0)
    return RefitReport(
        refit.plan.version, refit.mode, seconds=seconds, paused_seconds=paused, workers=workers
    )


def _describe_update(update: Update) -> tuple[str | None, int | None]:
    """Return how the weights came, and how many bytes they have."""
    if isinstance(update, Offered):
        return update.offer.transport, update.offer.nbytes
    if isinstance(update, FromDisk):
        return "checkpoint", None if update.checkpoint is None else update.checkpoint.nbytes
    return None, None
