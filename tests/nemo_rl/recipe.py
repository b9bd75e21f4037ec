"""NeMo-RL's own recipe for Dynamo, on a stack of light workers and for a trainer on CPU.

Imports NeMo-RL: a script calls `stand_ins.install()` first."""

from __future__ import annotations

from typing import Any

import nemo_rl.algorithms.grpo as grpo
from nemo_rl.models.generation import configure_generation_config
from nemo_rl.utils.config import load_config, register_omegaconf_resolvers
from omegaconf import OmegaConf

ENGINE_OPTIONS = (
    "tensor_parallel_size", "pipeline_parallel_size", "gpu_memory_utilization", "precision",
    "enforce_eager", "kv_cache_dtype", "env_vars",
)  # fmt: skip
"""Options of vLLM, which light workers do not have."""


def make_recipe(question: dict[str, Any], tokenizer: Any, **grpo_values: Any) -> Any:
    """Return NeMo-RL's master config: `question` has `config` and `stack`."""
    register_omegaconf_resolvers()
    values: Any = OmegaConf.to_container(load_config(question["config"]), resolve=True)
    values["policy"]["model_name"] = "tiny"
    generation = values["policy"]["generation"]
    generation["dynamo_cfg"]["stack"] = question["stack"]
    generation["vllm_cfg"] |= {"max_model_len": 64, "enable_vllm_metrics_logger": False}
    generation["vllm_kwargs"] = {}
    for key in ENGINE_OPTIONS:
        generation["vllm_cfg"].pop(key)
    generation["colocated"]["resources"] = {"gpus_per_node": None, "num_nodes": None}
    generation |= {"max_new_tokens": 8, "top_k": None, "val_top_k": None, "stop_token_ids": [0]}
    generation |= question.get("generation", {})
    values["cluster"] = {"gpus_per_node": 4, "num_nodes": 1, "weight_sync": {"method": "files"}}
    values["grpo"]["async_grpo"]["in_flight_weight_updates"] = question["in_flight"]
    values["grpo"] |= grpo_values
    values["logger"]["tensorboard_enabled"] = False
    for key in ("policy", "data", "loss_fn"):
        values[key] |= question.get(key, {})
    generation["vllm_cfg"] |= question.get("vllm_cfg", {})
    values["policy"]["generation"] = configure_generation_config(generation, tokenizer)
    return grpo.MasterConfig(**values)
