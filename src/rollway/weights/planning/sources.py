"""Describe what the ranks of a trainer hold, for the planner.

A `ResidentTensor` is a tensor in a rank's memory; its `Holding` lists the boxes of Hugging Face
tensors in it. Tensors of equal geometry share one `Holding` object, so the planner recognises equal
ones by identity. The functions here make sources from pieces, and from descriptions of FSDP and
Megatron trainers. They describe tensors and copy none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollway.errors import UsageError
from rollway.weights.layout import Box, Piece, Placed, Shape, Shard
from rollway.weights.megatron.pieces import MegatronModel, RankLayout, cuts
from rollway.weights.planning.targets import Headers


@dataclass(frozen=True, slots=True)
class Holding:
    """The geometry of a tensor in a rank's memory, and the boxes that are stored in it."""

    dtype: str
    shape: Shape
    held: tuple[Placed, ...]


@dataclass(frozen=True, slots=True)
class ResidentTensor:
    """A tensor of a source. `holding` refers to Hugging Face tensors by their index in `names`."""

    names: tuple[str, ...]
    holding: Holding


@dataclass(frozen=True)
class Source:
    """A rank that receivers can read from, with its tensors by the trainer's names."""

    name: str
    offers: Mapping[str, ResidentTensor]


def source_from_pieces(name: str, tensors: Headers, pieces: Sequence[Piece]) -> Source:
    """Return a source for a rank from its own tensors and the pieces that are stored in them."""
    by_tensor: dict[str, list[Piece]] = {}
    for piece in pieces:
        by_tensor.setdefault(piece.source, []).append(piece)
    shared: dict[Holding, Holding] = {}
    offers = {}
    for tensor, tensor_pieces in by_tensor.items():
        if tensor not in tensors:
            raise UsageError(
                f"{name} offers pieces of {tensor}, but has no such tensor.",
                "List every tensor that a piece is in.",
            )
        numbers: dict[str, int] = {}
        held = tuple(
            Placed(p.box, p.at, p.transposed, numbers.setdefault(p.name, len(numbers)))
            for p in tensor_pieces
        )
        holding = Holding(tensors[tensor].dtype, tensors[tensor].shape, held)
        offers[tensor] = ResidentTensor(tuple(numbers), shared.setdefault(holding, holding))
    return Source(name, offers)


def fsdp_sources(headers: Headers, ranks: int) -> list[Source]:
    """Return sources for ranks that shard every tensor by rows, as FSDP2 does. The last ranks may
    have fewer rows than others, or none. A tensor without dimensions is on all ranks."""
    if ranks < 1:
        raise UsageError(f"A trainer cannot have {ranks} ranks.", "Use 1 or more.")
    offers: list[dict[str, ResidentTensor]] = [{} for _ in range(ranks)]
    shared: dict[tuple[str, Shape, int], Holding] = {}
    for tensor, header in headers.items():
        for rank in range(ranks):
            key = header.dtype, header.shape, rank
            if key not in shared:
                box = Box.whole(header.shape)
                if header.shape:
                    rows, height = -(-header.shape[0] // ranks), header.shape[0]
                    box = box.narrow(0, min(rank * rows, height), min((rank + 1) * rows, height))
                held = (Placed(box, (0,) * len(box.start)),)
                shared[key] = Holding(header.dtype, box.shape, held)
            if math.prod(shared[key].shape):
                offers[rank][tensor] = ResidentTensor((tensor,), shared[key])
    names = ["trainer"] if ranks == 1 else [f"trainer{rank}" for rank in range(ranks)]
    return [Source(name, tensors) for name, tensors in zip(names, offers, strict=True)]


def megatron_sources(model: MegatronModel) -> list[Source]:
    """Return a source for every rank of a Megatron trainer, replicas included: the planner divides
    the load among them."""
    shared: dict[tuple[str, Box, int], Holding] = {}

    def share_holding(shard: Shard, count: int) -> Holding:
        held = cuts(shard, count, model.geometry)
        # `cuts` caches: it returns one tuple object for equal layers. The holding keeps a reference
        # to it, so its id cannot be reused.
        key = shard.dtype, shard.box, id(held)
        if key not in shared:
            shared[key] = Holding(shard.dtype, shard.box.shape, held)
        return shared[key]

    def make_source(rank: int, layout: RankLayout) -> Source:
        offers = {
            tensor: ResidentTensor(names, share_holding(layout.shards[tensor], len(names)))
            for tensor, names in layout.names.items()
        }
        return Source(f"trainer{rank}", offers)

    return [make_source(rank, layout) for rank, layout in model.ranks.items()]
