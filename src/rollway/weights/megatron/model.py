"""A Megatron model, described: what every rank holds, and what that is called by Hugging Face.

A live model is described by `rollway.weights.sources.from_megatron`, rank by rank, and one that
does not exist yet by `describe`. From here on, both are the same thing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from rollway.errors import UsageError
from rollway.weights.coverage import check_covered, owner
from rollway.weights.layout import Role, Shape, Shard
from rollway.weights.megatron.geometry import ModelGeometry, Position
from rollway.weights.megatron.pieces import Cut, cuts, hf_shapes, replica

_MOST_PARTS = 1 << 21
"""Of all tensors together; a model of 60 layers with 400 experts in 8 parts has a quarter of it."""
_LAYER_NUMBER = re.compile(r"\blayers\.(\d+)\.")


@dataclass(frozen=True)
class RankLayout:
    """What one rank holds, by Megatron's names."""

    position: Position
    shards: Mapping[str, Shard]
    names: Mapping[str, tuple[str, ...]]
    """What lies in each shard, in the order that `pieces` expects."""

    def owns(self, name: str) -> bool:
        """Whether this rank is the one of all replicas that publishes its shard."""
        me = replica(self.shards[name], self.position)
        return owner(name, me.count) == me.index


@dataclass(frozen=True)
class Part:
    """A cut of a Hugging Face tensor, and the rank and tensor it lies in."""

    rank: int
    source: str
    cut: Cut


@dataclass(frozen=True)
class MegatronModel:
    """All ranks of a trainer, or those that are known so far."""

    geometry: ModelGeometry
    ranks: Mapping[int, RankLayout] = field(default_factory=dict)

    def parts(self) -> Iterator[tuple[str, Shape, str, list[Part]]]:
        """Each Hugging Face tensor: its name, shape and dtype, and the parts that make it up.

        Of replicas one is taken. Parts that are missing or claimed twice are errors."""
        for name, (shape, parts) in self._index().items():
            check_covered(name, shape, (part.cut.box for part in parts))
            dtypes = {self.ranks[part.rank].shards[part.source].dtype for part in parts}
            if len(dtypes) > 1:
                raise UsageError(f"{name} has parts of different dtypes: {sorted(dtypes)}.")
            yield name, shape, dtypes.pop(), parts

    def check_whole(self) -> None:
        """Raise unless every layer is there and every tensor is covered exactly once."""
        names = [name for name, *_ in self.parts()]
        found = {int(number) for name in names for number in _LAYER_NUMBER.findall(name)}
        missing = (layer for layer in range(self.geometry.layers) if layer not in found)
        some = list(islice(missing, 5))
        if some:
            raise UsageError(
                f"No rank holds layer {', '.join(map(str, some))} of the model's "
                f"{self.geometry.layers}.",
                "A pipeline stage is missing, or layers have wrong numbers.",
            )

    def _index(self) -> dict[str, tuple[Shape, list[Part]]]:
        index: dict[str, tuple[Shape, list[Part]]] = {}
        published = self._published()
        self._check_count(published)
        for (source, rank), shard in published.items():
            names = self.ranks[rank].names[source]
            shapes = hf_shapes(shard, len(names), self.geometry)
            for name, shape in zip(names, shapes, strict=True):
                known, _ = index.setdefault(name, (shape, []))
                if known != shape:
                    raise UsageError(
                        f"{name} has the shape {list(known)} on some ranks and {list(shape)} on "
                        f"rank {rank}."
                    )
            for cut in cuts(shard, len(names), self.geometry):
                index[names[cut.index]][1].append(Part(rank, source, cut))
        return index

    def _check_count(self, published: Mapping[tuple[str, int], Shard]) -> None:
        """Refuse more parts than memory is for, before any of them is made: a short description
        of a fused tensor stands for some parts of every head."""
        count = sum(len(self.ranks[rank].names[source]) for source, rank in published)
        for shard in published.values():
            if shard.role is Role.QKV_COLUMN:
                count += shard.box.shape[0] // self.geometry.head_dim
        if count > _MOST_PARTS:
            raise UsageError(
                f"The model is cut into more than {_MOST_PARTS} parts.",
                "Check the numbers of heads, experts and ranks.",
            )

    def _published(self) -> dict[tuple[str, int], Shard]:
        """One rank's shard of every group of replicas; the owner's, where it is among us."""
        chosen: dict[tuple[str, Shape], int] = {}
        seen: dict[tuple[str, Shape, int], int] = {}
        for rank, layout in self.ranks.items():
            for name, shard in layout.shards.items():
                me = replica(shard, layout.position)
                other = seen.setdefault((name, me.group, me.index), rank)
                if other != rank:
                    raise UsageError(
                        f"Ranks {other} and {rank} say that they are at the same position.",
                        "Data-parallel replicas must differ in dp (and edp, for experts).",
                    )
                if (name, me.group) not in chosen or owner(name, me.count) == me.index:
                    chosen[name, me.group] = rank
        return {(name, rank): self.ranks[rank].shards[name] for (name, _), rank in chosen.items()}
