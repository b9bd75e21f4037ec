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
    asleep: it slept before (`sleep`) and sleeps again, because no update was issued

A worker that sleeps gets the memory of its weights back before it stages the update, and that of
its KV cache after the update: until then the memory may hold the staged weights.

This is the refit by single calls; `worker_order` has the refit by one order. `service` has the
worker's label and taints, by which other processes know its state.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import InitVar, dataclass, field

from rollway.errors import AdminError, RollwayError
from rollway.fleet.admin import (
    IN_DOUBT,
    AdminAPI,
    Asleep,
    PauseMode,
    run_to_the_end,
    unverified_label,
    version_left,
)
from rollway.fleet.canary import CanaryCheck
from rollway.fleet.report import WorkerReport
from rollway.fleet.service import Service
from rollway.fleet.updates import Preflight, Update
from rollway.fleet.workers import Worker, is_dead
from rollway.versions import FleetVersions, taint_of

Observer = Callable[[str, Worker], Awaitable[None]]
"""Called with the name of each step and its worker, before the step. The names, in order:
preflight, pause, update, flush, verify, open, resume."""
Replace = Callable[[Worker], Awaitable[bool]]
"""Stops a worker so that its supervisor restarts it; False if it has no supervisor."""


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
    """The refit of one worker: its service, its state and its times."""

    plan: RefitPlan
    listed: InitVar[Worker]
    report: WorkerReport
    service: Service = field(init=False)
    verifies_itself: bool = False
    """Whether the worker compares its parameters with the update."""
    may_equal: bool = False
    """Whether the update may be what all workers have already."""
    is_supervised: bool = False
    """Whether a supervisor labels the worker once it is ready."""
    may_hold_update: bool = False
    """Whether the update may be staged in the worker."""
    sleep_level: int = 0
    """The level at which the worker slept when the refit began; 0 if it was awake."""
    was_out: bool = False
    """Whether the worker was out of service when the refit began."""
    releases_kv: bool = False
    """Whether blocks that the worker holds for decode workers may be released: none reads them."""
    _lap_began: float = 0.0

    def __post_init__(self, listed: Worker) -> None:
        self.service = Service(self.plan.admin, self.plan.versions, listed)

    @property
    def worker(self) -> Worker:
        return self.service.worker

    @property
    def instance_id(self) -> int:
        return self.worker.instance_id

    @property
    def admin(self) -> AdminAPI:
        return self.plan.admin

    async def preflight(self) -> None:
        """Have the worker check and stage the update, and read its label. It stays in service. A
        supervised worker without a label is still starting: it gets no requests, and joins later.
        """
        plan, admin = self.plan, self.admin
        self.lap()
        await self.step("preflight")
        # A worker that takes orders looks at its label itself, and says so if it sleeps.
        if not admin.takes_refits(self.worker):
            self.report.calls += 1
            label = await admin.weight_version(self.worker)
            if label is None and self.is_supervised:
                self.report.state = "joining"
                return
        self.may_hold_update = True  # before the call, which may take effect even if cancelled
        await self._wake_weights()
        try:
            checked = await self._check_update()
        except Asleep:  # another process has put it to sleep
            await self._wake_weights()
            checked = await self._check_update()
        if checked.is_starting:
            self.may_hold_update, self.report.state = False, "joining"
            return
        self.verifies_itself, self.report.state = checked.verifies_itself, "untouched"
        self.may_equal = checked.may_equal
        if checked.reply is not None:
            self.service.label = checked.reply.label
        else:
            self.report.calls += 1
            self.service.label = await admin.weight_version(self.worker)
        if self.service.label is not None and self.service.label >= 0:
            plan.versions.mark_serving(self.instance_id, self.service.label)
        else:
            plan.versions.forget(self.instance_id)
            if (left := version_left(self.service.label)) is not None:
                plan.versions.note_served(left)  # its refit must not bring an older one
        # A worker in doubt is paused, so it could not answer a canary.
        self.was_out = self.service.label is not None and self.service.label < 0
        if self._needs_canary and not self.was_out and plan.canaries is not None:
            await plan.canaries.record_before(self.worker)
        self.report.preflight_seconds = self.lap("preflight")

    async def _wake_weights(self) -> None:
        """Give a worker that sleeps the memory of its weights back; the rest of it sleeps on."""
        if self.admin.sleep_level(self.worker):
            await self.admin.weight_version(self.worker)  # another process may have woken it
        self.sleep_level = self.admin.sleep_level(self.worker)
        if self.sleep_level:
            reply = await self.admin.wake(self.worker, ["weights"])
            self.report.memory["asleep"] = reply["before"]
            self.report.steps["wake.weights"] = reply["seconds"]

    async def _check_update(self) -> Preflight:
        self.report.calls += 1
        update = self.plan.update
        return await update.preflight(self.admin, self.worker, needs_label=self.is_supervised)

    async def discard(self) -> None:
        """Free the staged update, if it was not applied; a worker that slept sleeps again."""
        if self.may_hold_update and self.report.state not in ("gone", "replaced"):
            try:
                await self.plan.update.discard(self.admin, self.worker)
                self.may_hold_update = False
            finally:
                if self.sleep_level:
                    await self._sleep_again()

    async def _sleep_again(self) -> None:
        """Give the memory of the weights back to whom the worker left it."""
        label = await self.admin.weight_version(self.worker)
        if label is not None and label < 0:
            await self.admin.sleep(self.worker, self.sleep_level, "abort", label)
            self.plan.versions.mark_asleep(self.instance_id)
            if self.report.state in ("untouched", "paused", "restored"):
                self.report.state = "asleep"

    def note_if_current(self) -> bool:
        """Return whether the worker already serves the version; if so, record that."""
        is_current = self.service.label == self.plan.version  # a version names one set of weights
        if is_current:
            self.report.state, self.report.version = "serving", self.plan.version
            self.report.proof = "earlier refit"
        return is_current

    async def ensure_service(self) -> None:
        """Route to a worker that has the weights, and resume it. An interrupted refit may not have
        done so."""
        await self.service.ensure(self.plan.version)

    @property
    def takes_order(self) -> bool:
        """Whether one order moves this worker. A worker in doubt is paused and stays so if the
        refit fails, which an order would not know."""
        is_known = self.service.label is None or self.service.label >= 0
        is_staged = self.verifies_itself and self.plan.update.is_staged_in(self.worker)
        is_awake = not self.sleep_level
        return is_awake and is_known and is_staged and self.plan.admin.takes_refits(self.worker)

    def note_refusal(self, error: BaseException) -> None:
        """Record that the worker serves what it served before."""
        self.report.state, self.report.error = "restored", str(error)
        if self.service.label is not None:
            self.plan.versions.mark_serving(self.instance_id, self.service.label)

    def note_service(self, proof: str) -> None:
        """Record that the worker serves the version."""
        plan, versions = self.plan, self.plan.versions
        self.service.label, self.report.proof = plan.version, proof
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
        self.lap()
        await self.step("pause")
        await self.service.leave(connections)
        self.lap("leave")

    async def pause(self, mode: PauseMode) -> None:
        began = time.monotonic()
        if self.sleep_level or self.was_out:
            mode = "abort"  # nothing runs in it, and requests that wait there would never end
        if mode == "wait" and self.worker.role:
            # vLLM cannot clear the cache while a request waits for KV of another worker. Such
            # requests have not begun: abort them once those that run have ended.
            await self.service.pinned.pause(self.worker, "wait", clear_cache=False)
            await self.service.pinned.pause(self.worker, "abort")
        else:
            await self.service.pinned.pause(self.worker, mode)
        if mode == "wait":
            self.report.waited_seconds = time.monotonic() - began
        self.report.state = "paused"
        self.lap("pause")
        self.report.pause_seconds = self._sum_steps("leave", "pause")

    async def restore(self) -> None:
        """Put the worker back into service as it was. No update was issued to it."""
        await self.service.restore()
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
            # A worker whose cache does not fit beside the trainer would not fit after a restart.
            if self.report.state == "in doubt" and not isinstance(error, _StillAsleep):
                await self.replace()

    async def apply(self) -> None:
        """Send the update, once, and clear the cache."""
        self.lap()
        self.report.state = "updating"
        await self.step("update")
        self.plan.versions.mark_issued(self.instance_id)
        if self.service.label is None:
            await self.service.mark_leaving()
        if self.sleep_level:
            # From here on a wake must not restore the version that it slept with.
            await self.service.declare(self.service.pinned, IN_DOUBT)
        label = unverified_label(self.plan.version)
        await self.plan.update.apply(self.service.pinned, self.worker, label)
        self.service.label, self.may_hold_update = label, False
        self.lap("update")
        await self.step("flush")
        await self.service.pinned.flush_cache(self.worker)
        if self.sleep_level:
            await self._wake_cache()
        self.lap("flush")

    async def _wake_cache(self) -> None:
        """Take back the rest of the memory. The engine then generates, with the new weights."""
        self.plan.versions.mark_entered(self.instance_id, self.plan.version)
        try:
            reply = await self.service.pinned.wake(self.worker)
        except AdminError as error:
            raise _StillAsleep(error.message, error.hint) from error
        self.report.memory["after"] = reply["ranks"]
        self.report.steps["wake.kv_cache"] = reply["seconds"]

    async def verify(self) -> None:
        """Raise unless the worker holds the new weights, as far as that can be checked."""
        await self.step("verify")
        label = await self.service.pinned.weight_version(self.worker)
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
            is_proven = await self._verify_by_canary(self.plan.canaries)
            self.report.proof = "canary" if is_proven else "declared"
        self.lap("verify")
        self.report.update_seconds = self._sum_steps("update", "flush", "verify")

    @property
    def _needs_canary(self) -> bool:
        """Whether the worker can show its weights only by an answer. Requests cannot be pinned to a
        negative id, and a worker of one role does not answer alone."""
        is_alone = self.instance_id >= 0 and not self.worker.role
        return is_alone and not self.verifies_itself

    async def _verify_by_canary(self, canaries: CanaryCheck) -> bool:
        # The worker must generate to answer. It is outside the routing, but a stalled router may
        # still deliver a request: the answer to it must not count for the old version.
        await self.service.abort_late_requests()
        self.plan.versions.mark_entered(self.instance_id, self.plan.version)
        await self.service.pinned.resume(self.worker)
        try:
            return await canaries.verify(self.worker, may_equal=self.may_equal)
        finally:
            await self.service.pinned.pause(self.worker, "abort")

    async def enter_service(self) -> None:
        """Accept requests for the new version and generate."""
        plan, versions = self.plan, self.plan.versions
        await self.step("open")
        # Before the new taint: afterwards the queue holds requests for the new version too.
        await self.service.abort_late_requests()
        await self.service.set_taints(self.service.pinned, [taint_of(plan.version)])
        self.lap("open")
        await self.step("resume")
        versions.mark_entered(self.instance_id, plan.version)
        await self.service.pinned.resume(self.worker)
        # Last: a worker that is labelled with its version is in service.
        await self.service.declare(self.service.pinned, plan.version)
        self.lap("resume")
        self.report.resume_seconds = self._sum_steps("open", "resume")
        self.note_service(self.report.proof)

    async def keep_out(self) -> None:
        """Take a worker in doubt out of service, whatever state it is in, and keep it out."""
        if await is_dead(self.worker):
            self.report.state = "gone"
            return
        # This may fail without harm: the worker left the routing before the update. It fails at its
        # first call that fails, with the worker possibly not paused, so it is tried twice.
        for _ in range(2):
            with contextlib.suppress(RollwayError):
                if not await self.service.deny(self.plan.version):
                    self.report.state = "gone"
                return

    async def replace(self) -> bool:
        """Stop the worker so that its supervisor restarts it; return False if it has none."""
        self.plan.versions.forget(self.instance_id)
        is_replaced = self.plan.replace is not None and await self.plan.replace(self.worker)
        if is_replaced:
            self.report.state = "replaced"
        return is_replaced

    async def note_if_lost(self) -> bool:
        """Return whether the worker died or another process has its address; if so, record that."""
        is_lost = await self.service.is_lost()
        if is_lost:
            self.mark_gone()
        return is_lost

    def mark_gone(self) -> None:
        self.report.state = "gone"
        self.plan.versions.forget(self.instance_id)

    def mark_in_doubt(self, error: BaseException) -> None:
        self.report.state, self.report.error = "in doubt", str(error) or type(error).__name__

    async def step(self, name: str) -> None:
        if self.plan.observer is not None:
            await self.plan.observer(name, self.worker)

    def lap(self, step: str = "") -> float:
        """Return the seconds since the last lap, report them as those of a step, and begin the next
        lap. A step that begins after a wait for other workers calls this first, so that the wait
        is not counted."""
        now = time.monotonic()
        seconds, self._lap_began = now - self._lap_began, now
        if step:
            self.report.steps[step] = seconds
        return seconds

    def _sum_steps(self, *names: str) -> float:
        return sum(self.report.steps[name] for name in names)


class _StillAsleep(AdminError):
    """A worker has new weights, but not the memory of its KV cache."""
