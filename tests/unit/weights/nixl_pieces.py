"""Shared by the tests of unit/weights."""

from __future__ import annotations

import importlib
import importlib.util

import pytest
import torch

from rollway.weights.layout import Piece
from rollway.weights.planning.holdings import Source
from tests.unit.weights.nixl_source import Tensors

nixl = pytest.mark.skipif(
    importlib.util.find_spec("nixl_cu12") is None and importlib.util.find_spec("nixl_cu13") is None,
    reason="NIXL is not installed (pip install rollway[nixl])",
)


def same(found: Tensors, wanted: Tensors) -> bool:
    assert found.keys() == wanted.keys()
    return all(
        found[name].dtype == one.dtype and torch.equal(found[name], one)
        for name, one in wanted.items()
    )


def pieces_of(source: Source) -> list[Piece]:
    return [
        Piece(offer.names[held.tensor], held.box, tensor, held.at, held.transposed)
        for tensor, offer in source.offers.items()
        for held in offer.holding.held
    ]
