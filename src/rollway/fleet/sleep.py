"""Let workers sleep while a trainer uses their memory, and wake them.

    serving ── sleep ──► every worker may sleep at this level?        no: refused, nothing touched
                         label "leaving", no taints                   no new request reaches it
                         requests end or are cut, memory is released
                             │
             ┌─ level 1 ─────┴───── level 2 ─┐
             ▼                               ▼
      asleep, with weights            asleep, without weights
             │ wake                          │
             │   memory back                 │ only a refit (`worker_refit`):
             │   taint, resume, label        │   memory of the weights ─► copy ─► flush
             ▼                               │   memory of the KV cache ─► verify, taint, label
      serving the same version               ▼
                                      serving the new version

A refit of a worker at level 1 takes the right-hand way too. A worker that sleeps is labelled as
leaving its version: other processes see that it serves nothing, and what it answered before counts.
If a sleep fails or is cancelled, the workers are woken again; those whose weights are gone by then
wait for a refit. If its process is killed between two steps, the worker has no version, and the
next refit or a watcher brings it back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, get_args

from rollway.errors import AdminError, UsageError
from rollway.fleet.admin import (
    IN_DOUBT,
    AdminAPI,
    NoSuchMethod,
    PauseMode,
    call_all,
    call_all_or_raise,
    leaving_label,
    run_to_the_end,
    version_left,
)
from rollway.fleet.report import SleepReport, WorkerSleep
from rollway.fleet.service import ROUTING_SECONDS, set_taints
from rollway.fleet.workers import Worker
from rollway.versions import FleetVersions, taint_of

LEVELS = (1, 2)


@dataclass(slots=True)
class Sleeper:
    """Sleep and wake of the workers of one fleet."""

    admin: AdminAPI
    versions: FleetVersions
    supervised: Callable[[Worker], bool]
    _before: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    """The memory of each worker before its last sleep, as far as this process knows it."""

    async def sleep(self, workers: Sequence[Worker], level: int, mode: PauseMode) -> SleepReport:
        """Put these workers to sleep; raise before anything changes if one of them may not."""
        if level not in LEVELS or mode not in get_args(PauseMode) or mode == "keep":
            raise UsageError(
                f"Workers cannot sleep with level {level!r} and mode {mode!r}.",
                "Levels are 1 and 2; modes are wait and abort.",
            )
        report, began = SleepReport(level), time.monotonic()
        sleeps = [_WorkerSleep(self, worker) for worker in workers]
        report.workers = [sleep.report for sleep in sleeps]
        await call_all_or_raise(sleeps, lambda sleep: sleep.check(level))
        chosen = [sleep for sleep in sleeps if sleep.report.state == "awake"]
        with self._changing():
            try:
                await call_all_or_raise(chosen, lambda sleep: sleep.fall_asleep(level, mode))
            except BaseException:
                await run_to_the_end(_undo(chosen))
                raise
        report.seconds = time.monotonic() - began
        return report

    async def wake(self, workers: Sequence[Worker]) -> SleepReport:
        """Wake the workers that have weights, and return them to service with their version."""
        report, began = SleepReport(), time.monotonic()
        sleeps = [_WorkerSleep(self, worker) for worker in workers]
        report.workers = [sleep.report for sleep in sleeps]
        with self._changing():
            # To the end: a worker that is awake but has no label would wait for a refit.
            await run_to_the_end(call_all_or_raise(sleeps, _WorkerSleep.wake))
        report.seconds = time.monotonic() - began
        return report

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Hold requests back while workers leave or enter service."""
        self.versions.changing += 1
        self.versions.close()
        try:
            yield
        finally:
            self.versions.changing -= 1
            self.versions.open()


