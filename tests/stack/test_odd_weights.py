"""Weights that a worker could load and should not: of another dtype than it serves, or NaN."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rollway
from rollway.errors import RolloutError, UsageError
from tests.stack.policies import Policy
from tests.stack.serving import assert_serves, fresh_prompt, tensors
from tests.stack.stacks import VLLM_ARGS

pytestmark = pytest.mark.stack

SPOILT = "model.layers.1.mlp.down_proj.weight"
GREEDY = rollway.Sampling(max_tokens=16, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def stack(session_home: Path, base_model: Path) -> Iterator[rollway.Stack]:
    """A worker that serves a float32 checkpoint in bfloat16, and NaN, because the user says so."""
    args = {**VLLM_ARGS, "dtype": "bfloat16"}
    allow = {"ROLLWAY_ALLOW_NON_FINITE": "1"}
    model = {"path": str(base_model), "name": "tiny", "args": args, "env": allow}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLWAY_HOME", str(session_home))
        with rollway.up({"name": "rounded", "models": [model]}) as running:
            yield running


def test_an_offer_of_another_dtype_is_refused_and_changes_nothing(
    stack: rollway.Stack, policies: list[Policy]
) -> None:
    prompt, state = fresh_prompt(), tensors(policies[1])
    before = stack.rollouts().generate(prompt, GREEDY)
    assert (stack.version, stack.next_version) == (0, 1)
    with stack.publisher("shm") as weights:
        for refused in (weights.publish(1, state), policies[1].path):
            with pytest.raises(
                UsageError, match=r"layers\.0\S+ is F32\S+, served is BF16.*allow_cast"
            ):
                stack.refit(refused)
        assert set(stack.fleet.read_versions().values()) == {0}
        assert stack.rollouts().generate(prompt, GREEDY)[0].logprobs == before[0].logprobs
        own = {name: tensor.to(torch.bfloat16) for name, tensor in state.items()}
        assert stack.next_version == 2  # 1 was published, if in vain
        assert stack.refit(weights.publish(2, own)).workers[0].proof == "parameters"
        rounded = stack.rollouts().generate(prompt, GREEDY)
        stack.refit(weights.publish(stack.next_version, state), allow_cast=True)
        assert stack.rollouts().generate(prompt, GREEDY)[0].logprobs == rounded[0].logprobs


def spoil(state: dict[str, torch.Tensor], value: float = math.nan) -> dict[str, torch.Tensor]:
    """Return the tensors, one of them with a single value that is no number."""
    spoilt = state[SPOILT].clone()
    spoilt[3, 5] = value
    return state | {SPOILT: spoilt}


def test_what_is_left_of_nan_weights_spoils_no_later_version(
    stack: rollway.Stack, policies: list[Policy]
) -> None:
    """Freed blocks of the KV cache keep NaN, and zero times NaN is NaN."""
    state = {name: t.to(torch.bfloat16) for name, t in tensors(policies[1]).items()}
    rollouts = stack.rollouts()
    with stack.publisher("shm") as weights:
        stack.refit(weights.publish(stack.next_version, spoil(state)))
        for _ in range(8):
            with pytest.raises(RolloutError, match="not finite"):
                rollouts.generate(fresh_prompt(), GREEDY)
        stack.refit(weights.publish(stack.next_version, state))
    for length in (3, 20, 40, 70):
        for rollout in rollouts.generate(fresh_prompt(length), GREEDY, n=4):
            assert rollout.weight_version == stack.version


@pytest.mark.parametrize("transport", ["shm", "files", "delta", "collective"])
def test_nan_weights_are_refused_before_the_pause(
    vllm_stack: rollway.Stack, policies: list[Policy], versions: Iterator[int], transport: Any
) -> None:
    state = tensors(policies[1])
    with vllm_stack.publisher(transport) as weights:
        good = next(versions)
        vllm_stack.refit(weights.publish(good, state))
        for value in (math.nan, -math.inf):
            offer = weights.publish(next(versions), spoil(state, value))
            with pytest.raises(UsageError, match=rf"{SPOILT}.* has NaN or infinity"):
                vllm_stack.refit(offer)
        assert_serves(vllm_stack, policies[1], good)
        vllm_stack.refit(weights.publish(next(versions), state))


def test_versions_of_offers_and_refits(
    vllm_stack: rollway.Stack, policies: list[Policy], versions: Iterator[int]
) -> None:
    state = tensors(policies[2])
    with rollway.attach(vllm_stack.name, watch=False) as stack:
        version = next(versions)
        assert (stack.version, stack.next_version) == (version - 1, version)
        with stack.publisher("shm") as weights:
            offer = weights.publish(version, state)
            for wrong in (version, version - 1, "30", None):
                with pytest.raises(UsageError, match=r"cannot follow|a whole number"):
                    weights.publish(wrong, state)  # type: ignore[arg-type]
            with pytest.raises(UsageError, match=f"is of version {version}, and not of"):
                stack.refit(version + 1, offer)
            with pytest.raises(UsageError, match="a whole number"):
                stack.refit(str(version), offer)
            assert stack.refit(offer).version == version == stack.version
        with pytest.raises(UsageError, match="closed"):
            weights.publish(version + 1, state)
        assert stack.refit(policies[1].path).version == next(versions) == stack.version
    assert_serves(vllm_stack, policies[1], version + 1)
