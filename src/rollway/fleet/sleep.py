"""Let workers sleep while a trainer uses their memory, and wake them.

Each worker does it by one order, drawn in rollway/engine/sleep_orders.py. A worker that sleeps is
labelled as serving none since its version: other processes see that, and what it answered before
counts. A refit of a worker that sleeps wakes it with the new version.

If a sleep fails or is cancelled, the workers are woken again; those whose weights are gone by then
wait for a refit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, get_args

from rollway.errors import AdminError, UsageError
from rollway.fleet.admin import (
    IN_DOUBT,
    NoSuchMethod,
    PauseMode,
    call_all,
    call_all_or_raise,
    leaving_label,
    run_to_the_end,
    version_left,
)
from rollway.fleet.dynamo_admin import DynamoAdmin
from rollway.fleet.report import SleepReport, WorkerSleep
from rollway.fleet.workers import Worker
from rollway.versions import FleetVersions, taint_of

LEVELS = (1, 2)


@dataclass(slots=True)
class Sleeper:
    """Sleep and wake of the workers of one fleet."""

    admin: DynamoAdmin
    versions: FleetVersions
    supervised: Callable[[Worker], bool]

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
                await run_to_the_end(_wake_all(chosen))
                raise
        report.seconds = time.monotonic() - began
        return report

    async def wake(self, workers: Sequence[Worker]) -> SleepReport:
        """Wake the workers that have weights, and return them to service with their version."""
        report, began = SleepReport(), time.monotonic()
        sleeps = [_WorkerSleep(self, worker) for worker in workers]
        report.workers = [sleep.report for sleep in sleeps]
        with self._changing():
            await call_all_or_raise(sleeps, _WorkerSleep.wake)
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
        self._fleet, self._admin, self._versions = fleet, fleet.admin, fleet.versions
        self._worker = worker
        self._label: int | None = None
        self.report = WorkerSleep(worker.instance_id)

    async def check(self, level: int) -> None:
        """Read the worker's state, and raise if it may not sleep at this level."""
        worker, report = self._worker, self.report
        facts = await self._admin.read(worker)
        self._label = facts.label
        if self._label is None and self._fleet.supervised(worker):
            report.state = "joining"
            return
        if self._label is None:
            raise UsageError(
                f"{worker} declares no version, so that none could be restored after a sleep.",
                "Refit it first.",
            )
        if facts.sleep_level not in (0, level):
            raise UsageError(
                f"{worker} sleeps at level {facts.sleep_level} already.",
                "Wake it before it sleeps at another level; after level 2, refit it.",
            )
        try:
            ranks = await self._admin.memory(worker, level)
        except NoSuchMethod as error:
            raise UsageError(f"{worker} cannot sleep: {error.message}", error.hint) from error
        refusals = [rank["refusal"] for rank in ranks if rank["refusal"]]
        if refusals:
            raise UsageError(f"{worker} cannot sleep at level {level}: {refusals[0]}.")
        if facts.sleep_level:
            self._note_sleep(level, ranks)

    async def fall_asleep(self, level: int, mode: PauseMode) -> None:
        label = self._label
        assert label is not None
        is_known = label >= 0
        # Before the order, which may take effect although its answer is lost.
        self._versions.mark_asleep(self._worker.instance_id)
        order = {
            "level": level,
            "mode": mode,
            "label": label,
            "leaving": leaving_label(label) if is_known else IN_DOUBT,
            "taints": [taint_of(label)] if is_known else [],
        }
        reply = await self._admin.sleep(self._worker, order)
        self._label = label if is_known else IN_DOUBT
        self._note_sleep(level, reply["ranks"])
        self.report.seconds["sleep"] = reply["seconds"]
        self.report.memory["before"] = reply["before"]

    def _note_sleep(self, level: int, ranks: list[dict[str, Any]]) -> None:
        report, label = self.report, self._label
        report.state, report.level = "asleep", level
        report.memory["asleep"] = ranks
        kept = label if label is not None and label >= 0 else version_left(label)
        report.version = kept if level == 1 else None

    async def wake(self) -> None:
        """Wake the worker and route requests to it; leave one that needs a refit asleep."""
        worker, report = self._worker, self.report
        try:
            # Also to a worker that seems to be awake: its order to sleep may still be running.
            reply = await self._admin.wake(worker)
        except NoSuchMethod:  # then it never sleeps
            reply = {"is_awake": True}
        report.level = int(reply.get("level", 0))
        if reply.get("is_awake") is False:
            report.state = "asleep"
            self._versions.mark_asleep(worker.instance_id)
            return
        if reply.get("is_awake") is True:
            label = (await self._admin.read(worker)).label
            report.state = "joining" if label is None else "awake"
            report.version = None if label is None or label < 0 else label
        else:
            report.state, report.version = "serving", int(reply["version"])
            report.memory = {"asleep": reply["before"], "after": reply["ranks"]}
            report.seconds["wake"] = reply["seconds"]
        if report.version is not None:
            self._versions.mark_serving(worker.instance_id, report.version)


async def _wake_all(sleeps: Sequence[_WorkerSleep]) -> None:
    """Wake workers again after a sleep that failed. The error that ended it is raised anyway."""
    await call_all(sleeps, _WorkerSleep.wake)


def asleep_error(workers: Sequence[Worker], listed: int) -> AdminError:
    return AdminError(
        f"{len(workers)} of {listed} workers sleep, and are not resumed: "
        f"{'; '.join(map(str, workers))}.",
        "Wake them with `Stack.wake` or `rollway fleet wake`; after level 2, refit them.",
    )
