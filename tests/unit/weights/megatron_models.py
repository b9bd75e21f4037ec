"""Small test models: Hugging Face tensors in which every element is different."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import torch

from rollway.weights.checkpoint import TensorHeader
from rollway.weights.layout import Shape
from rollway.weights.megatron.geometry import ModelGeometry, Topology
from rollway.weights.megatron.names import NameMap
from rollway.weights.megatron.pieces import MegatronModel
from rollway.weights.planning.scenario import describe


def hf_shapes(
    geometry: ModelGeometry,
    ffn: int,
    moe_ffn: int = 0,
    *,
    bias: bool = False,
    expert_bias: bool = False,
    qk_norm: bool = True,
    shared_ffn: int = 0,
    dense_layers: int = 0,
    mixtral: bool = False,
) -> dict[str, Shape]:
    """Return shapes of a Qwen- or Mixtral-like model, the first `dense_layers` without experts."""
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (geometry.vocab, geometry.hidden)}
    for layer in range(geometry.layers):
        dense = not geometry.experts or layer < dense_layers
        for name, shape in {
            **_attention(geometry, qk_norm),
            **(_mlp("mlp.", ffn, geometry.hidden) if dense else {}),
            **({} if dense else _moe(geometry, moe_ffn, shared_ffn, mixtral)),
        }.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
            linear = "norm" not in name and not name.endswith("gate")
            if linear and (expert_bias if ".experts." in name else bias):
                shapes[f"model.layers.{layer}.{name}.bias"] = shape[:1]
    shapes["model.norm.weight"] = (geometry.hidden,)
    if not geometry.tied_embeddings:
        shapes["lm_head.weight"] = (geometry.vocab, geometry.hidden)
    return shapes


def numbered(shapes: dict[str, Shape]) -> dict[str, torch.Tensor]:
    """Return tensors of consecutive numbers; none is 0, the value of padding."""
    tensors, first = {}, 1
    for name, shape in shapes.items():
        count = int(torch.Size(shape).numel())
        tensors[name] = torch.arange(first, first + count, dtype=torch.int32).view(shape)
        first += count
    return tensors


def headers(shapes: dict[str, Shape], dtype: str = "I32") -> dict[str, TensorHeader]:
    return {name: TensorHeader(dtype, shape) for name, shape in shapes.items()}


def _attention(geometry: ModelGeometry, qk_norm: bool) -> dict[str, Shape]:
    hidden = geometry.hidden
    norms = {"self_attn.q_norm": (geometry.head_dim,), "self_attn.k_norm": (geometry.head_dim,)}
    return {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (geometry.query_rows, hidden),
        "self_attn.k_proj": (geometry.key_rows, hidden),
        "self_attn.v_proj": (geometry.key_rows, hidden),
        "self_attn.o_proj": (hidden, geometry.heads * geometry.head_dim),
        **(norms if qk_norm else {}),
    }


def _moe(geometry: ModelGeometry, ffn: int, shared_ffn: int, mixtral: bool) -> dict[str, Shape]:
    block = "block_sparse_moe" if mixtral else "mlp"
    shapes: dict[str, Shape] = {f"{block}.gate": (geometry.experts, geometry.hidden)}
    for expert in range(geometry.experts):
        inner = _mlp(f"{block}.experts.{expert}.", ffn, geometry.hidden)
        for name, shape in inner.items():
            if mixtral:
                name = name.replace("gate_proj", "w1").replace("up_proj", "w3")
                name = name.replace("down_proj", "w2")
            shapes[name] = shape
    if shared_ffn:
        shapes |= _mlp("mlp.shared_expert.", shared_ffn, geometry.hidden)
        shapes["mlp.shared_expert_gate"] = (1, geometry.hidden)
    return shapes


def _mlp(prefix: str, ffn: int, hidden: int) -> dict[str, Shape]:
    return {
        f"{prefix}gate_proj": (ffn, hidden),
        f"{prefix}up_proj": (ffn, hidden),
        f"{prefix}down_proj": (hidden, ffn),
    }


class Norms(StrEnum):
    """Where Megatron keeps the norms before attention and MLP."""

    FUSED = "fused"  # In the linear layer that follows, as Transformer Engine does
    SEPARATE = "separate"


class Experts(StrEnum):
    """Megatron's module for the local experts."""

    GROUPED = ".experts.linear_fc"
    SEQUENTIAL = ".experts.local_experts."
    LEGACY = ".experts.weight"


def describe_as(
    hf: Mapping[str, TensorHeader],
    names: NameMap,
    topology: Topology,
    *,
    padded_vocab: int = 0,
    norms: Norms = Norms.FUSED,
    experts: Experts = Experts.GROUPED,
) -> MegatronModel:
    """Describe a trainer that is built from these modules of Megatron's."""
    others = [kind for kind in Experts if kind is not experts]
    chosen = [name for name in names.table if not any(mark in name for mark in others)]
    fused = [name for name in chosen if ".layer_norm_" in name and norms is Norms.FUSED]
    templates = [*fused, *(name for name in chosen if ".layer_norm_" not in name)]
    return describe(hf, names, topology, padded_vocab=padded_vocab, templates=templates)
