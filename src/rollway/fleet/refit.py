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

`rollway.fleet.worker_refit` has the steps of one worker.
Nothing is sent twice to a worker once an update was issued to it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from rollway.errors import AdminError, RollwayError, UsageError
from rollway.fleet.admin import (
    OtherSecret,
    PauseMode,
    collect_failures,
    run_to_the_end,
)
from rollway.fleet.report import RefitMode, RefitReport, WorkerReport, refit_error
from rollway.fleet.stages import Stage, split_in_shares, split_in_stages
from rollway.fleet.worker_refit import RefitPlan, WorkerRefit
from rollway.fleet.workers import (
    LOOK_SECONDS,
    Membership,
    Worker,
    is_dead,
    no_workers_error,
    silent_workers_error,
)

log = logging.getLogger(__name__)

MAX_PASSES = 3
LONGEST_JOIN_SECONDS = 60.0
"""For how long an admission takes joiners along; others that want the fleet wait meanwhile."""
DISCARD_SECONDS = 10.0
"""The longest time that discarding staged updates may add to a refit."""

Supervised = Callable[[Worker], bool]
ANSWER_SECONDS = 15.0
"""How long a listed worker may fail to answer; a dead worker is listed for about 10 s."""
PENDING = ("untouched", "joining")
"""States of workers that this refit has not moved and may still move."""


