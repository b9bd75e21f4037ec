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
from collections import UserDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from rollway.demo.grpo import RolloutBatch, group_advantages
from rollway.demo.task import CountingTask, Prompt
from rollway.integrations.nemo_rl.config import WeightSync
from rollway.integrations.nemo_rl.generation import Generation
from rollway.integrations.nemo_rl.synchronizer import Synchronizer
from tests.nemo_rl.policy import Policy, get
from tests.stack.stacks import VLLM_ARGS

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]

GROUPS, GROUP_SIZE, STEPS = 10, 8, 12


class Batch(UserDict[str, Any]):
    """Stands in for NeMo-RL's BatchedDataDict."""


@dataclass
class Outcome:
    rewards: list[float] = field(default_factory=list)
    mismatches: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)

    @property
    def first(self) -> float:
        return sum(self.rewards[:2]) / 2

    @property
    def last(self) -> float:
        return sum(self.rewards[-2:]) / 2


@pytest.fixture(scope="module")
def generation(base_model: Path, session_home: Path) -> Iterator[Generation]:
    model = {"args": {**VLLM_ARGS, "max-num-seqs": 32}}
    config = {
        "backend": "dynamo",
        "model_name": str(base_model),
        "dynamo_cfg": {"stack": {"models": [model]}, "workers": 3, "control_timeout_s": 60},
        "vllm_cfg": {"max_model_len": 512, "precision": "fp32"},
        "max_new_tokens": 12, "temperature": 1.0, "top_p": 1.0, "top_k": None,
        "stop_token_ids": None, "stop_strings": None, "_pad_token_id": 0,
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLWAY_HOME", str(session_home))
        opened = Generation(None, config)
    yield opened
    opened.shutdown()


@pytest.fixture(scope="module")
def policy(base_model: Path) -> Iterator[Policy]:
    opened = Policy(base_model)
    yield opened
    opened.worker_group.close()


@pytest.fixture(scope="module")
def task(base_model: Path) -> CountingTask:
    return CountingTask(AutoTokenizer.from_pretrained(base_model))


async def collect(
    generation: Generation, prompts: list[Prompt]
) -> list[tuple[list[int], list[float], tuple[int, int]]]:
    """Sample as NeMo-RL's rollouts do: one `generate_async` of one prompt for each sample."""

    async def sample(prompt: Prompt) -> tuple[list[int], list[float], tuple[int, int]]:
        ids = torch.tensor([prompt.token_ids])
        data = Batch({"input_ids": ids, "input_lengths": torch.tensor([ids.shape[1]])})
        async for _, output in generation.generate_async(data):
            start, end = ids.shape[1], int(output["unpadded_sequence_lengths"][0])
            assert output["output_ids"][0, :start].tolist() == prompt.token_ids
            assert not output["logprobs"][0, :start].any()
            return (
                output["output_ids"][0, start:end].tolist(),
                output["logprobs"][0, start:end].tolist(),
                tuple(output["weight_versions"][0].tolist()),
            )
        raise AssertionError("nothing was generated")

    return await asyncio.gather(*(sample(prompt) for prompt in prompts))


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


def check(outcome: Outcome) -> None:
    """The engines sampled from the trainer's weights at every step, and the policy learnt."""
    assert max(outcome.mismatches) < 1e-3
    assert outcome.last > 2 * outcome.first
    assert all(oldest == newest for oldest, newest in outcome.versions)  # no mixed sample


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
    sync: dict[str, Any], generation: Generation, policy: Policy, task: CountingTask
) -> None:
    synchronizer = Synchronizer(policy, generation, WeightSync(**sync), get=get)
    try:
        check(train(generation, policy, synchronizer, task))
    finally:
        synchronizer.shutdown()


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
