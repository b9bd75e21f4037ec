"""What tests of NeMo-RL's interface share: its config, its batches."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import torch

from rollway.integrations.nemo_rl.generation import Generation


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