@dataclass(slots=True)
class Refit:
    """One run of the protocol over the whole fleet."""

    plan: RefitPlan
    membership: Membership
    supervised: Supervised
    """Whether a supervisor labels a worker once it is ready."""
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
    passes: int = 0
    workers: dict[int, WorkerRefit] = field(default_factory=dict)
    """All workers that this refit has seen, by instance id."""
    _began: float = field(default_factory=lambda: time.monotonic())

    async def run(self) -> RefitReport:
        """Move all workers to the version; raise unless every live worker serves it."""
        await self.plan.update.prepare()
        if self.mode == "rolling" and not self.plan.update.repeatable:
            raise UsageError(
                "These weights can be sent only once, to all workers at the same time.",
                "Refit with mode pause-all or in-flight.",
            )
        async with self._discard_afterwards():
            workers = await self._list_and_preflight()
            self._check_mode(workers)
            self._claim()
            workers = await self._keep_current(workers)
            trouble: RollwayError | None = None
            with self._changing():
                try:
                    workers = await self._move_all(workers)
                except RollwayError as error:
                    trouble = error
            if trouble is not None:
                raise refit_error(self.make_report(), trouble) from trouble
            for worker in workers:
                worker.report.error = f"it joined after {MAX_PASSES} passes"
            return self._check_outcome()

    async def catch_up(self) -> RefitReport:
        """Move workers that are behind to a version that others already serve, and beside them
        those that join meanwhile: none waits for the refit of another."""
        await self.plan.update.prepare()
        self.plan.versions.check_identity(self.plan.version, self.plan.update.identity)
        # The versions were read a moment ago, with a listing.
        behind = await self._list_behind(fresh=False)
        if not behind:
            return self.make_report()  # those that are behind are to be skipped, or not ready
        moves: list[asyncio.Task[bool]] = []
        async with self._discard_afterwards():
            with self._changing():
                try:
                    while behind or any(not move.done() for move in moves):
                        self.passes += bool(behind)
                        moves += [asyncio.create_task(self._move_joiner(each)) for each in behind]
                        await asyncio.wait(moves, timeout=LOOK_SECONDS)
                        is_late = time.monotonic() - self._began > LONGEST_JOIN_SECONDS
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
            # If none was ready, they are still starting, or gone.
            return self._check_outcome() if any(ends) else self.make_report()

    async def _move_joiner(self, behind: WorkerRefit) -> bool:
        """Move a worker that is behind; return whether it was there and ready."""
        ready = await self._preflight([behind])
        await self._ask_for_reference(ready)
        if ready:
            await self._move(ready, is_first_pass=False)
        return bool(ready)

    async def _list_more(self) -> list[WorkerRefit]:
        """Return workers that have joined since the last listing and are behind; none if a refit
        waits for this one to end."""
        before = set(self.workers)
        if self.is_awaited() or not await self.membership.has_changed():
            return []
        try:
            behind = await self._list_behind()
        except RollwayError:  # the frontend is busy, and will be asked again
            return []
        return [worker for worker in behind if worker.instance_id not in before]

    # --- who is there, who answers, who is ready, who is behind ----------------------------------
    #
    # Everybody that a listing shows is tracked, with one report for the whole refit. Nobody may be
    # left out who is silent, and not known to be dead: it may hold an old version and answer
    # requests later.

    async def _list_and_preflight(self) -> list[WorkerRefit]:
        """Have all workers check and stage the update; return those that can be moved. If all of
        them are still starting, wait for one: supervisors label workers that are ready."""
        deadline = time.monotonic() + ANSWER_SECONDS
        while True:
            workers = await self._try_preflight()
            is_starting = any(w.report.state == "joining" for w in self.workers.values())
            if workers or not is_starting or time.monotonic() > deadline:
                return workers
            await asyncio.sleep(0.5)

    async def _try_preflight(self) -> list[WorkerRefit]:
        known = await self.membership.confirm()
        if known is not None:
            # Everybody is known, so no listing need wait for busy workers: the preflight itself
            # shows who answers.
            workers = [self._track(worker) for worker in known]
            failures = await collect_failures(workers, WorkerRefit.preflight)
            for _, error in failures:
                if not isinstance(error, AdminError):
                    raise error
            if not failures:
                return _list_ready(workers)
        workers = await self._list_answering()
        for worker in self.workers.values():
            is_listed = worker in workers or worker.report.state != "untouched"
            if not is_listed and await self.membership.has_died(worker.worker):
                worker.report.state = "gone"  # since the beginning, and discovery knows it already
        return await self._preflight(workers)

    async def _list_answering(self) -> list[WorkerRefit]:
        """Return the workers once all of them answer.

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
                return [self._track(worker) for worker in listed]
            # The frontend lists a dead worker for about 10 s. There is no need to wait for that,
            # but somebody must be left, and every silent worker must be known to be dead.
            dead = [worker for worker in silent if await is_dead(worker, listed)]
            if len(dead) == len(silent) < len(listed):
                for worker in dead:
                    self._track(worker).report.state = "gone"
                return [self._track(worker) for worker in listed if worker.error is None]
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(0.5)
        if not listed:
            raise no_workers_error(self.membership.source)
        # They hang. A supervisor can replace them; the successors join during a later pass.
        for worker in silent:
            if not await self._track(worker).replace():
                raise silent_workers_error(silent, len(listed))
        return [self._track(worker) for worker in listed if worker.error is None]

    def _track(self, worker: Worker) -> WorkerRefit:
        tracked = self.workers.get(worker.instance_id)
        if tracked is None:
            report, is_supervised = WorkerReport(worker.instance_id), self.supervised(worker)
            tracked = WorkerRefit(self.plan, worker, report, is_supervised=is_supervised)
            self.workers[worker.instance_id] = tracked
        tracked.service.worker = worker  # as it was last listed
        return tracked

    async def _preflight(self, workers: Sequence[WorkerRefit]) -> list[WorkerRefit]:
        """Have every worker check and stage the update; raise if one refuses. Return those that
        are alive and ready. One with another secret than the others is left out."""
        failures = await collect_failures(workers, WorkerRefit.preflight)
        foreign = [worker for worker, error in failures if isinstance(error, OtherSecret)]
        is_every_one = len(foreign) == len(self.membership.known)
        for worker, error in failures:
            if isinstance(error, OtherSecret):
                if is_every_one:
                    raise UsageError(error.message, error.hint)
                self.membership.leave_out(worker.worker, error)
                worker.mark_gone()
                continue
            is_silent = isinstance(error, AdminError)
            if not (is_silent and await self.membership.has_died(worker.worker)):
                raise error
            worker.report.state = "gone"
        return _list_ready(workers)

    async def _list_behind(self, *, fresh: bool = True) -> list[WorkerRefit]:
        """Return workers that are not on the version and that this refit has not touched."""
        # Versions only go up: a worker on a newer one is not behind.
        served, version = self.plan.versions.by_worker, self.plan.version
        excluded = {*(worker for worker, has in served.items() if has >= version), *self.skip}
        for instance, worker in self.workers.items():
            if worker.report.state not in PENDING:
                excluded.add(instance)
        listed = await self.membership.workers(fresh=fresh)
        behind = [w for w in listed if w.error is None and w.instance_id not in excluded]
        return [self._track(worker) for worker in behind]

    async def _list_joined(self) -> list[WorkerRefit]:
        """Return workers that joined during this refit and must be moved. A new worker that does
        not answer makes the refit fail, since nobody knows what it serves."""
        touched = {i for i, w in self.workers.items() if w.report.state not in PENDING}
        known = await self.membership.confirm()
        if known is not None and touched.issuperset(worker.instance_id for worker in known):
            return []  # a listing would wait for workers that are busy again
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
        listed = await self.membership.workers()
        serving = [w for w in listed if w.instance_id in ids and w.error is None]
        if serving:
            await canaries.use_as_reference(serving[0])

    # --- groups of workers ---------------------------------------------------------------------

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Count this refit as under way."""
        self.plan.versions.changing += 1
        try:
            yield
        finally:
            self.plan.versions.changing -= 1

    async def _move_all(self, workers: list[WorkerRefit]) -> list[WorkerRefit]:
        """Move these workers and those that join meanwhile; return those that joined too late."""
        while workers and self.passes < MAX_PASSES:
            self.passes += 1
            for group in self._split_in_groups(workers):
                await self._move(group, is_first_pass=self.passes == 1)
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

    def make_report(self) -> RefitReport:
        """Return the state and the times of every worker until now."""
        workers = [self.workers[instance].report for instance in sorted(self.workers)]
        return RefitReport(
            self.plan.version,
            self.mode,
            seconds=time.monotonic() - self._began,
            paused_seconds=max((worker.paused_seconds for worker in workers), default=0.0),
            waited_seconds=max((worker.waited_seconds for worker in workers), default=0.0),
            passes=self.passes,
            workers=workers,
        )

    def _check_outcome(self) -> RefitReport:
        """Return the report; raise unless every live worker is on the version."""
        report = self.make_report()
        good = ("serving", "gone", "replaced", "joining")
        versions = self.plan.versions
        is_served = versions.is_served(self.plan.version) or (
            report.serving and not versions.needed_roles
        )
        if not is_served or any(worker.state not in good for worker in report.workers):
            raise refit_error(report)
        return report

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


def _list_ready(workers: Sequence[WorkerRefit]) -> list[WorkerRefit]:
    """Return the workers that are alive and, where a supervisor labels them, labelled."""
    return [worker for worker in workers if worker.report.state not in ("gone", "joining")]
