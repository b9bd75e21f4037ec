"""A draft model (EAGLE) is refitted with the policy, on a worker that decodes speculatively."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

import rollway
from rollway.errors import UsageError
from rollway.rollout.sampling import Sampling
from rollway.weights.transports.shm import ShmPublisher
from tests.stack.drafter import learnt_draft, random_draft, write_draft
from tests.stack.policies import Policy
from tests.stack.stacks import VLLM_ARGS

pytestmark = pytest.mark.stack

TOLERANCE = 1e-4
PROMPT = list(range(20, 60))
GREEDY = Sampling(max_tokens=60, temperature=0.0, ignore_eos=True)


@pytest.fixture
def stack(base_model: Path, policies: list[Policy], tmp_path: Path) -> Iterator[rollway.Stack]:
    draft = write_draft(tmp_path / "draft", policies[0], random_draft(policies[0]))
    speculative = {"method": "eagle", "model": str(draft), "num_speculative_tokens": 2}
    args = {**VLLM_ARGS, "speculative-config": json.dumps(speculative)}
    model = {"path": str(base_model), "name": "tiny", "args": args}
    with rollway.up({"name": "drafts", "models": [model]}) as running:
        yield running


def accepted(stack: rollway.Stack) -> float:
    """How many guesses of the draft model were right, since the worker started."""
    (worker,) = stack.fleet.workers()
    with urllib.request.urlopen(f"{worker.admin_url}/metrics") as answer:
        text = answer.read().decode()
    counts = re.findall(r"^vllm:spec_decode_num_accepted_tokens_total\{.*\} (\S+)$", text, re.M)
    return sum(map(float, counts))


def test_policy_and_draft_model_change_together(
    stack: rollway.Stack, policies: list[Policy]
) -> None:
    base, other = policies[0], policies[1]
    policy = load_file(other.path / "model.safetensors")
    draft = {f"draft.{n}": t for n, t in learnt_draft(other, PROMPT, 60).items()}
    assert distance_to(stack, base, 0) < TOLERANCE
    assert accepted(stack) == 0
    with ShmPublisher() as publisher:
        few = dict(list(draft.items())[:3])
        with pytest.raises(UsageError, match="draft model does not fit"):
            stack.refit(publisher.publish(1, [*policy.items(), *few.items()]))
        shared = {"draft.embed_tokens.weight": policy["model.embed_tokens.weight"]}
        with pytest.raises(UsageError, match="shares embed_tokens"):
            stack.refit(publisher.publish(2, [*policy.items(), *(draft | shared).items()]))
        report = stack.refit(publisher.publish(3, [*policy.items(), *draft.items()]))
        assert {worker.proof for worker in report.workers} == {"parameters"}
        assert distance_to(stack, other, 3) < TOLERANCE
        assert accepted(stack) > 10
        # Without draft tensors the draft model stays: right samples, and guesses of another policy.
        stack.refit(publisher.publish(4, load_file(base.path / "model.safetensors").items()))
        assert distance_to(stack, base, 4) < TOLERANCE


def distance_to(stack: rollway.Stack, policy: Policy, version: int) -> float:
    (rollout,) = stack.rollouts().generate(PROMPT, GREEDY)
    assert rollout.weight_version == version and rollout.logprobs is not None
    return policy.distance(PROMPT, rollout.token_ids, rollout.logprobs)
