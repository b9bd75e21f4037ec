"""The tensors of Megatron ranks: read them from a running model, and convert them.

With a virtual pipeline, a rank has several chunks, each with a layer 0, and only the layer module
knows its global number. So the layers of a running model have global numbers here.

`to_hf` and `from_hf` move every element by slicing, one copy per box, on the device of the tensors.
`to_hf` makes one tensor at a time, so it needs little memory beside the shards. A `Translation`
overwrites the tensors of the step before, which needs few Python calls per step.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from rollway.errors import UsageError
from rollway.weights.copies import Copies, copy_all
from rollway.weights.digest.checksums import dtype_name
from rollway.weights.layout import Placed, Role, Shape, Shard
from rollway.weights.megatron.geometry import ModelGeometry, Position
from rollway.weights.megatron.model import MegatronModel, Part, RankLayout
from rollway.weights.megatron.names import (
    NameMap,
    Parameter,
    RoleOverrides,
    classify,
    name_experts,
    plain_name,
)
from rollway.weights.megatron.pieces import cuts, hf_shapes, is_legacy, local_view, pieces, place
from rollway.weights.sources import HeldTensor

Tensors = Mapping[str, torch.Tensor]
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
        names = NameMap(config["model_type"], ModelGeometry.from_hf_config(config))
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
    """Return this rank's layout, for a sidecar, and its local tensors by name.

    The parameters are those of `from_megatron`. Tensors without a Hugging Face counterpart (the
    second copy of tied embeddings) are left out."""
    position = replace(position or current_position(), first_layer=0)
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
            role = _find_role(name, module, tensor, names.geometry, roles)
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
    geometry: ModelGeometry,
    overrides: RoleOverrides | None,
) -> Role:
    if type(tensor.data) is not torch.Tensor:
        raise UsageError(
            f"{name} is a {type(tensor.data).__name__}; Rollway does not know its memory.",
            "Publish from the parameters before they are quantised.",
        )
    parameter = Parameter(
        name,
        type(module).__name__,
        getattr(tensor, "tensor_model_parallel", None),
        getattr(tensor, "partition_dim", None),
        getattr(tensor, "partition_stride", None),
    )
    return classify(parameter, gated=geometry.gated, overrides=overrides)


# --- conversion --------------------------------------------------------------------------------


def to_hf(
    model: MegatronModel, tensors: Mapping[int, Tensors], out: Tensors | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each Hugging Face tensor with its name, made from the ranks' local tensors.

    Parameters:
        model: the layout of all ranks.
        tensors: the local tensors by rank and by Megatron's name.
        out: tensors to write to, by Hugging Face name: memory that was used before is faster than
            new memory. Without one, a tensor that is contiguous in one shard is a view of it.

    Raises `UsageError` if a rank lacks a tensor, or shapes or dtypes do not fit.
    """
    for name, shape, _, parts in model.parts():
        views = [_view_part(model, tensors, part) for part in parts]
        whole = out.get(name) if out else None
        if whole is None and len(parts) == 1:
            yield name, views[0].contiguous()
            continue
        if whole is None:
            whole = torch.empty(shape, dtype=views[0].dtype, device=views[0].device)
        copy_all(_pair(name, shape, whole, parts, views))
        yield name, whole


class Translation:
    """A conversion to Hugging Face tensors that is repeated for every step.

    The copies are planned once, and on a GPU the many small ones run together. The addresses of
    all tensors must not change. The parameters are those of `to_hf`; `out` has every tensor."""

    def __init__(self, model: MegatronModel, tensors: Mapping[int, Tensors], out: Tensors) -> None:
        self._copies = Copies()
        for name, shape, _, parts in model.parts():
            if name not in out:
                raise UsageError(
                    f"There is no tensor that {name} could be written to.", "Add it to `out`."
                )
            views = [_view_part(model, tensors, part) for part in parts]
            for target, source in _pair(name, shape, out[name], parts, views):
                self._copies.add(target, source)

    def run(self) -> None:
        """Overwrite all of `out`; on a GPU, enqueue the copies on its current stream."""
        self._copies.run()


