"""Asynchronous GRPO in NeMo-RL's order, 20 steps, on workers that come and go: no stale token.

    collector (thread)   groups of rollouts, at most one batch ahead of the trainer
    trainer              take a batch ─► compare, train ─► drain the collector ─► metrics ─► refit
                         ─► set the version ─► resume the collector ─► clear the metrics

Every token is compared with the log-probs of the weights whose version its sample names.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import rollway
from rollway.demo.grpo import RolloutBatch, group_advantages
from rollway.demo.task import CountingPrompt, CountingTask
from rollway.fleet.report import RefitReport
from rollway.fleet.workers import Worker
from rollway.integrations.nemo_rl.config import WeightSync
from rollway.integrations.nemo_rl.generation import Generation
from rollway.integrations.nemo_rl.synchronizer import Synchronizer
from tests.nemo_rl.conftest import MODEL_ARGS
from tests.nemo_rl.policy import Policy, get
from tests.nemo_rl.rollouts import GROUP_SIZE, GROUPS, Outcome, Samples, check, collect
from tests.waiting import wait_until

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(900)]

STEPS, JOIN, KILL = 20, 5, 12
"""The steps in all, and those whose refit a worker joins and another does not survive."""
TOLERANCE = 1e-4


class Collector:
    """Collects groups of rollouts in a thread, as NeMo-RL's AsyncTrajectoryCollector does in an
    actor: those of the next step are sampled while the trainer is at work on this one's."""

    def __init__(self, generation: Generation, task: CountingTask) -> None:
        self._generation, self._task = generation, task
        self._groups: list[Future[tuple[CountingPrompt, Samples]]] = []
        self._rng = random.Random(0)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def resume(self, step: int) -> None:
        """Begin the groups up to those of the step after this one."""
        while len(self._groups) < (step + 2) * GROUPS:
            for prompt in self._task.prompts(GROUPS, self._rng):
                work = self._collect(prompt)
                self._groups.append(asyncio.run_coroutine_threadsafe(work, self._loop))

    def take(self, step: int) -> list[tuple[CountingPrompt, Samples]]:
        """Return the groups of a step, as soon as all of them have ended."""
        return [group.result(120) for group in self._groups[step * GROUPS : (step + 1) * GROUPS]]

    def drain(self) -> None:
        """Wait until no rollout runs."""
        for group in self._groups:
            group.result(120)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _collect(self, prompt: CountingPrompt) -> tuple[CountingPrompt, Samples]:
        return prompt, await collect(self._generation, [prompt] * GROUP_SIZE)


@dataclass
class Faults:
    """Hold one refit until a new worker has joined, and kill a worker in a later one."""

    generation: Generation
    base_model: Path
    step: int = -1
    is_joining: bool = False
    killed: int | None = None
    cleanup: ExitStack = field(default_factory=ExitStack)

    async def observe(self, name: str, worker: Worker) -> None:
        if self.step == JOIN and name == "verify" and not self.is_joining:
            self.is_joining = True
            # The worker's own refit goes on; only the fleet's waits, until there is a new member.
            await asyncio.to_thread(self._start_worker)
        if self.step == KILL and name == "update" and self.killed is None:
            state = self.generation.connection.stack.read_state()
            assert state is not None
            pids = {process.instance: process.pid for process in state.processes}
            if (pid := pids.get(worker.instance_id)) is not None:
                self.killed = worker.instance_id
                os.kill(pid, signal.SIGKILL)

    def _start_worker(self) -> None:
        connection = self.generation.connection
        model = {"path": str(self.base_model), "name": connection.model}
        model["args"] = MODEL_ARGS  # a frontend leaves out workers with another context length
        spec = {**connection.stack.join_spec, "name": "joiner", "models": [model]}
        self.cleanup.enter_context(rollway.up(spec))


@contextmanager
def opened(generation: Generation, task: CountingTask, base_model: Path) -> Iterator[Any]:
    collector, faults = Collector(generation, task), Faults(generation, base_model)
    generation.connection.fleet.observer = faults.observe
    try:
        yield collector, faults
    finally:
        generation.connection.fleet.observer = None
        collector.close()
        faults.cleanup.close()


