"""The layout of a Megatron model: the tensors of every rank, and the Hugging Face tensors in them.

`live.read_rank` reads the layout of one rank of a running model. `describe` computes the layout of
a model that does not run yet. `sidecar` stores either as JSON.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from rollway.errors import UsageError
from rollway.weights.coverage import check_covered, publishing_replica
from rollway.weights.layout import Placed, Role, Shape, Shard
from rollway.weights.megatron.geometry import ModelGeometry, Position
from rollway.weights.megatron.pieces import cuts, hf_shapes, replica

_MAX_PARTS = 1 << 21
"""The limit for all tensors together: four times what 60 layers of 400 experts in 8 parts have."""
_LAYER_NUMBER = re.compile(r"\blayers\.(\d+)\.")


@dataclass(frozen=True)
class RankLayout:
    """What one rank holds, by Megatron's names."""

    position: Position
    shards: Mapping[str, Shard]
    names: Mapping[str, tuple[str, ...]]
    """The Hugging Face tensors in each shard, in the order that `pieces` expects."""

    def owns(self, name: str) -> bool:
        """Return whether this rank is the replica that publishes its shard."""
        own = replica(self.shards[name], self.position)
        return publishing_replica(name, own.count) == own.index


@dataclass(frozen=True)
class Part:
    """A box of a Hugging Face tensor, and the rank and tensor that contain it."""

    rank: int
    source: str
    cut: Placed


@dataclass(frozen=True)
class MegatronModel:
    """All ranks of a trainer, or those that are known so far."""

    geometry: ModelGeometry
    ranks: Mapping[int, RankLayout] = field(default_factory=dict)

    def parts(self) -> Iterator[tuple[str, Shape, str, list[Part]]]:
        """Yield name, shape and dtype of each Hugging Face tensor, and the parts that make it up.

        Of several replicas, one is used. Raise `UsageError` if a part is missing or held twice.
        """
        for name, (shape, parts) in self._index().items():
            check_covered(name, shape, (part.cut.box for part in parts))
            dtypes = {self.ranks[part.rank].shards[part.source].dtype for part in parts}
            if len(dtypes) > 1:
                raise UsageError(
                    f"{name} has parts of different dtypes: {sorted(dtypes)}.",
                    "Use one dtype for this tensor on all ranks.",
                )
            yield name, shape, dtypes.pop(), parts

    def check_whole(self) -> None:
        """Raise `UsageError` unless every layer is there and every tensor is covered once."""
        names = [name for name, *_ in self.parts()]
        present = {int(number) for name in names for number in _LAYER_NUMBER.findall(name)}
        missing = (layer for layer in range(self.geometry.layers) if layer not in present)
        first_missing = list(islice(missing, 5))
        if first_missing:
            raise UsageError(
                f"No rank holds layer {', '.join(map(str, first_missing))} of the model's "
                f"{self.geometry.layers}.",
                "A pipeline stage is missing, or layers have wrong numbers.",
            )

    def _index(self) -> dict[str, tuple[Shape, list[Part]]]:
        """Return shape and parts by the name of the Hugging Face tensor."""
        index: dict[str, tuple[Shape, list[Part]]] = {}
        published = self._list_published()
        self._check_count(published)
        for (source, rank), shard in published.items():
            names = self.ranks[rank].names[source]
            shapes = hf_shapes(shard, len(names), self.geometry)
            for name, shape in zip(names, shapes, strict=True):
                first_shape, _ = index.setdefault(name, (shape, []))
                if first_shape != shape:
                    raise UsageError(
                        f"{name} has the shape {list(first_shape)} on some ranks and "
                        f"{list(shape)} on rank {rank}.",
                        "Check the parallel sizes that the ranks report.",
                    )
            for cut in cuts(shard, len(names), self.geometry):
                index[names[cut.tensor]][1].append(Part(rank, source, cut))
        return index

    def _check_count(self, published: Mapping[tuple[str, int], Shard]) -> None:
        """Raise if there are more parts than fit in memory, before any is created.

        A few bytes of a sidecar describe a fused tensor, which has parts for every head. So a small
        file can stand for very many parts."""
        count = sum(len(self.ranks[rank].names[source]) for source, rank in published)
        for shard in published.values():
            if shard.role is Role.QKV_COLUMN:
                count += shard.box.shape[0] // self.geometry.head_dim
        if count > _MAX_PARTS:
            raise UsageError(
                f"The model is cut into more than {_MAX_PARTS} parts.",
                "Check the numbers of heads, experts and ranks.",
            )

    def _list_published(self) -> dict[tuple[str, int], Shard]:
        """Return one shard of every group of replicas, from the publishing rank if it is known."""
        chosen: dict[tuple[str, Shape], int] = {}
        seen: dict[tuple[str, Shape, int], int] = {}
        for rank, layout in self.ranks.items():
            for name, shard in layout.shards.items():
                own = replica(shard, layout.position)
                other = seen.setdefault((name, own.group, own.index), rank)
                if other != rank:
                    raise UsageError(
                        f"Ranks {other} and {rank} say that they are at the same position.",
                        "Data-parallel replicas must differ in dp (and edp, for experts).",
                    )
                publishes = publishing_replica(name, own.count) == own.index
                if publishes or (name, own.group) not in chosen:
                    chosen[name, own.group] = rank
        return {(name, rank): self.ranks[rank].shards[name] for (name, _), rank in chosen.items()}