def _pair(
    name: str, shape: Shape, whole: torch.Tensor, parts: list[Part], views: list[torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the (target, source) views whose copies fill `whole`."""
    if tuple(whole.shape) != shape:
        raise UsageError(
            f"{name} has the shape {list(shape)}, not {list(whole.shape)}.",
            "Give a tensor of the shape that Hugging Face has.",
        )
    pairs = []
    for part, view in zip(parts, views, strict=True):
        if whole.dtype != view.dtype:
            raise UsageError(
                f"{part.source} of rank {part.rank} has {view.dtype}; {name} is {whole.dtype}.",
                "Use the same dtype on both sides.",
            )
        pairs.append((whole[part.cut.box.slices], view))
    return pairs


def from_hf(hf: Tensors, model: MegatronModel) -> dict[int, dict[str, torch.Tensor]]:
    """Return the local tensors of every rank, made from whole Hugging Face tensors.

    `rank_from_hf` describes parameters and errors."""
    return {rank: rank_from_hf(hf, model, rank) for rank in model.ranks}


def rank_from_hf(hf: Tensors, model: MegatronModel, rank: int) -> dict[str, torch.Tensor]:
    """Return the local tensors of one rank by Megatron's names; rows of padding are zero.

    Parameters:
        hf: whole Hugging Face tensors by name.
        model: the layout of the trainer.
        rank: the rank whose tensors are made.

    Raises `UsageError` if a tensor is missing or has a shape that does not fit.
    """
    layout, local = model.ranks[rank], {}
    for name, shard in layout.shards.items():
        hf_names = layout.names[name]
        _check_shapes(hf, shard, hf_names, model.geometry)
        if not hf_names:
            raise UsageError(
                f"Rank {rank} has {name}, which Hugging Face has no tensor for.",
                "Copy it from the tensor that it is tied to.",
            )
        first = hf[hf_names[0]]
        tensor = torch.empty(shard.box.shape, dtype=first.dtype, device=first.device)
        boxes = cuts(shard, len(hf_names), model.geometry)
        if sum(cut.box.elements for cut in boxes) < shard.box.elements:
            tensor.zero_()
        for cut in boxes:
            _view(tensor, cut).copy_(hf[hf_names[cut.tensor]][cut.box.slices])
        local[name] = tensor.view(_megatron_shape(shard, model.geometry))
    return local


def _view_part(model: MegatronModel, tensors: Mapping[int, Tensors], part: Part) -> torch.Tensor:
    """Return the view of a part in its rank's tensor."""
    shard = model.ranks[part.rank].shards[part.source]
    tensor = tensors.get(part.rank, {}).get(part.source)
    if tensor is None:
        raise UsageError(
            f"Rank {part.rank} lacks {part.source}.", "Give all local tensors of all ranks."
        )
    if tuple(tensor.shape) not in (shard.box.shape, _megatron_shape(shard, model.geometry)):
        raise UsageError(
            f"{part.source} of rank {part.rank} has the shape {list(tensor.shape)} instead of "
            f"{list(shard.box.shape)}.",
            "Check the parallel sizes in the layout.",
        )
    return _view(tensor.reshape(shard.box.shape), part.cut)


def _megatron_shape(shard: Shard, geometry: ModelGeometry) -> Shape:
    """Return the shape that Megatron gives the tensor; see `local_view`."""
    if is_legacy(shard.name) and shard.name.endswith("weight1"):
        return geometry.hidden, shard.box.elements // geometry.hidden
    return shard.box.shape


def _view(local: torch.Tensor, cut: Placed) -> torch.Tensor:
    """Return the view of a cut in a local tensor, with the axes as Hugging Face has them."""
    view = local[cut.destination.slices]
    return view.t() if cut.transposed else view


def _check_shapes(
    hf: Tensors, shard: Shard, names: tuple[str, ...], geometry: ModelGeometry
) -> None:
    for name, shape in zip(names, hf_shapes(shard, len(names), geometry), strict=True):
        if name not in hf:
            raise UsageError(
                f"There is no {name}, which {shard.name} is made from.", "Give all tensors."
            )
        if tuple(hf[name].shape) != shape:
            raise UsageError(
                f"{name} has the shape {list(hf[name].shape)}; {shard.name} needs {list(shape)}.",
                "Check that the checkpoint and the layout are of the same model.",
            )
