"""What this rank of a trainer holds: its local tensors, and which boxes of the model they are.

Three kinds of trainers are read here: a plain module (also under DDP), one whose parameters are
DTensors (FSDP2, tensor parallel, both), and Megatron-Core. Nothing is gathered and nothing copied:
a `Held` is the tensor in the optimiser's own memory. What several ranks hold is published by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from rollway.errors import UsageError
from rollway.weights.coverage import owner
from rollway.weights.digest.bits import dtype_name
from rollway.weights.layout import Box, Piece, Role, Shape, Shard

_WRAPPERS = ("module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


@dataclass(frozen=True)
class Held:
    """A tensor of this rank, and what lies in it."""

    shard: Shard
    tensor: torch.Tensor
    """In the shape that `pieces` count in; it shares its memory with the trainer's parameter."""
    pieces: Sequence[Piece]
    owned_here: bool
    """Whether this rank publishes it; exactly one of the ranks that hold the same does."""


def from_module(module: torch.nn.Module, *, replica: tuple[int, int] | None = None) -> list[Held]:
    """A model with Hugging Face names; parameters that are DTensors count with their local part.

    `replica` is this rank's number among those that hold the same plain tensors, and how many
    they are; all ranks of the default process group, when it is not given."""
    index, count = replica or _world()
    held = []
    for name, tensor in _own_tensors(module):
        if isinstance(tensor, DTensor):
            part = _from_dtensor(name, tensor)
            held += [part] if part else []
        else:
            _check_plain(name, tensor)
            box = Box.whole(tuple(tensor.shape))
            owned = owner(name, count) == index
            held.append(_held(name, tuple(tensor.shape), box, tensor.detach(), owned))
    return held


def dtensor_box(shape: Shape, sizes: Shape, coordinate: Shape, placements: Sequence[Any]) -> Box:
    """What a rank holds of a tensor, by its coordinate in a mesh of these sizes.

    FSDP over tensor parallelism cuts on top of an earlier cut: torch calls that a strided shard,
    and it is a box as long as it comes after all the cuts that it is strided by."""
    start, length = [0] * len(shape), list(shape)
    for mesh_dim in _cutting_order(sizes, placements):
        axis = placements[mesh_dim].dim % len(shape)
        each = -(-length[axis] // sizes[mesh_dim])
        first = min(length[axis], each * coordinate[mesh_dim])
        start[axis] += first
        length[axis] = min(each, length[axis] - first)
    return Box(tuple(start), tuple(a + n for a, n in zip(start, length, strict=True)))


def _cutting_order(sizes: Shape, placements: Sequence[Any]) -> list[int]:
    """Mesh dimensions that cut, in the order in which they were applied."""
    order: list[int] = []
    strided: list[int] = []
    for mesh_dim, placement in enumerate(placements):
        if placement.is_partial():
            raise UsageError(f"{placement} is a sum that is not done yet; it cannot be published.")
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


def _from_dtensor(name: str, tensor: DTensor) -> Held | None:
    """None on ranks outside its mesh, and on those for which no element is left."""
    mesh, placements = tensor.device_mesh, tensor.placements
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    sizes, shape = tuple(mesh.shape), tuple(tensor.shape)
    try:
        box = dtensor_box(shape, sizes, tuple(coordinate), placements)
    except UsageError as error:
        raise UsageError(f"{name}: {error.message}", error.hint) from error
    local = tensor.detach().to_local()
    if tuple(local.shape) != box.shape and box.elements:
        raise UsageError(
            f"{name}: this rank should hold {list(box.shape)} of {list(shape)} ({placements}), "
            f"but has {list(local.shape)}."
        )
    if not box.elements:
        return None
    index, count = 0, 1
    for size, at, placement in zip(sizes, coordinate, placements, strict=True):
        if placement.is_replicate():
            index, count = index * size + at, count * size
    return _held(name, shape, box, local, owner(name, count) == index)


def _held(name: str, shape: Shape, box: Box, tensor: torch.Tensor, owned: bool) -> Held:
    shard = Shard(name, dtype_name(tensor), shape, box, Role.REPLICATED)
    return Held(shard, tensor, [Piece(name, box, name, (0,) * len(shape))], owned)


def _own_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and saved buffers under their own names; tied ones once, under the first."""
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
    """A subclass stands for other bytes than it shows: quantised, flattened, sharded in its way."""
    if type(tensor.data) is not torch.Tensor:
        raise UsageError(
            f"{name} is a {type(tensor.data).__name__}; Rollway does not know its memory.",
            "Publish from parameters that are plain tensors or DTensors.",
        )
    if type(tensor).__name__ == "FlatParameter":
        raise UsageError(
            f"{name} is a flat parameter of FSDP1.", "Use FSDP2 (`fully_shard`), or gather it."
        )


def _world() -> tuple[int, int]:
    dist = torch.distributed
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
