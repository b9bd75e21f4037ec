"""The layout of a Megatron model: the tensors of every rank, and the Hugging Face tensors in them.

`tensors.read_rank` reads the layout of one rank of a running model. `describe` computes the layout
of a trainer that does not run, from the shapes of a checkpoint alone: any topology, with the names
that Transformer Engine or Megatron's own layers give, and any of Megatron's three kinds of experts.
`sidecar` stores either as JSON.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache
from itertools import islice

from rollway.errors import UsageError
from rollway.weights.checkpoint import TensorHeader
from rollway.weights.layout import (
    Box,
    Placed,
    Role,
    Shape,
    Shard,
    check_covered,
    publishes,
)
from rollway.weights.megatron.geometry import ModelGeometry, Position, Topology
from rollway.weights.megatron.names import NameMap, Table, role_of_name
from rollway.weights.megatron.pieces import cuts, hf_shapes, is_legacy, replica, sharding

_MAX_PARTS = 1 << 21
"""The limit for all tensors together: four times what 60 layers of 400 experts in 8 parts have."""
_LAYER_NUMBER = re.compile(r"\blayers\.(\d+)\.")
_FUSED_NORM = ".layer_norm_"


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
        return publishes(name, own.index, own.count)


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
                if publishes(name, own.index, own.count) or (name, own.group) not in chosen:
                    chosen[name, own.group] = rank
        return {(name, rank): self.ranks[rank].shards[name] for (name, _), rank in chosen.items()}


# --- a trainer that does not run ---------------------------------------------------------------


class Norms(StrEnum):
    """Where Megatron keeps the norms before attention and MLP."""

    FUSED = "fused"  # In the linear layer that follows, as Transformer Engine does
    SEPARATE = "separate"


class Experts(StrEnum):
    """Megatron's module for the local experts."""

    GROUPED = "grouped"
    SEQUENTIAL = "sequential"
    LEGACY = "legacy"


def describe(
    hf: Mapping[str, TensorHeader],
    names: NameMap,
    topology: Topology,
    *,
    norms: Norms = Norms.FUSED,
    experts: Experts = Experts.GROUPED,
) -> MegatronModel:
    """Return what the ranks of a trainer hold of a model with these Hugging Face tensors.

    The second copy of tied embeddings, on the last pipeline stage, is left out."""
    templates = _choose_templates(names.table, norms, experts)
    layouts: dict[int, RankLayout] = {}
    shared: dict[tuple[int, int], list[tuple[Shard, tuple[str, ...]]]] = {}
    for rank, position in enumerate(topology.positions()):
        place = position.pp, position.ep  # the names of a rank's tensors depend only on these
        if place not in shared:
            shared[place] = list(_list_tensors(hf, names, position, templates))
        shards = {tensor.name: _make_shard(tensor, position) for tensor, _ in shared[place]}
        hf_names = {tensor.name: parts for tensor, parts in shared[place]}
        layouts[rank] = RankLayout(position, shards, hf_names)
    return MegatronModel(names.geometry, layouts)


def _list_tensors(
    hf: Mapping[str, TensorHeader], names: NameMap, position: Position, templates: list[str]
) -> Iterator[tuple[Shard, tuple[str, ...]]]:
    """Yield Megatron's tensors, all tensor-parallel ranks joined, and the HF tensors in each."""
    used: set[str] = set()
    for template, name in _list_names(templates, names.geometry, position):
        hf_names = names.hf_names(name, position)
        if not hf_names or any(n not in hf or n in used for n in hf_names):
            continue
        if _FUSED_NORM in name:
            # A norm is fused only into a linear layer that the model has.
            linear = name.rpartition(_FUSED_NORM)[0] + ".weight"
            if not all(n in hf for n in names.hf_names(linear, position)):
                continue
        used.update(hf_names)
        role = role_of_name(template, gated=names.geometry.gated)
        shapes = [hf[n].shape for n in hf_names]
        shape = _join_shapes(name, role, shapes, names.geometry, position)
        yield Shard(name, hf[hf_names[0]].dtype, shape, Box.whole(shape), role), hf_names


def _choose_templates(table: Table, norms: Norms, experts: Experts) -> list[str]:
    """Return the names of a family that this kind of model has; fused norms come first."""
    marks = {
        Experts.GROUPED: ".experts.linear_fc",
        Experts.SEQUENTIAL: ".experts.local_experts.",
        Experts.LEGACY: ".experts.weight",
    }
    other = tuple(mark for kind, mark in marks.items() if kind is not experts)
    chosen = [name for name in table if not any(mark in name for mark in other)]
    if norms is Norms.SEPARATE:
        return [name for name in chosen if _FUSED_NORM not in name]
    return sorted(chosen, key=lambda name: _FUSED_NORM not in name)


def _list_names(
    templates: list[str], geometry: ModelGeometry, position: Position
) -> Iterator[tuple[str, str]]:
    """Yield every name that a rank could have, after the template it is made from."""
    first, last = position.pp == 0, position.pp == position.pp_size - 1
    position.layer_offset(geometry)  # raises if the stages cannot share the layers evenly
    layers = range(geometry.layers // position.pp_size)
    experts = range(position.local_experts(geometry)) if geometry.experts else range(0)
    for template in templates:
        if ".experts." in template and not experts:
            continue
        if "{layer}" in template:
            for layer in layers:
                named = template.replace("{layer}", str(layer))
                for expert in experts if "{expert}" in template else (0,):
                    yield template, named.replace("{expert}", str(expert))
        elif first if template.startswith("embedding.") else last:
            yield template, template


def _make_shard(tensor: Shard, position: Position) -> Shard:
    box = _find_box(tensor.role, is_legacy(tensor.name), tensor.shape, position)
    if box is None:
        raise UsageError(
            f"{tensor.name} ({list(tensor.shape)}) cannot be cut evenly at {position}.",
            "Use other parallel sizes, or a padded_vocab that they divide.",
        )
    return replace(tensor, box=box)


@lru_cache(maxsize=65536)
def _find_box(role: Role, legacy: bool, shape: Shape, position: Position) -> Box | None:
    """Return the box of a tensor that a rank holds, or None if it cannot be shared evenly."""
    axis, rank, size = sharding(role, legacy, len(shape), position)
    whole = Box.whole(shape)
    if axis is None:
        return whole
    length, rest = divmod(shape[axis], size)
    return None if rest else whole.narrow(axis, rank * length, (rank + 1) * length)


def _join_shapes(
    name: str, role: Role, shapes: list[Shape], geometry: ModelGeometry, position: Position
) -> Shape:
    """Return the shape of Megatron's tensor, all tensor-parallel ranks joined."""
    if is_legacy(name):
        experts, width = position.local_experts(geometry), shapes[0][role is Role.EXPERT_ROW]
        if role is Role.EXPERT_ROW:
            return experts * width, geometry.hidden
        return experts * geometry.hidden, width * len(shapes) // experts
    if role is Role.VOCAB_PARALLEL:
        return (geometry.padded_vocab or geometry.vocab, *shapes[0][1:])
    if len(shapes) == 1:
        return shapes[0]
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])
