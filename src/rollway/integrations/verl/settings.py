"""verl's rollout config as a Rollway stack: one model, one worker for each replica."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollway.config import RawArgs, StackSpec, slug
from rollway.errors import UsageError
from rollway.integrations.verl.options import Options
from rollway.stack.plan import WORKER_EXTENSION
from rollway.weights.checkpoint import read_headers

_SAME_NAME = {
    "gpu_memory_utilization": "gpu-memory-utilization",
    "max_model_len": "max-model-len",
    "max_num_batched_tokens": "max-num-batched-tokens",
    "max_num_seqs": "max-num-seqs",
    "dtype": "dtype",
    "enforce_eager": "enforce-eager",
    "enable_chunked_prefill": "enable-chunked-prefill",
    "enable_prefix_caching": "enable-prefix-caching",
    "logprobs_mode": "logprobs-mode",
    "quantization": "quantization",
}
"""Fields of verl's RolloutConfig that vLLM knows under another spelling."""

ADAPTERS_KEPT = 2
"""Versions of the policy's adapter: the newest, and one that requests may still be on."""
_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""vLLM's; an adapter of a lower rank fits too."""


def stack_spec(
    rollout: Any,
    model: Any,
    options: Options,
    *,
    pool: str,
    replicas: int,
    gpus: list[str],
    before: int = 0,
    address: str | None = None,
) -> StackSpec:
    """`rollout` and `model` are verl's RolloutConfig and HFModelConfig; `gpus` are those of the
    replicas, in their order, and none on a machine without. Where a pool is on several nodes, this
    one has `address`, and `before` of the pool's workers are on the nodes before it."""
    refuse(rollout)
    served: dict[str, Any] = {
        "path": model_path(model),
        "replicas": replicas,
        "tensor_parallel": int(rollout.tensor_model_parallel_size),
        "seed": int(getattr(rollout, "seed", 0) or 0) + before,
        "args": engine_args(rollout, model, options, gpu=bool(gpus)),
        "env": {**_adapter_env(model), **options.engine_env},
    }
    if options.served_model_name:
        served["name"] = options.served_model_name
    fields: dict[str, Any] = {
        "name": f"verl-{slug(pool)[:20].rstrip('-')}-{secrets.token_hex(4)}",
        "models": [served],
        "router": {"mode": options.router_mode, "args": options.router_args},
        "frontend": {
            "port": options.frontend_port,
            "rl_port": options.rl_port,
            "args": options.frontend_args,
        },
        "python": options.python,
        "start_seconds": options.start_seconds,
        "restart": {"enabled": options.restart},
        "log_dir": options.log_dir and options.log_dir / pool,
    }
    if address is not None:
        fields["admin_host"] = fields["frontend"]["host"] = address
        fields |= {"discovery": "etcd", "etcd_endpoints": options.etcd_endpoints}
    if gpus:
        fields["env"] = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    return StackSpec.model_validate(fields)


def joining_spec(
    spec: StackSpec, invitation: Mapping[str, Any], pool_stack: str, number: int
) -> StackSpec:
    """The same for a node that is not the pool's: named and logged apart, since nodes may share
    a file system."""
    logs = spec.log_dir and spec.log_dir / f"node-{number}"
    fields = {**invitation, "name": f"{pool_stack}-{number}", "log_dir": logs}
    return StackSpec.model_validate({**spec.model_dump(mode="json", exclude_unset=True), **fields})


def engine_args(rollout: Any, model: Any, options: Options, *, gpu: bool) -> RawArgs:
    args: RawArgs = {}
    for field, flag in _SAME_NAME.items():
        value = getattr(rollout, field, None)
        if value is not None and (gpu or field != "gpu_memory_utilization"):
            args[flag] = value
    args["max-model-len"] = context_length(rollout)
    if not gpu:
        args.pop("enforce-eager", None)  # the CPU profile knows
    if getattr(model, "trust_remote_code", False):
        args["trust-remote-code"] = True
    if frees_engine(rollout, options):
        args["enable-sleep-mode"] = True
    if getattr(rollout, "enable_rollout_routing_replay", False):
        args["enable-return-routed-experts"] = True
    args |= _adapter_args(lora_rank(model))
    if options.kv_offload is not None:
        args["kv-transfer-config"] = options.kv_offload
    if options.python is not None:
        args["worker-extension-cls"] = WORKER_EXTENSION  # Rollway is there too: see docs/verl.md
    return {**args, **options.engine_args}


def model_path(model: Any) -> str:
    return str(getattr(model, "local_path", None) or model.path)


def tied_names(model: Path) -> frozenset[str]:
    """Names of a model's parameters that its files leave out: a head that is the embedding."""
    config = model / "config.json"
    if not config.is_file() or not json.loads(config.read_text()).get("tie_word_embeddings"):
        return frozenset()
    return frozenset({"lm_head.weight"} - read_headers(model).keys())


def lora_rank(model: Any) -> int:
    """Of adapters that verl hands over by themselves; 0 without, and where it merges them."""
    more = getattr(model, "lora", None) or {}
    if more.get("merge", False):
        return 0
    return int(more.get("rank", 0) or getattr(model, "lora_rank", 0) or 0)


def _adapter_args(rank: int) -> RawArgs:
    if not rank:
        return {}
    room = next((room for room in _LORA_RANKS if room >= rank), rank)  # else vLLM says its own
    return {"enable-lora": True, "max-lora-rank": room, "max-cpu-loras": ADAPTERS_KEPT + 1}


def _adapter_env(model: Any) -> dict[str, str]:
    return {"DYN_LORA_ENABLED": "true"} if lora_rank(model) else {}


def context_length(rollout: Any) -> int:
    said = getattr(rollout, "max_model_len", None)
    return int(said or rollout.prompt_length + rollout.response_length)


def frees_engine(rollout: Any, options: Options) -> bool:
    said = options.free_engine
    return bool(rollout.free_cache_engine) if said is None else said


def refuse(rollout: Any) -> None:
    """What would be passed over in silence."""
    for field, words in (
        ("pipeline_model_parallel_size", "pipeline parallelism"),
        ("data_parallel_size", "data parallelism inside a replica"),
        ("expert_parallel_size", "expert parallelism inside a replica"),
    ):
        if int(getattr(rollout, field, 1) or 1) > 1:
            raise UsageError(
                f"rollout.{field} is {getattr(rollout, field)}: rollout.name=dynamo knows no "
                f"{words}.",
                f"Leave rollout.{field} at 1; replicas are spread by Dynamo's router.",
            )
