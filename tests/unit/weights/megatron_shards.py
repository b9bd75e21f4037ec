"""Make the tensors that the ranks of a Megatron trainer would hold, from a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from rollway.weights.checkpoint import read_headers
from rollway.weights.megatron.geometry import ModelGeometry, Topology
from rollway.weights.megatron.model import describe
from rollway.weights.megatron.names import NameMap
from rollway.weights.megatron.pieces import pieces
from rollway.weights.megatron.tensors import from_hf
from rollway.weights.sources import HeldTensor


def held_by_ranks(
    directory: Path, tensors: Mapping[str, torch.Tensor], topology: Topology
) -> list[list[HeldTensor]]:
    config = json.loads((directory / "config.json").read_text())
    names = NameMap(config["model_type"], ModelGeometry.from_hf_config(config))
    model = describe(read_headers(directory), names, topology)
    local = from_hf(tensors, model)
    return [
        [
            HeldTensor(
                shard,
                local[rank][name].view(shard.box.shape),
                pieces(shard, layout.names[name], names.geometry),
                layout.owns(name),
            )
            for name, shard in layout.shards.items()
        ]
        for rank, layout in model.ranks.items()
    ]
