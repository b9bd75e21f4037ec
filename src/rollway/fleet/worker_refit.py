"""One worker in a refit. A managed worker is moved by two orders, and does the rest by itself:

    untouched ── preflight ──► untouched, update staged ── discard ──► untouched, or asleep again
                    │                  │
                    │                  │ one order, sent once (`rollway_refit`, drawn in
                    │                  ▼  rollway/engine/core.py)
                    │               updating ── served ───────► serving
                    │                  │     ── refused ──────► restored   (nothing was changed)
                    │                  │     ── other process ► gone
                    │                  │ no answer: its label tells which of them; otherwise
                    │                  ▼
                    │               in doubt ── replace ──► replaced       (if it has a supervisor)
                    ▼
    joining: its supervisor has not labelled it yet, so it serves nothing and waits
    gone: from any state; the worker died, or another process has its address

An order names the process that staged and the label that it had then; any other worker refuses it.
An order that has begun ends, also if this process is gone. A cancelled refit ends an order that
still waits for running requests. A worker that fails stays paused and has no version.

A foreign worker takes no orders. `foreign` moves it, through the same states and `paused`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollway.errors import AdminError, RollwayError
from rollway.fleet import foreign
from rollway.fleet.admin import (
    IN_DOUBT,
    AnotherProcess,
    NoSuchMethod,
    PauseMode,
    RefitRefused,
    StillAsleep,
    leaving_label,
    run_to_the_end,
    version_left,
)
from rollway.fleet.dynamo_admin import DynamoAdmin
from rollway.fleet.report import WorkerReport
from rollway.fleet.workers import Worker, is_dead
from rollway.versions import FleetVersions, taint_of

if TYPE_CHECKING:
    from rollway.fleet.refit import Refit

SETTLE_SECONDS = 10.0
"""How long a worker whose answer to an order was lost may take to show its new label."""
WATCH_SECONDS = 10.0
"""How often a worker is asked for a sign of life while its order runs. An order may take many
minutes, as long as running requests take; a worker that hangs is noticed sooner."""


@dataclass(slots=True, eq=False)
class WorkerRefit:
    """The refit of one worker: its state and its times."""

    refit: Refit
    worker: Worker
    report: WorkerReport
    is_supervised: bool = False
    """Whether a supervisor labels the worker once it is ready."""
    is_managed: bool = True
    """Whether the worker takes orders, as its preflight has shown."""
    label: int | None = None
    """The label that the worker had in its preflight."""
    sleep_level: int = 0
    """The level at which the worker slept then; 0 if it was awake."""
    may_hold_update: bool = False
    """Whether the update may be staged in the worker."""
    releases_kv: bool = False
    """Whether blocks that the worker holds for decode workers may be released: none reads them."""
    _lap_began: float = 0.0

    @property
    def instance_id(self) -> int:
        return self.worker.instance_id

    @property
    def admin(self) -> DynamoAdmin:
        return self.refit.admin

    @property
    def versions(self) -> FleetVersions:
        return self.refit.versions

    @property
    def is_out(self) -> bool:
        """Whether the worker was out of service when the refit began: asleep, or in doubt."""
        return self.label is not None and self.label < 0

    async def preflight(self) -> None:
        """Have the worker check and stage the update, and learn its label. It stays in service. A
        supervised worker without a label is still starting: it gets no requests, and joins later.
        """
        self.lap()
        await self.step("preflight")
        self.report.calls += 1
        self.may_hold_update = True  # before the call, which may take effect even if cancelled
        try:
            reply = await self.refit.update.stage(
                self.admin, self.worker, needs_label=self.is_supervised
            )
        except NoSuchMethod as why:
            self.is_managed = self.may_hold_update = False
            self.label = await foreign.check(self, why)
            is_starting = self.label is None and self.is_supervised
        else:
            self.label, self.sleep_level = reply.label, reply.sleep_level
            self.may_hold_update = bool(reply.ranks)
            self.versions.note_facts(self.instance_id, is_foreign=False)
            is_starting = not reply.ranks
        self.report.state = "joining" if is_starting else "untouched"
        if is_starting:
            return
        if self.label is not None and self.label >= 0:
            self.versions.mark_serving(self.instance_id, self.label)
        else:
            self.versions.forget(self.instance_id)
            if (left := version_left(self.label)) is not None:
                self.versions.note_served(left)  # its refit must not bring an older one
        self.report.preflight_seconds = self.lap("preflight")

    async def discard(self) -> None:
        """Free the staged update, if it was not applied; a worker that slept sleeps again."""
        if not self.may_hold_update or self.report.state in ("gone", "replaced"):
            return
        with contextlib.suppress(NoSuchMethod):  # its answer, that it is a foreign one, was lost
            await self.admin.discard(self.worker, self.refit.update.identity)
        self.may_hold_update = False
        if self.sleep_level and self.report.state in ("untouched", "restored"):
            self.report.state = "asleep"
            self.versions.mark_asleep(self.instance_id)

    def note_if_current(self) -> bool:
        """Return whether the worker already serves the version; if so, record that."""
        is_current = self.label == self.refit.version  # a version names one set of weights
        if is_current:
            self.report.state, self.report.version = "serving", self.refit.version
            self.report.proof = "earlier refit"
        return is_current

    async def move(self, mode: PauseMode) -> None:
        """Have a managed worker do everything by itself. Raise nothing but a cancellation."""
        self.lap()
        await self.step("pause")
        try:
            await self.refit.update.check_unchanged()
        except AdminError as error:
            return self._note_refusal(error)
        try:
            reply = await self._send_order(mode)
        except AnotherProcess:
            self.mark_gone()
        except RefitRefused as error:
            if not await self.note_if_dead():
                self._note_refusal(error)
        except BaseException as error:
            self.mark_in_doubt(error)
            await run_to_the_end(self._settle(error))
            if not isinstance(error, RollwayError):
                raise
        else:
            self._note_times(reply)
            self.note_service("parameters")

    async def _send_order(self, mode: PauseMode) -> Mapping[str, Any]:
        label, version = self.label, self.refit.version
        self.report.state = "updating"
        self.versions.mark_issued(self.instance_id)
        await self.step("update")
        leaving = label if label is not None and label < 0 else leaving_label(label or 0)
        # A wake must not take half-written weights for those from before the sleep.
        is_unknown = label is None or self.sleep_level
        order = {
            "identity": self.refit.update.identity,
            # Nothing runs in a worker that is out of service, and what waits there never ends.
            "mode": "abort" if self.is_out else mode,
            "label": label,
            "leaving": IN_DOUBT if is_unknown else leaving,
            "version": version,
            "taints": [taint_of(version)],
            "taints_before": [] if label is None or self.is_out else [taint_of(label)],
            "release": self.releases_kv,
        }
        self.report.calls += 1
        running = asyncio.create_task(self.admin.refit(self.worker, order))
        try:
            # The worker takes these steps by itself; observers hear of them while it does.
            for step in ("flush", "verify", "open", "resume"):
                await self.step(step)
            reply = await self._wait_for(running)
        except asyncio.CancelledError:
            await run_to_the_end(self._cancel(running))
            raise
        self.may_hold_update = False
        try:
            # A worker that lacks memory to stage the weights has read them only now.
            await self.refit.update.check_unchanged()
        except AdminError as error:
            raise _WrongWeights(error.message) from None
        return reply

    async def _wait_for(self, running: asyncio.Task[dict[str, Any]]) -> dict[str, Any]:
        """Wait for the answer to the order; raise if the worker shows no sign of life."""
        while not (await asyncio.wait({running}, timeout=WATCH_SECONDS))[0]:
            try:
                await self.admin.read(self.worker)
            except AdminError as error:
                is_silent = error.__cause__ is not None
                if is_silent and not running.done():
                    running.cancel()  # the order itself goes on, if the worker ever has it
                    raise
        return running.result()

    async def _cancel(self, running: asyncio.Task[dict[str, Any]]) -> None:
        """Stop an order that waits for running requests, and wait until it has ended."""
        with contextlib.suppress(RollwayError):
            await self.admin.cancel_refit(self.worker)
        with contextlib.suppress(RollwayError, TimeoutError):
            await asyncio.wait_for(running, SETTLE_SECONDS)

    async def _settle(self, error: BaseException) -> None:
        """Find out what became of an order that failed or whose answer was lost, by the worker's
        label; otherwise replace the worker."""
        deadline = time.monotonic() + SETTLE_SECONDS
        # A worker that answered with an error has stayed paused.
        is_lost = not isinstance(error, AdminError) or error.__cause__ is not None
        while is_lost and time.monotonic() < deadline and not await is_dead(self.worker):
            label: int | None = IN_DOUBT
            with contextlib.suppress(RollwayError):
                label = (await self.admin.read(self.worker)).label
            if label == self.refit.version:
                self.may_hold_update, self.report.error = False, None
                self.note_service("parameters")
                return
            if label == self.label and not self.is_out:
                self._note_refusal(error)
                return
            await asyncio.sleep(0.1)
        if not await self.note_if_dead():
            if isinstance(error, _WrongWeights):
                await self.keep_out()
            # A worker whose cache does not fit beside the trainer would not fit after a restart.
            if not isinstance(error, StillAsleep):
                await self.replace()

    async def keep_out(self) -> None:
        """Take a worker in doubt out of service, whatever state it is in."""
        if await self.note_if_dead():
            return
        # The worker may have left the routing before. It is tried twice: the first call that fails
        # ends it, and the worker may not be paused by then.
        for _ in range(2):
            with contextlib.suppress(RollwayError):
                async with self.admin.pin() as connection:
                    label = (await connection.read(self.worker)).label
                    if label is None or label >= 0:
                        if label not in (self.label, self.refit.version):
                            self.mark_gone()  # another process has its address
                            return
                        await connection.set_taints(self.worker, [])
                        # Not `leaving_label`, which promises that nothing was generated since.
                        await connection.declare_version(self.worker, IN_DOUBT)
                    await connection.pause(self.worker, "abort")
                return

    async def replace(self) -> bool:
        """Stop the worker so that its supervisor restarts it; return False if it has none."""
        self.versions.forget(self.instance_id)
        replace = self.refit.replace
        is_replaced = replace is not None and await replace(self.worker)
        if is_replaced:
            self.report.state = "replaced"
        return is_replaced

    async def note_if_dead(self) -> bool:
        """Return whether the worker died; if so, record that."""
        has_died = await is_dead(self.worker)
        if has_died:
            self.mark_gone()
        return has_died

    def mark_gone(self) -> None:
        self.report.state = "gone"
        self.versions.forget(self.instance_id)

    def mark_in_doubt(self, error: BaseException) -> None:
        self.report.state, self.report.error = "in doubt", str(error) or type(error).__name__

    def _note_refusal(self, error: BaseException) -> None:
        """Record that the worker serves what it served before."""
        self.report.state, self.report.error = "restored", str(error)
        if self.label is not None and self.label >= 0:
            self.versions.mark_serving(self.instance_id, self.label)

    def note_service(self, proof: str) -> None:
        """Record that the worker serves the version."""
        version, versions = self.refit.version, self.versions
        self.report.state, self.report.version, self.report.proof = "serving", version, proof
        versions.tainted = self.admin.taints
        versions.mark_serving(self.instance_id, version)
        if not versions.is_served(version):
            return  # prefill and decode apart: the other pool has no worker on the version yet
        versions.note_served(version)
        versions.open()

    def _note_times(self, reply: Mapping[str, Any]) -> None:
        """Record the seconds that the worker and its engine report."""
        report, engine, own = self.report, reply["report"], reply["seconds"]
        swap, memory = engine["swap"], dict(reply.get("memory") or {})
        report.paused_seconds = engine["paused_seconds"]
        report.waited_seconds = engine["waited_seconds"]
        report.pause_seconds = own["leave"] + engine["stop_seconds"]
        report.update_seconds = engine["swap_seconds"]
        report.resume_seconds = own["enter"]
        report.strategy = ": ".join(filter(None, (swap.get("strategy"), swap.get("reason"))))
        self.lap("order")
        report.steps |= memory.pop("seconds", {})
        report.memory |= memory
        report.steps |= {
            **{f"order.{name}": seconds for name, seconds in own.items()},
            "order.engine.stop": engine["stop_seconds"],
            "order.engine.swap": engine["swap_seconds"],
            **{f"order.engine.swap.{n}": s for n, s in swap.get("seconds", {}).items()},
        }

    async def step(self, name: str) -> None:
        if self.refit.observer is not None:
            await self.refit.observer(name, self.worker)

    def lap(self, step: str = "") -> float:
        """Return the seconds since the last lap, report them as those of a step, and begin the next
        lap. A step that begins after a wait for other workers calls this first, so that the wait
        is not counted."""
        now = time.monotonic()
        seconds, self._lap_began = now - self._lap_began, now
        if step:
            self.report.steps[step] = seconds
        return seconds


class _WrongWeights(AdminError):
    """A worker serves weights that are not those of the version."""
