"""The tensors that a Hugging Face checkpoint of a model has, from its `config.json` alone.

For planning before there is a checkpoint, and for measuring the planner on models that would not
fit on the machine. The Llama and Qwen families, dense and mixtures of experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rollway.errors import UsageError
from rollway.weights.checkpoint import TensorHeader, read_config, read_headers
from rollway.weights.layout import Shape
from rollway.weights.megatron.geometry import ModelGeometry

_QK_NORM = ("qwen3", "qwen3_moe")
_QKV_BIAS = ("qwen2", "qwen2_moe")
_KNOWN = ("llama", "mistral", *_QK_NORM, *_QKV_BIAS)
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def read_model(path: Path) -> tuple[dict[str, Any], dict[str, TensorHeader]]:
    """Config and tensors of a checkpoint directory; of a config alone, the tensors it implies."""
    file = path / "config.json" if path.is_dir() else path
    config = read_config(file)
    weights = path.is_dir() and any(path.glob("model*.safetensors*"))
    return config, read_headers(path) if weights else hf_headers(config)


def hf_headers(config: Mapping[str, Any]) -> dict[str, TensorHeader]:
    """Names, dtypes and shapes of the model that `config` describes."""
    kind = str(config.get("model_type", ""))
    if kind not in _KNOWN:
        raise UsageError(
            f"Rollway does not know the tensors of a model of type {kind!r}.",
            f"Give a directory with its weight files, or one of {', '.join(_KNOWN)}.",
        )
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    if dtype not in _DTYPES:
        raise UsageError(f"The model's config.json has the dtype {dtype}, which is not known.")
    size = ModelGeometry.from_hf_config(config)
    _check_layers(config)
    return {name: TensorHeader(_DTYPES[dtype], shape, "") for name, shape in _tensors(config, size)}


def _tensors(config: Mapping[str, Any], size: ModelGeometry) -> Iterator[tuple[str, Shape]]:
    yield "model.embed_tokens.weight", (size.vocab, size.hidden)
    for layer in range(size.layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (size.hidden,)
        yield from _attention(f"{prefix}.self_attn", config, size)
        yield f"{prefix}.post_attention_layernorm.weight", (size.hidden,)
        if size.experts and not _is_dense(layer, config):
            yield f"{prefix}.mlp.gate.weight", (size.experts, size.hidden)
            for expert in range(size.experts):
                yield from _mlp(f"{prefix}.mlp.experts.{expert}", size.moe_ffn, size.hidden)
        else:
            yield from _mlp(f"{prefix}.mlp", size.ffn, size.hidden)
    yield "model.norm.weight", (size.hidden,)
    if not size.tied_embeddings:
        yield "lm_head.weight", (size.vocab, size.hidden)


def _check_layers(config: Mapping[str, Any]) -> None:
    """The fields that say which layers have experts are numbers."""
    step, dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or []
    if type(step) is not int or step < 1 or not isinstance(dense, list):
        raise UsageError(
            "The model's config.json has a decoder_sparse_step or mlp_only_layers that cannot be.",
            "Save the model's config again.",
        )


def _is_dense(layer: int, config: Mapping[str, Any]) -> bool:
    step = int(config.get("decoder_sparse_step") or 1)
    return layer in (config.get("mlp_only_layers") or ()) or (layer + 1) % step != 0


def _attention(
    prefix: str, config: Mapping[str, Any], size: ModelGeometry
) -> Iterator[tuple[str, Shape]]:
    rows = {"q": size.query_rows, "k": size.key_rows, "v": size.key_rows}
    for part, count in rows.items():
        yield f"{prefix}.{part}_proj.weight", (count, size.hidden)
        if config.get("attention_bias") or config["model_type"] in _QKV_BIAS:
            yield f"{prefix}.{part}_proj.bias", (count,)
    yield f"{prefix}.o_proj.weight", (size.hidden, size.heads * size.head_dim)
    if config.get("attention_bias"):
        yield f"{prefix}.o_proj.bias", (size.hidden,)
    if config["model_type"] in _QK_NORM:
        yield f"{prefix}.q_norm.weight", (size.head_dim,)
        yield f"{prefix}.k_norm.weight", (size.head_dim,)


def _mlp(prefix: str, width: int, hidden: int) -> Iterator[tuple[str, Shape]]:
    yield f"{prefix}.gate_proj.weight", (width, hidden)
    yield f"{prefix}.up_proj.weight", (width, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, width)
