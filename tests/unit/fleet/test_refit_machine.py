"""Whatever joins, leaves, hangs or fails while weights move: the promises of a refit hold.

Hypothesis drives the real fleet, refits and rollouts over simulated workers (sim_fleet.py). The
saboteurs at the end switch off one protection each; the same checks must then fail."""

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
from rollway.fleet.canary import canary
from rollway.fleet.fleet import Fleet
from rollway.fleet.refit import Refit
from rollway.fleet.report import RefitMode
from rollway.rollout.client import Rollout, Rollouts
from rollway.rollout.sampling import Sampling
from rollway.versions import VersionBook, taint_of
from tests.soak import examples
from tests.unit.fleet import sim_fleet
from tests.unit.fleet.sim_fleet import OP, Call, SimAdmin, SimLoop, SimUpdate, SimWorker, World

MODES: list[RefitMode] = ["pause-all", "rolling", "in-flight"]
TOUCHING = ("pause", "resume", "flush", "update", "declare", "taint")
FAULTS = ("before", "lost", "refuse", "hang", "die", "lie")
"""Nothing done, done and the answer lost, refused, hung, dead, and ok said with nothing done."""
DRAIN_SECONDS = 2000.0
"""Longer than every timeout together: what is not over then is lost."""

Tasks = set[asyncio.Task[Any]]


class Coordinator:
    """A process that refits and samples: a real `Fleet` and `Rollouts`, and checks around them."""

    def __init__(self, world: World, *, replacing: bool = False) -> None:
        self.world, self.admin = world, SimAdmin(world)
        http: Any = world
        self.fleet = Fleet(
            http,
            "sim",
            admin=self.admin,  # type: ignore[arg-type]
            canary=canary(http, "sim", "m"),
            replace=self._replace if replacing else None,
            guard=lambda: world.lock,  # type: ignore[arg-type, return-value]
            supervised=lambda _: world.supervised,
            shelf=world,
        )
        self.book = self.fleet.versions
        self.fleet.observer = world.observe
        self.book.tainted = world.supervised
        bounds = {"timeout": 200.0, "patience": 10.0}
        known = {"refresh": self.fleet.refresh, "confirms": self.fleet.confirms}
        self.rollouts = Rollouts(http, "sim", "m", self.book, **known, **bounds)
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
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self.world.broken(f"{task.exception()!r} is no error that a user should meet")

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

    async def traffic(self, times: int, length: int = 8) -> None:
        """So dense that some request is always under way when something changes."""
        for _ in range(times):
            self.start(self.sample(length), self.sampling)
            await asyncio.sleep(0.01)

    async def sample(self, length: int) -> None:
        try:
            found = await self.rollouts.generate([1, 2], Sampling(max_tokens=length))
        except RollwayError:
            return
        self._check_rollout(found[0])

    async def _operation(self, work: Callable[[], Awaitable[Any]], version: int | None) -> str:
        world, op, began = self.world, next(self.world.ops), self.world.now
        OP.set(op)
        reached = None
        try:
            report = await work()
            outcome, reached = "done", report and report.version
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
            calls = [call for call in touching if call.worker == worker.instance_id]
            if any(call.op != op for call in calls):
                continue  # another process has begun since
            if reached is not None:
                if calls or version is not None:
                    self._check_serving(worker, reached)
            elif worker.issued_by == op and not worker.paused:
                world.broken(f"worker {worker.instance_id} is in doubt and generates")
            elif not all(paused.values()):
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
        """After a refit that returned. Who got ready after the last listing is a joiner."""
        if worker.ready_at >= self.world.listed_at or self._paused_by_user(worker):
            return
        taints = (taint_of(version),) if self.world.tainting else ()
        state = worker.label, worker.weights, worker.taints, worker.paused
        if state != (version, sim_fleet.weights_of(version), taints, False):
            name = f"worker {worker.instance_id}"
            self.world.broken(f"a refit to {version} returned, {name} is {state}")

    def _check_undone(self, worker: SimWorker, mine: list[Call]) -> None:
        """After a refit that could not pause everybody: who got no update is back."""
        routes = [call.route for call in mine]
        lost = any(not call.ok for call in mine if call.route != "pause")
        marked = any(call.route == "declare" for call in mine)  # only one whose version is known
        known = (marked or (worker.label or 0) >= 0) and not self._paused_by_user(worker)
        if worker.paused and known and not lost and "pause" in routes and "update" not in routes:
            self.world.broken(f"worker {worker.instance_id} was left paused")

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

    def check_book(self) -> None:
        current = -1 if self.book.current is None else self.book.current
        if current < self._seen:
            self.world.broken(f"the current version went from {self._seen} to {current}")
        self._seen = current
        shut = self.book.moving and not self.user_paused
        if not self.under_way and (self.book.changing or shut):
            self.world.broken(f"nothing is under way, changing={self.book.changing}, {shut=}")