def make_batch(task: CountingTask, groups: list[tuple[CountingPrompt, Samples]]) -> RolloutBatch:
    rewards = [[task.reward(prompt, ids) for ids, _, _ in samples] for prompt, samples in groups]
    return RolloutBatch(
        [prompt.token_ids for prompt, samples in groups for _ in samples],
        [ids for _, samples in groups for ids, _, _ in samples],
        group_advantages(torch.tensor(rewards)).flatten().tolist(),
        [logprobs for _, samples in groups for _, logprobs, _ in samples],
    )


def test_twenty_asynchronous_steps_with_a_join_and_a_death(
    generation: Generation,
    policy: Policy,
    task: CountingTask,
    base_model: Path,
    session_home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ROLLWAY_HOME", str(session_home))
    sync = WeightSync(method="shm", shards=True)
    synchronizer = Synchronizer(policy, generation, sync, get=get)
    outcome, reports, worst, ages = Outcome(), list[RefitReport](), 0.0, list[int]()
    policy.call("reset")
    current = int(synchronizer.sync_weights()["version"])
    policy.call("keep", version=current)
    with opened(generation, task, base_model) as (collector, faults):
        collector.resume(0)
        for step in range(STEPS):
            groups = collector.take(step)
            outcome.versions += [versions for _, samples in groups for *_, versions in samples]
            mismatches = []
            # The first batches of a version may hold samples of the one before.
            by_version: dict[int, list[tuple[CountingPrompt, Samples]]] = {}
            for group in groups:
                (version,) = {newest for *_, (_, newest) in group[1]}
                by_version.setdefault(version, []).append(group)
            for version, some in by_version.items():
                ages.append(current - version)
                batch = make_batch(task, some)
                mismatch, difference = policy.call("compare", batch=batch, version=version)[0]
                mismatches.append(mismatch)
                worst = max(worst, difference)
            outcome.mismatches.append(max(mismatches))
            scores = [task.reward(prompt, ids) for prompt, samples in groups for ids, *_ in samples]
            outcome.rewards.append(sum(scores) / len(scores))
            policy.call("train", batch=make_batch(task, groups))

            collector.drain()
            generation.get_logger_metrics()
            faults.step = step
            figures = synchronizer.sync_weights()
            assert synchronizer.report is not None
            reports.append(synchronizer.report)
            current = int(figures["version"])
            policy.call("keep", version=current)
            if step + 2 < STEPS:
                collector.resume(step + 1)
            generation.clear_logger_metrics()
            print(
                f"step {step}: reward {outcome.rewards[-1]:.3f}, KL {outcome.mismatches[-1]:.1e}, "
                f"version {current}, workers {figures['workers']:g}, passes {figures['passes']:g}, "
                f"refit {figures['seconds']:.2f} s"
            )
        check(outcome)
        print(f"largest difference of one token: {worst:.1e}; ages of batches: {sorted(set(ages))}")
        assert worst < TOLERANCE
        assert set(ages) == {0, 1}  # asynchronous, and never further behind
        # The refit that a worker joined: a second pass brought it to the version, and proved it.
        assert [worker.state for worker in reports[JOIN].workers] == ["serving"] * 4
        assert reports[JOIN].passes == 2
        assert all(worker.proof == "parameters" for worker in reports[JOIN].workers)
        # The refit with the death: the others serve, and the trainer went on.
        states = {worker.instance_id: worker.state for worker in reports[KILL].workers}
        assert faults.killed is not None
        assert states.pop(faults.killed) in ("gone", "replaced")
        assert set(states.values()) == {"serving"}
        # Its successor catches up without a refit by the trainer.
        connection = generation.connection
        wait_until(
            lambda: (
                list(connection.run(connection.fleet.read_versions()).values()).count(current) == 4
            )
        )
        synchronizer.shutdown()  # it removes the version that the successor is refitted from
