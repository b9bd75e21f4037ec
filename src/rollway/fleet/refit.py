"""One refit: move workers to a new version so that nothing is ever sampled from another one.

    check the weights ─► every worker checks, stages ─► claim the version    refused: discard, raise
                                                             │
    for one group of workers at a time, and in it one role after the other (`split_in_stages`):
                                                             ▼
       managed workers: one order each, at the same time    (`worker_refit`)
       foreign workers: pause all, then update each         (`foreign`)
                                                             │
       who fails stays paused, without a version; replaced if supervised
                                                             │
    somebody joined meanwhile: list again, move them, in a bounded number of passes
                                                             │
    at the end, however it ended: discard updates that are staged and were not applied

`catch_up` takes workers that join between refits through the same steps, each by itself, and looks
for more while it does. Nothing is sent twice to a worker once an update was issued to it.

With prefill and decode apart, the workers of one role change weights together:

    wait:   prefill pool ─────► decode pool         prefill workers drain: decode workers, which
                                                    still serve, fetch all KV that they hold
    abort:  decode pool ──────► prefill pool        decode workers drop what they have and wait
                                 release            for; nobody reads the prefill pool's blocks
                                                    any more, so they are released at once

A decode worker samples a request with the KV that a prefill worker computed, so both must have the
version that the request names. Four rules hold that together:

1. The router sends a request only to workers with the taint of its version, in both pools.
2. Each engine admits a request only if its cache salt names the version that the engine has, and a
   decode engine only KV that was computed for that version; if it refuses one, it tells the prefill
   worker to release its blocks.
3. A prefill engine swaps only when it holds no blocks for others: what is fetched from it was
   computed by the weights that it has.
4. A version counts as served when both pools have a worker on it (`FleetVersions.is_served`).

`keep` is refused: a decode worker would compute a frozen request's prompt again by itself, while
transfers of other requests are in flight, and vLLM does not clear its cache then.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TypeVar

from rollway.errors import AdminError, RollwayError, UsageError
from rollway.fleet import foreign
from rollway.fleet.admin import (
    OtherSecret,
    PauseMode,
    collect_failures,
    run_to_the_end,
)
from rollway.fleet.dynamo_admin import DynamoAdmin
from rollway.fleet.foreign import CanaryCheck
from rollway.fleet.report import RefitMode, RefitReport, WorkerReport, refit_error
from rollway.fleet.updates import Update
from rollway.fleet.worker_refit import WorkerRefit
from rollway.fleet.workers import (
    LOOK_SECONDS,
    Membership,
    Worker,
    is_dead,
    no_workers_error,
    silent_workers_error,
)
from rollway.versions import FleetVersions

log = logging.getLogger(__name__)

W = TypeVar("W")
GetRole = Callable[[W], str]
Observer = Callable[[str, Worker], Awaitable[None]]
"""Called with the name of each step and its worker, before the step. The names, in order:
preflight, pause, update, flush, verify, open, resume."""
Replace = Callable[[Worker], Awaitable[bool]]
"""Stops a worker so that its supervisor restarts it; False if it has no supervisor."""
Supervised = Callable[[Worker], bool]

MAX_PASSES = 3
LONGEST_JOIN_SECONDS = 60.0
"""For how long an admission takes joiners along; others that want the fleet wait meanwhile."""
DISCARD_SECONDS = 10.0
"""The longest time that discarding staged updates may add to a refit."""
ANSWER_SECONDS = 15.0
"""How long a listed worker may fail to answer; a dead worker is listed for about 10 s."""
PENDING = ("untouched", "joining")
"""States of workers that this refit has not moved and may still move."""
_DRAINING = ("", "prefill", "decode")
_DROPPING = ("", "decode", "prefill")


def split_in_stages(workers: Sequence[W], mode: str, get_role: GetRole[W]) -> list[list[W]]:
    """Return the workers by role, in the order in which the roles change weights."""
    order = _DROPPING if mode == "abort" else _DRAINING
    stages = ([w for w in workers if get_role(w) == role] for role in order)
    return [stage for stage in stages if stage]


def split_in_shares(workers: Sequence[W], share: float, get_role: GetRole[W]) -> list[list[W]]:
    """Return groups with a share of the workers of each role."""
    chunks = []
    for stage in split_in_stages(workers, "wait", get_role):
        size = max(1, min(len(stage) - 1, round(len(stage) * share)))
        chunks.append([stage[start : start + size] for start in range(0, len(stage), size)])
    return [[worker for part in parts for worker in part or ()] for parts in zip_longest(*chunks)]


@dataclass(slots=True)
class Refit:
    """One run of the protocol over the whole fleet."""

    admin: DynamoAdmin
    versions: FleetVersions
    update: Update
    version: int
    membership: Membership
    supervised: Supervised
    """Whether a supervisor labels a worker once it is ready."""
    mode: RefitMode = "pause-all"
    share: float = 0.5
    skip: frozenset[int] = frozenset()
    """Workers that `catch_up` leaves alone, because an update to them has failed."""
    is_awaited: Callable[[], bool] = lambda: False
    """Whether another refit waits for this one; then it takes no more joiners along."""
    canaries: CanaryCheck | None = None
    replace: Replace | None = None
    observer: Observer | None = None
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
        await self.update.prepare()
        if self.mode == "rolling" and not self.update.repeatable:
            raise UsageError(
                "These weights can be sent only once, to all workers at the same time.",
                "Refit with mode pause-all or in-flight.",
            )
        async with self._discard_afterwards():
            workers = await self._list_and_preflight()
            self._check_mode(workers)
            self._claim()
            workers = self._skip_current(workers)
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
        await self.update.prepare()
        self.versions.check_identity(self.version, self.update.identity)
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
            if not listed and not self.versions.by_worker:
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
            tracked = WorkerRefit(self, worker, report, is_supervised)
            self.workers[worker.instance_id] = tracked
        tracked.worker = worker  # as it was last listed
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
        served, version = self.versions.by_worker, self.version
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
        if self.mode == "keep" and self.versions.needed_roles:
            raise UsageError(
                "Running requests cannot be kept with prefill and decode apart: their KV is of two "
                "workers.",
                "Refit with mode in-flight.",
            )
        # A worker that is out of service has nothing to keep.
        serving = [w for w in workers if not w.is_out]
        unable = [w.worker for w in serving if self.mode == "keep" and not w.is_managed]
        if unable:
            raise UsageError(
                f"{len(unable)} of {len(workers)} workers cannot keep running requests, for "
                f"example {unable[0]}: they take no orders of Rollway.",
                "Refit with mode in-flight, or see docs/fleet.md for what a managed worker is.",
            )

    def _claim(self) -> None:
        """Bind the version to these weights. After the preflight, which reads what is served."""
        self.versions.claim(self.version, self.update.identity)
        if self.record is not None:
            self.record(self.version, self.update.identity)
        self.is_claimed = True

    def _skip_current(self, workers: Sequence[WorkerRefit]) -> list[WorkerRefit]:
        """Return the workers that do not serve the version yet."""
        return [worker for worker in workers if not worker.note_if_current()]

    async def _ask_for_reference(self, behind: Sequence[WorkerRefit]) -> None:
        """Ask a worker on the version for the right canary answer, if any worker needs a canary."""
        canaries = self.canaries
        if canaries is None or canaries.has_reference or all(w.is_managed for w in behind):
            return
        ids = self.versions.list_serving(self.version)
        listed = await self.membership.workers()
        serving = [w for w in listed if w.instance_id in ids and w.error is None]
        if serving:
            await canaries.use_as_reference(serving[0])

    # --- groups of workers ---------------------------------------------------------------------

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Count this refit as under way."""
        self.versions.changing += 1
        try:
            yield
        finally:
            self.versions.changing -= 1

    async def _move_all(self, workers: list[WorkerRefit]) -> list[WorkerRefit]:
        """Move these workers and those that join meanwhile; return those that joined too late."""
        while workers and self.passes < MAX_PASSES:
            self.passes += 1
            for group in self._split_in_groups(workers):
                await self._move(group, is_first_pass=self.passes == 1)
                if not self.versions.list_serving(self.version):
                    # The other groups would fail as well: they had better serve the old version.
                    raise AdminError("None of the first workers loaded the new weights.")
            workers = await self._list_joined()
            if workers and not self.update.repeatable:
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
        versions = self.versions
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
                await self._move_stage(stage, mode)
                if len(stages) > 1 and all(w.report.state != "serving" for w in stage):
                    # The other pool had better serve the old version.
                    role = stage[0].worker.role
                    raise AdminError(f"None of the {role} workers loaded the new weights.")
        finally:
            versions.open()

    async def _move_stage(self, stage: Sequence[WorkerRefit], mode: PauseMode) -> None:
        """Move workers of one role at the same time; raise when all have ended."""
        work = [asyncio.create_task(worker.move(mode)) for worker in stage if worker.is_managed]
        if strangers := [worker for worker in stage if not worker.is_managed]:
            work.append(asyncio.create_task(foreign.move(strangers, mode)))
        try:
            await asyncio.gather(*work)
        except BaseException:
            await asyncio.gather(*work, return_exceptions=True)
            raise

    def _can_release(self, worker: WorkerRefit) -> bool:
        """Return whether no decode worker reads the KV of this prefill worker any more: each has
        the new version, or is gone. One in doubt may still read, and one that joins may get its
        label and requests of the old version at any moment."""
        left = ("serving", "gone", "replaced")
        decoding = [w for w in self.workers.values() if w.worker.role == "decode"]
        return worker.worker.role == "prefill" and all(w.report.state in left for w in decoding)

    # --- afterwards ----------------------------------------------------------------------------

    def make_report(self) -> RefitReport:
        """Return the state and the times of every worker until now."""
        workers = [self.workers[instance].report for instance in sorted(self.workers)]
        return RefitReport(
            self.version,
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
        versions = self.versions
        is_served = versions.is_served(self.version) or (
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
