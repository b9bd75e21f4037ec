"""The promises of a refit hold, whatever joins, leaves, hangs or fails while weights change.

Hypothesis drives the real fleet, refits and rollouts over simulated workers (sim_fleet.py). The
sabotages at the end switch off one protection each; the same checks must then fail."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rollway.errors import RollwayError, UsageError
from rollway.fleet import refit, stages
from rollway.fleet.canary import make_canary
from rollway.fleet.fleet import Fleet
from rollway.fleet.report import RefitMode, SleepReport
from rollway.fleet.worker_refit import WorkerRefit
from rollway.rollout.client import Rollout, Rollouts
from rollway.rollout.sampling import Sampling
from rollway.versions import FleetVersions, taint_of
from tests.soak import examples
from tests.unit.fleet import sim_fleet
from tests.unit.fleet.sim_fleet import OP, Call, SimAdmin, SimLoop, SimUpdate, SimWorker, World

MODES: list[RefitMode] = ["pause-all", "rolling", "in-flight"]
TOUCHING = ("pause", "resume", "flush", "update", "declare", "taint", "refit", "sleep", "wake")
UPDATES = ("update", "refit")
FAULTS = ("before", "lost", "refuse", "hang", "die", "lie")
"""Nothing done, done but the answer lost, refused, hung, dead, and success without an effect."""
DRAIN_SECONDS = 2000.0
"""Longer than all timeouts together: an operation that has not ended by then never ends."""

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
        await self.fleet.membership.poll()
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
                world.broken(f"worker {worker.instance_id} keeps a second model")
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
        if worker.ready_at >= self.world.listed_at or self._paused_by_user(worker):
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


class RefitMachine(RuleBasedStateMachine):
    """Two processes, their workers, and all events that can happen to them."""

    @initialize(
        seed=st.integers(0, 10_000),
        verifying=st.booleans(),
        staging=st.booleans(),
        orders=st.booleans(),
        shape=st.sampled_from(["stack", "stack", "attached", "untainted", "pools"]),
        count=st.integers(1, 3),
        replacing=st.booleans(),
    )
    def begin(
        self,
        seed: int,
        verifying: bool,
        staging: bool = False,
        orders: bool = False,
        shape: str = "stack",
        count: int = 2,
        replacing: bool = False,
    ) -> None:
        self.loop, self.patch = SimLoop(), pytest.MonkeyPatch()
        # A worker of one role does not answer canaries, so it must compare its parameters.
        verifying = verifying or shape == "pools"
        self.world = World(
            self.loop, seed, verifying=verifying, staging=staging, orders=orders, shape=shape
        )
        self.world.install(self.patch)
        self.replacing = replacing and self.world.supervised
        self.tried = 0
        for _ in range(count + self.world.pools):
            self.world.join()
        self.advance(0.1)
        # Without the launcher's taints, versions rest on what one process knows: only one refits.
        self.processes = [self._coordinator() for _ in range(2 if self.world.supervised else 1)]
        self.advance(0.1)

    def _coordinator(self) -> Coordinator:
        coordinator = Coordinator(self.world, replacing=self.replacing)
        coordinator.start(coordinator.fleet.refresh(), coordinator.sampling)
        return coordinator

    def advance(self, seconds: float) -> None:
        """Let the simulated time pass."""
        self.loop.run_until_complete(asyncio.sleep(seconds))

    def _process(self, index: int) -> Coordinator:
        return self.processes[index % len(self.processes)]

    def _worker(self, index: int) -> SimWorker | None:
        alive = [w for w in self.world.workers.values() if w.alive]
        return alive[index % len(alive)] if alive else None

    def _crash(self, process: Coordinator) -> None:
        """Kill the process: its calls reach no worker any more, and another process follows."""
        process.admin.crashed = True
        for task in process.sampling:
            task.cancel()
        self.processes[self.processes.index(process)] = self._coordinator()

    # --- events ------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.01, 0.05, 0.2, 1.0, 6.0, 40.0]))
    def time_passes(self, seconds: float) -> None:
        self.advance(seconds)

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

    @rule(i=st.integers(0, 1), times=st.sampled_from([1, 5, 40]), length=st.integers(1, 30))
    def samples(self, i: int, times: int, length: int) -> None:
        self._process(i).start(self._process(i).traffic(times, length), self._process(i).sampling)

    @rule(
        i=st.integers(0, 1),
        mode=st.sampled_from([*MODES, "keep"]),
        faults=st.lists(
            st.tuples(
                st.sampled_from([*TOUCHING, "version", "check"]),
                st.integers(0, 3),
                st.sampled_from(FAULTS),
            ),
            max_size=2,
        ),
        fuse=st.none() | st.tuples(st.integers(1, 40), st.sampled_from(["cancel", "crash"])),
        seconds=st.sampled_from([0.0, 0.05, 0.1, 0.5, 5.0]),
        half=st.booleans(),
        busy=st.booleans(),
    )
    def refits(
        self,
        i: int,
        mode: RefitMode = "pause-all",
        faults: Sequence[tuple[str, int, str]] = (),
        fuse: tuple[int, str] | None = None,
        seconds: float = 5.0,
        half: bool = False,
        busy: bool = False,
    ) -> None:
        process = self._process(i)
        if busy:
            self.samples(i, 40, 8)
            self.advance(0.1)
        for route, index, kind in faults:
            worker = self._worker(index)
            if kind == "lie" and route not in (*UPDATES, "flush"):
                continue  # it would not show
            if worker is not None:
                # Half a load that is reported as a success shows in the parameters only.
                kind = "half" if kind == "lie" and half and self.world.verifying else kind
                self.world.faults[route, worker.instance_id] = kind
        self.tried += 1
        task = process.start(process.refit(self.tried, "", mode), process.under_way)
        if fuse is not None:
            crash = fuse[1] == "crash"
            process.admin.calls_left = fuse[0]
            process.admin.then = lambda: self._crash(process) if crash else task.cancel()
        self.advance(seconds)

    @rule(i=st.integers(0, 1), back=st.integers(0, 2), mode=st.sampled_from(MODES))
    def refits_again(self, i: int, back: int, mode: RefitMode) -> None:
        process = self._process(i)
        if back < self.tried:
            process.start(process.refit(self.tried - back, "", mode), process.under_way)

    @rule(i=st.integers(0, 1), weights=st.sampled_from(["bad", "unfit", "other"]))
    def refits_wrongly(self, i: int, weights: str) -> None:
        """Refit with no checkpoint, with one of other shapes, or with a version that is in use."""
        process = self._process(i)
        self.tried += 1
        version = (process.versions.current or 0) if weights == "other" else self.tried
        if version and (weights != "unfit" or self.world.verifying):
            process.start(process.refit(version, weights), process.under_way)

    @rule(i=st.integers(0, 1))
    def admits(self, i: int) -> None:
        self._process(i).start(self._process(i).admit(), self._process(i).under_way)

    @rule(i=st.integers(0, 1), mode=st.sampled_from(["wait", "keep", "abort"]))
    def user_pauses(self, i: int, mode: str) -> None:
        self._process(i).start(self._process(i).pause(mode), self._process(i).under_way)

    @rule(i=st.integers(0, 1))
    def user_resumes(self, i: int) -> None:
        self._process(i).start(self._process(i).resume(), self._process(i).under_way)

    @rule(
        i=st.integers(0, 1),
        level=st.sampled_from([1, 2]),
        mode=st.sampled_from(["wait", "abort"]),
        faults=st.lists(
            st.tuples(
                st.sampled_from(["sleep", "declare", "taint", "memory", "version"]),
                st.integers(0, 3),
                st.sampled_from(["before", "lost", "refuse", "hang", "die"]),
            ),
            max_size=1,
        ),
        fuse=st.none() | st.tuples(st.integers(1, 12), st.sampled_from(["cancel", "crash"])),
        seconds=st.sampled_from([0.0, 0.1, 5.0]),
    )
    def sleeps(
        self,
        i: int,
        level: int = 1,
        mode: str = "wait",
        faults: Sequence[tuple[str, int, str]] = (),
        fuse: tuple[int, str] | None = None,
        seconds: float = 5.0,
    ) -> None:
        if not self.world.supervised:
            return  # workers without a version are refused
        self._start(i, lambda process: process.sleep(level, mode), faults, fuse)
        self.advance(seconds)

    @rule(
        i=st.integers(0, 1),
        faults=st.lists(
            st.tuples(
                st.sampled_from(["wake", "resume", "declare", "taint"]),
                st.integers(0, 3),
                st.sampled_from(["before", "lost", "refuse", "hang", "die"]),
            ),
            max_size=1,
        ),
        fuse=st.none() | st.tuples(st.integers(1, 12), st.sampled_from(["cancel", "crash"])),
        seconds=st.sampled_from([0.0, 0.1, 5.0]),
    )
    def wakes(
        self,
        i: int,
        faults: Sequence[tuple[str, int, str]] = (),
        fuse: tuple[int, str] | None = None,
        seconds: float = 5.0,
    ) -> None:
        self._start(i, Coordinator.wake, faults, fuse)
        self.advance(seconds)

    def _start(
        self,
        i: int,
        operation: Callable[[Coordinator], Coroutine[Any, Any, str]],
        faults: Sequence[tuple[str, int, str]],
        fuse: tuple[int, str] | None,
    ) -> None:
        process = self._process(i)
        for route, index, kind in faults:
            if (worker := self._worker(index)) is not None:
                self.world.faults[route, worker.instance_id] = kind
        task = process.start(operation(process), process.under_way)
        if fuse is not None:
            crash = fuse[1] == "crash"
            process.admin.calls_left = fuse[0]
            process.admin.then = lambda: self._crash(process) if crash else task.cancel()

    # --- promises ----------------------------------------------------------------------------

    @invariant()
    def holds(self) -> None:
        for process in getattr(self, "processes", []):
            process.check_versions()
            assert not self.world.violations, self.world.violations

    def settles(self) -> None:
        """Check that everything ends by itself, and that one more refit repairs the fleet."""
        self.advance(DRAIN_SECONDS)
        for process in self.processes:
            assert not process.under_way, "an operation never ends"
            assert not process.sampling, "a rollout is lost"
        self.holds()
        self.world.faults.clear()
        self.world.listing_fails = 0
        for _ in range(2 if self.world.pools else 1):  # one of each role, if all are dead
            self.world.join()
        self.advance(DRAIN_SECONDS)
        run = self.loop.run_until_complete
        for process in self.processes:
            process.admin.calls_left = 0
            run(process.resume())
        process, version = self.processes[0], self.tried + 1
        outcome = run(process.refit(version, "", "in-flight"))
        assert outcome == "done", f"the last refit was {outcome}: {process.trouble}"
        (rollout,) = run(process.rollouts.generate([1], Sampling(max_tokens=3)))
        assert rollout.weight_version == version
        self.holds()

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            try:
                self.settles()
            finally:
                self.close()

    def close(self) -> None:
        self.patch.undo()
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.advance(0.0)
        self.loop.close()


TestRefitMachine = RefitMachine.TestCase
TestRefitMachine.settings = settings(
    max_examples=examples(150), stateful_step_count=20, deadline=None, derandomize=True
)


# --- faults that the machine has found, as short as possible ---------------------------------


@contextmanager
def machine(**options: Any) -> Iterator[RefitMachine]:
    refit_machine = RefitMachine()
    refit_machine.begin(seed=1, **options)
    try:
        yield refit_machine
    finally:
        refit_machine.close()


def joins_during_a_refit(m: RefitMachine) -> None:
    m.refits(0, seconds=0.0)
    m.joins(0.0)


def gets_its_label_during_a_refit(m: RefitMachine) -> None:
    m.joins(0.0)
    m.refits(0)


def misses_its_label(m: RefitMachine) -> None:
    m.refits(0, faults=[("declare", 0, "before")])


def is_resumed_by_a_user_during_a_refit(m: RefitMachine) -> None:
    for tick in range(5, 40):
        m.refits(0, seconds=tick / 1000)
        m.user_resumes(0)
        m.time_passes(6.0)


def is_resumed_by_a_user_after_an_unverified_load(m: RefitMachine) -> None:
    m.refits(0, faults=[("flush", 0, "before")])
    m.user_resumes(0)


def is_in_doubt_when_the_next_pause_fails(m: RefitMachine) -> None:
    m.refits(0, faults=[("flush", 0, "before")])
    m.refits(0, faults=[("pause", 1, "before")])


def is_in_doubt_when_a_users_pause_fails(m: RefitMachine) -> None:
    m.refits(0, faults=[("flush", 0, "before")])
    m.world.faults["pause", 2] = "refuse"
    m.user_pauses(0, "wait")


def has_the_weights_and_is_out_of_service(m: RefitMachine) -> None:
    m.refits(0, faults=[("resume", 0, "refuse")])
    m.refits_again(0, 0, "pause-all")


def joins_after_a_refused_refit(m: RefitMachine) -> None:
    m.refits(0)
    m.refits_wrongly(0, "other")
    m.joins(0.0)
    m.time_passes(6.0)
    m.admits(0)


def is_restored_while_the_refit_is_cancelled(m: RefitMachine) -> None:
    for call in range(12, 20):
        m.refits(0, faults=[("pause", 0, "before")], fuse=(call, "cancel"))


def resumes_and_its_answer_is_lost(m: RefitMachine) -> None:
    m.refits(0, faults=[("resume", 0, "lost")])


@pytest.mark.parametrize("verifying", [True, False], ids=["parameters", "canary"])
@pytest.mark.parametrize(
    "happens",
    [
        joins_during_a_refit,
        gets_its_label_during_a_refit,
        misses_its_label,
        is_resumed_by_a_user_during_a_refit,
        is_resumed_by_a_user_after_an_unverified_load,
        is_in_doubt_when_the_next_pause_fails,
        is_in_doubt_when_a_users_pause_fails,
        has_the_weights_and_is_out_of_service,
        joins_after_a_refused_refit,
        is_restored_while_the_refit_is_cancelled,
        resumes_and_its_answer_is_lost,
    ],
)
def test_the_promises_hold_for_a_worker_that(
    happens: Callable[[RefitMachine], None], verifying: bool
) -> None:
    with machine(verifying=verifying) as m:
        happens(m)
        m.time_passes(6.0)
        m.settles()


def loses_the_answer_to_its_order(m: RefitMachine) -> None:
    m.refits(0, faults=[("refit", 0, "lost")], busy=True)


def never_gets_its_order(m: RefitMachine) -> None:
    m.refits(0, "in-flight", faults=[("refit", 0, "before")], busy=True)


def refuses_its_order(m: RefitMachine) -> None:
    m.refits(0, "in-flight", faults=[("refit", 0, "refuse")], busy=True)


def dies_of_its_order(m: RefitMachine) -> None:
    m.refits(0, "in-flight", faults=[("refit", 0, "die")], busy=True)


def hangs_with_its_order(m: RefitMachine) -> None:
    m.refits(0, "in-flight", faults=[("refit", 0, "hang")], busy=True)


def swaps_half_of_the_weights(m: RefitMachine) -> None:
    m.refits(0, "in-flight", faults=[("refit", 0, "lie")], half=True, busy=True)


def runs_an_order_while_the_refit_is_cancelled(m: RefitMachine) -> None:
    for call in range(1, 17):
        m.refits(0, "pause-all", fuse=(call, "cancel"), busy=True, seconds=0.5)


def keeps_its_requests(m: RefitMachine) -> None:
    for _ in range(3):
        m.refits(0, "keep", busy=True, seconds=0.2)


def loses_the_answer_while_it_keeps_its_requests(m: RefitMachine) -> None:
    m.refits(0, "keep", faults=[("refit", 0, "lost")], busy=True)


def dies_while_it_keeps_its_requests(m: RefitMachine) -> None:
    m.refits(0, "keep", busy=True, seconds=0.3)
    m.dies(0)


def runs_an_order_while_the_client_crashes(m: RefitMachine) -> None:
    for call in range(1, 17):
        m.refits(0, "rolling", fuse=(call, "crash"), busy=True, seconds=0.5)


@pytest.mark.parametrize("shape", ["stack", "attached"])
@pytest.mark.parametrize(
    "happens",
    [
        joins_during_a_refit,
        gets_its_label_during_a_refit,
        is_resumed_by_a_user_during_a_refit,
        has_the_weights_and_is_out_of_service,
        loses_the_answer_to_its_order,
        never_gets_its_order,
        refuses_its_order,
        dies_of_its_order,
        hangs_with_its_order,
        swaps_half_of_the_weights,
        keeps_its_requests,
        loses_the_answer_while_it_keeps_its_requests,
        dies_while_it_keeps_its_requests,
        runs_an_order_while_the_refit_is_cancelled,
        runs_an_order_while_the_client_crashes,
    ],
)
def test_the_promises_hold_for_a_worker_that_takes_orders_and(
    happens: Callable[[RefitMachine], None], shape: str
) -> None:
    with machine(verifying=True, staging=True, orders=True, shape=shape) as m:
        happens(m)
        m.time_passes(6.0)
        assert any(call.route == "refit" for call in m.world.log)
        m.settles()


def test_a_lost_answer_to_an_order_costs_nothing() -> None:
    """The worker ends the order by itself, and its label tells that it serves the version."""
    with machine(verifying=True, staging=True, orders=True) as m:
        m.world.faults["refit", 1] = "lost"
        assert m.loop.run_until_complete(m.processes[0].refit(1)) == "done"


def test_a_cancelled_refit_ends_an_order_that_waits_for_requests() -> None:
    with machine(verifying=True, staging=True, orders=True, count=1) as m:
        process, (worker,) = m.processes[0], m.world.workers.values()
        process.start(process.sample(500), process.sampling)  # ten seconds
        m.time_passes(1.0)
        task = m.loop.create_task(process.refit(1))
        while not worker.paused:
            m.time_passes(0.01)
        task.cancel()
        began = m.world.now
        assert m.loop.run_until_complete(task) == "cancelled"
        assert m.world.now - began < 1.0
        assert (worker.paused, worker.label, worker.taints) == (False, 0, (taint_of(0),))
        m.settles()


def test_rollouts_that_an_order_cuts_keep_their_tokens_and_ask_nothing() -> None:
    """The engine answers from its version only, so no answer needs a question afterwards."""
    with machine(verifying=True, staging=True, orders=True, count=1) as m:
        process = m.processes[0]
        m.world.workers[1].load_seconds = 0.02
        m.loop.run_until_complete(process.refit(1))
        work = process.rollouts.generate([1, 2], Sampling(max_tokens=100), n=32)
        sampling = m.loop.create_task(work)
        m.time_passes(1.0)
        before = len(m.world.log)
        assert m.loop.run_until_complete(process.refit(2, "", "in-flight")) == "done"
        rollouts = m.loop.run_until_complete(sampling)
        assert all([span.version for span in r.spans] == [1, 2] for r in rollouts)
        assert [call.route for call in m.world.log[before:]] == ["check", "refit"]
        m.tried = 2
        m.settles()


def test_requests_that_a_refit_keeps_have_both_versions() -> None:
    with machine(verifying=True, staging=True, orders=True, count=1) as m:
        process = m.processes[0]
        m.world.workers[1].load_seconds = 0.02
        work = process.rollouts.generate([1, 2], Sampling(max_tokens=100), n=8)
        sampling = m.loop.create_task(work)
        m.time_passes(0.5)
        assert m.loop.run_until_complete(process.refit(1, "", "keep")) == "done"
        rollouts = m.loop.run_until_complete(sampling)
        for rollout in rollouts:
            process._check_rollout(rollout)
            assert [span.version for span in rollout.spans] == [0, 1]
        m.tried = 1
        m.settles()


def test_workers_that_cannot_keep_requests_are_named() -> None:
    with machine(verifying=True, staging=True) as m:
        assert m.loop.run_until_complete(m.processes[0].refit(1, "", "keep")) == "refused"
        assert "2 of 2 workers cannot keep running requests" in m.processes[0].trouble


def test_answers_sampled_beside_a_canary_are_discarded() -> None:
    """A stalled router delivers a request during a canary, the refit is cancelled, and another
    process asks the worker for its version."""
    m = RefitMachine()
    m.begin(seed=267, verifying=False, count=3)
    m.refits(
        0, "rolling", [("resume", 0, "before"), ("taint", 1, "before")], busy=True, seconds=0.5
    )
    m.refits(0, "rolling", busy=True, seconds=0.0)
    m.joins(0.0)
    m.refits(0, "rolling", busy=True)
    m.refits(0, "rolling", fuse=(31, "cancel"), busy=True, seconds=0.05)
    m.refits(1, busy=True)
    m.teardown()


# --- a refit that ends early frees staged updates --------------------------------------------


def another_worker_refuses_the_update(m: RefitMachine) -> str:
    m.world.faults["check", 2] = "refuse"
    return m.loop.run_until_complete(m.processes[0].refit(2))


def the_version_is_taken(m: RefitMachine) -> str:
    return m.loop.run_until_complete(m.processes[0].refit(1, "other"))


def the_version_is_served_already(m: RefitMachine) -> str:
    return m.loop.run_until_complete(m.processes[0].refit(1))


def a_pause_fails(m: RefitMachine) -> str:
    m.world.faults["pause", 2] = "refuse"
    return m.loop.run_until_complete(m.processes[0].refit(2))


def the_update_fails(m: RefitMachine) -> str:
    m.world.faults["update", 1] = m.world.faults["update", 2] = "refuse"
    return m.loop.run_until_complete(m.processes[0].refit(2))


def the_refit_is_cancelled_while_workers_stage(m: RefitMachine) -> str:
    task = m.loop.create_task(m.processes[0].refit(2))
    while not all(worker.staged for worker in m.world.workers.values()):
        m.time_passes(0.001)
    task.cancel()
    return m.loop.run_until_complete(task)


def the_refit_is_cancelled_before_the_swap(m: RefitMachine) -> str:
    task = m.loop.create_task(m.processes[0].refit(2))
    while not any(worker.paused for worker in m.world.workers.values()):
        m.time_passes(0.001)
    task.cancel()
    return m.loop.run_until_complete(task)


@pytest.mark.parametrize(
    ("happens", "outcome"),
    [
        (another_worker_refuses_the_update, "refused"),
        (the_version_is_taken, "refused"),
        (the_version_is_served_already, "done"),
        (a_pause_fails, "failed"),
        (the_update_fails, "failed"),
        (the_refit_is_cancelled_while_workers_stage, "cancelled"),
        (the_refit_is_cancelled_before_the_swap, "cancelled"),
    ],
)
def test_no_worker_keeps_a_second_model_when(
    happens: Callable[[RefitMachine], str], outcome: str
) -> None:
    with machine(verifying=True, staging=True) as m:
        for worker in m.world.workers.values():
            worker.load_seconds = 0.2
        assert m.loop.run_until_complete(m.processes[0].refit(1)) == "done"
        staged = sum(call.detail == "rollway_stage" for call in m.world.log)
        assert happens(m) == outcome
        assert sum(call.detail == "rollway_stage" for call in m.world.log) > staged
        assert [worker.staged for worker in m.world.workers.values()] == [None, None]
        m.holds()


# --- the same checks, with one protection switched off ---------------------------------------


Sabotage = Callable[[pytest.MonkeyPatch], None]


def run_story(
    sabotage: Sabotage, shape: str, verifying: bool, staging: bool = False, orders: bool = False
) -> int:
    """Run traffic through every mode, then an event for each protection. Return how many requests
    arrived late."""
    with machine(shape=shape, verifying=verifying, staging=staging, orders=orders) as m:
        run, process, world = m.loop.run_until_complete, m.processes[0], m.world
        sabotage(m.patch)
        for worker in world.workers.values():
            worker.lag, worker.load_seconds, worker.sticky = 0.05, 0.01, world.supervised
        world.workers[2].load_seconds = 0.5  # the others serve meanwhile

        def then(work: Coroutine[Any, Any, str], expected: str) -> None:
            outcome = run(work)
            m.holds()
            assert outcome == expected, process.trouble

        for version, mode in enumerate(MODES * 2, 1):
            for sampler in m.processes:
                sampler.start(sampler.traffic(80, 4), sampler.sampling)
            m.advance(0.2)
            then(process.refit(version, "", mode), "done")
            m.advance(2.0)
        then(process.refit(5), "refused")
        then(process.refit(6, "other"), "refused")
        world.faults["refit" if orders else "pause", 1] = "refuse"
        then(process.refit(7), "failed")
        # By calls also with orders: the worker is in doubt by now.
        world.faults["update", 1] = "half" if verifying else "refuse"
        then(process.refit(8, "", "rolling"), "failed")
        process.start(process.traffic(20), process.sampling)
        then(process.resume(), "failed")
        m.tried = 8
        m.settles()
        return sum(worker.late for worker in world.workers.values())


def nothing(patch: pytest.MonkeyPatch) -> None: ...


def late_answers_are_believed(patch: pytest.MonkeyPatch) -> None:
    """Requests that arrive late are aborted, but a stalled router sends even later."""
    patch.setattr(FleetVersions, "mark_entered", lambda *_: None)


def no_salt(patch: pytest.MonkeyPatch) -> None:
    real = FleetVersions.ticket
    patch.setattr(
        FleetVersions, "ticket", lambda self, version=None: replace(real(self, version), salt=None)
    )


def failed_workers_are_resumed(patch: pytest.MonkeyPatch) -> None:
    real = WorkerRefit.install

    async def install(self: WorkerRefit) -> None:
        await real(self)
        if self.report.state == "in doubt":
            await self.plan.admin.resume(self.worker)

    patch.setattr(WorkerRefit, "install", install)


def no_label_says_in_doubt(patch: pytest.MonkeyPatch) -> None:
    real = SimWorker.declare
    patch.setattr(SimWorker, "declare", lambda self, label: label >= 0 and real(self, label))


def a_failed_pause_is_not_undone(patch: pytest.MonkeyPatch) -> None:
    async def restore(self: WorkerRefit) -> None:
        self.report.state = "restored"

    patch.setattr(WorkerRefit, "restore", restore)


def staged_updates_are_kept(patch: pytest.MonkeyPatch) -> None:
    async def discard(self: WorkerRefit) -> None: ...

    patch.setattr(WorkerRefit, "discard", discard)


def updates_are_sent_again(patch: pytest.MonkeyPatch) -> None:
    real = SimUpdate.apply

    async def apply(self: SimUpdate, admin: Any, worker: Any, version: int) -> None:
        await real(self, admin, worker, version)
        await real(self, admin, worker, version)

    patch.setattr(SimUpdate, "apply", apply)


def versions_go_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FleetVersions, "claim", lambda *_: None)


def the_gate_stays_shut(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FleetVersions, "open", lambda _: None)


def every_answer_is_believed(patch: pytest.MonkeyPatch) -> None:
    async def yes(*_: object) -> bool:
        return True

    patch.setattr(Rollouts, "_is_attributed", yes)


def the_engine_admits_every_request(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sim_fleet, "version_in", lambda _: None)


def test_an_engine_that_admits_other_versions_is_noticed() -> None:
    with pytest.raises(AssertionError, match="stamped"):
        run_story(the_engine_admits_every_request, "stack", True, staging=True, orders=True)


def blocks_are_freed_while_others_fetch_them(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(stages, "_DROPPING", ("", "prefill", "decode"))
    patch.setattr(refit.Refit, "_can_release", lambda *_: True)


def one_pool_is_enough(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FleetVersions, "needed_roles", frozenset())


def old_blocks_are_fetched(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sim_fleet, "STALE_SECONDS", float("inf"))


def both_engines_admit_every_request(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SimWorker, "admits", lambda *_: True)


def run_pools(sabotage: Sabotage, *, orders: bool = True) -> None:
    """Run traffic through every mode with prefill and decode apart, and stop a decode worker for
    longer than blocks are held."""
    with machine(shape="pools", verifying=True, staging=True, orders=orders, count=3) as m:
        sabotage(m.patch)
        process, world = m.processes[0], m.world
        # What waits on the way to a decode worker keeps its prefill worker from changing weights.
        world.stalling = {"prefill": 0.3, "decode": 0.3 if orders else 0.0}
        decoding = next(worker for worker in world.workers.values() if worker.role == "decode")
        for worker in world.workers.values():
            worker.lag, worker.load_seconds, worker.sticky = 0.05, 0.01, orders

        async def observe(step: str, worker: Any) -> None:
            current = process.versions.current or 0
            if {w.role for w in world.workers.values() if w.served >= current} == {"prefill"}:
                world.broken(f"version {current} is current with prefill workers only")
            await world.observe(step, worker)

        process.fleet.observer = observe
        for version, mode in enumerate(MODES * 4, 1):
            for sampler in m.processes:
                sampler.start(sampler.traffic(120, 4), sampler.sampling)
            m.advance(0.2)
            outcome = m.loop.run_until_complete(process.refit(version, "", mode))
            m.holds()
            assert outcome == "done", process.trouble
            served = process.versions.current
            assert served == version, f"{served} is current after a refit to {version}"
            m.advance(2.0)
        process.start(process.traffic(20), process.sampling)
        m.advance(0.05)
        decoding.hang(sim_fleet.LEASE_SECONDS + 10.0)
        m.tried = 12
        m.settles()


@pytest.mark.parametrize("orders", [True, False], ids=["orders", "calls"])
def test_prefill_and_decode_never_mix_versions(orders: bool) -> None:
    run_pools(nothing, orders=orders)


@pytest.mark.parametrize(
    ("sabotage", "notices"),
    [
        (both_engines_admit_every_request, "stamped"),
        (one_pool_is_enough, "is current with prefill workers only"),
        (blocks_are_freed_while_others_fetch_them, "blocks that were freed"),
        (old_blocks_are_fetched, "blocks that were freed"),
    ],
)
def test_a_missing_protection_of_two_pools_is_noticed(sabotage: Sabotage, notices: str) -> None:
    with pytest.raises(AssertionError, match=notices):
        run_pools(sabotage)


@pytest.mark.parametrize("verifying", [True, False], ids=["parameters", "canary"])
@pytest.mark.parametrize("shape", ["stack", "untainted"])
def test_late_requests_are_aborted_and_not_served(shape: str, verifying: bool) -> None:
    assert run_story(nothing, shape, verifying) > 0


@pytest.mark.parametrize(
    ("sabotage", "shape", "notices"),
    [
        (late_answers_are_believed, "stack", "stamped"),
        (no_salt, "stack", "KV of"),
        (failed_workers_are_resumed, "stack", "failed and then got resume"),
        (no_label_says_in_doubt, "stack", "returned, worker 1 is"),
        (a_failed_pause_is_not_undone, "stack", "left paused"),
        (staged_updates_are_kept, "stack", "keeps a second model"),
        (updates_are_sent_again, "stack", "2 updates"),
        (versions_go_back, "stack", "goes from 6 to w5"),
        (the_gate_stays_shut, "stack", "shut=True"),
        (every_answer_is_believed, "untainted", "stamped"),
    ],
)
def test_a_missing_protection_is_noticed(sabotage: Sabotage, shape: str, notices: str) -> None:
    staging = sabotage is staged_updates_are_kept
    with pytest.raises(AssertionError, match=notices):
        run_story(sabotage, shape, verifying=True, staging=staging)
