"""Configs of small models, and arrays for their tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollway.weights.checkpoint import TensorHeader
from rollway.weights.planning.scenario import hf_headers

Model = dict[str, NDArray[np.int32]]
DTYPE = "I32"
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
    """Return arrays in which every element is different, and none is 0."""
    headers = {name: replace(h, dtype=DTYPE) for name, h in hf_headers(config).items()}
    model, first = {}, 1
    for name, header in headers.items():
        size = int(np.prod(header.shape))
        model[name] = np.arange(first, first + size, dtype=np.int32).reshape(header.shape)
        first += size
    return model, headers
