"""Trainers as a planner sees them, from layouts that are described: a checkpoint, FSDP, Megatron.

What a running trainer holds is described by the packages that know it; here such descriptions
become sources.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from rollway.errors import UsageError
from rollway.weights.layout import Box, Shape, Shard
from rollway.weights.megatron.model import MegatronModel, RankLayout
from rollway.weights.megatron.pieces import Cut, cuts
from rollway.weights.planning.holdings import Held, Holding, Resident, Source
from rollway.weights.planning.wants import Described


def hf_source(headers: Mapping[str, Described], name: str = "trainer") -> Source:
    """One rank that has every Hugging Face tensor whole."""
    return fsdp_sources(headers, 1, name)[0]


def fsdp_sources(
    headers: Mapping[str, Described], ranks: int, name: str = "trainer"
) -> list[Source]:
    """Ranks that hold every tensor in rows, as FSDP2 cuts them: the last may have fewer, or none.

    A tensor without dimensions is on all of them."""
    if ranks < 1:
        raise UsageError(f"A trainer cannot have {ranks} ranks.")
    offers: list[dict[str, Resident]] = [{} for _ in range(ranks)]
    shared: dict[tuple[str, Shape, int], Holding] = {}
    for tensor, header in headers.items():
        for rank in range(ranks):
            key = header.dtype, header.shape, rank
            if key not in shared:
                box = _rows(header.shape, rank, ranks)
                held = (Held(0, box, (0,) * len(box.start)),)
                shared[key] = Holding(header.dtype, box.shape, held)
            if math.prod(shared[key].shape):
                offers[rank][tensor] = Resident((tensor,), shared[key])
    names = [name] if ranks == 1 else [f"{name}{rank}" for rank in range(ranks)]
    return [Source(*one) for one in zip(names, offers, strict=True)]


def _rows(shape: Shape, rank: int, ranks: int) -> Box:
    whole = Box.whole(shape)
    if not shape:
        return whole
    each = -(-shape[0] // ranks)
    first, last = min(rank * each, shape[0]), min((rank + 1) * each, shape[0])
    return Box((first, *whole.start[1:]), (last, *whole.stop[1:]))


def megatron_sources(model: MegatronModel, name: str = "trainer") -> list[Source]:
    """Every rank of a Megatron trainer, also those that only repeat what others hold: a planner
    shares the work among them."""
    shared: dict[tuple[str, Box, int], tuple[tuple[Cut, ...], Holding]] = {}

    def holding(shard: Shard, count: int) -> Holding:
        found = cuts(shard, count, model.geometry)
        key = shard.dtype, shard.box, id(found)  # equal layers have the very same cuts
        if key not in shared:
            held = tuple(Held(cut.index, cut.box, cut.at, cut.transposed) for cut in found)
            shared[key] = found, Holding(shard.dtype, shard.box.shape, held)
        return shared[key][1]

    def source(rank: int, layout: RankLayout) -> Source:
        offers = {
            tensor: Resident(names, holding(layout.shards[tensor], len(names)))
            for tensor, names in layout.names.items()
        }
        return Source(f"{name}{rank}", offers)

    return [source(rank, layout) for rank, layout in model.ranks.items()]
