"""A machine that lets two processes, their workers and all events meet in any order.

Hypothesis runs it in test_refit_machine.py; other tests play single events on it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rollway.fleet.report import RefitMode
from rollway.rollout.sampling import Sampling
from tests.unit.fleet.coordinator import TOUCHING, UPDATES, Coordinator
from tests.unit.fleet.sim_fleet import SimLoop, SimWorker, World

MODES: list[RefitMode] = ["pause-all", "rolling", "in-flight"]
FAULTS = ("before", "lost", "refuse", "hang", "die", "lie")
"""Nothing done, done but the answer lost, refused, hung, dead, and success without an effect."""
DRAIN_SECONDS = 2000.0
"""Longer than all timeouts together: an operation that has not ended by then never ends."""


class RefitMachine(RuleBasedStateMachine):
    """Two processes, their workers, and all events that can happen to them."""

    @initialize(
        seed=st.integers(0, 10_000),
        kind=st.sampled_from(
            [
                ("managed", "stack"),
                ("managed", "stack"),
                ("managed", "attached"),
                ("managed", "pools"),
                ("foreign", "stack"),
                ("foreign", "attached"),
                ("foreign", "plain"),
            ]
        ),
        count=st.integers(1, 3),
        replacing=st.booleans(),
        answer_seconds=st.sampled_from([0.0, 1.0]),
        unknown_seconds=st.sampled_from([0.0, 0.05, 3.0]),
    )
    def begin(
        self,
        seed: int,
        kind: tuple[str, str] = ("managed", "stack"),
        count: int = 2,
        replacing: bool = False,
        answer_seconds: float = 0.0,
        unknown_seconds: float = 0.0,
    ) -> None:
        self.loop, self.patch = SimLoop(), pytest.MonkeyPatch()
        self.world = World(self.loop, seed, managed=kind[0] == "managed", shape=kind[1])
        self.world.install(self.patch)
        self.world.answer_seconds = answer_seconds
        self.world.unknown_seconds = unknown_seconds
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
                kind = "half" if kind == "lie" and half and self.world.managed else kind
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
        if version and (weights != "unfit" or self.world.managed):
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
        if not (self.world.supervised and self.world.managed):
            return  # workers without a version are refused, and foreign ones
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


@contextmanager
def machine(**options: Any) -> Iterator[RefitMachine]:
    refit_machine = RefitMachine()
    refit_machine.begin(**{"seed": 1, **options})
    try:
        yield refit_machine
    finally:
        refit_machine.close()
