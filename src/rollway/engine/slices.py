"""Find the part of each tensor that a rank of the engine holds, so that it receives no more.

vLLM's loaders accept whole tensors and cut them. A rank that received only its part passes them a
zero-padded tensor: the shape of the whole tensor, with the part in its place. The zeros are never
touched, so on a CPU they take no memory. A loader that cut elsewhere would load zeros, and the
verification after the load would fail.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from rollway.errors import UsageError
from rollway.weights.checkpoint import TensorHeader
from rollway.weights.layout import Box, Shape, Slices
from rollway.weights.planning.targets import EngineRank, engine_ranks, part_of


def find_slices(
    rank: EngineRank | None, headers: Mapping[str, TensorHeader], model: torch.nn.Module
) -> Slices:
    """Return the slices that `rank` holds of the tensors in `headers`.

    A tensor is sliced only if there is a rule for it, and the model's parameter has the shape that
    follows from the rule. All other tensors are received whole."""
    if rank is None:
        return Slices()
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    boxes: dict[str, Box | None] = {}
    parameters: dict[str, str] = {}
    divided: set[str] = set()  # Parameters that receive less than all of a tensor
    filled: set[str] = set()  # Parameters that receive anything
    unlike: set[str] = set()  # Parameters of another shape than the rule gives
    for name, header in headers.items():
        try:
            parameter, part = part_of(name, headers, rank)
        except (UsageError, IndexError):  # no rule, or a tensor unlike those of the rule
            continue
        parameters[name] = parameter
        boxes[name] = part.box if part is not None else None
        if boxes[name] != Box.whole(header.shape):
            divided.add(parameter)
        if part is not None:
            filled.add(parameter)
        if parameter not in shapes or (part is not None and shapes[parameter] != part.shape):
            unlike.add(parameter)
    slices = Slices(boxes, {name: header.shape for name, header in headers.items()}, parameters)
    # A parameter that consists of padding alone is received whole: the engine still loads the
    # padding, and verifies it.
    return slices.without(set(parameters.values()) - ((divided & filled) - unlike))


def rank_of(worker: Any) -> EngineRank | None:
    """Return the worker's rank in its engine, or None if it is alone or its sharding is unknown."""
    from vllm.distributed import (
        get_ep_group,
        get_tensor_model_parallel_rank,
        get_tensor_model_parallel_world_size,
    )

    parallel = worker.vllm_config.parallel_config
    tp, ep = get_tensor_model_parallel_world_size(), 1
    rank = get_tensor_model_parallel_rank()
    if parallel.enable_expert_parallel and worker.model_config.is_moe:
        if parallel.enable_eplb or parallel.expert_placement_strategy != "linear":
            return None  # experts move between ranks
        ep, rank = get_ep_group().world_size, get_ep_group().rank_in_group
    if max(tp, ep) == 1:
        return None
    try:
        return engine_ranks(worker.model_config.hf_config.to_dict(), tp, ep)[rank]
    except UsageError:
        return None


def zero_padded(
    slices: Slices, tensors: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors, with each part at its place in a zero-padded whole tensor."""
    for name, tensor in tensors:
        box = slices.boxes.get(name)
        if box is not None and box != Box.whole(slices.shapes[name]):
            tensor = zero_pad(tensor, box, slices.shapes[name])
        yield name, tensor


def zero_pad(part: torch.Tensor, box: Box, shape: Shape) -> torch.Tensor:
    """Return a zero-padded tensor of this shape with `part` at `box`."""
    if part.device.type == "cpu":
        # numpy's zeros are pages that the kernel provides when they are touched; torch's are
        # written.
        raw = np.zeros(Box.whole(shape).elements * part.element_size(), dtype=np.uint8)
        whole = torch.from_numpy(raw).view(part.dtype).view(shape)
    else:
        whole = torch.zeros(shape, dtype=part.dtype, device=part.device)
    whole[box.slices] = part
    return whole
