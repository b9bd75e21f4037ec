"""What belongs to a version besides the policy's weights, through NeMo-RL's interface and into real
engines: a trained draft model (EAGLE-3), and the scales of an FP8 KV cache."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rollway.errors import RollwayError
from rollway.integrations.nemo_rl.config import WeightSync
from rollway.integrations.nemo_rl.generation import Generation
from rollway.integrations.nemo_rl.synchronizer import Synchronizer
from rollway.rollout.sampling import Sampling
from tests.stack import revealing_worker
from tests.stack.drafter import Tensors, random_eagle3, write_eagle3
from tests.stack.nemo_rl import InProcessPolicy, make_config
from tests.stack.policies import Policy
from tests.stack.stacks import VLLM_ARGS

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]

TOLERANCE = 1e-4
PROMPT = list(range(20, 60))
GREEDY = Sampling(max_tokens=30, temperature=0.0, ignore_eos=True)
METHODS = ("shm", "files", "delta", "collective", "nixl")


@contextmanager
def opened(base: Path, revealed: Path, **args: Any) -> Iterator[Generation]:
    model = {"path": str(base), "name": "tiny", "args": {**VLLM_ARGS, **args}}
    model |= {"env": revealing_worker.make_environment(revealed)}
    model["args"] |= revealing_worker.ARGS
    config = make_config("tiny", stack={"name": "extras", "models": [model]})
    config["vllm_cfg"] = {"kv_cache_dtype": args.get("kv-cache-dtype", "auto")}
    generation = Generation(None, config)
    try:
        yield generation
    finally:
        generation.shutdown()


@contextmanager
def synchronized(
    generation: Generation, weights: Tensors, method: str = "shm"
) -> Iterator[Synchronizer]:
    exported: Any = SimpleNamespace(named_parameters=weights.items)
    policy, sync = InProcessPolicy(exported), WeightSync(method=method)
    synchronizer = Synchronizer(policy, generation, sync, get=list)
    try:
        yield synchronizer
    finally:
        synchronizer.shutdown()


def distance_to(generation: Generation, policy: Policy, version: int) -> float:
    connection = generation.connection
    (rollout,) = connection.run(connection.rollouts.generate(PROMPT, GREEDY))
    assert rollout.weight_version == version and rollout.logprobs is not None
    return policy.distance(PROMPT, rollout.token_ids, rollout.logprobs)


def check_held(held: Tensors, policy: Tensors, draft: Tensors) -> None:
    """Every parameter of both models has the bytes that were published, or zeros of padding."""
    expected = {f"policy.{name}": tensor for name, tensor in join(policy).items()}
    names = {"d2t": "draft_id_to_target_id", "lm_head.weight": "lm_head.weight"}
    for name, tensor in join(draft).items():
        own = names.get(name) or f"model.{name.replace('midlayer.', 'layers.0.')}"
        expected[f"draft.{own}"] = tensor
    for name, tensor in expected.items():
        if name not in held and name == "policy.lm_head.weight":
            continue  # tied
        rows = held[name][: len(tensor)]
        assert torch.equal(rows, tensor.to(rows.dtype)), name
        assert not held[name][len(tensor) :].any(), name
    unseen = [n for n in held if n.startswith("draft.") and n not in expected]
    assert all("embed_tokens" in name or "_scale" in name or "rotary" in name for name in unseen)


def join(tensors: Tensors) -> Tensors:
    """Fuse tensors as vLLM's layers have them."""
    joined = dict(tensors)
    fused: dict[str, Sequence[str]] = {"qkv_proj": "qkv", "gate_up_proj": ("gate", "up")}
    for whole, parts in fused.items():
        first = f".{parts[0]}_proj."
        for name in [n for n in joined if first in n]:
            pieces = [joined.pop(name.replace(first, f".{part}_proj.")) for part in parts]
            joined[name.replace(first, f".{whole}.")] = torch.cat(pieces)
    return joined


