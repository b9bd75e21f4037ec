"""The workers of one refit: who is there, who answers, who is ready, who is behind.

Everybody that a listing shows is tracked, with one report for the whole refit. Whom nobody may
leave out is decided here: a worker that is silent, and not known to be dead, may hold an old
version and answer requests later.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from rollway.errors import AdminError, UsageError
from rollway.fleet.admin import (
    OtherSecret,
    collect_failures,
    no_workers_error,
    silent_workers_error,
)
from rollway.fleet.discovery import Worker, is_dead
from rollway.fleet.membership import Membership
from rollway.fleet.report import WorkerReport
from rollway.fleet.worker_refit import RefitPlan, WorkerRefit

Supervised = Callable[[Worker], bool]
ANSWER_SECONDS = 15.0
"""How long a listed worker may fail to answer; a dead worker is listed for about 10 s."""
PENDING = ("untouched", "joining")
"""States of workers that this refit has not moved and may still move."""


@dataclass(slots=True)
class Roster:
    """The workers of a fleet as one refit sees them."""

    plan: RefitPlan
    membership: Membership
    supervised: Supervised
    """Whether a supervisor labels the worker once it is ready."""
    workers: dict[int, WorkerRefit] = field(default_factory=dict)

    async def list_and_preflight(self) -> list[WorkerRefit]:
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
        return await self.preflight(workers)

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

    async def preflight(self, workers: Sequence[WorkerRefit]) -> list[WorkerRefit]:
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

    async def list_behind(
        self, skip: Iterable[int] = (), *, fresh: bool = True
    ) -> list[WorkerRefit]:
        """Return workers that are not on the version and that this refit has not touched."""
        # Versions only go up: a worker on a newer one is not behind.
        served, version = self.plan.versions.by_worker, self.plan.version
        excluded = {*(worker for worker, has in served.items() if has >= version), *skip}
        for instance, worker in self.workers.items():
            if worker.report.state not in PENDING:
                excluded.add(instance)
        listed = await self.membership.workers(fresh=fresh)
        behind = [w for w in listed if w.error is None and w.instance_id not in excluded]
        return [self._track(worker) for worker in behind]

    async def list_joined(self) -> list[WorkerRefit]:
        """Return workers that joined during this refit and must be moved. A new worker that does
        not answer makes the refit fail, since nobody knows what it serves."""
        touched = {i for i, w in self.workers.items() if w.report.state not in PENDING}
        known = await self.membership.confirm()
        if known is not None and touched.issuperset(worker.instance_id for worker in known):
            return []  # a listing would wait for workers that are busy again
        behind = await self.list_behind()
        listed = await self.membership.workers()
        for worker in listed:
            is_new = worker.instance_id not in self.workers
            if worker.error is not None and is_new and not await is_dead(worker, listed):
                self._track(worker).report.error = worker.error
        try:
            behind = await self.preflight(behind)
        except UsageError as error:
            raise AdminError(error.message, error.hint) from error
        return [worker for worker in behind if not worker.note_if_current()]


def _list_ready(workers: Sequence[WorkerRefit]) -> list[WorkerRefit]:
    """Return the workers that are alive and, where a supervisor labels them, labelled."""
    return [worker for worker in workers if worker.report.state not in ("gone", "joining")]
