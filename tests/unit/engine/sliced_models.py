"""Shared by the tests of unit/engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from rollway.weights.checkpoint import TensorHeader
from rollway.weights.planning.targets import engine_ranks, part_of
from tests.unit.weights.megatron_plans import DENSE as SMALL
from tests.unit.weights.megatron_plans import MOE as SMALL_MOE

DENSE, MOE = {**SMALL, "vocab_size": 250}, {**SMALL_MOE, "vocab_size": 250}


Headers = dict[str, TensorHeader]


def engine(config: dict[str, Any], headers: Headers, tp: int, ep: int, rank: int) -> Any:
    """As far as anybody looks: the parameters of a rank, with their shapes."""
    place = engine_ranks(config, tp, ep)[rank]
    parts = [part_of(name, headers, place) for name in headers]
    shapes = {parameter: part.shape for parameter, part in parts if part is not None}
    named = [(name, torch.empty(shape)) for name, shape in shapes.items()]
    modules = [(name.rpartition(".")[0], torch.nn.Module()) for name in shapes]
    return SimpleNamespace(named_parameters=lambda: named, named_modules=lambda: modules)