def test_policy_and_draft_model_arrive_together(
    base_model: Path, policies: list[Policy], tmp_path: Path
) -> None:
    checkpoint = write_eagle3(tmp_path / "draft", policies[0], random_eagle3(policies[0]))
    speculative = {"method": "eagle3", "model": str(checkpoint), "num_speculative_tokens": 2}
    revealed = tmp_path / "revealed"
    args = {"speculative-config": json.dumps(speculative)}
    with opened(base_model, revealed, **args) as generation:
        for number, method in enumerate(METHODS, 1):
            policy = policies[number % 2]
            weights = load_file(policy.path / "model.safetensors")
            draft = random_eagle3(policy, seed=number)
            exported = {**weights, **{f"draft.{name}": t for name, t in draft.items()}}
            with synchronized(generation, exported, method) as synchronizer:
                figures = synchronizer.sync_weights()
            check_held(torch.load(revealed)["tensors"], weights, draft)
            assert distance_to(generation, policy, int(figures["version"])) < TOLERANCE
        served = int(figures["version"])
        # Nothing of a version is served whose draft model does not fit.
        few = {name: t for name, t in exported.items() if name != "draft.fc.weight"}
        with (
            synchronized(generation, few) as synchronizer,
            pytest.raises(RollwayError, match=r"fc\.weight is missing"),
        ):
            synchronizer.sync_weights()
        assert distance_to(generation, policy, served) < TOLERANCE
        # The engine decides: this trainer believes that its cache is quantised.
        generation.cfg["vllm_cfg"]["kv_cache_dtype"] = "fp8"
        with (
            synchronized(generation, weights) as synchronizer,
            pytest.raises(RollwayError, match="this worker's cache is not quantised"),
        ):
            synchronizer.sync_weights(kv_scales=make_scales(policy, 1.0))
        assert distance_to(generation, policy, served) < TOLERANCE


def make_scales(policy: Policy, value: float) -> dict[str, float]:
    """The scales of all layers, under the names that NeMo-RL gives them."""
    names = ("self_attn.attn.q_scale", "self_attn.k_scale", "self_attn.v_scale")
    return {
        f"model.layers.{layer}.{name}": value * (1 + layer / 4)
        for layer in range(policy.model.config.num_hidden_layers)
        for name in names
    }


def test_scales_of_an_fp8_cache_are_part_of_the_version(
    base_model: Path, policies: list[Policy], tmp_path: Path
) -> None:
    base, other = policies[0], policies[1]
    revealed = tmp_path / "revealed"
    with opened(base_model, revealed, **{"kv-cache-dtype": "fp8"}) as generation:
        assert generation.requires_kv_scale_sync
        distances = {}
        # The first scales are so small that keys and values do not fit into eight bits.
        for value in (1e-4, 0.05):
            for number, method in enumerate(METHODS):
                policy = policies[number % 2]
                scales = make_scales(policy, value)
                weights = load_file(policy.path / "model.safetensors")
                with synchronized(generation, weights, method) as synchronizer:
                    figures = synchronizer.sync_weights(kv_scales=scales)
                held = torch.load(revealed)
                assert held["scales"] == {
                    f"policy.model.layers.{layer}.self_attn.attn": [
                        pytest.approx(value * (1 + layer / 4))
                    ]
                    * 3
                    for layer in range(2)
                }
                check_held(held["tensors"], weights, {})
                served = int(figures["version"])
                distances[value, policy] = distance_to(generation, policy, served)
        # Prompts are the same: blocks that were written with the old scales are not read.
        for policy in (base, other):
            assert distances[0.05, policy] < distances[1e-4, policy] / 3
        # A version without scales leaves them.
        weights = load_file(other.path / "model.safetensors")
        with synchronized(generation, weights) as synchronizer:
            figures = synchronizer.sync_weights()
        assert torch.load(revealed)["scales"] == held["scales"]
        served = int(figures["version"])
        assert distance_to(generation, other, served) == distances[0.05, other]
        draft = {f"draft.{name}": tensor for name, tensor in random_eagle3(other).items()}
        with (
            synchronized(generation, {**weights, **draft}) as synchronizer,
            pytest.raises(RollwayError, match="weights of a draft model, but this worker has none"),
        ):
            synchronizer.sync_weights()
        assert distance_to(generation, other, served) == distances[0.05, other]
