"""What the trainings share: rollouts as NeMo-RL takes them, and what a training must show."""

from __future__ import annotations

import asyncio
from collections import UserDict
from dataclasses import dataclass, field
from typing import Any

import torch

from rollway.demo.task import CountingPrompt
from rollway.integrations.nemo_rl.generation import Generation

GROUPS, GROUP_SIZE = 10, 8

Samples = list[tuple[list[int], list[float], tuple[int, int]]]


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


async def collect(generation: Generation, prompts: list[CountingPrompt]) -> Samples:
    """Sample as NeMo-RL's rollouts do: one `generate_async` of one prompt for each sample."""

    async def sample(prompt: CountingPrompt) -> tuple[list[int], list[float], tuple[int, int]]:
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


def check(outcome: Outcome) -> None:
    """The engines sampled from the trainer's weights at every step, and the policy learnt."""
    assert max(outcome.mismatches) < 1e-3
    assert outcome.last > 2 * outcome.first
    assert all(oldest == newest for oldest, newest in outcome.versions)  # no mixed sample
