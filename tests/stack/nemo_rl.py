"""What tests of NeMo-RL's interface share: its config, its batches, a policy of one rank."""

from __future__ import annotations

import asyncio
import importlib
from collections import UserDict
from typing import Any

import torch

from rollway.integrations.nemo_rl.generation import Generation
from rollway.integrations.nemo_rl.publish import ShardPublishing


class Batch(UserDict[str, Any]):
    """Stands in for NeMo-RL's BatchedDataDict."""


def make_config(model: str, **dynamo: Any) -> dict[str, Any]:
    return {
        "backend": "dynamo", "model_name": model, "dynamo_cfg": dynamo, "vllm_cfg": {},
        "max_new_tokens": 8, "temperature": 1.0, "top_p": 1.0, "top_k": None,
        "stop_token_ids": None, "stop_strings": None, "_pad_token_id": 0,
    }  # fmt: skip


def make_batch(*prompts: list[int]) -> Batch:
    longest = max(map(len, prompts))
    rows = [prompt + [0] * (longest - len(prompt)) for prompt in prompts]
    return Batch(
        {"input_ids": torch.tensor(rows), "input_lengths": torch.tensor(list(map(len, prompts)))}
    )


async def collect(generation: Generation, batch: Batch, *, greedy: bool = False) -> dict[int, Any]:
    return {index: output async for index, output in generation.generate_async(batch, greedy)}


class InProcessPolicy(ShardPublishing):
    """NeMo-RL's policy of one rank, which is in this process: also its worker group."""

    rank = 0

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.worker_group = self
        self.workers = [self]
        self._engine: Any = None

    def run_all_workers_single_data(self, name: str, **fields: Any) -> list[Any]:
        return [getattr(self, name)(**fields)]

    def checkpoint_engine_rpc(self, checkpoint_method: str, method_kwargs: dict[str, Any]) -> Any:
        """Answer as NeMo-RL's policy workers do."""
        match checkpoint_method:
            case "init_checkpoint_engine":
                module, name = method_kwargs["backend"].split(":")
                size, options = method_kwargs["bucket_size_bytes"], method_kwargs["engine_kwargs"]
                kind = getattr(importlib.import_module(module), name)
                self._engine = kind(bucket_size=size, **options)
                return None
            case "init_checkpoint_engine_process_group":
                return self._engine.init_policy_process_group(worker_rank=0, **method_kwargs)
            case "send_weights_via_checkpoint_engine":
                named = ((n, p.detach()) for n, p in self.model.named_parameters())
                return asyncio.run(self._engine.send_weights(named))
            case "finalize_checkpoint_engine":
                return self._engine.finalize()
        return getattr(self._engine, checkpoint_method)(**method_kwargs)
