"""Describe the tensors that this rank of a trainer holds, and which boxes of the model they are.

Three kinds of trainers are supported: a plain module (also under DDP), a module whose parameters
are DTensors (FSDP2, tensor parallelism, or both), and Megatron-Core (`megatron.tensors`). A
`HeldTensor` refers to the parameter's own memory: nothing is gathered or copied. If several ranks
hold the same tensor, one of them publishes it.

transformers 5 keeps the experts of a layer in one parameter. Engines load the names of the
checkpoint, so a rank publishes its part of such a parameter as views of each expert's tensors:

    experts.gate_up_proj [experts, 2 ffn, hidden]  ─►  experts.7.gate_proj.weight [ffn, hidden]
                                                       experts.7.up_proj.weight   [ffn, hidden]
    experts.down_proj    [experts, hidden, ffn]    ─►  experts.7.down_proj.weight [hidden, ffn]

transformers knows how it joined them when it loaded one (`conversion_mapping`); families whose
checkpoints have one tensor for all experts stay as they are.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from rollway.errors import UsageError
from rollway.weights.digest.checksums import dtype_name
from rollway.weights.layout import Box, Piece, Shape, Shard, publishes

_WRAPPERS = ("module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_MERGE, _JOIN = "MergeModulelist", "Concatenate"  # How transformers joins the tensors of experts
_PIPELINE = "pp"  # The dimension of pipeline stages in the meshes of torch, torchtitan and NeMo-RL


@dataclass(frozen=True)
class HeldTensor:
    """A tensor of this rank, and the boxes of Hugging Face tensors that it contains."""

    shard: Shard
    tensor: torch.Tensor
    """In the shape that `pieces` refer to; it shares memory with the trainer's parameter."""
    pieces: Sequence[Piece]
    owned_here: bool  # Whether this rank publishes it; exactly one of its replicas does


def from_module(
    module: torch.nn.Module, *, replica: tuple[int, int] | None = None
) -> list[HeldTensor]:
    """Return what this rank holds of a model with Hugging Face names, also under DDP or FSDP2.

    Nothing is gathered or copied: parameters that are DTensors count with their local part.

    Args:
        module: the model, wrapped or not.
        replica: this rank's number among those that hold the same plain tensors, and how many
            they are; by default all ranks of the default process group.

    Returns:
        The tensors for `Publisher.publish`.

    Raises:
        UsageError: a parameter whose part is not one block of the tensor.

    Example:
        offer = weights.publish(step, rollway.from_module(model))
    """
    index, count = replica or _get_rank_and_world()
    items: list[HeldTensor] = []
    fused = find_fused(module)
    for name, tensor in _list_tensors(module):
        if isinstance(tensor, DTensor):
            local = _describe_dtensor(name, tensor)
            items += name_as_checkpoint(local, fused) if local else []
        else:
            check_plain(name, tensor)
            whole = hold_whole(name, tensor, owned_here=publishes(name, index, count))
            items += name_as_checkpoint(whole, fused)
    return items


def hold_whole(name: str, tensor: torch.Tensor, *, owned_here: bool) -> HeldTensor:
    """Return a tensor that is whole on this rank, under the name that it is published by."""
    shape = tuple(tensor.shape)
    return _describe(name, shape, Box.whole(shape), tensor.detach(), owned_here)


