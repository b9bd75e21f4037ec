"""Find the part of each tensor that a rank of the engine holds, so that it receives no more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rollway.errors import UsageError
from rollway.weights.checkpoint import TensorHeader
from rollway.weights.layout import Box
from rollway.weights.planning.vllm_layout import EngineRank, engine_ranks, part_of
from rollway.weights.slices import WHOLE, Slices, zero_pad

__all__ = ["WHOLE", "Slices", "rank_of", "slices", "zero_pad"]


def slices(
    rank: EngineRank | None,
    headers: Mapping[str, TensorHeader],
    model: torch.nn.Module,
) -> Slices:
    """What `rank` holds, where our rules say so and the model's parameters have the shapes that
    follow from them. Nothing is cut of what is not known: it is taken whole."""
    if rank is None:
        return WHOLE
    held = {name: tuple(one.shape) for name, one in model.named_parameters()}
    boxes: dict[str, Box | None] = {}
    parameters: dict[str, str] = {}
    unlike: set[str] = set()
    for name in headers:
        try:
            parameter, part = part_of(name, headers, rank)
        except (UsageError, IndexError):  # no rule, or a tensor unlike those of the rule
            continue
        parameters[name] = parameter
        boxes[name] = part.box if part is not None else None
        if parameter not in held or (part is not None and held[parameter] != part.shape):
            unlike.add(parameter)
    shapes = {name: header.shape for name, header in headers.items()}
    cut = {parameters[name] for name, box in boxes.items() if box != Box.whole(shapes[name])}
    # One that holds padding alone still loads it, and proves it.
    some = {parameters[name] for name, box in boxes.items() if box is not None}
    taken = (cut & some) - unlike
    return Slices(boxes, shapes, parameters).without(set(parameters.values()) - taken)


def rank_of(worker: Any) -> EngineRank | None:
    """Where this worker stands in its engine; None when it is alone, or cuts as nobody knows."""
    from vllm.distributed import (
        get_ep_group,
        get_tensor_model_parallel_rank,
        get_tensor_model_parallel_world_size,
    )

    parallel = worker.vllm_config.parallel_config
    tp = get_tensor_model_parallel_world_size()
    ep, place = 1, get_tensor_model_parallel_rank()
    if parallel.enable_expert_parallel and worker.model_config.is_moe:
        if parallel.enable_eplb or parallel.expert_placement_strategy != "linear":
            return None  # experts move about
        ep, place = get_ep_group().world_size, get_ep_group().rank_in_group
    if max(tp, ep) == 1:
        return None
    try:
        return engine_ranks(worker.model_config.hf_config.to_dict(), tp, ep)[place]
    except UsageError:
        return None
