"""One refit: bring workers to a new version so that nothing is ever sampled from another one.

    look at the weights ─► ask every worker ─► claim the version      refused here: nothing touched
                                                    │
    for a group of workers at a time:               ▼
      leave the routing ─► pause ──────────────► a pause failed: all back as they were, raised
                             │
      each worker on its own:▼
      label "between versions" ─► load ─► flush KV ─► verify ─► end what still queued
        ─► enter the routing as the new version ─► resume
              └─ anything failed: it stays paused, outside the routing, in doubt; replaced if ours
                             │
    list again: workers that joined meanwhile are moved too, a bounded number of times

Nothing is sent twice to a worker once an update was issued to it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rollway.errors import AdminError, NoWorkers, RollwayError, UsageError
from rollway.fleet.admin import not_answering, on_all
from rollway.fleet.discovery import Worker
from rollway.fleet.moves import Mover, is_dead
from rollway.fleet.report import RefitReport, refit_error
from rollway.versions import taint_of

MAX_PASSES = 3
_DYING_SECONDS = (0.0, 0.3, 0.7, 1.5)
"""Between looks at a worker that did not answer."""


@dataclass(slots=True)
class Refit(Mover):
    """One run of the protocol."""

    async def run(self) -> RefitReport:
        began = time.monotonic()
        report = RefitReport(self.version, self.mode)
        await self.update.prepare()
        workers = await self._answering()
        await self._preflight(workers)
        if self.mode == "rolling" and not self.update.repeatable:
            raise UsageError(
                "These weights can be brought to the workers only once, all at the same time.",
                "Refit with mode pause-all or in-flight.",
            )
        self.book.claim(self.version, self.update.identity)
        if self.record is not None:
            self.record(self.version, self.update.identity)
        self.claimed = True
        workers = [w for w in workers if w.instance_id not in self.states]
        there = [worker for worker in workers if self._is_there(worker)]
        workers = [worker for worker in workers if worker not in there]
        for worker, result in zip(there, await on_all(there, self._stays), strict=True):
            if isinstance(result, BaseException):
                self._state(worker).state, self._state(worker).error = "in doubt", str(result)
        self.book.changing += 1
        trouble: RollwayError | None = None
        try:
            while workers and report.passes < MAX_PASSES:
                report.passes += 1
                for group in self._groups(workers):
                    seconds = await self._move(group, first=report.passes == 1)
                    report.paused_seconds = max(report.paused_seconds, seconds)
                    if not self.book.served_by(self.version):
                        # Not one of them got there: the others are better left as they are.
                        raise AdminError("None of the first workers took the new weights.")
                workers = await self._joined()
                if workers and not self.update.repeatable:
                    raise AdminError(
                        f"{len(workers)} workers joined too late for an update that cannot be "
                        "repeated; the next refit takes them along."
                    )
        except RollwayError as error:
            trouble = error
        finally:
            self.book.changing -= 1
            report.workers = sorted(self.states.values(), key=lambda state: state.instance_id)
            report.seconds = time.monotonic() - began
        if trouble is not None:
            raise refit_error(report, trouble) from trouble
        self._judge(report, left_over=workers)
        return report

    async def catch_up(self) -> RefitReport:
        """Bring those that are not on a version that others serve already to it."""
        began = time.monotonic()
        report = RefitReport(self.version, "rolling", passes=1)
        await self.update.prepare()
        self.book.refuse_others(self.version, self.update.identity)
        behind = [w for w in await self._behind() if w.instance_id not in self.skip]
        if not behind:
            return report  # only such as are left alone, or not ready
        self.book.changing += 1
        try:
            await self._preflight(behind)
            behind = [worker for worker in behind if worker.instance_id not in self.states]
            await self._hear_one_that_serves(behind)
            if behind:
                report.paused_seconds = await self._move(behind, first=False)
        finally:
            self.book.changing -= 1
            report.workers = list(self.states.values())
            report.seconds = time.monotonic() - began
        self._judge(report, left_over=[])
        return report

    # --- before anything is touched ----------------------------------------------------------

    async def _answering(self) -> list[Worker]:
        """All workers, every one of them answering. A worker that does not must not be passed
        over: it is waited for, and replaced where that is possible."""
        deadline = time.monotonic() + self.answer_seconds
        while True:
            workers = await self.membership.workers(fresh=True)
            silent = [worker for worker in workers if worker.error is not None]
            if not workers and not self.book.by_worker:
                break  # nobody was ever there
            if not silent and workers:
                return await self._labelled(workers)
            dead = [worker for worker in silent if await is_dead(worker, workers)]
            if len(dead) == len(silent) < len(workers):
                for worker in dead:
                    self._state(worker).state = "gone"
                return await self._labelled([w for w in workers if w.error is None])
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(0.5)
        if not workers:
            raise NoWorkers(
                "No RL worker is listed.",
                "Workers need --enable-rl, and the mocker engine has no admin routes.",
            )
        for worker in silent:
            if not await self._replaced(worker):
                raise not_answering(silent, len(workers))
        return await self._labelled([worker for worker in workers if worker.error is None])

    async def _labelled(self, workers: list[Worker]) -> list[Worker]:
        """Without those that their supervisor is still getting ready: they take no traffic, and
        join later."""
        supervised = [worker for worker in workers if self.supervised(worker)]
        told = await on_all(supervised, self.admin.weight_version)
        joining = [w for w, label in zip(supervised, told, strict=True) if label is None]
        for worker in joining:
            self._state(worker).state = "joining"
        return [worker for worker in workers if worker not in joining]

    async def _preflight(self, workers: Sequence[Worker]) -> None:
        async def ask(worker: Worker) -> None:
            await self._step("preflight", worker)
            if await self.update.preflight(self.admin, worker):
                self.proving.add(worker.instance_id)
            declared = await self.admin.weight_version(worker)
            self.labels[worker.instance_id] = declared
            if declared is not None and declared >= 0:
                self.book.serves(worker.instance_id, declared)
            else:
                self.book.gone(worker.instance_id)
            # One in doubt is paused: it could not answer.
            heard = declared is None or declared >= 0
            if self.agreement is not None and heard and worker.instance_id not in self.proving:
                await self.agreement.before(worker)

        for worker, result in zip(workers, await on_all(workers, ask), strict=True):
            if isinstance(result, BaseException):
                if not (isinstance(result, AdminError) and await self._has_died(worker)):
                    raise result
                self._state(worker).state = "gone"

    async def _has_died(self, worker: Worker) -> bool:
        """Whether one that did not answer is dead. A process takes a moment to go, and its
        successor, at the same address, may be there by then."""
        for seconds in _DYING_SECONDS:
            await asyncio.sleep(seconds)
            if await is_dead(worker):
                return True
            listed = await self.membership.workers(fresh=True)
            if any(w.admin_url == worker.admin_url for w in listed) and worker.instance_id not in {
                w.instance_id for w in listed
            }:
                return True
        return False

    def _is_there(self, worker: Worker) -> bool:
        """Whether a worker serves the version already: its weights are these, as claimed."""
        there = self.labels.get(worker.instance_id) == self.version
        if there:
            state = self._state(worker)
            state.state, state.version, state.proof = "serving", self.version, "earlier refit"
        return there

    async def _stays(self, worker: Worker) -> None:
        """It has these weights; an interrupted refit may have left it out of service."""
        async with self.admin.held() as line:
            await self._same_process(line, worker)
            await self._taint(line, worker, [taint_of(self.version)])
            await line.resume(worker)

    def _groups(self, workers: Sequence[Worker]) -> list[list[Worker]]:
        if self.mode != "rolling":
            return [list(workers)]
        size = max(1, min(len(workers) - 1, round(len(workers) * self.share)))
        return [list(workers[start : start + size]) for start in range(0, len(workers), size)]

    async def _hear_one_that_serves(self, behind: Sequence[Worker]) -> None:
        """For joiners that only a canary can prove: what the others answer is right."""
        if self.agreement is None or all(w.instance_id in self.proving for w in behind):
            return
        serving = self.book.served_by(self.version)
        for worker in await self.membership.workers():
            if worker.instance_id in serving and worker.error is None:
                await self.agreement.agree_with(worker)
                return

    # --- afterwards ----------------------------------------------------------------------------

    async def _behind(self) -> list[Worker]:
        """Workers that answer, are not on the version and were not given up."""
        listed = await self.membership.workers(fresh=True)
        out = {i for i, state in self.states.items() if state.state not in ("untouched", "joining")}
        out |= set(self.book.served_by(self.version))
        return await self._labelled(
            [worker for worker in listed if worker.error is None and worker.instance_id not in out]
        )

    async def _joined(self) -> list[Worker]:
        """Those that are still to be moved; a new one that does not answer is an error, since
        nobody can say what it serves."""
        behind = await self._behind()
        listed = await self.membership.workers()
        for worker in listed:
            new = worker.instance_id not in self.states
            if worker.error is not None and new and not await is_dead(worker, listed):
                self._state(worker).error = worker.error
        try:
            await self._preflight(behind)
        except UsageError as error:
            raise AdminError(error.message, error.hint) from error
        behind = [w for w in behind if self._state(w).state != "gone"]
        return [worker for worker in behind if not self._is_there(worker)]

    def _judge(self, report: RefitReport, left_over: Sequence[Worker]) -> None:
        """Raise unless every live worker is on the version."""
        for worker in left_over:
            self._state(worker).error = f"it joined after {MAX_PASSES} passes"
        report.workers = sorted(self.states.values(), key=lambda state: state.instance_id)
        fine = ("serving", "gone", "replaced", "joining")
        if all(state.state in fine for state in report.workers) and (
            report.serving or self.book.served_by(self.version)
        ):
            return
        raise refit_error(report)
