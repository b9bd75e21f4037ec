"""Whatever joins, leaves, hangs or fails while weights move: the promises of a refit hold.

Hypothesis drives the real fleet, refits and rollouts over simulated workers (sim_fleet.py). The
saboteurs at the end switch off one protection each, and the same checks must then fail."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    run_state_machine_as_test,
    rule,
)

from rollway.errors import RollwayError, UsageError
from rollway.fleet.fleet import Fleet
from rollway.fleet.refit import Refit
from rollway.fleet.report import RefitMode
from rollway.fleet.versions import taint_of
from rollway.rollout import client
from rollway.rollout.canary import canary
from rollway.rollout.client import Rollout, Rollouts
from rollway.rollout.sampling import Sampling
from tests.unit.sim_fleet import (
    OP, TOUCHING, Call, SimAdmin, SimLoop, SimUpdate, SimWorker, World, weights_of
)

MODES: list[RefitMode] = ["pause-all", "rolling", "in-flight"]
ROUTES = ["pause", "resume", "flush", "update", "declare", "taint", "version", "check"]
FAULTS = ["before", "lost", "refuse", "hang", "die"]
DRAIN_SECONDS = 2000.0
"""Longer than every timeout together: a rollout that is not over then is lost."""


class Coordinator:
    """A process that refits and samples: a real `Fleet` and `Rollouts`, and checks around them."""

    def __init__(self, world: World, *, replacing: bool = False) -> None:
        self.world = world
        self.admin = SimAdmin(world)
        self.fleet = Fleet(
            world,  # type: ignore[arg-type]
            "sim",
            admin=self.admin,  # type: ignore[arg-type]
            canary=canary(world, "sim", "m"),  # type: ignore[arg-type]
            replace=self._replace if replacing else None,
            guard=lambda: world.lock,  # type: ignore[arg-type, return-value]
            supervised=world.supervised,
            shelf=world,
        )
        self.fleet.observer = world.observe
        self.fleet.versions.tainted = world.supervised
        self.rollouts = Rollouts(
            world,  # type: ignore[arg-type]
            "sim",
            "m",
            self.fleet.versions,
            refresh=self.fleet.refresh,
            timeout=200.0,
        )
        self.under_way: set[asyncio.Task[Any]] = set()
        self.sampling: set[asyncio.Task[Any]] = set()
        self.user_paused = False
        self.trouble = ""
        self._seen: int = -1

    async def _replace(self, worker: Any) -> bool:
        if self.admin.process.crashed:
            return False
        self.world.workers[worker.instance_id].die()
        self.world.join(ready_after=2.0)
        return True

    def start(
        self, work: Coroutine[Any, Any, Any], into: set[asyncio.Task[Any]]
    ) -> asyncio.Task[Any]:
        task = self.world.loop.create_task(work)
        into.add(task)
        task.add_done_callback(into.discard)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self.world.broken(f"{task.exception()!r} is no error that a user should meet")

    # --- operations --------------------------------------------------------------------------

    async def refit(self, version: int, weights: str, mode: RefitMode = "pause-all") -> str:
        update = SimUpdate(Path("/weights") / weights)
        return await self._operation(lambda: self.fleet.refit(version, update, mode=mode), version)

    async def admit(self) -> str:
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

    async def _operation(self, work: Callable[[], Awaitable[Any]], version: int | None) -> str:
        world, op, began = self.world, next(self.world.ops), self.world.now
        OP.set(op)
        reached = version
        try:
            result = await work()
            outcome = "done"
            reached = result.version if result is not None else None
        except UsageError:
            outcome = "refused"
        except RollwayError as error:
            outcome, self.trouble = "failed", str(error)
        except asyncio.CancelledError:
            outcome = "cancelled"
        start = next((n for n, call in enumerate(world.log) if call.op == op), len(world.log))
        touching = [call for call in world.log[start:] if call.route in TOUCHING]
        if self.admin.process.crashed or op in world.users_pauses:
            return outcome
        self._check_calls([call for call in touching if call.op == op], outcome)
        paused = {c.worker: c.ok for c in reversed(touching) if (c.op, c.route) == (op, "pause")}
        for worker in world.workers.values():
            calls = [call for call in touching if call.worker == worker.instance_id]
            if worker.hung_at >= began or any(call.op != op for call in calls):
                continue
            if reached is not None and outcome == "done" and (calls or version is not None):
                self._check_serving(worker, reached)
            elif worker.alive and worker.issued_by == op and not worker.paused:
                world.broken(f"worker {worker.instance_id} is in doubt and generates")
            elif worker.alive and not all(paused.values()):
                self._check_undone(worker, calls)
        return outcome

    # --- promises ----------------------------------------------------------------------------

    def _check_calls(self, calls: list[Call], outcome: str) -> None:
        if outcome == "refused" and calls:
            self.world.broken("a refused refit has touched a worker")
        for worker in {call.worker for call in calls}:
            mine = [c for c in calls if c.worker == worker]
            updates = [n for n, call in enumerate(mine) if call.route == "update"]
            if len(updates) > 1:
                self.world.broken(f"worker {worker} was sent {len(updates)} updates by one refit")
            after = mine[updates[0] :] if updates else []
            failed = next((n for n, call in enumerate(after) if not call.ok), len(after))
            for call in after[failed + 1 :]:
                if call.route in ("resume", "flush") or (call.route == "taint" and call.detail):
                    self.world.broken(f"worker {worker} failed and then got {call.route}")

    def _check_serving(self, worker: SimWorker, version: int) -> None:
        """After a refit that returned. Who got its label after the last listing is a joiner."""
        joined = worker.ready_at >= self.world.listed_at
        if not worker.alive or joined or self._paused_by_user(worker):
            return
        taints = (taint_of(version),) if self.world.tainting else ()
        state = worker.label, worker.weights, worker.taints, worker.paused
        if state != (version, weights_of(version), taints, False):
            self.world.broken(f"a refit to {version} returned, worker is {state}")

    def _check_undone(self, worker: SimWorker, mine: list[Call]) -> None:
        """After a refit that could not pause everybody: who was paused and got no update is back."""
        routes = [call.route for call in mine]
        lost = any(not call.ok for call in mine if call.route != "pause")
        if "pause" in routes and "update" not in routes and not lost:
            if worker.paused and (worker.label or 0) >= 0 and not self._paused_by_user(worker):
                self.world.broken(f"worker {worker.instance_id} was left paused")

    def _paused_by_user(self, worker: SimWorker) -> bool:
        return worker.paused and worker.paused_by in self.world.users_pauses

    async def traffic(self, times: int, length: int = 8, gap: float = 0.01) -> None:
        """So dense that some request is always under way when something changes."""
        for _ in range(times):
            self.start(self.sample(length), self.sampling)
            await asyncio.sleep(gap)

    async def sample(self, length: int) -> None:
        try:
            found = await self.rollouts.generate([1, 2], Sampling(max_tokens=length))
        except RollwayError:
            return
        for rollout in found:
            self._check_rollout(rollout)

    def _check_rollout(self, rollout: Rollout) -> None:
        world = self.world
        if sum(span.end - span.start for span in rollout.spans) != len(rollout.token_ids):
            world.broken(f"spans {rollout.spans} do not cover {len(rollout.token_ids)} tokens")
        for span in [span for span in rollout.spans if span.version is not None]:
            for token in rollout.token_ids[span.start : span.end]:
                weights, kv = world.samples[token]
                if weights != weights_of(span.version) or kv != {weights}:
                    world.broken(f"stamped {span.version}: sampled from {weights}, KV of {kv}")

    def check_book(self) -> None:
        book = self.fleet.versions
        current = -1 if book.current is None else book.current
        if current < self._seen:
            self.world.broken(f"the current version went from {self._seen} to {current}")
        self._seen = current
        if not self.under_way and (book.changing or (book.moving and not self.user_paused)):
            self.world.broken(f"nothing is under way, changing={book.changing}, gate is shut")


class RefitMachine(RuleBasedStateMachine):
    """Two processes, their workers, and everything that can happen to them."""

    @initialize(
        seed=st.integers(0, 10_000),
        proving=st.booleans(),
        shape=st.sampled_from(["stack", "stack", "attached", "untainted"]),
        count=st.integers(1, 3),
        replacing=st.booleans(),
    )
    def begin(self, seed: int, proving: bool, shape: str, count: int, replacing: bool) -> None:
        self.loop = SimLoop()
        self.patch = pytest.MonkeyPatch()
        self.world = World(self.loop, seed, proving=proving, shape=shape)
        self.world.install(self.patch)
        self.replacing = replacing and shape == "stack"
        for _ in range(count):
            self.world.join()
        self._pass(0.1)
        # Without the launcher's taints, stamps rest on what one process knows: only one refits.
        processes = 2 if shape == "stack" else 1
        self.everyone = [self._coordinator() for _ in range(processes)]
        self.tried = 0
        self._pass(0.1)

    def _coordinator(self) -> Coordinator:
        made = Coordinator(self.world, replacing=self.replacing)
        made.start(made.fleet.refresh(), made.sampling)
        return made

    def _pass(self, seconds: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))

    def _who(self, index: int) -> Coordinator:
        return self.everyone[index % len(self.everyone)]

    def _worker(self, index: int) -> SimWorker | None:
        alive = [w for w in self.world.workers.values() if w.alive]
        return alive[index % len(alive)] if alive else None

    def _crash(self, who: Coordinator) -> None:
        """The process dies: no call of it reaches anybody any more, another takes its place."""
        who.admin.process.crashed = True
        for task in who.sampling:
            task.cancel()
        self.everyone[self.everyone.index(who)] = self._coordinator()

    # --- what happens ------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.01, 0.05, 0.2, 1.0, 6.0, 40.0]))
    def time_passes(self, seconds: float) -> None:
        self._pass(seconds)

    @rule(ready_after=st.sampled_from([0.0, 0.3, 20.0]))
    def joins(self, ready_after: float) -> None:
        if sum(w.alive for w in self.world.workers.values()) < 4:
            self.world.join(ready_after)

    @rule(index=st.integers(0, 3))
    def dies(self, index: int) -> None:
        if worker := self._worker(index):
            worker.die()

    @rule(index=st.integers(0, 3), seconds=st.sampled_from([0.1, 4.0, 60.0]))
    def hangs(self, index: int, seconds: float) -> None:
        if worker := self._worker(index):
            worker.hang(seconds)

    @rule(times=st.integers(1, 2))
    def frontend_restarts(self, times: int) -> None:
        self.world.listing_fails = times

    @rule(i=st.integers(0, 1), times=st.sampled_from([1, 5, 60]), length=st.integers(1, 30))
    def samples(self, i: int, times: int, length: int) -> None:
        who = self._who(i)
        who.start(who.traffic(times, length), who.sampling)

    @rule(
        i=st.integers(0, 1),
        mode=st.sampled_from(MODES),
        faults=st.lists(
            st.tuples(
                st.sampled_from(ROUTES), st.integers(0, 3), st.sampled_from([*FAULTS, "lie"])
            ),
            max_size=2,
        ),
        fuse=st.none() | st.tuples(st.integers(1, 40), st.sampled_from(["cancel", "crash"])),
        seconds=st.sampled_from([0.0, 0.1, 0.5, 5.0]),
        half=st.booleans(),
        busy=st.booleans(),
    )
    def refits(
        self,
        i: int,
        mode: RefitMode,
        faults: list[tuple[str, int, str]],
        fuse: tuple[int, str] | None,
        seconds: float,
        half: bool,
        busy: bool,
    ) -> None:
        who = self._who(i)
        if busy:
            self.samples(i, 60, 8)
            self._pass(0.1)
        for route, index, kind in faults:
            worker = self._worker(index)
            if kind == "lie" and route not in ("update", "flush"):
                continue  # nobody could tell
            if worker is not None:
                # Half a load that passes for a whole one shows in the parameters only.
                kind = "half" if (kind, half) == ("lie", self.world.proving) else kind
                self.world.faults[route, worker.instance_id] = kind
        self.tried += 1
        task = self._refit(who, self.tried, weights_of(self.tried), mode)
        if fuse is not None:
            crash = fuse[1] == "crash"
            who.admin.process.calls_left = fuse[0]
            who.admin.process.then = lambda: self._crash(who) if crash else task.cancel()
        self._pass(seconds)

    def _refit(
        self, who: Coordinator, version: int, weights: str, mode: RefitMode
    ) -> asyncio.Task[Any]:
        return who.start(who.refit(version, weights, mode), who.under_way)

    @rule(i=st.integers(0, 1), back=st.integers(0, 2), mode=st.sampled_from(MODES))
    def refits_again(self, i: int, back: int, mode: RefitMode) -> None:
        if back < self.tried:
            self._refit(self._who(i), self.tried - back, weights_of(self.tried - back), mode)

    @rule(i=st.integers(0, 1), weights=st.sampled_from(["bad", "unfit", "other"]))
    def refits_wrongly(self, i: int, weights: str) -> None:
        """No checkpoint, one of other shapes, or a version that is taken."""
        who = self._who(i)
        self.tried += 1
        version = (who.fleet.versions.current or 0) if weights == "other" else self.tried
        if version and (weights != "unfit" or self.world.proving):
            self._refit(who, version, weights, "pause-all")

    @rule(i=st.integers(0, 1))
    def admits(self, i: int) -> None:
        who = self._who(i)
        who.start(who.fleet.membership.poll(), who.sampling)
        who.start(who.admit(), who.under_way)

    @rule(i=st.integers(0, 1), mode=st.sampled_from(["wait", "keep", "abort"]))
    def user_pauses(self, i: int, mode: str) -> None:
        who = self._who(i)
        who.start(who.pause(mode), who.under_way)

    @rule(i=st.integers(0, 1))
    def user_resumes(self, i: int) -> None:
        who = self._who(i)
        who.start(who.resume(), who.under_way)

    # --- what must hold ----------------------------------------------------------------------

    @invariant()
    def holds(self) -> None:
        for who in getattr(self, "everyone", []):
            who.check_book()
        assert not getattr(self, "world", None) or not self.world.violations, self.world.violations

    def _settles(self) -> None:
        """Left alone, everything comes to an end, and one more refit puts it right."""
        self._pass(DRAIN_SECONDS)
        for who in self.everyone:
            assert not who.under_way, "an operation never ends"
            assert not who.sampling, "a rollout is lost"
        self.holds()
        self.world.faults.clear()
        self.world.listing_fails = 0
        self.world.join()
        self._pass(DRAIN_SECONDS)
        for who in self.everyone:
            who.admin.process.calls_left = 0
            self.loop.run_until_complete(who.resume())
        who, version = self.everyone[0], self.tried + 1
        outcome = self.loop.run_until_complete(
            who.refit(version, weights_of(version), "in-flight")
        )
        assert outcome == "done", f"a last refit {outcome}: {who.trouble}"
        found = self.loop.run_until_complete(who.rollouts.generate([1], Sampling(max_tokens=3)))
        assert found[0].weight_version == version
        self.holds()

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        try:
            self._settles()
        finally:
            self.patch.undo()
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self._pass(0.0)
            self.loop.close()


TestRefitMachine = RefitMachine.TestCase
TestRefitMachine.settings = settings(
    max_examples=60, stateful_step_count=20, deadline=None, derandomize=True
)
