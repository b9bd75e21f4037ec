"""The part of a refit that touches workers: out of service, new weights, back into service.

Everything that is done to a worker goes over one held connection, so that it reaches one process
and never a successor at its address. Nothing is sent twice once an update was issued.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from rollway.errors import AdminError, RequestFailed, RollwayError
from rollway.fleet.admin import IN_DOUBT, AdminAPI, PauseMode, leaving, on_all, unproven
from rollway.fleet.canary import Agreement
from rollway.fleet.discovery import Worker
from rollway.fleet.membership import Membership
from rollway.fleet.report import RefitMode, WorkerRefit
from rollway.fleet.updates import Update
from rollway.versions import VersionBook, taint_of

Observer = Callable[[str, Worker], Awaitable[None]]
"""Told of each step before it is taken."""
Replace = Callable[[Worker], Awaitable[bool]]
"""Ends a worker that its supervisor will start anew; False when nobody supervises it."""
Supervised = Callable[[Worker], bool]

ANSWER_SECONDS = 15.0
"""How long a listed worker may fail to answer; a dead one is listed for about 10 s."""
ROUTING_SECONDS = 0.05
"""A router may still send what it chose before it heard of a change (10 to 30 ms measured). What
comes even later is sampled for nothing: `VersionBook.vouches` refuses the answer."""


@dataclass(slots=True)
class Mover:
    """What a refit works with, and the part of it that touches workers."""

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
    supervised: Supervised = lambda _: False
    """Whose supervisor labels it when it is ready: without a label it is not."""
    skip: frozenset[int] = frozenset()
    """Workers that `catch_up` leaves alone: an update to them has failed."""
    states: dict[int, WorkerRefit] = field(default_factory=dict)
    proving: set[int] = field(default_factory=set)
    labels: dict[int, int | None] = field(default_factory=dict)
    """What each worker declared when last asked: another process declares otherwise."""
    _lines: dict[int, AdminAPI] = field(default_factory=dict)
    """Connections held from the first pause to the end, so that all calls reach one process."""
    record: Callable[[int, str], None] | None = None
    """Keeps which weights a version names, for other processes."""
    claimed: bool = False
    """Whether the version is this refit's: before that nothing was touched."""
    _had: dict[int, int | None] = field(default_factory=dict)
    """Labels before the update."""
    _untainted: dict[int, float] = field(default_factory=dict)

    # --- a group of workers --------------------------------------------------------------------

    async def _move(self, group: Sequence[Worker], *, first: bool) -> float:
        """Pause a group and bring it to the version; returns how long it stood still."""
        current = self.book.current
        serving = set() if current is None else set(self.book.served_by(current))
        if (self.mode != "rolling" and first) or serving <= {w.instance_id for w in group}:
            self.book.close()  # nobody would be left to take requests
        began = time.monotonic()
        try:
            async with AsyncExitStack() as lines:
                paused = await self._pause(group, lines)
                moves = [asyncio.create_task(self._move_one(worker)) for worker in paused]
                try:
                    await asyncio.gather(*moves)
                except BaseException:
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
            label = self.labels.get(worker.instance_id)
            if label is not None and label >= 0:
                await self._mark(line, worker)
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
                await to_the_end(self._restore(group))
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
                label = self.labels.get(worker.instance_id)
                version = self._had.get(worker.instance_id, label)
                if version is not None and version < 0:
                    return  # in doubt since an earlier refit: never resumed
                await line.resume(worker)
                await self._taint(line, worker, [] if version is None else [taint_of(version)])
                if version is not None:
                    await line.declare_version(worker, version)
                    self.labels[worker.instance_id] = version

        for worker, result in zip(group, await on_all(group, restore), strict=True):
            state = self._state(worker)
            if not isinstance(result, BaseException):
                state.state = "restored"
            elif not await self._lost(worker):
                state.state, state.error = "in doubt", str(result)
                self.book.gone(worker.instance_id)

    async def _mark(self, line: AdminAPI, worker: Worker) -> None:
        """Label a worker so that everybody leaves it alone, should nobody live to finish this."""
        had = self._had[worker.instance_id] = self.labels.get(worker.instance_id)
        mark = IN_DOUBT if had is None else leaving(had)
        await line.declare_version(worker, mark)
        self.labels[worker.instance_id] = mark

    async def _same_process(self, line: AdminAPI, worker: Worker) -> None:
        """Raise unless what a line reaches is what was asked last."""
        told = await line.weight_version(worker)
        # The answer to a mark may have been lost.
        had = self._had.get(worker.instance_id)
        marked = had is not None and told == leaving(had)
        if told != self.labels.get(worker.instance_id) and not marked:
            raise _AnotherProcess(f"{worker} is gone: another process has its address.")

    async def _lost(self, worker: Worker) -> bool:
        """Whether a worker has died, or another process has its address; notes it if so."""
        gone = await is_dead(worker)
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
            if self.labels.get(worker.instance_id) is None:
                await self._mark(line, worker)
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
            await to_the_end(self._keep_out(worker))
            if not isinstance(error, RollwayError):
                raise
            if state.state == "in doubt":
                await self._replaced(worker)

    async def _verify(self, line: AdminAPI, worker: Worker) -> str:
        declared = await line.weight_version(worker)
        if declared != unproven(self.version):
            raise AdminError(
                f"{worker} says ok and has not taken the update (its label is {declared})."
            )
        if worker.instance_id in self.proving:
            return "parameters"  # compared by the worker itself while it loaded them
        if self.agreement is None or worker.instance_id < 0:
            return "word"
        # It has to generate to be heard; outside the routing nobody else hears it.
        await self._end_late(line, worker)
        self.book.enters(worker.instance_id, self.version)
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
        """End what a router sent late, take the new version's requests, generate. The label comes
        last: a worker that carries its version is in service."""
        await self._step("open", worker)
        await self._end_late(line, worker)
        await self._taint(line, worker, [taint_of(self.version)])
        await self._step("resume", worker)
        self.book.enters(worker.instance_id, self.version)
        await line.resume(worker)
        await line.declare_version(worker, self.version)
        self.labels[worker.instance_id] = self.version
        self.book.serves(worker.instance_id, self.version)
        if self.book.current is None or self.book.current < self.version:
            self.book.current = self.version
        self.book.open()

    async def _keep_out(self, worker: Worker) -> None:
        """Keep a worker in doubt out of service; it may have been heard, or have entered it."""
        if await is_dead(worker):
            self._state(worker).state = "gone"
            return
        with contextlib.suppress(RollwayError):  # it was out of the routing when this began
            async with self.admin.held() as line:
                told = await line.weight_version(worker)
                ours = self.version, self.labels.get(worker.instance_id)
                if told not in ours and (told is None or told >= 0):
                    self._state(worker).state = "gone"  # another process has its address
                    return
                await self._taint(line, worker, [])
                if told is None or told >= 0:
                    # It may have generated: nobody must take an answer for one from before.
                    mark = IN_DOUBT if told is None else unproven(self.version)
                    await line.declare_version(worker, mark)
                await line.pause(worker, "abort")

    async def _replaced(self, worker: Worker) -> bool:
        self.book.gone(worker.instance_id)
        done = self.replace is not None and await self.replace(worker)
        if done:
            self._state(worker).state = "replaced"
        return done

    async def _taint(self, line: AdminAPI, worker: Worker, taints: Sequence[str]) -> None:
        await route(line, self.book, worker, taints)
        if not taints:
            self._untainted[worker.instance_id] = time.monotonic()

    def _state(self, worker: Worker) -> WorkerRefit:
        return self.states.setdefault(worker.instance_id, WorkerRefit(worker.instance_id))

    async def _step(self, name: str, worker: Worker) -> None:
        if self.observer is not None:
            await self.observer(name, worker)


class _AnotherProcess(AdminError):
    """What answers at a worker's address is not that worker."""


async def route(line: AdminAPI, book: VersionBook, worker: Worker, taints: Sequence[str]) -> None:
    """Say which requests a worker takes; notes whether anybody heeds it."""
    heeded = line.taints
    if heeded:
        try:
            await line.set_taints(worker, taints)
        except AdminError as error:
            cause = error.__cause__
            if not (isinstance(cause, RequestFailed) and cause.status == 404):
                raise
            heeded = False  # an older Dynamo: stamps rest on what this process knows
    book.tainted = heeded


async def to_the_end(work: Coroutine[Any, Any, None]) -> None:
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


async def is_dead(worker: Worker, listed: Sequence[Worker] = ()) -> bool:
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
