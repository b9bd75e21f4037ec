"""Shared by the tests of unit/weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rollway.weights.checkpoint import TensorHeader
from rollway.weights.planning.scenario import hf_headers
from tests.unit.weights.planned import DTYPE, Model, some_model

MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "intermediate_size": 16,
    "moe_intermediate_size": 8,
    "num_experts": 4,
    "vocab_size": 30,
    "mlp_only_layers": [1],
}


DENSE: dict[str, Any] = {**MOE, "model_type": "qwen2", "num_experts": 0}


def model_of(config: dict[str, Any]) -> tuple[Model, dict[str, TensorHeader]]:
    headers = hf_headers(config)
    model = some_model({name: header.shape for name, header in headers.items()})
    return model, {name: replace(header, dtype=DTYPE) for name, header in headers.items()}
