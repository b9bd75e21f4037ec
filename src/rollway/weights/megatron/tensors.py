"""Read what a rank of a running Megatron model holds, under Hugging Face names.

With a virtual pipeline, a rank has several chunks, each with a layer 0, and only the layer module
knows its global number. So the layers of a running model have global numbers here.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from rollway.errors import UsageError
from rollway.weights.digest.checksums import dtype_name
from rollway.weights.layout import Role, Shape
from rollway.weights.megatron.geometry import Position
from rollway.weights.megatron.names import (
    NameMap,
    Parameter,
    RoleOverrides,
    classify,
    name_experts,
    plain_name,
)
from rollway.weights.megatron.pieces import RankLayout, local_view, pieces, place
from rollway.weights.sources import HeldTensor, check_plain

_LAYER = re.compile(r"^(decoder\.layers\.)(\d+)(?=\.|$)")
_WEIGHT_BUFFERS = ("expert_bias",)  # Buffers that are weights; all others are counters and states
_GROUPS = {
    "tp": "tensor_model_parallel",
    "pp": "pipeline_model_parallel",
    "ep": "expert_model_parallel",
    "etp": "expert_tensor_parallel",
    "dp": "data_parallel",
    "edp": "expert_data_parallel",
}
"""Megatron's names of the groups, in its functions `get_…_rank` and `get_…_world_size`."""


def from_megatron(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    names: NameMap,
    position: Position | None = None,
    *,
    roles: RoleOverrides | None = None,
    skipped: str = "",
    experts: str = "",
) -> list[HeldTensor]:
    """Return what this rank holds of a Megatron-Core model, under Hugging Face names.

    Args:
        model: the model or its chunks, wrapped by DDP or not.
        names: the map from Megatron's names to those of the checkpoint.
        position: the rank's place in the parallel groups; by default that of Megatron's own
            state.
        roles: how to read parameters that Rollway does not know.
        skipped: a module of the model that is no part of the policy, for example a draft model.
        experts: part of the name of the modules that have the experts, if it is not Megatron's.

    Returns:
        The tensors for `Publisher.publish`.

    Raises:
        UsageError: a parameter that cannot be mapped.

    Example:
        names = NameMap.from_hf_config(config)
        offer = weights.publish(step, rollway.from_megatron(model, names))
    """
    layout, tensors = read_rank(
        model, names, position, roles=roles, skipped=skipped, experts=experts
    )
    return [
        HeldTensor(
            shard,
            tensors[name],
            pieces(shard, layout.names[name], names.geometry),
            owned_here=layout.owns(name),
        )
        for name, shard in layout.shards.items()
    ]


def read_rank(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    names: NameMap,
    position: Position | None = None,
    *,
    roles: RoleOverrides | None = None,
    skipped: str = "",
    experts: str = "",
) -> tuple[RankLayout, dict[str, torch.Tensor]]:
    """Return this rank's layout and its local tensors by name.

    The parameters are those of `from_megatron`. Tensors without a Hugging Face counterpart (the
    second copy of tied embeddings) are left out."""
    position = position or current_position()
    shards, hf_names, tensors = {}, {}, {}
    chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
    for chunk in chunks:
        for name, module, tensor in _list_tensors(chunk):
            if skipped and name.startswith(f"{skipped}."):
                continue
            name = name_experts(name, experts)
            counterparts = names.hf_names(name, position)
            if not counterparts:
                continue
            if name in shards:
                raise UsageError(
                    f"This rank has two tensors that are called {name}.",
                    "Check the layer_number of the layers in each chunk.",
                )
            role = _find_role(name, module, tensor, names, roles)
            local: Shape = local_view(name, tuple(tensor.shape), names.geometry, position)
            shards[name] = place(name, dtype_name(tensor), local, role, position)
            hf_names[name], tensors[name] = counterparts, tensor.detach().view(local)
    return RankLayout(position, shards, hf_names), tensors


def current_position() -> Position:
    """Return this process's position, from Megatron's process groups."""
    try:
        state: Any = importlib.import_module("megatron.core.parallel_state")
    except ImportError as error:
        raise UsageError(
            "megatron.core cannot be imported, so this rank's position is not known.",
            "Give the position.",
        ) from error
    fields: dict[str, int] = {}
    for group, name in _GROUPS.items():
        # Context-parallel ranks hold the same weights, so they are replicas too.
        options = {"with_context_parallel": True} if group == "dp" else {}
        fields[group] = getattr(state, f"get_{name}_rank")(**options)
        fields[f"{group}_size"] = getattr(state, f"get_{name}_world_size")(**options)
    return Position(**fields)


def _list_tensors(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, torch.Tensor]]:
    """Yield every weight of a chunk with its module, by its name with global layer numbers."""
    layers: dict[str, int] = {}
    for path, module in chunk.named_modules():
        path = plain_name(f"{path}.").removesuffix(".")
        match = _LAYER.match(path)
        if match and match.end() == len(path):
            layers[match[2]] = _get_layer_number(path, module)
        weights = dict(module.named_parameters(recurse=False))
        weights |= {n: b for n, b in module.named_buffers(recurse=False) if n in _WEIGHT_BUFFERS}
        if match and weights:
            path = f"{match[1]}{layers[match[2]]}{path[match.end() :]}"
        for name, tensor in weights.items():
            yield f"{path}.{name}".lstrip("."), module, tensor


def _get_layer_number(path: str, layer: torch.nn.Module) -> int:
    number = getattr(layer, "layer_number", None)
    if not isinstance(number, int):
        raise UsageError(
            f"{path} ({type(layer).__name__}) does not know its layer_number.",
            "Use Megatron's TransformerLayer, or give the layer this attribute.",
        )
    return number - 1  # Megatron counts from 1


def _find_role(
    name: str,
    module: torch.nn.Module,
    tensor: torch.Tensor,
    names: NameMap,
    overrides: RoleOverrides | None,
) -> Role:
    check_plain(name, tensor)
    parameter = Parameter(
        name,
        type(module).__name__,
        getattr(tensor, "tensor_model_parallel", None),
        getattr(tensor, "partition_dim", None),
        getattr(tensor, "partition_stride", None),
    )
    return classify(parameter, gated=names.gated, overrides=overrides)
