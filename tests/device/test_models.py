"""Models that need more than a dense policy, on the device that vLLM has here: LoRA adapters,
experts, a draft model, two ranks. Each is refitted from the trainer's own memory and compared with
transformers on that device.

On a CPU these are soaks. On a GPU machine without the development packages:

    python3 -m pytest -c /dev/null --rootdir . --noconftest -p no:cacheprovider tests/device
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import rollway
from rollway.errors import SpecError
from tests.device.stacks import (
    DEVICES,
    GPUS,
    PROMPTS,
    SAMPLING,
    assert_of,
    base,
    describe,
    home,
    place_tensors,
    read_tensors,
    sample,
)
from tests.stack.drafter import learnt_draft, random_draft, write_draft
from tests.stack.moe import build_moe
from tests.stack.policies import ALPHA, RANK, Policy, perturbed, write_adapter

__all__ = ["base", "home"]  # fixtures
pytestmark = [pytest.mark.stack]

GREEDY = rollway.Sampling(max_tokens=60, temperature=0.0, ignore_eos=True)
CONFIG = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": ["q_proj"]}


def publish_twice(
    stack: rollway.Stack, policies: list[Policy], dtype: torch.dtype = torch.float32
) -> Iterator[tuple[int, Policy]]:
    """Refit to each policy from its own memory, and yield the version and the policy."""
    with stack.publisher("cuda_ipc", in_place=True) as publisher:
        for version, policy in enumerate(policies, 1):
            tensors = read_tensors(policy.path, dtype)
            offer = publisher.publish(version, list(tensors.items()))
            assert offer.where["copied_bytes"] == 0, offer.where["why_copied"]
            # The checkpoint has float32; an engine in bfloat16 has cast it.
            report = stack.refit(version, offer, allow_cast=dtype != torch.float32)
            (worker,) = report.workers
            print(f"version {version}: {worker.strategy}, paused {report.paused_seconds:.4f} s")
            assert worker.proof == "parameters"
            yield version, policy


@pytest.mark.parametrize("device", DEVICES)
def test_adapters(device: str, base: Path, tmp_path: Path) -> None:
    """Two versions of an adapter, and a new policy below it. vLLM's LoRA kernels for GPUs refuse
    float32 (an assertion in `lora_shrink_op`)."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    first = Policy(base, device, dtype)
    second = Policy(perturbed(base, tmp_path / "p1", 1), device, dtype)
    args = {"enable-lora": True, "max-lora-rank": 8, "max-cpu-loras": 4}
    args |= {"dtype": str(dtype).removeprefix("torch.")}
    if device == "cuda":
        args["attention-backend"] = "TRITON_ATTN"  # heads of 32 are too narrow for others
    spec = describe(base, "adapters", args=args, env={"DYN_LORA_ENABLED": "true"})
    with rollway.up(spec) as stack:
        before = first
        with stack.publisher("cuda_ipc") as publisher:
            for version in (1, 2):
                adapted = write_adapter(tmp_path / f"a{version}", first, version)
                stored = load_file(tmp_path / f"a{version}" / "adapter_model.safetensors")
                tensors = {name: tensor.to(device, dtype) for name, tensor in stored.items()}
                offer = publisher.publish(version, list(tensors.items()))
                name = stack.fleet.load_adapter("style", version, offer, CONFIG)
                assert_of(adapted, before, sample(stack, 0, adapter=name), dtype)
                before = adapted
        assert_of(first, before, sample(stack, 0), dtype)
        for version, policy in publish_twice(stack, [second], dtype):
            assert_of(policy, first, sample(stack, version), dtype)
            adapted = write_adapter(tmp_path / "a2", policy, 2)
            assert_of(adapted, policy, sample(stack, version, adapter="style"), dtype)


@pytest.mark.parametrize("device", DEVICES)
def test_experts(device: str, base: Path, tmp_path: Path) -> None:
    """On a GPU by vLLM's Triton kernels, whose layers may be changed after loading."""
    first = build_moe(base, tmp_path / "moe")
    paths = [perturbed(first, tmp_path / f"moe{seed}", seed) for seed in (1, 2)]
    before = Policy(first, device)
    with rollway.up(describe(first, "experts")) as stack:
        assert_of(before, Policy(paths[0], device), sample(stack, 0))
        policies = [Policy(path, device) for path in paths]
        for version, policy in publish_twice(stack, policies):
            assert_of(policy, before, sample(stack, version))
            before = policy


@pytest.mark.parametrize("device", DEVICES)
def test_a_draft_model(device: str, base: Path, tmp_path: Path) -> None:
    """Policy and draft model are refitted together; the samples are the policy's. On a CPU only
    greedy ones: vLLM 0.31 divides by a temperature from uninitialised memory there
    (`_expand_kernel_impl` writes to a copy), and its log-probs are wrong or not finite."""
    samplings = [GREEDY, SAMPLING] if device == "cuda" else [GREEDY]
    first = Policy(base, device)
    policies = [Policy(perturbed(base, tmp_path / f"p{seed}", seed), device) for seed in (1, 2)]
    draft = write_draft(tmp_path / "draft", first, random_draft(first))
    speculative = {"method": "eagle", "model": str(draft), "num_speculative_tokens": 2}
    spec = describe(base, "drafts", args={"speculative-config": json.dumps(speculative)})
    before = first
    with rollway.up(spec) as stack, stack.publisher("cuda_ipc", in_place=True) as publisher:
        for version, policy in enumerate(policies, 1):
            guesses = learnt_draft(policy, PROMPTS[0], GREEDY.max_tokens)
            tensors = read_tensors(policy.path)
            tensors |= place_tensors({f"draft.{name}": guesses[name] for name in guesses})
            report = stack.refit(version, publisher.publish(version, list(tensors.items())))
            assert {worker.proof for worker in report.workers} == {"parameters"}
            for sampling in samplings:
                assert_of(policy, before, sample(stack, version, sampling))
            before = policy


@pytest.mark.parametrize("device", DEVICES)
def test_two_ranks(device: str, base: Path, tmp_path: Path) -> None:
    """On a CPU, or with two GPUs. On one GPU it is refused before anything starts: vLLM gives each
    rank a device of its own, and NCCL forms no group of two ranks on one device."""
    first = Policy(base, device)
    spec = describe(base, "ranks", tensor_parallel=2)
    if device == "cuda" and len(GPUS) < 2:
        with pytest.raises(SpecError, match="has 2 ranks, and its CUDA_VISIBLE_DEVICES names 1"):
            rollway.up(spec).__enter__()
        del spec["models"][0]["env"]["CUDA_VISIBLE_DEVICES"]
        with pytest.raises(SpecError, match="need 2 GPUs"):
            rollway.up(spec).__enter__()
        return
    if device == "cuda":
        spec["models"][0]["env"]["CUDA_VISIBLE_DEVICES"] = ",".join(GPUS[:2])
    paths = [perturbed(base, tmp_path / f"p{seed}", seed) for seed in (1, 2)]
    before = first
    with rollway.up(spec) as stack:
        for version, policy in publish_twice(stack, [Policy(path, device) for path in paths]):
            assert_of(policy, before, sample(stack, version))
            before = policy
