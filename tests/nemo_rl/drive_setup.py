"""Runs NeMo-RL's own `setup` with Rollway plugged in: a script for its environment.

The policy and the synchronizer are stand-ins; the trainer's functions, configs and batches are
NeMo-RL's, and the stack is real. The question on stdin has `config` (a recipe of NeMo-RL) and
`stack`; what was seen goes to the file that the first argument names.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from tests.nemo_rl import stand_ins

stand_ins.install()

import nemo_rl.algorithms.grpo as grpo  # noqa: E402
from nemo_rl.distributed.batched_data_dict import BatchedDataDict  # noqa: E402
from nemo_rl.models.generation.interfaces import verify_right_padding  # noqa: E402

from rollway.integrations.nemo_rl import auto  # noqa: E402, F401
from tests.nemo_rl.recipe import make_recipe  # noqa: E402

seen: dict[str, Any] = {"synced": []}


class Synchronizer:
    """Records what it is created with and called with."""

    def __init__(self, policy: Any, generation: Any, sync: Any) -> None:
        seen["sync_method"] = sync.method
        self.is_stale = True

    def init_communicator(self) -> None:
        seen["communicator"] = True

    def sync_weights(self, *, timer: Any = None, kv_scales: Any = None) -> dict[str, float]:
        seen["synced"].append(kv_scales)
        return {"refit/seconds": 1.0}


class Policy:
    """Takes what `setup` gives to a policy, and holds no model."""

    def __init__(self, cluster: Any, **_: Any) -> None:
        seen["training_gpus"] = cluster.world_size()

    def print_node_ip_and_gpu_id(self) -> None:
        pass


module = ModuleType("rollway.integrations.nemo_rl.synchronizer")
module.Synchronizer = Synchronizer  # type: ignore[attr-defined]
sys.modules[module.__name__] = module


def read_batch(output: Any) -> dict[str, Any]:
    right, reason = verify_right_padding(output, pad_value=0, raise_error=False)
    return {
        "class": type(output).__name__,
        "is_right_padded": right,
        "reason": reason,
        "ids": output["output_ids"].tolist(),
        "lengths": output["generation_lengths"].tolist(),
        "versions": output["weight_versions"].tolist(),
    }


def prepare_collector(recipe: Any) -> dict[str, bool]:
    """Prepare NeMo-RL's collector for a refit while a rollout runs; then wait for the rollout."""
    from nemo_rl.algorithms.async_utils import AsyncTrajectoryCollector

    collector = object.__new__(AsyncTrajectoryCollector.__ray_metadata__.modified_class)
    collector._refit_pause_cleared = threading.Event()
    collector._refit_pause_cleared.set()
    collector.master_config, collector.async_config = recipe, recipe.grpo.async_grpo
    collector._threads_lock = threading.Lock()
    end = threading.Event()
    rollout = threading.Thread(target=end.wait, daemon=True)
    rollout.start()
    collector._inflight_threads = {rollout}
    collector.prepare_for_refit()
    state = {
        "is_waiting": not rollout.is_alive(),
        "is_paused": not collector._refit_pause_cleared.is_set(),
    }
    end.set()
    collector.wait_for_pending_generations()
    return {**state, "is_done": not rollout.is_alive()}


async def collect(generation: Any, batch: Any) -> dict[int, Any]:
    return {i: read_batch(output) async for i, output in generation.generate_async(batch, True)}


def main() -> None:
    tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=0)
    recipe = make_recipe(json.load(sys.stdin), tokenizer)
    result = grpo.setup(recipe, tokenizer, [{}] * 4, None, policy_factory=Policy)
    policy, generation, *_, master_config, _, _ = result
    train_cluster, inference_cluster = result[3]
    seen["clusters"] = [train_cluster.world_size(), inference_cluster.world_size()]
    seen["reserved"] = inference_cluster._node_placement_groups is not None
    seen["cluster_after"] = {k: recipe.cluster[k] for k in ("gpus_per_node", "num_nodes")}
    seen["resources_after"] = master_config.policy["generation"]["colocated"]["resources"]
    seen["in_flight_after"] = master_config.grpo.async_grpo.in_flight_weight_updates
    seen["refit_mode"] = generation.cfg["dynamo_cfg"]["refit_mode"]
    try:
        seen["collector"] = prepare_collector(master_config)
        seen["figures"] = grpo.refit_policy_generation(policy, generation, False)
        batch = BatchedDataDict(
            {
                "input_ids": torch.tensor([[1, 2, 3, 0], [4, 5, 6, 7]]),
                "input_lengths": torch.tensor([3, 4]),
            }
        )
        seen["batch"] = read_batch(generation.generate(batch, True))
        seen["singles"] = asyncio.run(collect(generation, batch))
        copy = pickle.loads(pickle.dumps(generation))
        seen["copy"] = read_batch(copy.generate(batch, True))
        seen["copys_synchronizer"] = copy.weight_synchronizer
        copy.shutdown()
        seen["metrics"] = grpo.print_performance_metrics(
            {},
            {"total_num_tokens": 1000},
            {"total_step_time": 10.0, "policy_training": 5.0, "exposed_generation": 1.0},
            master_config,
            num_prompts_per_step=2,
            num_generations_per_prompt=2,
            is_async_rl=True,
        )
    finally:
        generation.shutdown()
        generation.shutdown()
    Path(sys.argv[1]).write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
