"""Every transport into real vLLM workers: what is served afterwards is the published policy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rollway.errors import UsageError
from rollway.rollout.sampling import Sampling
from rollway.sync import SyncStack
from rollway.weights.store import SharedMemory, Store
from rollway.weights.transports.delta import DeltaPublisher
from rollway.weights.transports.files import FilesPublisher
from rollway.weights.transports.shm import ShmPublisher
from tests.stack.policies import Policy
from tests.stack.test_vllm_stack import TOLERANCE, _versions, fresh_prompt

pytestmark = pytest.mark.stack

SHORT = Sampling(max_tokens=8, ignore_eos=True)


def tensors(policy: Policy) -> dict[str, torch.Tensor]:
    return load_file(policy.path / "model.safetensors")


def assert_serves(stack: SyncStack, policy: Policy, version: int) -> None:
    """Log-probs are a fresh model's, on every worker, and nothing of older weights is cached."""
    prompts = [fresh_prompt() for _ in range(6)]
    for (rollout,) in stack.rollouts().generate_batch(prompts, SHORT):
        assert rollout.weight_version == version
        assert rollout.logprobs is not None
        assert policy.distance(rollout.prompt_ids, rollout.token_ids, rollout.logprobs) < TOLERANCE


@pytest.fixture
def shm(tmp_path: Path) -> Iterator[ShmPublisher]:
    with ShmPublisher() as publisher:
        yield publisher


def test_shared_memory(vllm_stack: SyncStack, policies: list[Policy], shm: ShmPublisher) -> None:
    for policy in (policies[1], policies[2], policies[0]):
        version = next(_versions)
        report = vllm_stack.refit(version, shm.publish(version, tensors(policy).items()))
        assert {worker.proof for worker in report.workers} == {"parameters"}
        assert_serves(vllm_stack, policy, version)


def test_files(vllm_stack: SyncStack, policies: list[Policy], tmp_path: Path) -> None:
    publisher = FilesPublisher(tmp_path / "versions", policies[0].path, keep_recent=2)
    for policy in (policies[1], policies[2]):
        version = next(_versions)
        report = vllm_stack.refit(version, publisher.publish(version, tensors(policy).items()))
        assert {worker.proof for worker in report.workers} == {"parameters"}
        assert_serves(vllm_stack, policy, version)


@pytest.mark.parametrize("carrier", ["directory", "shared memory"])
def test_deltas(
    vllm_stack: SyncStack, policies: list[Policy], tmp_path: Path, carrier: str
) -> None:
    with ExitStack() as cleanup:
        store = Store(tmp_path / "deltas")
        if carrier == "shared memory":
            store = cleanup.enter_context(SharedMemory())
        publisher = DeltaPublisher(store, snapshot_every=3)
        for policy in (policies[1], policies[2], policies[0], policies[1]):
            version = next(_versions)
            vllm_stack.refit(version, publisher.publish(version, tensors(policy).items()))
            assert_serves(vllm_stack, policy, version)


def test_parameters_that_were_adopted_are_not_copied_to_publish(
    vllm_stack: SyncStack, policies: list[Policy], shm: ShmPublisher
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(policies[1].path, dtype=torch.float32)
    shm.adopt(dict(model.named_parameters()))
    for policy in (policies[1], policies[2]):
        model.load_state_dict(tensors(policy), strict=False)
        version = next(_versions)
        vllm_stack.refit(version, shm.publish(version))
        assert_serves(vllm_stack, policy, version)


def test_weights_that_change_after_they_were_published_are_refused(
    vllm_stack: SyncStack, policies: list[Policy], shm: ShmPublisher
) -> None:
    """A trainer that steps too early, or a byte that flips: nothing of it is served."""
    served = vllm_stack.fleet.read_versions()
    version = next(_versions)
    offer = shm.publish(version, tensors(policies[1]).items())
    slot = Path("/dev/shm") / offer.where["slot"]
    with slot.open("r+b") as file:
        file.seek(1000)
        byte = file.read(1)
        file.seek(1000)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(UsageError, match="changed while it was read"):
        vllm_stack.refit(version, offer)
    assert vllm_stack.fleet.read_versions() == served
