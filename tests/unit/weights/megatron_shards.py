"""Make the tensors that the ranks of a Megatron trainer would hold, and read them as workers do."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from rollway.weights.checkpoint import read_headers
from rollway.weights.layout import Shape, Shard
from rollway.weights.megatron.geometry import ModelGeometry, Topology
from rollway.weights.megatron.names import NameMap
from rollway.weights.megatron.pieces import MegatronModel, is_legacy, pieces
from rollway.weights.offer import Manifest, list_boxes
from rollway.weights.planning.scenario import describe
from rollway.weights.sources import HeldTensor
from rollway.weights.transports.entries import make_entry
from rollway.weights.transports.shm import assemble, group_by_tensor

Tensors = Mapping[str, torch.Tensor]


def rank_from_hf(hf: Tensors, model: MegatronModel, rank: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a rank by Megatron's names and in its shapes; padding is zero."""
    layout, local = model.ranks[rank], {}
    for name, shard in layout.shards.items():
        tensor = torch.zeros(shard.box.shape, dtype=hf[layout.names[name][0]].dtype)
        for piece in pieces(shard, layout.names[name], model.geometry):
            part = tensor[piece.slices]
            (part.t() if piece.transposed else part).copy_(hf[piece.name][piece.box.slices])
        local[name] = tensor.view(_megatron_shape(shard, model.geometry))
    return local


def from_hf(hf: Tensors, model: MegatronModel) -> dict[int, dict[str, torch.Tensor]]:
    return {rank: rank_from_hf(hf, model, rank) for rank in model.ranks}


def hold(model: MegatronModel, rank: int, tensors: Tensors) -> list[HeldTensor]:
    """Return what a rank publishes of its tensors, as `from_megatron` does."""
    layout = model.ranks[rank]
    return [
        HeldTensor(
            shard,
            tensors[name].reshape(shard.box.shape),
            pieces(shard, layout.names[name], model.geometry),
            layout.owns(name),
        )
        for name, shard in layout.shards.items()
    ]


def to_hf(
    model: MegatronModel, tensors: Mapping[int, Tensors]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the Hugging Face tensors that a worker makes from the shards of all ranks."""
    manifests, views = [], []
    for rank in model.ranks:
        owned = [h for h in hold(model, rank, tensors[rank]) if h.owned_here and h.pieces]
        entries = [make_entry(h.shard.name, h.tensor, 0, boxes=list_boxes(h.pieces)) for h in owned]
        manifests.append(Manifest(0, sum(entry.nbytes for entry in entries), entries))
        views.append({h.shard.name: h.tensor for h in owned})
    for name, parts in group_by_tensor(manifests).items():
        yield name, assemble(parts, views)


def _megatron_shape(shard: Shard, geometry: ModelGeometry) -> Shape:
    """Return the shape that Megatron gives the tensor; see `local_view`."""
    if is_legacy(shard.name) and shard.name.endswith("weight1"):
        return geometry.hidden, shard.box.elements // geometry.hidden
    return shard.box.shape


def held_by_ranks(directory: Path, tensors: Tensors, topology: Topology) -> list[list[HeldTensor]]:
    config = json.loads((directory / "config.json").read_text())
    names = NameMap.from_hf_config(config)
    model = describe(read_headers(directory), names, topology)
    local = from_hf(tensors, model)
    return [hold(model, rank, local[rank]) for rank in model.ranks]