class RefitMachine(RuleBasedStateMachine):
    """Two processes, their workers, and everything that can happen to them."""

    @initialize(
        seed=st.integers(0, 10_000),
        proving=st.booleans(),
        shape=st.sampled_from(["stack", "stack", "attached", "untainted"]),
        count=st.integers(1, 3),
        replacing=st.booleans(),
    )
    def begin(
        self,
        seed: int,
        proving: bool,
        shape: str = "stack",
        count: int = 2,
        replacing: bool = False,
    ) -> None:
        self.loop, self.patch = SimLoop(), pytest.MonkeyPatch()
        self.world = World(self.loop, seed, proving=proving, shape=shape)
        self.world.install(self.patch)
        self.replacing = replacing and shape == "stack"
        self.tried = 0
        for _ in range(count):
            self.world.join()
        self._pass(0.1)
        # Without the launcher's taints, stamps rest on what one process knows: only one refits.
        self.everyone = [self._coordinator() for _ in range(2 if shape == "stack" else 1)]
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
        who.admin.crashed = True
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

    @rule(i=st.integers(0, 1), times=st.sampled_from([1, 5, 40]), length=st.integers(1, 30))
    def samples(self, i: int, times: int, length: int) -> None:
        self._who(i).start(self._who(i).traffic(times, length), self._who(i).sampling)

    @rule(
        i=st.integers(0, 1),
        mode=st.sampled_from(MODES),
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
        who = self._who(i)
        if busy:
            self.samples(i, 40, 8)
            self._pass(0.1)
        for route, index, kind in faults:
            worker = self._worker(index)
            if kind == "lie" and route not in ("update", "flush"):
                continue  # nobody could tell
            if worker is not None:
                # Half a load that passes for a whole one shows in the parameters only.
                kind = "half" if kind == "lie" and half and self.world.proving else kind
                self.world.faults[route, worker.instance_id] = kind
        self.tried += 1
        task = who.start(who.refit(self.tried, "", mode), who.under_way)
        if fuse is not None:
            crash = fuse[1] == "crash"
            who.admin.calls_left = fuse[0]
            who.admin.then = lambda: self._crash(who) if crash else task.cancel()
        self._pass(seconds)

    @rule(i=st.integers(0, 1), back=st.integers(0, 2), mode=st.sampled_from(MODES))
    def refits_again(self, i: int, back: int, mode: RefitMode) -> None:
        who = self._who(i)
        if back < self.tried:
            who.start(who.refit(self.tried - back, "", mode), who.under_way)

    @rule(i=st.integers(0, 1), weights=st.sampled_from(["bad", "unfit", "other"]))
    def refits_wrongly(self, i: int, weights: str) -> None:
        """No checkpoint, one of other shapes, or a version that is taken."""
        who = self._who(i)
        self.tried += 1
        version = (who.book.current or 0) if weights == "other" else self.tried
        if version and (weights != "unfit" or self.world.proving):
            who.start(who.refit(version, weights), who.under_way)

    @rule(i=st.integers(0, 1))
    def admits(self, i: int) -> None:
        self._who(i).start(self._who(i).admit(), self._who(i).under_way)

    @rule(i=st.integers(0, 1), mode=st.sampled_from(["wait", "keep", "abort"]))
    def user_pauses(self, i: int, mode: str) -> None:
        self._who(i).start(self._who(i).pause(mode), self._who(i).under_way)

    @rule(i=st.integers(0, 1))
    def user_resumes(self, i: int) -> None:
        self._who(i).start(self._who(i).resume(), self._who(i).under_way)

    # --- what must hold ----------------------------------------------------------------------

    @invariant()
    def holds(self) -> None:
        for who in getattr(self, "everyone", []):
            who.check_book()
            assert not self.world.violations, self.world.violations

    def settles(self) -> None:
        """Left alone everything comes to an end, and one more refit puts the fleet right."""
        self._pass(DRAIN_SECONDS)
        for who in self.everyone:
            assert not who.under_way, "an operation never ends"
            assert not who.sampling, "a rollout is lost"
        self.holds()
        self.world.faults.clear()
        self.world.listing_fails = 0
        self.world.join()
        self._pass(DRAIN_SECONDS)
        run = self.loop.run_until_complete
        for who in self.everyone:
            who.admin.calls_left = 0
            run(who.resume())
        who, version = self.everyone[0], self.tried + 1
        outcome = run(who.refit(version, "", "in-flight"))
        assert outcome == "done", f"the last refit was {outcome}: {who.trouble}"
        found = run(who.rollouts.generate([1], Sampling(max_tokens=3)))
        assert found[0].weight_version == version
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
        self._pass(0.0)
        self.loop.close()


TestRefitMachine = RefitMachine.TestCase
TestRefitMachine.settings = settings(
    max_examples=examples(150), stateful_step_count=20, deadline=None, derandomize=True
)


# --- what it has found, as short as it gets --------------------------------------------------


@contextmanager
def machine(**options: Any) -> Iterator[RefitMachine]:
    made = RefitMachine()
    made.begin(seed=1, **options)
    try:
        yield made
    finally:
        made.close()


def joins_during_a_refit(m: RefitMachine) -> None:
    m.refits(0, seconds=0.0)
    m.joins(0.0)


def gets_its_label_during_a_refit(m: RefitMachine) -> None:
    m.joins(0.0)
    m.refits(0)


def does_not_hear_that_it_is_in_doubt(m: RefitMachine) -> None:
    m.refits(0, faults=[("declare", 0, "before")])


def is_resumed_by_a_user_during_a_refit(m: RefitMachine) -> None:
    for tick in range(5, 40):
        m.refits(0, seconds=tick / 1000)
        m.user_resumes(0)
        m.time_passes(6.0)


def is_resumed_by_a_user_after_an_unproven_load(m: RefitMachine) -> None:
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


def is_heard_and_the_answer_is_lost(m: RefitMachine) -> None:
    m.refits(0, faults=[("resume", 0, "lost")])


@pytest.mark.parametrize("proving", [True, False], ids=["parameters", "canary"])
@pytest.mark.parametrize(
    "happens",
    [
        joins_during_a_refit,
        gets_its_label_during_a_refit,
        does_not_hear_that_it_is_in_doubt,
        is_resumed_by_a_user_during_a_refit,
        is_resumed_by_a_user_after_an_unproven_load,
        is_in_doubt_when_the_next_pause_fails,
        is_in_doubt_when_a_users_pause_fails,
        has_the_weights_and_is_out_of_service,
        joins_after_a_refused_refit,
        is_restored_while_the_refit_is_cancelled,
        is_heard_and_the_answer_is_lost,
    ],
)
def test_a_worker_that(happens: Callable[[RefitMachine], None], proving: bool) -> None:
    with machine(proving=proving) as m:
        happens(m)
        m.time_passes(6.0)
        m.settles()


def test_what_a_worker_samples_beside_its_canary_is_not_believed() -> None:
    """A stalled router delivers while a canary is heard, the refit is cancelled, and another
    process asks the worker whether it had changed."""
    m = RefitMachine()
    m.begin(seed=267, proving=False, count=3)
    m.refits(
        0, "rolling", [("resume", 0, "before"), ("taint", 1, "before")], busy=True, seconds=0.5
    )
    m.refits(0, "rolling", busy=True, seconds=0.0)
    m.joins(0.0)
    m.refits(0, "rolling", busy=True)
    m.refits(0, "rolling", fuse=(31, "cancel"), busy=True, seconds=0.05)
    m.refits(1, busy=True)
    m.teardown()


# --- the same checks, with one protection switched off ---------------------------------------


def story(sabotage: Callable[[pytest.MonkeyPatch], None], shape: str, proving: bool) -> int:
    """Traffic through every mode, then what each protection is there for; tells how many requests
    came late."""
    with machine(shape=shape, proving=proving) as m:
        run, who, world = m.loop.run_until_complete, m.everyone[0], m.world
        sabotage(m.patch)
        for worker in world.workers.values():
            worker.lag, worker.load_seconds, worker.sticky = 0.05, 0.01, world.supervised
        world.workers[2].load_seconds = 0.5  # the others serve meanwhile

        def then(work: Coroutine[Any, Any, str], outcome: str) -> None:
            got = run(work)
            m.holds()
            assert got == outcome, who.trouble

        for version, mode in enumerate(MODES * 2, 1):
            for process in m.everyone:
                process.start(process.traffic(80, 4), process.sampling)
            m._pass(0.2)
            then(who.refit(version, "", mode), "done")
            m._pass(2.0)
        then(who.refit(5), "refused")
        then(who.refit(6, "other"), "refused")
        world.faults["pause", 1] = "refuse"
        then(who.refit(7), "failed")
        world.faults["update", 1] = "half" if proving else "refuse"
        then(who.refit(8, "", "rolling"), "failed")
        who.start(who.traffic(20), who.sampling)
        then(who.resume(), "failed")
        m.tried = 8
        m.settles()
        return sum(worker.late for worker in world.workers.values())


def nothing(patch: pytest.MonkeyPatch) -> None: ...


def late_answers_are_believed(patch: pytest.MonkeyPatch) -> None:
    """What a router sends late is aborted, and kept away, but a stalled one sends even later."""
    patch.setattr(VersionBook, "enters", lambda *_: None)


def no_salt(patch: pytest.MonkeyPatch) -> None:
    real = VersionBook.ticket
    patch.setattr(
        VersionBook, "ticket", lambda self, version=None: replace(real(self, version), salt=None)
    )


def failed_workers_are_resumed(patch: pytest.MonkeyPatch) -> None:
    real = Refit._move_one

    async def move_one(self: Refit, worker: Any) -> None:
        await real(self, worker)
        if self._state(worker).state == "in doubt":
            await self.admin.resume(worker)

    patch.setattr(Refit, "_move_one", move_one)


def no_label_says_in_doubt(patch: pytest.MonkeyPatch) -> None:
    real = SimWorker.declare
    patch.setattr(SimWorker, "declare", lambda self, label: label >= 0 and real(self, label))


def a_failed_pause_is_not_undone(patch: pytest.MonkeyPatch) -> None:
    async def restore(self: Refit, group: list[Any]) -> None:
        for worker in group:
            self._state(worker).state = "restored"

    patch.setattr(Refit, "_restore", restore)


def updates_are_sent_again(patch: pytest.MonkeyPatch) -> None:
    real = SimUpdate.apply

    async def apply(self: SimUpdate, admin: Any, worker: Any, version: int) -> None:
        await real(self, admin, worker, version)
        await real(self, admin, worker, version)

    patch.setattr(SimUpdate, "apply", apply)


def versions_go_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(VersionBook, "claim", lambda *_: None)


def the_gate_stays_shut(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(VersionBook, "open", lambda _: None)


def every_answer_is_believed(patch: pytest.MonkeyPatch) -> None:
    async def yes(*_: object) -> bool:
        return True

    patch.setattr(Rollouts, "_vouched", yes)


@pytest.mark.parametrize("proving", [True, False], ids=["parameters", "canary"])
@pytest.mark.parametrize("shape", ["stack", "untainted"])
def test_requests_that_come_late_are_aborted_not_served(shape: str, proving: bool) -> None:
    assert story(nothing, shape, proving) > 0


@pytest.mark.parametrize(
    ("sabotage", "shape", "notices"),
    [
        (late_answers_are_believed, "stack", "stamped"),
        (no_salt, "stack", "KV of"),
        (failed_workers_are_resumed, "stack", "failed and then got resume"),
        (no_label_says_in_doubt, "stack", "returned, worker 1 is"),
        (a_failed_pause_is_not_undone, "stack", "left paused"),
        (updates_are_sent_again, "stack", "2 updates"),
        (versions_go_back, "stack", "goes from 6 to w5"),
        (the_gate_stays_shut, "stack", "shut=True"),
        (every_answer_is_believed, "untainted", "stamped"),
    ],
)
def test_a_protection_that_is_missing_is_noticed(
    sabotage: Callable[[pytest.MonkeyPatch], None], shape: str, notices: str
) -> None:
    with pytest.raises(AssertionError, match=notices):
        story(sabotage, shape, proving=True)
