"""One order moves a worker: it leaves service, swaps its weights and returns by itself.

    untouched, update staged
        │ one call, sent once (`rollway_refit`, drawn in rollway/engine/core.py)
        ▼
     updating ── served ───────► serving
        │     ── refused ──────► restored     (nothing was changed)
        │     ── other process ► gone         (the order names the process that staged)
        │ no answer: the worker's label tells which of them; otherwise
        ▼
     in doubt ── replace ──────► replaced     (if it has a supervisor)

An order that has begun ends, also if this process is gone. A cancelled refit ends an order that
still waits for running requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from typing import Any

from rollway.errors import AdminError, RollwayError
from rollway.fleet.admin import (
    IN_DOUBT,
    AnotherProcess,
    PauseMode,
    RefitRefused,
    leaving_label,
    run_to_the_end,
)
from rollway.fleet.worker_refit import WorkerRefit
from rollway.fleet.workers import is_dead
from rollway.versions import taint_of

SETTLE_SECONDS = 10.0
"""How long a worker whose answer to an order was lost may take to show its new label."""
WATCH_SECONDS = 10.0
"""How often a worker is asked for a sign of life while its order runs. An order may take many
minutes, as long as running requests take; a worker that hangs is noticed sooner."""


class WorkerOrder:
    """The order to one worker."""

    def __init__(self, refit: WorkerRefit) -> None:
        self._refit = refit

    async def run(self, mode: PauseMode) -> None:
        """Have the worker do everything by itself. Raise nothing but a cancellation."""
        try:
            reply = await self._send(mode)
        except AnotherProcess:
            self._refit.mark_gone()
        except RefitRefused as error:
            if not await self._refit.note_if_lost():
                self._refit.note_refusal(error)
        except BaseException as error:
            self._refit.mark_in_doubt(error)
            await run_to_the_end(self._settle(error))
            if not isinstance(error, RollwayError):
                raise
        else:
            self._note_times(reply)
            self._refit.note_service("parameters")

    async def _send(self, mode: PauseMode) -> Mapping[str, Any]:
        plan, versions = self._refit.plan, self._refit.plan.versions
        self._refit.lap()
        await self._refit.step("pause")
        await plan.update.check_unchanged()
        self._refit.report.state = "updating"
        # The answers that arrive while the order runs, and after it, name their versions.
        versions.mark_enforced(self._refit.instance_id)
        versions.mark_issued(self._refit.instance_id)
        if mode == "keep":
            # The engine resumes by itself. An answer without stamps may be of both versions then.
            versions.mark_entered(self._refit.instance_id, plan.version)
        await self._refit.step("update")
        label = self._refit.service.label
        order = {
            "identity": plan.update.identity,
            "mode": mode,
            "label": label,
            "leaving": IN_DOUBT if label is None else leaving_label(label),
            "version": plan.version,
            "taints": [taint_of(plan.version)],
            "taints_before": [] if label is None else [taint_of(label)],
            "release": self._refit.releases_kv,
        }
        self._refit.report.calls += 1
        running = asyncio.create_task(self._refit.admin.refit(self._refit.worker, order))
        try:
            # The worker takes these steps by itself; observers hear of them while it does.
            for step in ("flush", "verify", "open", "resume"):
                await self._refit.step(step)
            reply = await self._wait_for(running)
        except asyncio.CancelledError:
            await run_to_the_end(self._cancel(running))
            raise
        self._refit.may_hold_update = False
        try:
            # A worker that lacks memory to stage the weights has read them only now.
            await plan.update.check_unchanged()
        except AdminError as error:
            raise _WrongWeights(error.message) from None
        return reply

    async def _wait_for(self, running: asyncio.Task[dict[str, Any]]) -> dict[str, Any]:
        """Wait for the answer to the order; raise if the worker shows no sign of life."""
        while not (await asyncio.wait({running}, timeout=WATCH_SECONDS))[0]:
            try:
                await self._refit.admin.weight_version(self._refit.worker)
            except AdminError as error:
                is_silent = error.__cause__ is not None
                if is_silent and not running.done():
                    running.cancel()  # the order itself goes on, if the worker ever has it
                    raise
        return running.result()

    async def _cancel(self, running: asyncio.Task[dict[str, Any]]) -> None:
        """Stop an order that waits for running requests, and wait until it has ended."""
        with contextlib.suppress(RollwayError):
            await self._refit.admin.cancel_refit(self._refit.worker)
        with contextlib.suppress(RollwayError, TimeoutError):
            await asyncio.wait_for(running, SETTLE_SECONDS)

    async def _settle(self, error: BaseException) -> None:
        """Find out what became of an order that failed or whose answer was lost, by the worker's
        label; keep the worker out of service if that does not tell."""
        deadline = time.monotonic() + SETTLE_SECONDS
        # A worker that answered with an error has stayed paused.
        is_lost = not isinstance(error, AdminError) or error.__cause__ is not None
        while is_lost and time.monotonic() < deadline and not await is_dead(self._refit.worker):
            label: int | None = IN_DOUBT
            with contextlib.suppress(RollwayError):
                label = await self._refit.admin.weight_version(self._refit.worker)
            if label == self._refit.plan.version:
                self._refit.may_hold_update, self._refit.report.error = False, None
                self._refit.note_service("parameters")
                return
            if label == self._refit.service.label:
                self._refit.note_refusal(error)
                return
            await asyncio.sleep(0.1)
        await self._refit.keep_out()
        if self._refit.report.state == "in doubt":
            await self._refit.replace()

    def _note_times(self, reply: Mapping[str, Any]) -> None:
        """Record the seconds that the worker and its engine report."""
        report, engine, own = self._refit.report, reply["report"], reply["seconds"]
        swap = engine["swap"]
        report.paused_seconds = engine["paused_seconds"]
        report.waited_seconds = engine["waited_seconds"]
        report.pause_seconds = own["leave"] + engine["stop_seconds"]
        report.update_seconds = engine["swap_seconds"]
        report.resume_seconds = own["enter"]
        report.strategy = ": ".join(filter(None, (swap.get("strategy"), swap.get("reason"))))
        self._refit.lap("order")
        report.steps |= {
            **{f"order.{name}": seconds for name, seconds in own.items()},
            "order.engine.stop": engine["stop_seconds"],
            "order.engine.swap": engine["swap_seconds"],
            **{f"order.engine.swap.{n}": s for n, s in swap.get("seconds", {}).items()},
        }


class _WrongWeights(AdminError):
    """A worker serves weights that are not those of the version."""
