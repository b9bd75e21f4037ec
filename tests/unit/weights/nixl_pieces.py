"""What the tests of NIXL share: shards of a model, receiving, comparing."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest
import torch

from rollway.weights.layout import Box, Piece, Shard
from rollway.weights.planning.plan import Source
from rollway.weights.planning.targets import Headers
from rollway.weights.sources import HeldTensor
from tests.unit.weights.planned import held_by

nixl = pytest.mark.skipif(
    importlib.util.find_spec("nixl_cu12") is None and importlib.util.find_spec("nixl_cu13") is None,
    reason="NIXL is not installed (pip install rollway[nixl])",
)


def held_tensors(
    source: Source, model: dict[str, Any], shapes: Headers | None = None
) -> list[HeldTensor]:
    """Return what a rank holds of a model; `shapes` are those of the whole tensors."""
    held = []
    for name, array in held_by(source, model).items():
        resident = source.tensors[name]
        pieces = [
            Piece(resident.names[part.tensor], part.box, name, part.at, part.transposed)
            for part in resident.held
        ]
        shape = shapes[name].shape if shapes else tuple(array.shape)
        shard = Shard(name, resident.dtype, shape, Box.whole(tuple(array.shape)))
        held.append(HeldTensor(shard, torch.from_numpy(array), pieces, True))
    return held
