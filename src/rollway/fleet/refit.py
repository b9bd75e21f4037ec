"""One refit: move workers to a new version so that nothing is ever sampled from another one.

    check the weights ─► every worker checks, stages ─► claim the version    refused: discard, raise
                                                             │
    for one group of workers at a time, and in it one role after the other (`stages`):
                                                             ▼
      workers that take orders: one order each, at the same time (`worker_order`); the others:
      all leave the routing and pause ─────────────────► a pause failed: restore all, raise
                             │
      each worker by itself: ▼
      update ─► flush KV ─► verify ─► abort late requests ─► enter the routing ─► resume ─► label
              └─ any failure: it stays paused, outside the routing, in doubt; replaced if supervised
                             │
    list again: move workers that joined meanwhile, in a bounded number of passes
                             │
    at the end, however it ended: discard updates that are staged and were not applied

`rollway.fleet.worker_refit` has the steps of one worker. Nothing is sent twice to a worker once an
update was issued to it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from rollway.errors import AdminError, RollwayError, UsageError
from rollway.fleet.admin import PauseMode, call_all, no_workers_error, silent_workers_error
from rollway.fleet.discovery import Worker, is_dead
from rollway.fleet.membership import Membership
from rollway.fleet.report import RefitMode, RefitReport, WorkerReport, refit_error
from rollway.fleet.stages import split_in_shares, split_in_stages
from rollway.fleet.worker_order import WorkerOrder
from rollway.fleet.worker_refit import RefitPlan, WorkerRefit, run_to_the_end

log = logging.getLogger(__name__)

Supervised = Callable[[Worker], bool]
MAX_PASSES = 3
ANSWER_SECONDS = 15.0
"""How long a listed worker may fail to answer; a dead worker is listed for about 10 s."""
DISCARD_SECONDS = 10.0
"""The longest time that discarding staged updates may add to a refit."""


@dataclass(slots=True)
class Refit:
    """One run of the protocol over the whole fleet."""

    plan: RefitPlan
    membership: Membership
    mode: RefitMode = "pause-all"
    share: float = 0.5
    supervised: Supervised = lambda _: False
    """Whether a supervisor labels the worker once it is ready."""
    skip: frozenset[int] = frozenset()
    """Workers that `catch_up` leaves alone, because an update to them has failed."""
    record: Callable[[int, str], None] | None = None
    """Records for other processes which weights a version names."""
    workers: dict[int, WorkerRefit] = field(default_factory=dict)
    is_claimed: bool = False
    """Whether the version belongs to this refit; before that, no worker was touched."""

    async def run(self) -> RefitReport:
        """Move all workers to the version; raise unless every live worker serves it."""
        began = time.monotonic()
        report = RefitReport(self.plan.version, self.mode)
        await self.plan.update.prepare()
        if self.mode == "rolling" and not self.plan.update.repeatable:
            raise UsageError(
                "These weights can be sent only once, to all workers at the same time.",
                "Refit with mode pause-all or in-flight.",
            )
        async with self._discard_afterwards():
            workers = await self._preflight(await self._list_answering())
            self._check_mode(workers)
            self._claim()
            workers = await self._keep_current(workers)
            trouble: RollwayError | None = None
            with self._changing(report, began):
                try:
                    workers = await self._move_all(workers, report)
                except RollwayError as error:
                    trouble = error
            if trouble is not None:
                raise refit_error(report, trouble) from trouble
            for worker in workers:
                worker.report.error = f"it joined after {MAX_PASSES} passes"
            self._check_outcome(report)
        return report

    async def catch_up(self) -> RefitReport:
        """Move workers that are behind to a version that others already serve."""
        began = time.monotonic()
        report = RefitReport(self.plan.version, "rolling", passes=1)
        await self.plan.update.prepare()
        self.plan.versions.check_identity(self.plan.version, self.plan.update.identity)
        behind = await self._list_behind(self.skip)
        if not behind:
            return report  # those that are behind are to be skipped, or not ready
        async with self._discard_afterwards():
            with self._changing(report, began):
                behind = await self._preflight(behind)
                await self._ask_for_reference(behind)
                if behind:
                    await self._move(behind, is_first_pass=False)
            self._check_outcome(report)
        return report

    # --- before any worker is touched --------------------------------------------------------

    async def _list_answering(self) -> list[WorkerRefit]:
        """Return the workers once all of them answer, without those that are not ready yet.

        A silent worker cannot be left out: it may be hung, still hold the old version and answer
        requests later. So it must answer, be dead, or be replaced."""
        deadline = time.monotonic() + ANSWER_SECONDS
        while True:
            listed = await self.membership.workers(fresh=True)
            silent = [worker for worker in listed if worker.error is not None]
            # An empty list is final only if there never was a worker: a frontend that restarts
            # lists none for a moment.
            if not listed and not self.plan.versions.by_worker:
                break
            if listed and not silent:
                return await self._track_ready(listed)
            # The frontend lists a dead worker for about 10 s. There is no need to wait for that,
            # but somebody must be left, and every silent worker must be known to be dead.
            dead = [worker for worker in silent if await is_dead(worker, listed)]
            if len(dead) == len(silent) < len(listed):
                for worker in dead:
                    self._track(worker).report.state = "gone"
                return await self._track_ready([w for w in listed if w.error is None])
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(0.5)
        if not listed:
            raise no_workers_error(self.membership.source)
        # They hang. A supervisor can replace them; the successors join during a later pass.
        for worker in silent:
            if not await self._track(worker).replace():
                raise silent_workers_error(silent, len(listed))
        return await self._track_ready([worker for worker in listed if worker.error is None])

    async def _track_ready(self, listed: Sequence[Worker]) -> list[WorkerRefit]:
        """Track these workers, and return those that are ready. A supervised worker without a
        label is still starting: it gets no requests, and joins later."""
        supervised = [worker for worker in listed if self.supervised(worker)]
        labels = await call_all(supervised, self.plan.admin.weight_version)
        starting = [w for w, label in zip(supervised, labels, strict=True) if label is None]
        for worker in starting:
            self._track(worker).report.state = "joining"
        return [self._track(worker) for worker in listed if worker not in starting]

    def _track(self, worker: Worker) -> WorkerRefit:
        tracked = self.workers.get(worker.instance_id)
        if tracked is None:
            tracked = WorkerRefit(self.plan, worker, WorkerReport(worker.instance_id))
            self.workers[worker.instance_id] = tracked
        tracked.worker = worker  # as it was last listed
        return tracked

    async def _preflight(self, workers: Sequence[WorkerRefit]) -> list[WorkerRefit]:
        """Have every worker check and stage the update; raise if one refuses. Return live ones."""
        for worker, error in await self._call_all(workers, WorkerRefit.preflight):
            is_silent = isinstance(error, AdminError)
            if not (is_silent and await self.membership.has_died(worker.worker)):
                raise error
            worker.report.state = "gone"
        return [worker for worker in workers if worker.report.state != "gone"]

    def _check_mode(self, workers: Sequence[WorkerRefit]) -> None:
        """Raise if a worker cannot keep requests and name the versions of their tokens."""
        if self.mode == "keep" and self.plan.versions.needed_roles:
            raise UsageError(
                "Running requests cannot be kept with prefill and decode apart: their KV is of two "
                "workers.",
                "Refit with mode in-flight.",
            )
        unable = [w.worker for w in workers if self.mode == "keep" and not w.takes_order]
        if unable:
            raise UsageError(
                f"{len(unable)} of {len(workers)} workers cannot keep running requests, for "
                f"example {unable[0]}: the engine must refit itself and verify staged weights.",
                "Refit with mode in-flight, or see docs/fleet.md for what `keep` needs.",
            )

    def _claim(self) -> None:
        """Bind the version to these weights. After the preflight, which reads what is served."""
        plan = self.plan
        plan.versions.claim(plan.version, plan.update.identity)
        if self.record is not None:
            self.record(plan.version, plan.update.identity)
        self.is_claimed = True

    async def _keep_current(self, workers: Sequence[WorkerRefit]) -> list[WorkerRefit]:
        """Put workers that have the version into service, and return the others."""
        current = [worker for worker in workers if worker.note_if_current()]
        for worker, error in await self._call_all(current, WorkerRefit.ensure_service):
            worker.mark_in_doubt(error)
        return [worker for worker in workers if worker not in current]

    async def _ask_for_reference(self, behind: Sequence[WorkerRefit]) -> None:
        """Ask a worker on the version for the right canary answer, if any worker needs a canary."""
        canaries = self.plan.canaries
        if canaries is None or all(worker.verifies_itself for worker in behind):
            return
        ids = self.plan.versions.list_serving(self.plan.version)
        listed = await self.membership.workers()
        serving = [w for w in listed if w.instance_id in ids and w.error is None]
        if serving:
            await canaries.use_as_reference(serving[0])

    # --- groups of workers ---------------------------------------------------------------------

    @contextmanager
    def _changing(self, report: RefitReport, began: float) -> Iterator[None]:
        """Count this refit as under way, and complete its report at the end."""
        self.plan.versions.changing += 1
        try:
            yield
        finally:
            self.plan.versions.changing -= 1
            states = (worker.report for worker in self.workers.values())
            report.workers = sorted(states, key=lambda state: state.instance_id)
            for worker in report.workers:
                report.paused_seconds = max(report.paused_seconds, worker.paused_seconds)
                report.waited_seconds = max(report.waited_seconds, worker.waited_seconds)
            report.seconds = time.monotonic() - began

    async def _move_all(self, workers: list[WorkerRefit], report: RefitReport) -> list[WorkerRefit]:
        """Move these workers and those that join meanwhile; return those that joined too late."""
        while workers and report.passes < MAX_PASSES:
            report.passes += 1
            for group in self._split_in_groups(workers):
                await self._move(group, is_first_pass=report.passes == 1)
                if not self.plan.versions.list_serving(self.plan.version):
                    # The other groups would fail as well: they had better serve the old version.
                    raise AdminError("None of the first workers loaded the new weights.")
            workers = await self._list_joined()
            if workers and not self.plan.update.repeatable:
                raise AdminError(
                    f"{len(workers)} workers joined too late for an update that cannot be "
                    "repeated; the next refit includes them."
                )
        return workers

    def _split_in_groups(self, workers: Sequence[WorkerRefit]) -> list[list[WorkerRefit]]:
        if self.mode != "rolling":
            return [list(workers)]
        return split_in_shares(workers, self.share, _get_role)

    async def _move(self, group: Sequence[WorkerRefit], *, is_first_pass: bool) -> None:
        """Move a group of workers to the version."""
        versions = self.plan.versions
        current = versions.current
        ids = {worker.instance_id for worker in group}
        nobody_left = current is None or not versions.is_served(current, without=ids)
        if (self.mode != "rolling" and is_first_pass) or nobody_left:
            versions.close()
        modes: dict[str, PauseMode] = {"in-flight": "abort", "keep": "keep"}
        mode = modes.get(self.mode, "wait")
        try:
            stages = split_in_stages(group, mode, _get_role)
            for stage in stages:
                await self._move_stage(stage, mode)
                if len(stages) > 1 and all(w.report.state != "serving" for w in stage):
                    # The other pool had better serve the old version.
                    role = stage[0].worker.role
                    raise AdminError(f"None of the {role} workers loaded the new weights.")
        finally:
            versions.open()

    async def _move_stage(self, stage: Sequence[WorkerRefit], mode: PauseMode) -> None:
        """Move workers of one role, all at the same time."""
        by_order = [worker for worker in stage if worker.takes_order]
        others = [worker for worker in stage if worker not in by_order]
        for worker in stage:
            worker.releases_kv = mode == "abort" and self._can_release(worker)
        work = [WorkerOrder(worker).run(mode) for worker in by_order]
        if others:
            work.append(self._move_by_calls(others, mode))
        await _run_all(work)

    def _can_release(self, worker: WorkerRefit) -> bool:
        """Return whether no decode worker reads the KV of this prefill worker any more: each has
        the new version, or is gone. One in doubt may still read."""
        left = ("serving", "gone", "replaced", "joining")
        decoding = [w for w in self.workers.values() if w.worker.role == "decode"]
        return worker.worker.role == "prefill" and all(w.report.state in left for w in decoding)

    async def _move_by_calls(self, group: Sequence[WorkerRefit], mode: PauseMode) -> None:
        """Pause the group as a whole, then install the update in each worker."""
        began = time.monotonic()
        async with AsyncExitStack() as connections:
            paused = await self._pause(group, mode, connections)
            # The connections close here: not before every worker is in service or out.
            await _run_all([worker.install() for worker in paused])
        waited = max((worker.report.waited_seconds for worker in paused), default=0.0)
        for worker in paused:
            worker.report.paused_seconds = time.monotonic() - began - waited

    async def _pause(
        self, group: Sequence[WorkerRefit], mode: PauseMode, connections: AsyncExitStack
    ) -> list[WorkerRefit]:
        """Take workers out of service, and return those that are there. A worker that has died
        needs no pause. If any other cannot be paused, restore the whole group and raise."""

        async def pause(worker: WorkerRefit) -> None:
            await worker.leave_service(connections)
            await worker.pause(mode)

        failures: list[tuple[WorkerRefit, BaseException]] = []
        is_complete = False
        try:
            for worker, error in await self._call_all(group, pause):
                if not await worker.note_if_lost():
                    failures.append((worker, error))
            is_complete = not failures
        finally:
            if not is_complete:
                # A pause that timed out or was cancelled here may still take effect in the worker,
                # so all are resumed; that does no harm to a worker that was not paused.
                await run_to_the_end(self._restore(group))
        for worker, error in failures:
            worker.report.error = str(error)
        if failures:
            raise AdminError(
                f"Not every worker could be paused: {failures[0][1]}",
                "The others were put back into service.",
            )
        return [worker for worker in group if worker.report.state == "paused"]

    async def _restore(self, group: Sequence[WorkerRefit]) -> None:
        for worker, error in await self._call_all(group, WorkerRefit.restore):
            if not await worker.note_if_lost():
                worker.mark_in_doubt(error)
                self.plan.versions.forget(worker.instance_id)

    # --- afterwards ----------------------------------------------------------------------------

    async def _list_behind(self, skip: Iterable[int] = ()) -> list[WorkerRefit]:
        """Return ready workers that are not on the version and that this refit has not touched."""
        # Versions only go up: a worker on a newer one is not behind.
        served, version = self.plan.versions.by_worker, self.plan.version
        excluded = {*(worker for worker, has in served.items() if has >= version), *skip}
        for instance, worker in self.workers.items():
            if worker.report.state not in ("untouched", "joining"):
                excluded.add(instance)
        listed = await self.membership.workers(fresh=True)
        return await self._track_ready(
            [w for w in listed if w.error is None and w.instance_id not in excluded]
        )

    async def _list_joined(self) -> list[WorkerRefit]:
        """Return workers that joined during this refit and must be moved. A new worker that does
        not answer makes the refit fail, since nobody knows what it serves."""
        behind = await self._list_behind()
        listed = await self.membership.workers()
        for worker in listed:
            is_new = worker.instance_id not in self.workers
            if worker.error is not None and is_new and not await is_dead(worker, listed):
                self._track(worker).report.error = worker.error
        try:
            behind = await self._preflight(behind)
        except UsageError as error:
            raise AdminError(error.message, error.hint) from error
        return [worker for worker in behind if not worker.note_if_current()]

    def _check_outcome(self, report: RefitReport) -> None:
        """Raise unless every live worker is on the version."""
        good = ("serving", "gone", "replaced", "joining")
        versions = self.plan.versions
        is_served = versions.is_served(self.plan.version) or (
            report.serving and not versions.needed_roles
        )
        if not is_served or any(worker.state not in good for worker in report.workers):
            raise refit_error(report)

    @asynccontextmanager
    async def _discard_afterwards(self) -> AsyncIterator[None]:
        """At the end, free updates that workers staged and that were not applied: no worker keeps
        a second model. The error that ended the refit is never replaced by one from here."""
        try:
            yield
        finally:
            await run_to_the_end(self._discard())

    async def _discard(self) -> None:
        holding = [worker for worker in self.workers.values() if worker.may_hold_update]
        try:
            async with asyncio.timeout(DISCARD_SECONDS):
                for worker, error in await self._call_all(holding, WorkerRefit.discard):
                    log.warning("%s may keep staged weights: %s", worker.worker, error)
        except TimeoutError:
            log.warning("staged weights could not be discarded within %g s", DISCARD_SECONDS)

    async def _call_all(
        self, workers: Sequence[WorkerRefit], call: Callable[[WorkerRefit], Awaitable[None]]
    ) -> list[tuple[WorkerRefit, BaseException]]:
        """Make one call on every worker, and return those that failed with their errors."""
        results = zip(workers, await call_all(workers, call), strict=True)
        return [(worker, error) for worker, error in results if error is not None]


def _get_role(worker: WorkerRefit) -> str:
    return worker.worker.role


async def _run_all(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all at once to the end, also those beside one that fails; raise its error then."""
    tasks = [asyncio.create_task(coroutine) for coroutine in work]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
