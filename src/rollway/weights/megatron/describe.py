"""What the ranks of a Megatron trainer would hold, from the shapes of a checkpoint alone.

Tests and planning need layouts of trainers that do not run: any topology, with the names that
Transformer Engine or Megatron's own layers give, and any of its three kinds of experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from rollway.errors import UsageError
from rollway.weights.checkpoint import TensorHeader
from rollway.weights.layout import Box, Role, Shape, Shard
from rollway.weights.megatron.geometry import ModelGeometry, Position, Topology
from rollway.weights.megatron.model import MegatronModel, RankLayout
from rollway.weights.megatron.names import NameMap, Table
from rollway.weights.megatron.pieces import is_legacy, sharding
from rollway.weights.megatron.roles import role_of_name

_FUSED_NORM = ".layer_norm_"


class Norms(StrEnum):
    """Where Megatron keeps the norms before attention and MLP."""

    FUSED = "fused"
    """With Transformer Engine: in the linear layer that follows."""
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
    """What the ranks of a trainer hold of a model with these Hugging Face tensors.

    The second copy of tied embeddings, on the last pipeline stage, is left out."""
    templates = _templates(names.table, norms, experts)
    layouts: dict[int, RankLayout] = {}
    alike: dict[tuple[int, int], list[_Tensor]] = {}
    for rank, position in enumerate(topology.positions()):
        place = position.pp, position.ep  # what a rank's tensors are called depends on no more
        if place not in alike:
            alike[place] = list(_tensors(hf, names, position, templates))
        shards = {tensor.name: _shard(tensor, position) for tensor in alike[place]}
        layouts[rank] = RankLayout(position, shards, {t.name: t.hf_names for t in alike[place]})
    return MegatronModel(names.geometry, layouts)


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor of Megatron, all tensor-parallel ranks together."""

    name: str
    hf_names: tuple[str, ...]
    dtype: str
    role: Role
    shape: Shape


def _tensors(
    hf: Mapping[str, TensorHeader], names: NameMap, position: Position, templates: list[str]
) -> Iterator[_Tensor]:
    taken: set[str] = set()
    for template, name in _rank_names(templates, names.geometry, position):
        hf_names = names.hf_names(name, position)
        if not hf_names or any(n not in hf or n in taken for n in hf_names):
            continue
        if _FUSED_NORM in name and not _has(hf, names, name, position):
            continue
        taken.update(hf_names)
        role = _role(template, names.geometry.gated)
        parts = [hf[n] for n in hf_names]
        shape = _joined_shape(name, role, [p.shape for p in parts], names.geometry, position)
        yield _Tensor(name, hf_names, parts[0].dtype, role, shape)


@lru_cache
def _role(template: str, gated: bool) -> Role:
    return role_of_name(template, gated=gated)


def _has(
    hf: Mapping[str, TensorHeader], names: NameMap, fused_norm: str, position: Position
) -> bool:
    """Whether the linear layer is there that a norm would be fused into."""
    linear = fused_norm.rpartition(_FUSED_NORM)[0] + ".weight"
    return all(name in hf for name in names.hf_names(linear, position))


def _templates(table: Table, norms: Norms, experts: Experts) -> list[str]:
    """Those names of a family that this kind of model has; fused norms go before their twins."""
    marks = {
        Experts.GROUPED: ".experts.linear_fc",
        Experts.SEQUENTIAL: ".experts.local_experts.",
        Experts.LEGACY: ".experts.weight",
    }
    other = tuple(mark for kind, mark in marks.items() if kind is not experts)
    kept = [name for name in table if not any(mark in name for mark in other)]
    if norms is Norms.SEPARATE:
        return [name for name in kept if _FUSED_NORM not in name]
    return sorted(kept, key=lambda name: _FUSED_NORM not in name)


def _rank_names(
    templates: list[str], geometry: ModelGeometry, position: Position
) -> Iterator[tuple[str, str]]:
    """Every name that a rank could have, and the template it is made from."""
    first, last = position.pp == 0, position.pp == position.pp_size - 1
    position.layer_offset(geometry)  # raises where the layers cannot be shared evenly
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


def _shard(tensor: _Tensor, position: Position) -> Shard:
    box = _box(tensor.role, is_legacy(tensor.name), tensor.shape, position)
    if box is None:
        raise UsageError(
            f"{tensor.name} ({list(tensor.shape)}) cannot be cut evenly at {position}.",
            "Use other parallel sizes, or a padded_vocab that they divide.",
        )
    return Shard(tensor.name, tensor.dtype, tensor.shape, box, tensor.role)


@lru_cache(maxsize=65536)
def _box(role: Role, legacy: bool, shape: Shape, position: Position) -> Box | None:
    """What a rank holds of a tensor; None where the ranks cannot share it evenly."""
    axis, rank, size = sharding(role, legacy, len(shape), position)
    if axis is None:
        return Box.whole(shape)
    each, rest = divmod(shape[axis], size)
    start = tuple(rank * each if d == axis else 0 for d in range(len(shape)))
    stop = tuple((rank + 1) * each if d == axis else n for d, n in enumerate(shape))
    return None if rest else Box(start, stop)


def _joined_shape(
    name: str, role: Role, shapes: list[Shape], geometry: ModelGeometry, position: Position
) -> Shape:
    """The shape of Megatron's tensor, all of its ranks together."""
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
