"""What the tests of NIXL share: shards of a model, receiving, comparing."""

from __future__ import annotations

import importlib
import importlib.util

import pytest

from rollway.weights.digest.checksums import dtype_name
from rollway.weights.layout import Box, Piece, Shard
from rollway.weights.megatron.pieces import MegatronModel
from rollway.weights.sources import HeldTensor
from tests.unit.weights.megatron_shards import Tensors, from_hf, hold

nixl = pytest.mark.skipif(
    importlib.util.find_spec("nixl_cu12") is None and importlib.util.find_spec("nixl_cu13") is None,
    reason="NIXL is not installed (pip install rollway[nixl])",
)


def hold_rows(model: Tensors, ranks: int) -> list[list[HeldTensor]]:
    """Return what ranks hold of a model that shard every tensor by rows, as FSDP2 does."""
    held: list[list[HeldTensor]] = [[] for _ in range(ranks)]
    for name, tensor in model.items():
        shape = tuple(tensor.shape)
        rows = -(-shape[0] // ranks)
        for rank, start in enumerate(range(0, shape[0], rows)):
            box = Box.whole(shape).narrow(0, start, min(start + rows, shape[0]))
            shard = Shard(name, dtype_name(tensor), shape, box)
            piece = Piece(name, shape, box, (0,) * len(shape))
            held[rank].append(HeldTensor(shard, tensor[box.slices], [piece], True))
    return held


def hold_shards(model: Tensors, described: MegatronModel) -> list[list[HeldTensor]]:
    """Return what the ranks of a Megatron trainer hold of a model."""
    local = from_hf(model, described)
    return [hold(described, rank, local[rank]) for rank in described.ranks]
