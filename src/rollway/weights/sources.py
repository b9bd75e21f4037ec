"""Describe the tensors that this rank of a trainer holds, and which boxes of the model they are.

Three kinds of trainers are supported: a plain module (also under DDP), a module whose parameters
are DTensors (FSDP2, tensor parallelism, or both), and Megatron-Core (`megatron.tensors`). A
`HeldTensor` refers to the parameter's own memory: nothing is gathered or copied. If several ranks
hold the same tensor, one of them publishes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from rollway.errors import UsageError
from rollway.weights.digest.checksums import dtype_name
from rollway.weights.fused_experts import Fused, find_fused, split_experts
from rollway.weights.layout import Box, Piece, Shape, Shard, publishes

_WRAPPERS = ("module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
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
            items += _name_as_checkpoint(local, fused) if local else []
        else:
            _check_plain(name, tensor)
            whole = hold_whole(name, tensor, owned_here=publishes(name, index, count))
            items += _name_as_checkpoint(whole, fused)
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


def _name_as_checkpoint(item: HeldTensor, fused: list[Fused]) -> list[HeldTensor]:
    """Return a tensor of all experts as views of each expert's, and any other as it is."""
    shard = item.shard
    parts = [
        _describe(part.name, part.shape, part.box, item.tensor[part.within], item.owned_here)
        for part in split_experts(shard.name, shard.shape, shard.box, fused)
    ]
    return parts or [item]


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
    return HeldTensor(shard, tensor, [Piece(name, box, name, (0,) * len(shape))], owned)


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


def _check_plain(name: str, tensor: torch.Tensor) -> None:
    """Raise for tensor subclasses: their bytes are not the values they show (quantised, flat)."""
    if type(tensor.data) is not torch.Tensor:
        raise UsageError(
            f"{name} is a {type(tensor.data).__name__}; Rollway does not know its memory.",
            "Publish from parameters that are plain tensors or DTensors.",
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
