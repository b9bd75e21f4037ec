"""Which part of each tensor a rank holds, so that no more than that is brought to it.

vLLM's loaders take whole tensors and cut them. A rank that was brought its part alone gives them a
hollow tensor: of the whole one's shape, with the part in its place and zeros around it that were
never touched, so that on CPU they take no memory. The loader cuts out exactly what is there; would
it cut elsewhere, it would load zeros, and the proof would not hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from rollway.errors import UsageError
from rollway.weights.checkpoint import TensorHeader
from rollway.weights.layout import Box, Shape
from rollway.weights.planning.vllm_layout import EngineTarget, engine_ranks, part_of


@dataclass(frozen=True)
class Slices:
    """Boxes of the tensors of parameters that ranks cut; None where this one holds nothing."""

    boxes: Mapping[str, Box | None] = field(default_factory=dict)
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    """Of the whole tensors."""
    parameters: Mapping[str, str] = field(default_factory=dict)
    """Of the engine, that the tensors go into."""

    def made_of(self, pieces: Mapping[str, list[Box]]) -> Slices:
        """Those that are some of these pieces, whole; a parameter's tensors come all cut, or all
        whole, because they are proved together."""
        loose = {
            self.parameters[name]
            for name, box in self.boxes.items()
            if box is not None and not _made_of(box, pieces.get(name, []))
        }
        return self._without(loose)

    def hollowed(
        self, tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The same tensors, with parts in the place that they have in the whole."""
        for name, tensor in tensors:
            box = self.boxes.get(name)
            if box is not None and box != Box.whole(self.shapes[name]):
                tensor = hollow(tensor, box, self.shapes[name])
            yield name, tensor

    def _without(self, parameters: set[str]) -> Slices:
        kept = {n: box for n, box in self.boxes.items() if self.parameters[n] not in parameters}
        return Slices(kept, self.shapes, self.parameters)


WHOLE = Slices()
"""Nothing is cut."""


def _made_of(box: Box, pieces: Iterable[Box]) -> bool:
    return all(piece.cut(box) in (None, piece) for piece in pieces)


def hollow(part: torch.Tensor, box: Box, shape: Shape) -> torch.Tensor:
    """A tensor of this shape with `part` at `box`."""
    if part.device.type == "cpu":
        # numpy's zeros are the system's, who gives them when they are touched; torch writes them.
        raw = np.zeros(Box.whole(shape).elements * part.element_size(), dtype=np.uint8)
        whole = torch.from_numpy(raw).view(part.dtype).view(shape)
    else:
        whole = torch.zeros(shape, dtype=part.dtype, device=part.device)
    whole[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))] = part
    return whole


def slices(
    rank: EngineTarget | None,
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
    return Slices(boxes, shapes, parameters)._without(set(parameters.values()) - taken)


def rank_of(worker: Any) -> EngineTarget | None:
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
