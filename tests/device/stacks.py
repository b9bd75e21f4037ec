"""A worker on the device that vLLM has here, and its samples compared with transformers.

Fixtures are imported by name: a GPU machine runs these tests without any conftest."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import rollway
from examples.exactness.mismatch import Mismatch, mismatch
from rollway.demo.model import build_base
from rollway.demo.placement import make_float32_env
from rollway.rollout.client import Rollout
from rollway.stack.preset import cache_dir, list_gpus
from tests.stack.policies import Policy

GPUS = list_gpus() if torch.cuda.is_available() else []
DEVICE = "cuda" if GPUS else "cpu"
DEVICES = [
    pytest.param("cuda", marks=pytest.mark.skipif(not GPUS, reason="there is no GPU")),
    pytest.param(
        "cpu",
        marks=[pytest.mark.soak, pytest.mark.skipif(bool(GPUS), reason="vLLM uses the GPU")],
    ),
]
SAMPLING = rollway.Sampling(max_tokens=16, ignore_eos=True, seed=3)
PROMPTS = [[20 + (7 * place * (number + 1)) % 150 for place in range(40)] for number in range(6)]
LARGEST_KL = {torch.float32: 1e-6, torch.bfloat16: 0.02}


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
    args: dict[str, Any] = {"dtype": "float32", "max-model-len": 512, "max-num-seqs": 16}
    args["kv-cache-memory-bytes"] = 64 << 20
    env = more.pop("env", {})
    if DEVICE == "cuda":
        args |= {"gpu-memory-utilization": 0.05, "enforce-eager": True}
        env |= {**make_float32_env(), "CUDA_VISIBLE_DEVICES": GPUS[0]}
    args |= more.pop("args", {})
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
