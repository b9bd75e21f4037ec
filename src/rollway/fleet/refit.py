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
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from rollway.errors import AdminError, NoWorkers, RequestFailed, RollwayError, UsageError
from rollway.fleet.admin import IN_DOUBT, AdminAPI, PauseMode, on_all, unproven
from rollway.fleet.discovery import Worker
from rollway.fleet.membership import Membership
from rollway.fleet.report import RefitMode, RefitReport, WorkerRefit, refit_error
from rollway.fleet.updates import Update
from rollway.fleet.verify import Agreement
from rollway.fleet.versions import VersionBook, taint_of

Observer = Callable[[str, Worker], Awaitable[None]]
"""Told of each step before it is taken."""
Replace = Callable[[Worker], Awaitable[bool]]
"""Ends a worker that its supervisor will start anew; False when nobody supervises it."""

MAX_PASSES = 3
ANSWER_SECONDS = 15.0
"""How long a listed worker may fail to answer; a dead one is listed for about 10 s."""
ROUTING_SECONDS = 0.1
"""A router may still send what it chose before it heard of a change (10 to 30 ms measured)."""


@dataclass(slots=True)
class Refit:
    """One run of the protocol."""

    admin: AdminAPI
    membership: Membership
    book: VersionBook
    update: Update
    version: int
    mode: RefitMode = "pause-all"
    share: float = 0.5
    agreement: Agreement | None = None
    replace: Replace | None = None
    observer: Observer | None = None
    answer_seconds: float = ANSWER_SECONDS
    supervised: bool = False
    """A supervisor labels each worker when it is ready: one without a label is not."""
    skip: frozenset[int] = frozenset()
    """Workers that `catch_up` leaves alone: an update to them has failed."""
    states: dict[int, WorkerRefit] = field(default_factory=dict)
    proving: set[int] = field(default_factory=set)
    labels: dict[int, int | None] = field(default_factory=dict)
    """What each worker declared when last asked: another process declares otherwise."""
    _lines: dict[int, AdminAPI] = field(default_factory=dict)
    """Connections held from the first pause to the end, so that all calls reach one process."""
    claimed: bool = False
    _had: dict[int, int | None] = field(default_factory=dict)
    _untainted: dict[int, float] = field(default_factory=dict)

    async def run(self) -> RefitReport:
        began = time.monotonic()
        report = RefitReport(self.version, self.mode)
        await self.update.prepare()
        workers = await self._answering()
        await self._preflight(workers)
        self.book.claim(self.version, self.update.identity)
        self.claimed = True
        workers = [w for w in workers if w.instance_id not in self.states]
        there = [worker for worker in workers if self._is_there(worker)]
        workers = [worker for worker in workers if worker not in there]
        for worker, result in zip(there, await on_all(there, self._stays), strict=True):
            if isinstance(result, BaseException):
                self._state(worker).state, self._state(worker).error = "in doubt", str(result)
        self.book.changing += 1
        trouble: AdminError | None = None
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
        except AdminError as error:
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
        behind = [w for w in await self._behind() if w.instance_id not in self.skip]
        if not behind:
            return report  # only such as are left alone, or not ready
        self.book.changing += 1
        try:
            await self._preflight(behind)
            behind = [worker for worker in behind if worker.instance_id not in self.states]
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
            dead = [worker for worker in silent if await _is_dead(worker, workers)]
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
                raise AdminError(
                    f"{len(silent)} of {len(workers)} workers do not answer: "
                    + "; ".join(f"{worker}: {worker.error}" for worker in silent)
                    + ".",
                    "Wait for them to recover or leave (a dead one is listed for about 10 s).",
                )
        return await self._labelled([worker for worker in workers if worker.error is None])

    async def _labelled(self, workers: list[Worker]) -> list[Worker]:
        """Without those that their supervisor is still getting ready: they take no traffic, and
        join later."""
        if not self.supervised:
            return workers
        told = await on_all(workers, self.admin.weight_version)
        for worker, label in zip(workers, told, strict=True):
            if label is None:
                self._state(worker).state = "joining"
        return [worker for worker, label in zip(workers, told, strict=True) if label is not None]

    async def _preflight(self, workers: Sequence[Worker]) -> None:
        async def ask(worker: Worker) -> None:
            await self._step("preflight", worker)
            if await self.update.preflight(self.admin, worker):
                self.proving.add(worker.instance_id)
            declared = await self.admin.weight_version(worker)
            self.labels[worker.instance_id] = declared
            if declared is not None and declared >= 0:
                self.book.serves(worker.instance_id, declared)
            # One in doubt is paused: it could not answer.
            heard = declared is None or declared >= 0
            if self.agreement is not None and heard and worker.instance_id not in self.proving:
                await self.agreement.before(worker)

        for worker, result in zip(workers, await on_all(workers, ask), strict=True):
            if isinstance(result, BaseException):
                if not (isinstance(result, AdminError) and await _is_dead(worker)):
                    raise result
                self._state(worker).state = "gone"

    def _is_there(self, worker: Worker) -> bool:
        """Whether a worker serves the version already: its weights are these, as claimed."""
        there = self.book.by_worker.get(worker.instance_id) == self.version
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

    # --- a group of workers --------------------------------------------------------------------

    def _groups(self, workers: Sequence[Worker]) -> list[list[Worker]]:
        if self.mode != "rolling":
            return [list(workers)]
        size = max(1, min(len(workers) - 1, round(len(workers) * self.share)))
        return [list(workers[start : start + size]) for start in range(0, len(workers), size)]

    async def _move(self, group: Sequence[Worker], *, first: bool) -> float:
        """Pause a group and bring it to the version; returns how long it stood still."""
        if self.mode != "rolling" and first:
            self.book.close()
        began = time.monotonic()
        try:
            async with AsyncExitStack() as lines:
                paused = await self._pause(group, lines)
                moves = [asyncio.create_task(self._move_one(worker)) for worker in paused]
                try:
                    await asyncio.gather(*moves)
                except asyncio.CancelledError:
                    await asyncio.gather(*moves, return_exceptions=True)
                    raise
        finally:
            self._lines.clear()
            self.book.open()
        return time.monotonic() - began

    async def _pause(self, group: Sequence[Worker], lines: AsyncExitStack) -> list[Worker]:
        """Take workers out of service; returns those that are there. One that has died needs no
        pause; if one cannot be paused, all are put back."""
        mode: PauseMode = "abort" if self.mode == "in-flight" else "wait"

        async def pause(worker: Worker) -> None:
            started = time.monotonic()
            await self._step("pause", worker)
            line = await lines.enter_async_context(self.admin.held())
            await self._same_process(line, worker)
            self._lines[worker.instance_id] = line
            await self._taint(line, worker, [])
            await line.pause(worker, mode)
            state = self._state(worker)
            state.state = "paused"
            state.pause_seconds = time.monotonic() - started

        failed: dict[int, BaseException] = {}
        complete = False
        try:
            results = await on_all(group, pause)
            for worker, result in zip(group, results, strict=True):
                if isinstance(result, BaseException) and not await self._lost(worker):
                    failed[worker.instance_id] = result
            complete = not failed
        finally:
            if not complete:
                # A pause that timed out, or was cancelled here, may still take effect there: all
                # are resumed, which does no harm to one that was not paused.
                await _to_the_end(self._restore(group))
        for instance, error in failed.items():
            self.states[instance].error = str(error)
        if failed:
            raise AdminError(
                f"Not every worker could be paused: {next(iter(failed.values()))}",
                "The others were put back into service.",
            )
        return [worker for worker in group if self._state(worker).state == "paused"]

    async def _restore(self, group: Sequence[Worker]) -> None:
        """Put workers back into service as they were; no update was issued to them."""

        async def restore(worker: Worker) -> None:
            async with self.admin.held() as line:
                await self._same_process(line, worker)
                version = self.labels.get(worker.instance_id)
                if version is not None and version < 0:
                    return  # in doubt since an earlier refit: never resumed
                await line.resume(worker)
                served = [] if version is None or version < 0 else [taint_of(version)]
                await self._taint(line, worker, served)

        for worker, result in zip(group, await on_all(group, restore), strict=True):
            state = self._state(worker)
            if not isinstance(result, BaseException):
                state.state = "restored"
            elif not await self._lost(worker):
                state.state, state.error = "in doubt", str(result)
                self.book.gone(worker.instance_id)

    async def _same_process(self, line: AdminAPI, worker: Worker) -> None:
        """Raise unless what a line reaches is what was asked last."""
        if await line.weight_version(worker) != self.labels.get(worker.instance_id):
            raise _AnotherProcess(f"{worker} is gone: another process has its address.")

    async def _lost(self, worker: Worker) -> bool:
        """Whether a worker has died, or another process has its address; notes it if so."""
        gone = await _is_dead(worker)
        if not gone:
            try:
                async with self.admin.held() as line:
                    await self._same_process(line, worker)
            except _AnotherProcess:
                gone = True
            except AdminError:
                pass  # it is there and does not answer
        if gone:
            self._state(worker).state = "gone"
            self.book.gone(worker.instance_id)
        return gone

    # --- one worker ----------------------------------------------------------------------------

    async def _move_one(self, worker: Worker) -> None:
        """Load, flush, verify, enter service. On any failure the worker is left paused: what it
        would serve is unknown, and no sample is better than a wrong one."""
        state, line = self._state(worker), self._lines[worker.instance_id]
        started = time.monotonic()
        try:
            state.state = "updating"
            await self._step("update", worker)
            self.book.issued(worker.instance_id)
            self._had[worker.instance_id] = self.labels.get(worker.instance_id)
            self.labels[worker.instance_id] = IN_DOUBT  # should nobody live to finish this
            await line.declare_version(worker, IN_DOUBT)
            await self.update.apply(line, worker, unproven(self.version))
            self.labels[worker.instance_id] = unproven(self.version)
            await self._step("flush", worker)
            await line.flush_cache(worker)
            await self._step("verify", worker)
            state.proof = await self._verify(line, worker)
            state.update_seconds = time.monotonic() - started
            started = time.monotonic()
            await self._enter_service(line, worker)
            state.resume_seconds = time.monotonic() - started
            state.state, state.version = "serving", self.version
        except BaseException as error:
            state.state, state.error = "in doubt", str(error) or type(error).__name__
            await _to_the_end(self._keep_out(worker))
            if not isinstance(error, RollwayError):
                raise
            if state.state == "in doubt":
                await self._replaced(worker)

    async def _verify(self, line: AdminAPI, worker: Worker) -> str:
        declared = await line.weight_version(worker)
        if declared != unproven(self.version):
            raise AdminError(f"{worker} declares version {declared} after the update.")
        if worker.instance_id in self.proving:
            return "parameters"  # compared by the worker itself while it loaded them
        if self.agreement is None or worker.instance_id < 0:
            return "word"
        # It has to generate to be heard; outside the routing nobody else hears it.
        await self._end_late(line, worker)
        await line.resume(worker)
        try:
            await self.agreement.after(worker)
        finally:
            await line.pause(worker, "abort")
        return "canary"

    async def _end_late(self, line: AdminAPI, worker: Worker) -> None:
        """End what a router sent before it heard: it would be sampled from the new weights."""
        since = time.monotonic() - self._untainted.get(worker.instance_id, 0.0)
        if since < ROUTING_SECONDS:
            await asyncio.sleep(ROUTING_SECONDS - since)
        await line.pause(worker, "abort")

    async def _enter_service(self, line: AdminAPI, worker: Worker) -> None:
        """End what a router sent late, take the new version's requests, generate."""
        await self._step("open", worker)
        await self._end_late(line, worker)
        await line.declare_version(worker, self.version)
        self.labels[worker.instance_id] = self.version
        await self._taint(line, worker, [taint_of(self.version)])
        await self._step("resume", worker)
        await line.resume(worker)
        self.book.serves(worker.instance_id, self.version)
        if self.book.current is None or self.book.current < self.version:
            self.book.current = self.version
        self.book.open()

    async def _keep_out(self, worker: Worker) -> None:
        """Keep a worker in doubt out of service; it may have been heard, or have entered it."""
        if await _is_dead(worker):
            self._state(worker).state = "gone"
            return
        with contextlib.suppress(RollwayError):  # it was out of the routing when this began
            async with self.admin.held() as line:
                had = self._had.get(worker.instance_id)
                told = await line.weight_version(worker)
                if told not in (self.version, had) and (told is None or told >= 0):
                    self._state(worker).state = "gone"  # another process has its address
                    return
                await self._taint(line, worker, [])
                await line.declare_version(worker, IN_DOUBT)
                await line.pause(worker, "abort")

    async def _replaced(self, worker: Worker) -> bool:
        self.book.gone(worker.instance_id)
        done = self.replace is not None and await self.replace(worker)
        if done:
            self._state(worker).state = "replaced"
        return done

    async def _taint(self, line: AdminAPI, worker: Worker, taints: Sequence[str]) -> None:
        if not line.taints:
            self.book.tainted = False
            return
        try:
            await line.set_taints(worker, taints)
        except AdminError as error:
            cause = error.__cause__
            if not (isinstance(cause, RequestFailed) and cause.status == 404):
                raise
            self.book.tainted = False  # an older Dynamo: stamps rest on what this process knows
            return
        self.book.tainted = True
        if not taints:
            self._untainted[worker.instance_id] = time.monotonic()

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
            if worker.error is not None and new and not await _is_dead(worker, listed):
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

    def _state(self, worker: Worker) -> WorkerRefit:
        return self.states.setdefault(worker.instance_id, WorkerRefit(worker.instance_id))

    async def _step(self, name: str, worker: Worker) -> None:
        if self.observer is not None:
            await self.observer(name, worker)


class _AnotherProcess(AdminError):
    """What answers at a worker's address is not that worker."""


async def _to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Finish, and only then be cancelled: nobody else may begin before."""
    task = asyncio.create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    task.result()


async def _is_dead(worker: Worker, listed: Sequence[Worker] = ()) -> bool:
    """Whether a worker is dead and not slow: nobody listens at its admin address any more, or
    another one does (its successor, started with the same ports)."""
    if any(w.admin_url == worker.admin_url and w.error is None for w in listed):
        return worker.error is not None
    host, _, port = worker.admin_url.rpartition("://")[2].rpartition(":")
    if not port.isdigit():
        return False
    try:
        async with asyncio.timeout(2.0):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    writer.close()
    return False
