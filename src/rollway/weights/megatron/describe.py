"""Describe what the ranks of a Megatron trainer would hold, from the shapes of a checkpoint alone.

Tests and planning need layouts of trainers that do not run: any topology, with the names that
Transformer Engine or Megatron's own layers give, and any of Megatron's three kinds of experts.
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
    shared: dict[tuple[int, int], list[_Tensor]] = {}
    for rank, position in enumerate(topology.positions()):
        place = position.pp, position.ep  # the names of a rank's tensors depend only on these
        if place not in shared:
            shared[place] = list(_list_tensors(hf, names, position, templates))
        shards = {tensor.name: _make_shard(tensor, position) for tensor in shared[place]}
        layouts[rank] = RankLayout(position, shards, {t.name: t.hf_names for t in shared[place]})
    return MegatronModel(names.geometry, layouts)


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor of Megatron, all tensor-parallel ranks joined."""

    name: str
    hf_names: tuple[str, ...]
    dtype: str
    role: Role
    shape: Shape


def _list_tensors(
    hf: Mapping[str, TensorHeader], names: NameMap, position: Position, templates: list[str]
) -> Iterator[_Tensor]:
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
        role = _find_role(template, names.geometry.gated)
        parts = [hf[n] for n in hf_names]
        shape = _join_shapes(name, role, [p.shape for p in parts], names.geometry, position)
        yield _Tensor(name, hf_names, parts[0].dtype, role, shape)


@lru_cache
def _find_role(template: str, gated: bool) -> Role:
    return role_of_name(template, gated=gated)


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


def _make_shard(tensor: _Tensor, position: Position) -> Shard:
    box = _find_box(tensor.role, is_legacy(tensor.name), tensor.shape, position)
    if box is None:
        raise UsageError(
            f"{tensor.name} ({list(tensor.shape)}) cannot be cut evenly at {position}.",
            "Use other parallel sizes, or a padded_vocab that they divide.",
        )
    return Shard(tensor.name, tensor.dtype, tensor.shape, box, tensor.role)


@lru_cache(maxsize=65536)
def _find_box(role: Role, legacy: bool, shape: Shape, position: Position) -> Box | None:
    """Return the box of a tensor that a rank holds, or None if it cannot be shared evenly."""
    axis, rank, size = sharding(role, legacy, len(shape), position)
    if axis is None:
        return Box.whole(shape)
    length, rest = divmod(shape[axis], size)
    start = tuple(rank * length if d == axis else 0 for d in range(len(shape)))
    stop = tuple((rank + 1) * length if d == axis else n for d, n in enumerate(shape))
    return None if rest else Box(start, stop)


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
