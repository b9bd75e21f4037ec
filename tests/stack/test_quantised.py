"""A worker that quantises what it loads: no offers; a checkpoint gets scales of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

import rollway
from rollway.errors import UsageError
from rollway.rollout.sampling import Sampling
from rollway.weights.transports.shm import ShmPublisher
from tests.stack.policies import Policy
from tests.stack.stacks import VLLM_ARGS

pytestmark = pytest.mark.stack

PROMPT = list(range(30, 90))
GREEDY = Sampling(max_tokens=24, temperature=0.0, ignore_eos=True)
TOLERANCE = 0.1  # of int8 and bfloat16; another policy is at 10


@pytest.fixture
def stack(base_model: Path) -> Iterator[rollway.Stack]:
    quantised = {"dtype": "bfloat16", "quantization": "int8_per_channel_weight_only"}
    model = {"path": str(base_model), "name": "tiny", "args": {**VLLM_ARGS, **quantised}}
    with rollway.up({"name": "quantised", "models": [model]}) as running:
        yield running


def test_a_quantised_model_accepts_only_checkpoints(
    stack: rollway.Stack, policies: list[Policy]
) -> None:
    with ShmPublisher() as publisher:
        offer = publisher.publish(1, load_file(policies[1].path / "model.safetensors").items())
        with pytest.raises(UsageError, match=r"is quantised .* refit from a checkpoint directory"):
            stack.refit(1, offer)
    report = stack.refit(1, policies[1].path)
    assert [worker.proof for worker in report.workers] == ["canary"]
    (rollout,) = stack.rollouts().generate(PROMPT, GREEDY)
    assert rollout.weight_version == 1 and rollout.logprobs is not None
    assert policies[1].distance(PROMPT, rollout.token_ids, rollout.logprobs) < TOLERANCE
