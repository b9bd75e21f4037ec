"""Weights that a worker could load and should not: of another dtype than it serves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import rollway
from rollway.errors import UsageError
from tests.stack.policies import Policy
from tests.stack.serving import fresh_prompt, tensors
from tests.stack.stacks import VLLM_ARGS

pytestmark = pytest.mark.stack

GREEDY = rollway.Sampling(max_tokens=16, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def stack(session_home: Path, base_model: Path) -> Iterator[rollway.Stack]:
    """A worker that serves a float32 checkpoint in bfloat16, because the user says so."""
    args = {**VLLM_ARGS, "dtype": "bfloat16"}
    model = {"path": str(base_model), "name": "tiny", "args": args}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLWAY_HOME", str(session_home))
        with rollway.up({"name": "rounded", "models": [model]}) as running:
            yield running


def test_an_offer_of_another_dtype_is_refused_and_changes_nothing(
    stack: rollway.Stack, policies: list[Policy]
) -> None:
    prompt, state = fresh_prompt(), tensors(policies[1])
    before = stack.rollouts().generate(prompt, GREEDY)
    with stack.publisher("shm") as weights:
        for refused in (weights.publish(1, state), policies[1].path):
            with pytest.raises(
                UsageError, match=r"layers\.0\S+ is F32\S+, served is BF16.*allow_cast"
            ):
                stack.refit(1, refused)
        assert set(stack.fleet.read_versions().values()) == {0}
        assert stack.rollouts().generate(prompt, GREEDY)[0].logprobs == before[0].logprobs
        own = {name: tensor.to(torch.bfloat16) for name, tensor in state.items()}
        assert stack.refit(2, weights.publish(2, own)).workers[0].proof == "parameters"
        rounded = stack.rollouts().generate(prompt, GREEDY)
        stack.refit(3, weights.publish(3, state), allow_cast=True)
        assert stack.rollouts().generate(prompt, GREEDY)[0].logprobs == rounded[0].logprobs