def dtensor_box(shape: Shape, sizes: Shape, coordinate: Shape, placements: Sequence[Any]) -> Box:
    """Return the box of a tensor that the rank at `coordinate` of a mesh of `sizes` holds."""
    start, length = [0] * len(shape), list(shape)
    for mesh_dim in _sharding_order(sizes, placements):
        axis = placements[mesh_dim].dim % len(shape)
        rows = -(-length[axis] // sizes[mesh_dim])
        first = min(length[axis], rows * coordinate[mesh_dim])
        start[axis] += first
        length[axis] = min(rows, length[axis] - first)
    return Box(tuple(start), tuple(a + n for a, n in zip(start, length, strict=True)))


def _sharding_order(sizes: Shape, placements: Sequence[Any]) -> list[int]:
    """Return the mesh dimensions that shard the tensor, in the order they were applied.

    With FSDP over tensor parallelism, FSDP's mesh dimension comes first but was applied second.
    torch calls it a strided shard. The result is a box as long as the stride covers exactly the
    later mesh dimensions that shard the same axis."""
    order: list[int] = []
    strided: list[int] = []
    for mesh_dim, placement in enumerate(placements):
        if placement.is_partial():
            raise UsageError(
                f"{placement} is a sum that is not done yet; it cannot be published.",
                "Reduce the tensor first, for example with `redistribute`.",
            )
        factor = getattr(placement, "split_factor", 1)
        if factor > 1:
            later = 1
            for other in range(mesh_dim + 1, len(sizes)):
                if getattr(placements[other], "dim", None) == placement.dim:
                    later *= sizes[other]
            if later != factor:
                raise UsageError(
                    f"{placement} over {sizes[mesh_dim]} ranks is not one block of the tensor.",
                    "Rollway reads FSDP2 on top of tensor parallelism; other strides it does not.",
                )
            strided.append(mesh_dim)
        elif hasattr(placement, "dim"):
            order.append(mesh_dim)
    return order + strided[::-1]


def _describe_dtensor(name: str, tensor: DTensor) -> HeldTensor | None:
    """Return this rank's part; None outside the tensor's mesh, and if the part is empty."""
    mesh, placements = tensor.device_mesh, tensor.placements
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    sizes, shape = tuple(mesh.shape), tuple(tensor.shape)
    try:
        box = dtensor_box(shape, sizes, tuple(coordinate), placements)
    except UsageError as error:
        raise UsageError(f"{name}: {error.message}", error.hint) from error
    if not box.elements:
        return None
    local = tensor.detach().to_local()
    if tuple(local.shape) != box.shape:
        raise UsageError(
            f"{name}: this rank should hold {list(box.shape)} of {list(shape)} ({placements}), "
            f"but has {list(local.shape)}.",
            "Publish from parameters whose placements describe their local tensors.",
        )
    # This rank among those with the same part: other meshes like this one, and the dimensions of
    # this one that replicate.
    index, count = _find_sibling(mesh)
    for size, at, placement in zip(sizes, coordinate, placements, strict=True):
        if placement.is_replicate():
            index, count = index * size + at, count * size
    return _describe(name, shape, box, local, publishes(name, index, count))


def find_fused(module: torch.nn.Module) -> dict[str, tuple[str, ...]]:
    """Return the parameters of all experts that transformers joins for the models in a module.

    Keys are how their names end, values what stands there in the names of the checkpoint; `*` is
    the expert's number."""
    configs = (getattr(inner, "config", None) for inner in module.modules())
    families = {getattr(config, "model_type", None) for config in configs}
    fused: dict[str, tuple[str, ...]] = {}
    for family in sorted(family for family in families if isinstance(family, str)):
        try:
            mapping: Any = importlib.import_module("transformers.conversion_mapping")
        except ImportError:  # before transformers 5, every expert has its own parameters
            return {}
        for converter in mapping.get_checkpoint_conversion_mapping(family) or []:
            fused |= _read_converter(converter)
    return fused


def name_as_checkpoint(
    item: HeldTensor, fused: Mapping[str, tuple[str, ...]]
) -> Iterator[HeldTensor]:
    """Yield a tensor of all experts as views of each expert's, and any other as it is."""
    name, shape, box = item.shard.name, item.shard.shape, item.shard.box
    suffix = next((each for each in fused if name.endswith(each)), None)
    if suffix is None or len(shape) != 3:
        yield item
        return
    prefix, parts = name.removesuffix(suffix), fused[suffix]
    rows, columns = shape[1] // len(parts), (box.start[2], box.stop[2])
    for expert in range(box.start[0], box.stop[0]):
        for number, part in enumerate(parts):
            # The part's own rows, as far as this box reaches.
            first = max(box.start[1] - number * rows, 0)
            last = min(box.stop[1] - number * rows, rows)
            if first < last:
                above = number * rows - box.start[1]
                yield _describe(
                    prefix + part.replace("*", str(expert)),
                    (rows, shape[2]),
                    Box((first, columns[0]), (last, columns[1])),
                    item.tensor[expert - box.start[0], above + first : above + last],
                    item.owned_here,
                )


def _read_converter(converter: Any) -> dict[str, tuple[str, ...]]:
    """Return what a converter joins, if it joins whole tensors of experts by rows."""
    steps = [
        (type(step).__name__, getattr(step, "dim", None))
        for step in getattr(converter, "operations", ())
    ]
    sources = _list_patterns(converter.source_patterns)
    targets = _list_patterns(converter.target_patterns)
    expected = [(_MERGE, 0), (_JOIN, 1)] if len(sources) > 1 else [(_MERGE, 0)]
    is_plain = all(name.replace("*", "").replace(".", "").isidentifier() for name in sources)
    if steps != expected or len(targets) != 1 or not is_plain:
        return {}
    return {targets[0]: tuple(sources)}


def _list_patterns(patterns: Any) -> list[str]:
    several = [patterns] if isinstance(patterns, str) else list(patterns)
    return [pattern.replace(r"\.", ".") for pattern in several]


def _find_sibling(mesh: DeviceMesh) -> tuple[int, int]:
    """Return the number of this mesh among those like it in its root mesh, and how many there are.

    With FSDP over tensor parallelism, norms are not part of the tensor parallel plan: they are
    sharded over a mesh of one dimension, and every tensor parallel rank has such a mesh with the
    same norms. Pipeline stages have different parameters, so they are not counted."""
    root = mesh._get_root_mesh()
    ranks, own = root.mesh, root.get_coordinate()
    if own is None or ranks.numel() == mesh.mesh.numel():
        return 0, 1
    places = torch.isin(ranks, mesh.mesh).nonzero()
    names = root.mesh_dim_names or ("",) * ranks.ndim
    index, count = 0, 1
    for dim, name in enumerate(names):
        is_within = len(set(places[:, dim].tolist())) > 1
        if not is_within and name != _PIPELINE:
            size = ranks.shape[dim]
            index, count = index * size + own[dim], count * size
    return index, count


def _describe(name: str, shape: Shape, box: Box, tensor: torch.Tensor, owned: bool) -> HeldTensor:
    shard = Shard(name, dtype_name(tensor), shape, box)
    return HeldTensor(shard, tensor, [Piece(name, shape, box, (0,) * len(shape))], owned)


def _list_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and saved buffers by plain names; tied ones once, under the first name."""
    seen: set[int] = set()
    for path, inner in module.named_modules():
        unsaved = inner._non_persistent_buffers_set
        tensors: Mapping[str, torch.Tensor | None] = {
            **inner._parameters,
            **{name: buffer for name, buffer in inner._buffers.items() if name not in unsaved},
        }
        parts = [part for part in path.split(".") if part and part not in _WRAPPERS]
        for name, tensor in tensors.items():
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield ".".join([*parts, name]), tensor


def check_plain(name: str, tensor: torch.Tensor) -> None:
    """Raise for tensor subclasses: their bytes are not the values they show (quantised, flat)."""
    if type(tensor.data) is not torch.Tensor:
        raise UsageError(
            f"{name} is a {type(tensor.data).__name__}; Rollway does not know its memory.",
            "Publish from parameters that are plain tensors or DTensors, and not quantised yet.",
        )
    if type(tensor).__name__ == "FlatParameter":
        raise UsageError(
            f"{name} is a flat parameter of FSDP1.", "Use FSDP2 (`fully_shard`), or gather it."
        )


def _get_rank_and_world() -> tuple[int, int]:
    dist = torch.distributed
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
