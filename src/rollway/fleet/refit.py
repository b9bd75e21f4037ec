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
    somebody joined meanwhile: list again, move them, in a bounded number of passes
                             │
    at the end, however it ended: discard updates that are staged and were not applied

`catch_up` takes workers that join between refits through the same steps, each by itself, and looks
for more while it does.

`rollway.fleet.roster` knows the workers, `rollway.fleet.worker_refit` has the steps of one of them.
Nothing is sent twice to a worker once an update was issued to it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from rollway.errors import AdminError, RollwayError, UsageError
from rollway.fleet.admin import PauseMode, collect_failures, run_to_the_end
from rollway.fleet.membership import CLOSE_LOOK_SECONDS
from rollway.fleet.report import RefitMode, RefitReport, refit_error
from rollway.fleet.roster import Roster
from rollway.fleet.stages import Stage, split_in_shares, split_in_stages
from rollway.fleet.worker_refit import RefitPlan, WorkerRefit

log = logging.getLogger(__name__)

MAX_PASSES = 3
LONGEST_JOIN_SECONDS = 60.0
"""For how long an admission takes joiners along; others that want the fleet wait meanwhile."""
DISCARD_SECONDS = 10.0
"""The longest time that discarding staged updates may add to a refit."""


@dataclass(slots=True)
class Refit:
    """One run of the protocol over the whole fleet."""

    roster: Roster
    mode: RefitMode = "pause-all"
    share: float = 0.5
    skip: frozenset[int] = frozenset()
    """Workers that `catch_up` leaves alone, because an update to them has failed."""
    is_awaited: Callable[[], bool] = lambda: False
    """Whether another refit waits for this one; then it takes no more joiners along."""
    record: Callable[[int, str], None] | None = None
    """Records for other processes which weights a version names."""
    is_claimed: bool = False
    """Whether the version belongs to this refit; before that, no worker was touched."""

    @property
    def plan(self) -> RefitPlan:
        return self.roster.plan

    @property
    def workers(self) -> dict[int, WorkerRefit]:
        """All workers that this refit has seen, by instance id."""
        return self.roster.workers

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
            workers = await self.roster.list_and_preflight()
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
        """Move workers that are behind to a version that others already serve, and beside them
        those that join meanwhile: none waits for the refit of another."""
        began = time.monotonic()
        report = RefitReport(self.plan.version, "rolling")
        await self.plan.update.prepare()
        self.plan.versions.check_identity(self.plan.version, self.plan.update.identity)
        # The versions were read a moment ago, with a listing.
        behind = await self.roster.list_behind(self.skip, fresh=False)
        if not behind:
            return report  # those that are behind are to be skipped, or not ready
        moves: list[asyncio.Task[bool]] = []
        async with self._discard_afterwards():
            with self._changing(report, began):
                try:
                    while behind or any(not move.done() for move in moves):
                        report.passes += bool(behind)
                        moves += [asyncio.create_task(self._move_joiner(each)) for each in behind]
                        await asyncio.wait(moves, timeout=CLOSE_LOOK_SECONDS)
                        is_late = time.monotonic() - began > LONGEST_JOIN_SECONDS
                        behind = [] if is_late else await self._list_more()
                except BaseException:
                    for move in moves:
                        move.cancel()
                    raise
                finally:
                    ends = await asyncio.gather(*moves, return_exceptions=True)
            if error := next((end for end in ends if isinstance(end, BaseException)), None):
                if isinstance(error, UsageError) and True in ends:  # others were moved
                    raise AdminError(error.message, error.hint) from error
                raise error
            if any(ends):  # otherwise they are still starting, or gone
                self._check_outcome(report)
        return report

    async def _move_joiner(self, behind: WorkerRefit) -> bool:
        """Move a worker that is behind; return whether it was there and ready."""
        ready = await self.roster.preflight([behind])
        await self._ask_for_reference(ready)
        if ready:
            await self._move(ready, is_first_pass=False)
        return bool(ready)

    async def _list_more(self) -> list[WorkerRefit]:
        """Return workers that have joined since the last listing and are behind; none if a refit
        waits for this one to end."""
        before = set(self.workers)
        if self.is_awaited() or not await self.roster.membership.has_changed():
            return []
        try:
            behind = await self.roster.list_behind(self.skip)
        except RollwayError:  # the frontend is busy, and will be asked again
            return []
        return [worker for worker in behind if worker.instance_id not in before]

    # --- before any worker is touched --------------------------------------------------------

    def _check_mode(self, workers: Sequence[WorkerRefit]) -> None:
        """Raise if a worker cannot keep requests and name the versions of their tokens."""
        if self.mode == "keep" and self.plan.versions.needed_roles:
            raise UsageError(
                "Running requests cannot be kept with prefill and decode apart: their KV is of two "
                "workers.",
                "Refit with mode in-flight.",
            )
        # A worker that sleeps, or is out of service, has nothing to keep.
        awake = [w for w in workers if not w.sleep_level and not w.was_out]
        unable = [w.worker for w in awake if self.mode == "keep" and not w.takes_order]
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
        for worker, error in await collect_failures(current, WorkerRefit.ensure_service):
            worker.mark_in_doubt(error)
        return [worker for worker in workers if worker not in current]

    async def _ask_for_reference(self, behind: Sequence[WorkerRefit]) -> None:
        """Ask a worker on the version for the right canary answer, if any worker needs a canary."""
        canaries = self.plan.canaries
        if canaries is None or canaries.has_reference:
            return
        if all(worker.verifies_itself for worker in behind):
            return
        ids = self.plan.versions.list_serving(self.plan.version)
        listed = await self.roster.membership.workers()
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
            workers = await self.roster.list_joined()
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
                for worker in stage:
                    worker.releases_kv = mode == "abort" and self._can_release(worker)
                await Stage(stage, mode).move()
                if len(stages) > 1 and all(w.report.state != "serving" for w in stage):
                    # The other pool had better serve the old version.
                    role = stage[0].worker.role
                    raise AdminError(f"None of the {role} workers loaded the new weights.")
        finally:
            versions.open()

    def _can_release(self, worker: WorkerRefit) -> bool:
        """Return whether no decode worker reads the KV of this prefill worker any more: each has
        the new version, or is gone. One in doubt may still read."""
        left = ("serving", "gone", "replaced", "joining")
        decoding = [w for w in self.workers.values() if w.worker.role == "decode"]
        return worker.worker.role == "prefill" and all(w.report.state in left for w in decoding)

    # --- afterwards ----------------------------------------------------------------------------

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
        their memory. The error that ended the refit is never replaced by one from here."""
        try:
            yield
        finally:
            await run_to_the_end(self._discard())

    async def _discard(self) -> None:
        holding = [worker for worker in self.workers.values() if worker.may_hold_update]
        try:
            async with asyncio.timeout(DISCARD_SECONDS):
                for worker, error in await collect_failures(holding, WorkerRefit.discard):
                    log.warning("%s may keep staged weights: %s", worker.worker, error)
        except TimeoutError:
            log.warning("staged weights could not be discarded within %g s", DISCARD_SECONDS)


def _get_role(worker: WorkerRefit) -> str:
    return worker.worker.role