class _WorkerSleep:
    """The sleep or wake of one worker."""

    def __init__(self, fleet: Sleeper, worker: Worker) -> None:
        self._admin, self._versions = fleet.admin, fleet.versions
        self._supervised, self._before = fleet.supervised, fleet._before
        self._worker = worker
        self._label: int | None = None
        self._has_left = False
        self.report = WorkerSleep(worker.instance_id)

    async def check(self, level: int) -> None:
        """Read the worker's state, and raise if it may not sleep at this level."""
        worker, report = self._worker, self.report
        self._label = await self._admin.weight_version(worker)
        if self._label is None and self._supervised(worker):
            report.state = "joining"
            return
        if self._label is None:
            raise UsageError(
                f"{worker} declares no version, so that none could be restored after a sleep.",
                "Refit it first.",
            )
        asleep = self._admin.sleep_level(worker)
        if asleep and asleep != level:
            raise UsageError(
                f"{worker} sleeps at level {asleep} already.",
                "Wake it before it sleeps at another level; after level 2, refit it.",
            )
        try:
            ranks = await self._admin.memory(worker, level)
        except NoSuchMethod as error:
            raise UsageError(f"{worker} cannot sleep: {error.message}", error.hint) from error
        refusals = [rank["refusal"] for rank in ranks if rank["refusal"]]
        if refusals:
            raise UsageError(f"{worker} cannot sleep at level {level}: {refusals[0]}.")
        if asleep:
            report.state, report.level = "asleep", asleep
            report.memory["asleep"] = ranks
            self._note_version()

    async def fall_asleep(self, level: int, mode: PauseMode) -> None:
        worker, report, began = self._worker, self.report, time.monotonic()
        label = self._label
        assert label is not None
        self._has_left = True
        # A worker in doubt keeps no version through the sleep.
        self._label = leaving_label(label) if label >= 0 else IN_DOUBT
        async with self._admin.pin() as connection:
            await connection.declare_version(worker, self._label)
            await set_taints(connection, self._versions, worker, [])
            self._versions.mark_asleep(worker.instance_id)
            # Requests that a router placed before it knew: they end like the others.
            await asyncio.sleep(ROUTING_SECONDS)
            report.seconds["leave"] = time.monotonic() - began
            reply = await connection.sleep(worker, level, mode, self._label)
        report.state, report.level = "asleep", level
        report.seconds["sleep"] = reply["seconds"]
        report.memory = {"before": reply["before"], "asleep": reply["ranks"]}
        self._before[worker.instance_id] = reply["before"]
        self._note_version()

    async def undo(self) -> None:
        """Return to service after a sleep that failed, if the weights are there."""
        if self._has_left:
            await self.wake()

    async def wake(self) -> None:
        """Wake the worker and route requests to it; leave one that needs a refit asleep."""
        worker, report = self._worker, self.report
        async with self._admin.pin() as connection:
            self._label = await connection.weight_version(worker)
            report.level = self._admin.sleep_level(worker)
            if not report.level and not self._has_left:
                report.state = "joining" if self._label is None else "awake"
                report.version = self._label if self._label is None or self._label >= 0 else None
                return
            self._note_version()
            if report.version is None:
                report.state = "asleep"
                self._versions.mark_asleep(worker.instance_id)
                return
            reply = await connection.wake(worker)
            began = time.monotonic()
            self._versions.mark_entered(worker.instance_id, report.version)
            # A worker that left and did not sleep is only paused, or not even that.
            await connection.resume(worker)
            await set_taints(connection, self._versions, worker, [taint_of(report.version)])
            # Last: a worker that is labelled with its version is in service.
            await connection.declare_version(worker, report.version)
        self._versions.mark_serving(worker.instance_id, report.version)
        before = self._before.pop(worker.instance_id, None)
        report.memory = {} if before is None else {"before": before}
        report.memory |= {"asleep": reply["before"], "after": reply["ranks"]}
        report.seconds |= {"wake": reply["seconds"], "enter": time.monotonic() - began}
        report.state = "serving"

    def _note_version(self) -> None:
        """Note the version that a wake restores: the worker left it and kept its weights."""
        label = self._label
        # A sleep that was cancelled may not even have set the label.
        kept = label if label is not None and label >= 0 else version_left(label)
        self.report.version = None if self.report.level == 2 else kept


async def _undo(sleeps: Sequence[_WorkerSleep]) -> None:
    """Wake workers again after a sleep that failed. The error that ended it is raised anyway."""
    await call_all(sleeps, _WorkerSleep.undo)


def asleep_error(workers: Sequence[Worker], listed: int) -> AdminError:
    return AdminError(
        f"{len(workers)} of {listed} workers sleep, and are not resumed: "
        f"{'; '.join(map(str, workers))}.",
        "Wake them with `Stack.wake` or `rollway fleet wake`; after level 2, refit them.",
    )
