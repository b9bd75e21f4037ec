"""A process that refits and samples on the simulated fleet, and the promises that it checks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

from rollway.errors import RollwayError, UsageError
from rollway.fleet.fleet import Fleet
from rollway.fleet.foreign import make_canary
from rollway.fleet.report import RefitMode, SleepReport
from rollway.rollout.client import Rollout, Rollouts
from rollway.rollout.sampling import Sampling
from rollway.versions import taint_of
from tests.unit.fleet import sim_fleet
from tests.unit.fleet.sim_fleet import OP, Call, SimAdmin, SimUpdate, SimWorker, World

TOUCHING = ("pause", "resume", "flush", "update", "declare", "taint", "refit", "sleep", "wake")
UPDATES = ("update", "refit")
Tasks = set[asyncio.Task[Any]]


class Coordinator:
    """A process that refits and samples: a real `Fleet` and `Rollouts`, with checks."""

    def __init__(self, world: World, *, replacing: bool = False) -> None:
        self.world, self.admin = world, SimAdmin(world)
        http: Any = world
        self.fleet = Fleet(
            http,
            "sim",
            admin=self.admin,  # type: ignore[arg-type]
            canary=make_canary(http, "sim", "m"),
            replace=self._replace if replacing else None,
            guard=lambda: world.lock,  # type: ignore[arg-type, return-value]
            supervised=lambda _: world.supervised,
            record=world,
        )
        self.versions = self.fleet.versions
        self.fleet.observer = world.observe
        self.versions.tainted = world.supervised
        bounds = {"timeout": 200.0, "patience": 10.0}
        checks = {"refresh": self.fleet.refresh, "still_serves": self.fleet.still_serves}
        self.rollouts = Rollouts(http, "sim", "m", self.versions, **checks, **bounds)
        self.under_way: Tasks = set()
        self.sampling: Tasks = set()
        self.user_paused, self.trouble = False, ""
        self._seen = -1

    async def _replace(self, worker: Any) -> bool:
        if not self.admin.crashed:
            self.world.workers[worker.instance_id].die()
            self.world.join(ready_after=2.0)
        return not self.admin.crashed

    def start(self, work: Coroutine[Any, Any, Any], into: Tasks) -> asyncio.Task[Any]:
        task = self.world.loop.create_task(work)
        into.add(task)
        task.add_done_callback(into.discard)
        task.add_done_callback(self._check_error)
        return task

    def _check_error(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self.world.broken(f"{task.exception()!r} is no error for users")

    # --- operations --------------------------------------------------------------------------

    async def refit(self, version: int, weights: str = "", mode: RefitMode = "pause-all") -> str:
        update = SimUpdate(Path("/weights") / (weights or sim_fleet.weights_of(version)))
        return await self._operation(lambda: self.fleet.refit(version, update, mode=mode), version)

    async def admit(self) -> str:
        await self.fleet._look_around()
        return await self._operation(self.fleet.admit, None)

    async def pause(self, mode: Any = "wait") -> str:
        def work() -> Awaitable[None]:
            self.world.users_pauses.add(OP.get())
            return self.fleet.pause(mode)

        before, self.user_paused = self.user_paused, True
        outcome = await self._operation(work, None)
        self.user_paused = before or outcome == "done"
        return outcome

    async def resume(self) -> str:
        outcome = await self._operation(self.fleet.resume, None)
        self.user_paused = self.user_paused and outcome != "done"
        return outcome

    async def sleep(self, level: int = 1, mode: Any = "wait") -> str:
        async def work() -> None:
            self._check_asleep(await self.fleet.sleep(level, mode))

        return await self._operation(work, None)

    async def wake(self) -> str:
        return await self._operation(self.fleet.wake, None)

    async def traffic(self, times: int, length: int = 8) -> None:
        """Send requests so often that some are always under way when weights change."""
        for _ in range(times):
            self.start(self.sample(length), self.sampling)
            await asyncio.sleep(0.01)  # of the simulated time

    async def sample(self, length: int) -> None:
        try:
            (rollout,) = await self.rollouts.generate([1, 2], Sampling(max_tokens=length))
        except RollwayError:
            return
        self._check_rollout(rollout)
        if rollout.finish_reason != "length" or len(rollout.token_ids) != length:
            sampled = f"{len(rollout.token_ids)} of {length} tokens ({rollout.finish_reason})"
            self.world.broken(f"a rollout that nobody aborted has {sampled}")

    async def _operation(self, work: Callable[[], Awaitable[Any]], version: int | None) -> str:
        world, op, began = self.world, next(self.world.ops), self.world.now
        OP.set(op)
        reached = None
        try:
            report = await work()
            outcome, reached = "done", getattr(report, "version", None)
        except UsageError as error:
            outcome, self.trouble = "refused", str(error)
        except RollwayError as error:
            outcome, self.trouble = "failed", str(error)
        except asyncio.CancelledError:
            outcome = "cancelled"
        if self.admin.crashed or op in world.users_pauses:
            return outcome
        start = next((n for n, call in enumerate(world.log) if call.op == op), len(world.log))
        touching = [call for call in world.log[start:] if call.route in TOUCHING]
        self._check_calls([call for call in touching if call.op == op], outcome)
        paused = {c.worker: c.ok for c in reversed(touching) if (c.op, c.route) == (op, "pause")}
        for worker in [w for w in world.workers.values() if w.alive and w.hung_at < began]:
            if worker.staged is not None and worker.staged_by == op:
                world.broken(f"worker {worker.instance_id} keeps staged weights")
            calls = [call for call in touching if call.worker == worker.instance_id]
            if any(call.op != op for call in calls):
                continue  # another process has begun since
            if outcome == "refused" and calls and all(call.ok for call in calls):
                if worker.sleeping != {"weights", "kv_cache"}:
                    world.broken(f"worker {worker.instance_id} does not sleep as before")
            elif reached is not None:
                if calls or version is not None:
                    self._check_serving(worker, reached)
            elif worker.issued_by == op and not worker.paused:
                world.broken(f"worker {worker.instance_id} is in doubt and generates")
            elif not all(paused.values()):
                self._check_undone(worker, calls)
            elif worker.paused and (worker.label or -1) >= 0 and not self._paused_by_user(worker):
                world.broken(f"worker {worker.instance_id} was left paused")
        return outcome

    # --- promises ----------------------------------------------------------------------------

    def _check_calls(self, calls: list[Call], outcome: str) -> None:
        if outcome == "refused" and any(call.route not in ("sleep", "wake") for call in calls):
            self.world.broken("a refused refit has touched a worker")
        for worker in {call.worker for call in calls}:
            mine = [c for c in calls if c.worker == worker]
            updates = [n for n, call in enumerate(mine) if call.route in UPDATES]
            if len(updates) > 1:
                self.world.broken(f"worker {worker} was sent {len(updates)} updates by one refit")
            after = mine[updates[0] :] if updates else []
            failed = next((n for n, call in enumerate(after) if not call.ok), len(after))
            for call in after[failed + 1 :]:
                if call.route in ("resume", "flush") or (call.route == "taint" and call.detail):
                    self.world.broken(f"worker {worker} failed and then got {call.route}")

    def _check_serving(self, worker: SimWorker, version: int) -> None:
        """Check a worker after a refit that returned. A worker that got ready after the last
        listing is a joiner."""
        if worker.ready_at >= self.world.listed_by.get(OP.get(), 0.0) or self._paused_by_user(
            worker
        ):
            return
        taints = (taint_of(version),) if self.world.tainting else ()
        state = worker.label, worker.weights, worker.taints, worker.paused
        if state != (version, sim_fleet.weights_of(version), taints, False):
            name = f"worker {worker.instance_id}"
            self.world.broken(f"a refit to {version} returned, {name} is {state}")

    def _check_undone(self, worker: SimWorker, mine: list[Call]) -> None:
        """Check that a worker without an update is back after a failed pause."""
        routes = [call.route for call in mine]
        lost = any(not call.ok for call in mine if call.route != "pause")
        marked = any(call.route == "declare" for call in mine)  # its version was known
        known = (marked or (worker.label or 0) >= 0) and not self._paused_by_user(worker)
        updated = any(route in UPDATES for route in routes)
        known = known and not worker.sleep_level
        if worker.paused and known and not lost and "pause" in routes and not updated:
            self.world.broken(f"worker {worker.instance_id} was left paused")

    def _check_asleep(self, report: SleepReport) -> None:
        """Check the workers after a sleep that returned; one that was starting is left alone."""
        names = {w.instance_id: w.state for w in report.workers}
        for worker in [w for w in self.world.workers.values() if w.alive and w.awake.is_set()]:
            state = worker.sleep_level, worker.taints, worker.running, (worker.label or 0) < 0
            is_asleep = state == (report.level, (), [], True)
            if names.get(worker.instance_id) == "asleep" and not is_asleep:
                self.world.broken(f"worker {worker.instance_id} should sleep, it is {state}")
        if not set(names.values()) <= {"asleep", "joining"}:
            self.world.broken(f"a sleep returned with {names}")

    def _paused_by_user(self, worker: SimWorker) -> bool:
        return worker.paused and worker.paused_by in self.world.users_pauses

    def _check_rollout(self, rollout: Rollout) -> None:
        world = self.world
        if sum(span.end - span.start for span in rollout.spans) != len(rollout.token_ids):
            world.broken(f"spans {rollout.spans} do not cover {len(rollout.token_ids)} tokens")
        for span in [span for span in rollout.spans if span.version is not None]:
            for token in rollout.token_ids[span.start : span.end]:
                weights, kv = world.samples[token]
                if weights != sim_fleet.weights_of(span.version) or kv != {weights}:
                    world.broken(f"stamped {span.version}: sampled from {weights}, KV of {kv}")

    def check_versions(self) -> None:
        current = -1 if self.versions.current is None else self.versions.current
        if current < self._seen:
            self.world.broken(f"the current version went from {self._seen} to {current}")
        self._seen = current
        shut = self.versions.is_closed and not self.user_paused
        if not self.under_way and (self.versions.changing or shut):
            self.world.broken(f"nothing is under way, changing={self.versions.changing}, {shut=}")
