"""Models that need more than a dense policy, on the device that vLLM has here: LoRA adapters,
experts, a draft model, two ranks. Each is refitted from the trainer's own memory and compared with
transformers on that device.

On a CPU these are soaks. On a GPU machine without the development packages:

    python3 -m pytest -c /dev/null --rootdir . --noconftest -p no:cacheprovider tests/device
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import rollway
from rollway.demo.model import build_base
from rollway.demo.placement import make_float32_env
from rollway.errors import SpecError
from rollway.rollout.client import Rollout
from rollway.rollout.mismatch import Mismatch, mismatch
from rollway.stack.preset import cache_dir, list_gpus
from tests.stack.drafter import learnt_draft, random_draft, write_draft
from tests.stack.moe import build_moe
from tests.stack.policies import ALPHA, RANK, Policy, perturbed, write_adapter

GPUS = list_gpus() if torch.cuda.is_available() else []
DEVICE = "cuda" if GPUS else "cpu"
DEVICES = [
    pytest.param("cuda", marks=pytest.mark.skipif(not GPUS, reason="there is no GPU")),
    pytest.param(
        "cpu",
        marks=[pytest.mark.soak, pytest.mark.skipif(bool(GPUS), reason="vLLM uses the GPU")],
    ),
]
pytestmark = [pytest.mark.stack]

SAMPLING = rollway.Sampling(max_tokens=16, ignore_eos=True, seed=3)
GREEDY = rollway.Sampling(max_tokens=60, temperature=0.0, ignore_eos=True)
PROMPTS = [[20 + (7 * place * (number + 1)) % 150 for place in range(40)] for number in range(6)]
LARGEST_KL = {torch.float32: 1e-6, torch.bfloat16: 0.02}
CONFIG = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": ["q_proj"]}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own, as everywhere; also where there is no conftest."""
    monkeypatch.setenv("ROLLWAY_HOME", str(tmp_path / "rollway-home"))


@pytest.fixture
def base() -> Path:
    return build_base(cache_dir() / "demo")


def describe(path: Path, name: str, **more: Any) -> dict[str, Any]:
    """Return the spec of one worker; on a GPU it takes a small share, so that several tests can
    run at once."""
    args = {"dtype": "float32", "max-model-len": 512, "max-num-seqs": 16}
    args |= {"kv-cache-memory-bytes": 64 << 20, **more.pop("args", {})}
    env = more.pop("env", {})
    if DEVICE == "cuda":
        args |= {"gpu-memory-utilization": 0.05, "enforce-eager": True}
        env |= {**make_float32_env(), "CUDA_VISIBLE_DEVICES": GPUS[0]}
    model = {"path": str(path), "name": "tiny", "args": args, "env": env, **more}
    # The logs stay where a GPU machine's operator looks for them.
    logs = {"log_dir": os.environ["ROLLWAY_TEST_LOGS"]} if "ROLLWAY_TEST_LOGS" in os.environ else {}
    return {"name": name, "models": [model], **logs}


def place_tensors(
    stored: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Return tensors as a trainer on the device has them: parameters, which need no copy."""
    return {
        name: torch.nn.Parameter(tensor.to(DEVICE, dtype), requires_grad=False)
        for name, tensor in stored.items()
    }


def read_tensors(path: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return place_tensors(load_file(path / "model.safetensors"), dtype)


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


def sample(
    stack: rollway.Stack, version: int, sampling: rollway.Sampling = SAMPLING, **options: Any
) -> list[Rollout]:
    groups = stack.rollouts(**options).generate_batch(PROMPTS, sampling)
    rollouts = [group[0] for group in groups]
    assert {rollout.weight_version for rollout in rollouts} == {version}
    return rollouts


def compare(policy: Policy, rollouts: list[Rollout]) -> Mismatch:
    rows = [policy.logprobs(rollout.prompt_ids, rollout.token_ids) for rollout in rollouts]
    return mismatch(rows, [rollout.logprobs for rollout in rollouts])


def assert_of(
    policy: Policy, other: Policy, rollouts: list[Rollout], dtype: torch.dtype = torch.float32
) -> None:
    """The tokens are the policy's, by transformers on the device, and clearly not the other's."""
    right, wrong = compare(policy, rollouts), compare(other, rollouts)
    print(f"k3 {right.k3:.2g}, largest {right.max_abs:.2g}; of the other policy {wrong.k3:.2g}")
    assert right.k3 < LARGEST_KL[dtype]
    assert wrong.k3 > 4 * right.k3 and wrong.k3 > 1e-3


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
