"""GRPO through NeMo-RL's interface, in NeMo-RL's order, on three vLLM workers: it learns.

The trainer has two ranks with FSDP2 shards (`policy.py` stands in for NeMo-RL's policy workers,
which need CUDA). Every refit is checked by the mismatch between the trainer's log-probs and the
engines'.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from rollway.demo.grpo import RolloutBatch, group_advantages
from rollway.demo.task import CountingTask
from rollway.integrations.nemo_rl.config import WeightSync
from rollway.integrations.nemo_rl.generation import Generation
from rollway.integrations.nemo_rl.synchronizer import Synchronizer
from tests.conftest import Cli
from tests.megatron.package import install_megatron
from tests.nemo_rl.megatron_policy import MegatronRank
from tests.nemo_rl.policy import Policy, get
from tests.nemo_rl.rollouts import GROUP_SIZE, GROUPS, Outcome, check, collect
from tests.steps import check_steps

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]

STEPS = 12


def train(
    generation: Generation,
    policy: Policy,
    synchronizer: Synchronizer,
    task: CountingTask,
    steps: int = STEPS,
    *,
    refits: bool = True,
) -> Outcome:
    """Train from the base weights; without `refits` the engines keep them."""
    rng, outcome = random.Random(0), Outcome()
    policy.call("reset")
    synchronizer.sync_weights()  # NeMo-RL's initial refit
    for step in range(steps):
        deal = [p for p in task.prompts(GROUPS, rng) for _ in range(GROUP_SIZE)]
        samples = asyncio.run(collect(generation, deal))
        rewards = [task.reward(p, ids) for p, (ids, _, _) in zip(deal, samples, strict=True)]
        shaped = group_advantages(torch.tensor(rewards).view(GROUPS, GROUP_SIZE))
        batch = RolloutBatch(
            [p.token_ids for p in deal],
            [ids for ids, _, _ in samples],
            shaped.flatten().tolist(),
            [logprobs for _, logprobs, _ in samples],
        )
        mismatch = policy.call("train", batch=batch)
        outcome.rewards.append(sum(rewards) / len(rewards))
        outcome.mismatches.append(max(mismatch))
        outcome.versions += [versions for _, _, versions in samples]
        generation.get_logger_metrics()
        if refits:
            figures = synchronizer.sync_weights()
            assert figures["workers"] >= 1
        generation.invalidate_kv_cache()
        generation.clear_logger_metrics()
        print(f"step {step}: reward {outcome.rewards[-1]:.3f}, KL {outcome.mismatches[-1]:.1e}")
    return outcome


@pytest.mark.parametrize(
    "sync",
    [
        {"method": "shm", "shards": True},
        {"method": "collective"},
        pytest.param({"method": "nixl", "shards": True}, marks=pytest.mark.slow),
        pytest.param({"method": "files"}, marks=pytest.mark.slow),
        pytest.param({"method": "delta"}, marks=pytest.mark.slow),
        pytest.param({"method": "auto"}, marks=pytest.mark.slow),
    ],
    ids=lambda sync: f"{sync['method']}{'-shards' if sync.get('shards') else ''}",
)
def test_it_learns(
    sync: dict[str, Any], generation: Generation, policy: Policy, task: CountingTask, cli: Cli
) -> None:
    began = time.time()
    synchronizer = Synchronizer(policy, generation, WeightSync(**sync), get=get)
    try:
        check(train(generation, policy, synchronizer, task))
    finally:
        synchronizer.shutdown()
    record = generation.connection.stack.record_dir
    assert record is not None
    check_steps(record, range(1, STEPS + 1), cli, since=began)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["shm", "nixl"])
def test_it_trains_from_megatron_ranks(
    method: str, generation: Generation, base_model: Path, task: CountingTask
) -> None:
    """Two tensor-parallel ranks of megatron-core publish their own shards."""
    install_megatron()
    policy = Policy(base_model, rank_class=MegatronRank)
    sync = WeightSync(method=method, shards=True)
    synchronizer = Synchronizer(policy, generation, sync, get=get)
    try:
        check(train(generation, policy, synchronizer, task))
    finally:
        synchronizer.shutdown()
        policy.worker_group.close()


@pytest.mark.slow
def test_without_refits_it_does_not(
    generation: Generation, policy: Policy, task: CountingTask
) -> None:
    synchronizer = Synchronizer(policy, generation, WeightSync(method="shm"), get=get)
    try:
        outcome = train(generation, policy, synchronizer, task, refits=False)
    finally:
        synchronizer.shutdown()
    assert outcome.last < 2 * outcome.first
    assert max(outcome.mismatches) > 1e-3


@pytest.mark.slow
def test_it_learns_while_a_worker_dies(
    generation: Generation,
    policy: Policy,
    task: CountingTask,
    session_home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker is killed in the third refit. Its successor joins on the current version."""
    monkeypatch.setenv("ROLLWAY_HOME", str(session_home))
    synchronizer = Synchronizer(policy, generation, WeightSync(method="shm"), get=get)
    state = generation.connection.stack.read_state()
    assert state is not None
    victim = next(process for process in state.processes if process.role == "worker")
    seen = 0

    async def kill(step: str, worker: Any) -> None:
        nonlocal seen
        seen += 1
        if seen == 12 and victim.pid is not None:
            os.kill(victim.pid, signal.SIGKILL)

    generation.connection.fleet.observer = kill
    try:
        outcome = train(generation, policy, synchronizer, task)
    finally:
        generation.connection.fleet.observer = None
        synchronizer.shutdown()
    assert seen >= 12
    check(outcome)
