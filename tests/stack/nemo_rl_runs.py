"""Runs of NeMo-RL's interface on light workers: opened, refitted, and checked by their samples."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rollway.errors import RollwayError
from rollway.integrations.nemo_rl.config import WeightSync
from rollway.integrations.nemo_rl.generation import Generation
from rollway.integrations.nemo_rl.synchronizer import Synchronizer
from tests.stack.nemo_rl import InProcessPolicy, make_batch, make_config
from tests.stack.policies import Policy
from tests.stack.serving import TOLERANCE, fresh_prompt

BOUND = 60.0
"""Within these seconds every fault must be named."""
FOREIGN = {"LIGHT_FOREIGN": "1"}


@contextmanager
def opened(spec: dict[str, Any]) -> Iterator[Generation]:
    generation = Generation(None, make_config(spec["models"][0]["name"], stack=spec))
    try:
        yield generation
    finally:
        generation.shutdown()


def make_synchronizer(
    generation: Generation, policy: Policy, seconds: float | None = None, **sync: Any
) -> Synchronizer:
    return Synchronizer(
        InProcessPolicy(policy.model),
        generation,
        WeightSync(**(sync or {"method": "files"})),
        refit_timeout_s=seconds,
        get=list,
    )


def expect_failure(synchronizer: Synchronizer, match: str) -> RollwayError:
    began = time.monotonic()
    with pytest.raises(RollwayError, match=match) as raised:
        synchronizer.sync_weights()
    assert time.monotonic() - began < BOUND
    assert synchronizer.is_stale
    return raised.value


def check_samples(generation: Generation, policy: Policy, version: int, count: int = 8) -> None:
    """Every sample is of this version, and of the weights that it names."""
    prompts = [fresh_prompt(20) for _ in range(count)]
    output = generation.generate(make_batch(*prompts))
    assert output["weight_versions"].tolist() == [[version, version]] * count
    for row, prompt in enumerate(prompts):
        end = int(output["unpadded_sequence_lengths"][row])
        ids = output["output_ids"][row, 20:end].tolist()
        logprobs = output["logprobs"][row, 20:end].tolist()
        assert policy.distance(prompt, ids, logprobs) < TOLERANCE


def read_versions(generation: Generation) -> dict[int, int | None]:
    return generation.connection.run(generation.connection.fleet.read_versions())
