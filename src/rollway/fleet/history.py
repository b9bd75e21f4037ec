"""What a driver records about its fleets: refits with their steps, joins, leaves, versions."""

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
from rollway.fleet.report import RefitReport
from rollway.fleet.updates import FromDisk, Offered, Update
from rollway.observe import steps
from rollway.observe.metrics_endpoint import serve_if_asked
from rollway.observe.record import Recorder
from rollway.observe.tally import RolloutTally
from rollway.versions import FleetVersions

_STEPS = {"update": "load"}
"""Steps that the record names otherwise."""


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
        name = _STEPS.get(step, step)
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
