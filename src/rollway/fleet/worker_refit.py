"""One worker in a refit: out of service, new weights, back into service.

    untouched ── preflight ► untouched, update staged ── discard ──► untouched
                                   │
                                   │ leave_service: label "leaving", no taints; pause
                                   ▼
                                paused ── restore ──► restored       (no update was issued)
                                   │
                                   │ apply: the update is sent, once
                                   ▼
                               updating ── verify ── enter_service ──► serving
                                   │
                                   │ any failure: keep_out
                                   ▼
                               in doubt ── replace ──► replaced      (if it has a supervisor)

    from any state ──► gone: the worker died, or another process has its address
    joining: its supervisor has not labelled it yet, so it serves nothing and waits

This is the refit by single calls; `worker_order` has the refit by one order. All calls between the
pause and the resume go over one pinned connection: they reach one process, never its successor at
the same address. Other processes read its state from its label: a worker is labelled with a version
only while it serves that version.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, cast

from rollway.errors import AdminError, RequestFailed, RollwayError
from rollway.fleet.admin import (
    IN_DOUBT,
    AdminAPI,
    PauseMode,
    leaving_label,
    unverified_label,
)
from rollway.fleet.canary import CanaryCheck
from rollway.fleet.discovery import Worker, is_dead
from rollway.fleet.report import WorkerReport
from rollway.fleet.updates import Update
from rollway.versions import FleetVersions, taint_of

Observer = Callable[[str, Worker], Awaitable[None]]
"""Called with the name of each step and its worker, before the step. The names, in order:
preflight, pause, update, flush, verify, open, resume."""
Replace = Callable[[Worker], Awaitable[bool]]
"""Stops a worker so that its supervisor restarts it; False if it has no supervisor."""

ROUTING_SECONDS = 0.05
"""A router may still send requests that it placed before it received new taints (10 to 30 ms
measured). `FleetVersions.attributes_to` rejects the answers to requests that arrive even later."""


@dataclass(slots=True)
class RefitPlan:
    """The version of one refit and the objects that its workers share."""

    admin: AdminAPI
    versions: FleetVersions
    update: Update
    version: int
    canaries: CanaryCheck | None = None
    replace: Replace | None = None
    observer: Observer | None = None


@dataclass(slots=True, eq=False)
class WorkerRefit:
    """The refit of one worker: its connection, its label, its state and its times."""

    plan: RefitPlan
    worker: Worker
    report: WorkerReport
    label: int | None = None
    """The label that this process last read or set. If the worker shows a different one, another
    process has its address."""
    verifies_itself: bool = False
    """Whether the worker compares its parameters with the update."""
    may_hold_update: bool = False
    """Whether the update may be staged in the worker, as a second model."""
    releases_kv: bool = False
    """Whether blocks that the worker holds for decode workers may be released: none reads them."""
    _label_before: int | None = None
    _connection: AdminAPI | None = None
    _untainted_at: float = 0.0
    _lap_began: float = 0.0
    _current_step: str = ""

    @property
    def instance_id(self) -> int:
        return self.worker.instance_id

    async def preflight(self) -> None:
        """Have the worker check and stage the update, and read its label. It stays in service."""
        plan = self.plan
        self.lap()
        await self.step("preflight")
        self.may_hold_update = True  # before the call, which may take effect even if cancelled
        self.verifies_itself = await plan.update.preflight(plan.admin, self.worker)
        self.label = await plan.admin.weight_version(self.worker)
        if self.label is not None and self.label >= 0:
            plan.versions.mark_serving(self.instance_id, self.label)
        else:
            plan.versions.forget(self.instance_id)
        # A worker in doubt is paused, so it could not answer a canary.
        generates = self.label is None or self.label >= 0
        if self._needs_canary and generates and plan.canaries is not None:
            await plan.canaries.record_before(self.worker)
        self.report.preflight_seconds = self.lap()

    async def discard(self) -> None:
        """Free the staged update, if it was not applied."""
        if self.may_hold_update and self.report.state not in ("gone", "replaced"):
            await self.plan.update.discard(self.plan.admin, self.worker)
            self.may_hold_update = False

    def note_if_current(self) -> bool:
        """Return whether the worker already serves the version; if so, record that."""
        is_current = self.label == self.plan.version  # a version names one set of weights
        if is_current:
            self.report.state, self.report.version = "serving", self.plan.version
            self.report.proof = "earlier refit"
        return is_current

    async def ensure_service(self) -> None:
        """Route to a worker that has the weights, and resume it. An interrupted refit may not have
        done so."""
        async with self.plan.admin.pinned() as connection:
            await self.check_process(connection)
            await self._set_taints(connection, [taint_of(self.plan.version)])
            await connection.resume(self.worker)

    @property
    def takes_order(self) -> bool:
        """Whether one order moves this worker. A worker in doubt is paused and stays so if the
        refit fails, which an order would not know."""
        is_known = self.label is None or self.label >= 0
        is_staged = self.verifies_itself and self.plan.update.is_staged_in(self.worker)
        return is_known and is_staged and self.plan.admin.takes_refits(self.worker)

    def note_refusal(self, error: BaseException) -> None:
        """Record that the worker serves what it served before."""
        self.report.state, self.report.error = "restored", str(error)
        if self.label is not None:
            self.plan.versions.mark_serving(self.instance_id, self.label)

    def note_service(self, proof: str) -> None:
        """Record that the worker serves the version."""
        plan, versions = self.plan, self.plan.versions
        self.label, self.report.proof = plan.version, proof
        self.report.state, self.report.version = "serving", plan.version
        versions.tainted = plan.admin.taints
        versions.mark_entered(self.instance_id, plan.version)
        versions.mark_serving(self.instance_id, plan.version)
        if not versions.is_served(plan.version):
            return  # prefill and decode apart: the other pool has no worker on the version yet
        if versions.current is None or versions.current < plan.version:
            versions.current = plan.version
        versions.open()

    async def leave_service(self, connections: AsyncExitStack) -> None:
        """Connect to the worker, label it as leaving and take it out of the routing."""
        self.lap()
        await self.step("pause")
        connection = await connections.enter_async_context(self.plan.admin.pinned())
        await self.check_process(connection)
        self._connection = cast(AdminAPI, _TimedCalls(connection, self._note_call))
        if self.label is not None and self.label >= 0:
            await self._mark_leaving()
        await self._set_taints(connection, [])

    async def pause(self, mode: PauseMode) -> None:
        began = time.monotonic()
        if mode == "wait" and self.worker.role:
            # vLLM cannot clear the cache while a request waits for KV of another worker. Such
            # requests have not begun: abort them once those that run have ended.
            await self._pinned.pause(self.worker, "wait", clear_cache=False)
            await self._pinned.pause(self.worker, "abort")
        else:
            await self._pinned.pause(self.worker, mode)
        if mode == "wait":
            self.report.waited_seconds = time.monotonic() - began
        self.report.state = "paused"
        self.report.pause_seconds = self.lap()

    async def restore(self) -> None:
        """Put the worker back into service as it was. No update was issued to it."""
        # A new connection: the failure may have broken the pinned one.
        async with self.plan.admin.pinned() as connection:
            await self.check_process(connection)
            version = self.label if self._label_before is None else self._label_before
            # A worker in doubt since an earlier refit is never resumed.
            if version is None or version >= 0:
                await connection.resume(self.worker)
                taints = [] if version is None else [taint_of(version)]
                await self._set_taints(connection, taints)
                if version is not None:
                    await self._declare(connection, version)
        self.report.state = "restored"

    async def install(self) -> None:
        """Apply the update, verify it and enter service. After a failure stay out of service: no
        sample is better than a wrong one."""
        try:
            await self.apply()
            await self.verify()
            await self.enter_service()
        except BaseException as error:
            self.mark_in_doubt(error)
            await run_to_the_end(self.keep_out())
            if not isinstance(error, RollwayError):
                raise
            if self.report.state == "in doubt":
                await self.replace()

    async def apply(self) -> None:
        """Send the update, once, and clear the cache."""
        self.lap()
        self.report.state = "updating"
        await self.step("update")
        self.plan.versions.mark_issued(self.instance_id)
        if self.label is None:
            await self._mark_leaving()
        label = unverified_label(self.plan.version)
        await self.plan.update.apply(self._pinned, self.worker, label)
        self.label, self.may_hold_update = label, False
        await self.step("flush")
        await self._pinned.flush_cache(self.worker)

    async def verify(self) -> None:
        """Raise unless the worker holds the new weights, as far as that can be checked."""
        await self.step("verify")
        label = await self._pinned.weight_version(self.worker)
        if label != unverified_label(self.plan.version):
            raise AdminError(
                f"{self.worker} reported success and has not applied the update (its label is "
                f"{label})."
            )
        if self.verifies_itself:
            self.report.proof = "parameters"  # compared while it loaded them
        elif self.plan.canaries is None or not self._needs_canary:
            self.report.proof = "declared"
        else:
            await self._verify_by_canary(self.plan.canaries)
            self.report.proof = "canary"
        self.report.update_seconds = self.lap()

    @property
    def _needs_canary(self) -> bool:
        """Whether the worker can show its weights only by an answer. Requests cannot be pinned to a
        negative id, and a worker of one role does not answer alone."""
        is_alone = self.instance_id >= 0 and not self.worker.role
        return is_alone and not self.verifies_itself

    async def _verify_by_canary(self, canaries: CanaryCheck) -> None:
        # The worker must generate to answer. It is outside the routing, but a stalled router may
        # still deliver a request: the answer to it must not count for the old version.
        await self._abort_late_requests()
        self.plan.versions.mark_entered(self.instance_id, self.plan.version)
        await self._pinned.resume(self.worker)
        try:
            await canaries.verify(self.worker)
        finally:
            await self._pinned.pause(self.worker, "abort")

    async def enter_service(self) -> None:
        """Accept requests for the new version and generate."""
        plan, versions = self.plan, self.plan.versions
        await self.step("open")
        # Before the new taint: afterwards the queue holds requests for the new version too.
        await self._abort_late_requests()
        await self._set_taints(self._pinned, [taint_of(plan.version)])
        await self.step("resume")
        versions.mark_entered(self.instance_id, plan.version)
        await self._pinned.resume(self.worker)
        # Last: a worker that is labelled with its version is in service.
        await self._declare(self._pinned, plan.version)
        self.report.resume_seconds = self.lap()
        self.note_service(self.report.proof)

    async def keep_out(self) -> None:
        """Take a worker in doubt out of service, whatever state it is in, and keep it out."""
        if await is_dead(self.worker):
            self.report.state = "gone"
            return
        # This may fail without harm: the worker left the routing before the update.
        with contextlib.suppress(RollwayError):
            async with self.plan.admin.pinned() as connection:
                label = await connection.weight_version(self.worker)
                has_version = label is None or label >= 0
                if has_version and label not in (self.plan.version, self.label):
                    self.report.state = "gone"  # another process has its address
                    return
                await self._set_taints(connection, [])
                if has_version:
                    # Not `leaving_label`, which promises that nothing was generated since.
                    doubt = IN_DOUBT if label is None else unverified_label(self.plan.version)
                    await connection.declare_version(self.worker, doubt)
                await connection.pause(self.worker, "abort")

    async def replace(self) -> bool:
        """Stop the worker so that its supervisor restarts it; return False if it has none."""
        self.plan.versions.forget(self.instance_id)
        is_replaced = self.plan.replace is not None and await self.plan.replace(self.worker)
        if is_replaced:
            self.report.state = "replaced"
        return is_replaced

    async def note_if_lost(self) -> bool:
        """Return whether the worker died or another process has its address; if so, record that."""
        is_lost = await is_dead(self.worker)
        if not is_lost:
            try:
                async with self.plan.admin.pinned() as connection:
                    await self.check_process(connection)
            except _AnotherProcess:
                is_lost = True
            except AdminError:
                pass  # something listens there but did not answer: it is not lost
        if is_lost:
            self.report.state = "gone"
            self.plan.versions.forget(self.instance_id)
        return is_lost

    def mark_in_doubt(self, error: BaseException) -> None:
        self.report.state, self.report.error = "in doubt", str(error) or type(error).__name__

    @property
    def _pinned(self) -> AdminAPI:
        assert self._connection is not None
        return self._connection

    async def _mark_leaving(self) -> None:
        """Set a negative label: if this process dies now, others see that no version is served."""
        self._label_before = self.label
        label = IN_DOUBT if self.label is None else leaving_label(self.label)
        await self._declare(self._pinned, label)

    async def _declare(self, connection: AdminAPI, label: int) -> None:
        await connection.declare_version(self.worker, label)
        self.label = label

    async def check_process(self, connection: AdminAPI) -> None:
        """Raise unless the connection reaches the process that was asked before."""
        label = await connection.weight_version(self.worker)
        before = self._label_before
        # The call that set the label may have worked although its answer was lost.
        is_leaving = before is not None and label == leaving_label(before)
        if label != self.label and not is_leaving:
            raise _AnotherProcess(f"{self.worker} is gone: another process has its address.")

    async def _abort_late_requests(self) -> None:
        """Abort requests that a router sent before it knew that the worker left."""
        since = time.monotonic() - self._untainted_at
        if since < ROUTING_SECONDS:
            await asyncio.sleep(ROUTING_SECONDS - since)
        await self._pinned.pause(self.worker, "abort")

    async def _set_taints(self, connection: AdminAPI, taints: Sequence[str]) -> None:
        await set_taints(connection, self.plan.versions, self.worker, taints)
        if not taints:
            self._untainted_at = time.monotonic()

    def _note_call(self, name: str, seconds: float) -> None:
        steps, name = self.report.steps, f"{self._current_step}.{name}"
        steps[name] = steps.get(name, 0.0) + seconds

    async def step(self, name: str) -> None:
        self._current_step = name
        if self.plan.observer is not None:
            await self.plan.observer(name, self.worker)

    def lap(self) -> float:
        """Return the seconds since the last lap, and begin the next one. A step that begins
        after a wait for other workers calls this first, so that the wait is not counted."""
        now = time.monotonic()
        seconds, self._lap_began = now - self._lap_began, now
        return seconds


class _AnotherProcess(AdminError):
    """Another process answers at a worker's address."""


class _TimedCalls:
    """An `AdminAPI` that adds the seconds of its calls to a report."""

    def __init__(self, admin: AdminAPI, note: Callable[[str, float], None]) -> None:
        self._admin = admin
        self._note = note

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._admin, name)
        if not asyncio.iscoroutinefunction(call):
            return call

        async def run(*args: Any, **kwargs: Any) -> Any:
            began = time.monotonic()
            try:
                return await call(*args, **kwargs)
            finally:
                self._note(name, time.monotonic() - began)

        return run


async def set_taints(
    admin: AdminAPI, versions: FleetVersions, worker: Worker, taints: Sequence[str]
) -> None:
    """Set a worker's taints, and record whether a router respects them."""
    is_respected = admin.taints
    if is_respected:
        try:
            await admin.set_taints(worker, taints)
        except AdminError as error:
            cause = error.__cause__
            if not (isinstance(cause, RequestFailed) and cause.status == 404):
                raise
            is_respected = False  # an older Dynamo: only this process's own record counts
    versions.tainted = is_respected


async def run_to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Run to the end even if cancelled, and raise the cancellation afterwards: until the work is
    done, the caller's lock must not be released."""
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
