"""Find which boxes of Hugging Face tensors one rank's tensor contains, for all Megatron layouts.

    linear_qkv   per query group [ Q .. Q | K | V ]; a rank holds any run of these rows
    linear_fc1   [ gate of this rank ; up of this rank ]
    embedding    rows after the model's vocabulary are padding
    experts      `weight1`, `weight2` of the old GroupedMLP have all local experts, transposed

`Shard.shape` is the plain concatenation of all ranks. Layers share their geometry, so pieces are
computed once, without names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from rollway.errors import UsageError
from rollway.weights.layout import Box, Piece, Role, Shape, Shard, publishes
from rollway.weights.megatron.geometry import ModelGeometry, Position

_BY_TENSOR_RANK = {Role.QKV_COLUMN, Role.GATED_MLP_COLUMN, Role.COLUMN, Role.VOCAB_PARALLEL}
_NOT_FUSED = {Role.COLUMN, Role.ROW, Role.REPLICATED, Role.EXPERT_ROW}


@dataclass(frozen=True)
class RankLayout:
    """What one rank holds, by Megatron's names."""

    position: Position
    shards: Mapping[str, Shard]
    names: Mapping[str, tuple[str, ...]]
    """The Hugging Face tensors in each shard, in the order that `pieces` expects."""

    def owns(self, name: str) -> bool:
        """Return whether this rank is the replica that publishes its shard."""
        return publishes(name, *find_replica(self.shards[name], self.position))


@dataclass(frozen=True)
class MegatronModel:
    """All ranks of a trainer."""

    geometry: ModelGeometry
    ranks: Mapping[int, RankLayout] = field(default_factory=dict)


def pieces(shard: Shard, hf_names: Sequence[str], geometry: ModelGeometry) -> list[Piece]:
    """Return the boxes of the tensors `hf_names` that `shard` contains.

    The names are in canonical order: q, k, v; gate, up; by expert. A tensor without a Hugging Face
    counterpart has no names."""
    if not hf_names:
        return []
    legacy, count = is_legacy(shard.name), len(hf_names)
    try:
        nameless = _cut(shard.role, legacy, count, shard.shape, shard.box, geometry)
    except _Misfit as error:
        raise UsageError(
            f"{shard.name} ({shard.role}, {list(shard.shape)} over all ranks) does not fit the "
            f"model: {error}.",
            "Check the model's geometry, the tensor's role and the parallel sizes.",
        ) from error
    return [replace(piece, name=hf_names[number]) for number, piece in nameless]


def place(name: str, dtype: str, local: Shape, role: Role, position: Position) -> Shard:
    """Return the shard that a rank at `position` holds if its tensor has the shape `local`."""
    axis, rank, size = sharding(role, is_legacy(name), len(local), position)
    if axis is None:
        return Shard(name, dtype, local, Box.whole(local), role)
    if axis >= len(local):
        raise UsageError(
            f"{name} ({role}) has the shape {list(local)}, which cannot be cut by its role.",
            "Check the tensor's role.",
        )
    shape = (*local[:axis], local[axis] * size, *local[axis + 1 :])
    box = Box.whole(shape).narrow(axis, rank * local[axis], (rank + 1) * local[axis])
    return Shard(name, dtype, shape, box, role)


def local_view(name: str, local: Shape, geometry: ModelGeometry, position: Position) -> Shape:
    """Return the shape in which boxes of a rank's tensor are counted.

    It is the tensor's own shape, except for GroupedMLP's `weight1`: its memory has expert after
    expert although its shape says otherwise."""
    if is_legacy(name) and name.endswith("weight1"):
        rows = position.local_experts(geometry) * geometry.hidden
        return rows, local[0] * local[1] // rows
    return local


def is_legacy(name: str) -> bool:
    """Return whether this is the tensor of all local experts that the old GroupedMLP has."""
    return name.endswith((".experts.weight1", ".experts.weight2"))


def sharding(
    role: Role, legacy: bool, dimensions: int, position: Position
) -> tuple[int | None, int, int]:
    """Return the sharded axis (None: not sharded), this rank's number, and how many ranks share."""
    if role in _BY_TENSOR_RANK:
        return 0, position.tp, position.tp_size
    if role is Role.ROW and dimensions > 1:
        return 1, position.tp, position.tp_size
    if role is Role.EXPERT_COLUMN:
        return (1 if legacy else 0), position.etp, position.etp_size
    if role is Role.EXPERT_ROW and dimensions > 1:
        return (0 if legacy else 1), position.etp, position.etp_size
    # A row-parallel bias is added after the sum over the ranks, so every rank has it whole.
    return None, 0, 1


def find_replica(shard: Shard, position: Position) -> tuple[int, int]:
    """Return this rank's number among those that hold the same bytes, and how many they are."""
    axis, _, _ = sharding(shard.role, is_legacy(shard.name), len(shard.shape), position)
    if shard.role in (Role.EXPERT_COLUMN, Role.EXPERT_ROW):
        index, count, rank, size = position.edp, position.edp_size, position.etp, position.etp_size
    else:
        index, count, rank, size = position.dp, position.dp_size, position.tp, position.tp_size
    # Where it is not sharded, the tensor ranks are replicas of each other as well.
    return (rank + size * index, size * count) if axis is None else (index, count)


class _Misfit(Exception):
    """A shape does not follow from the geometry; the message becomes part of a `UsageError`.

    Cached functions raise it without the tensor's name, which is not part of their key."""


@lru_cache(maxsize=65536)
def _cut(
    role: Role, legacy: bool, count: int, shape: Shape, box: Box, geometry: ModelGeometry
) -> list[tuple[int, Piece]]:
    """Return the pieces in a box of a tensor, each after the number of its name."""
    if legacy:
        return _cut_legacy(role, count, shape, box, geometry)
    if role in _NOT_FUSED:
        if count != 1:
            raise _Misfit(f"it has one part, but {count} names")
        return [(0, Piece("", shape, box, (0,) * len(shape)))]
    heights = _heights(role, shape, geometry)
    if count not in (1, len(heights)):
        raise _Misfit(f"it has {len(heights)} parts, but {count} names")
    if role is Role.VOCAB_PARALLEL:
        runs = [_Run(0, box.start[0], box.start[0], box.shape[0])]
    elif role is Role.QKV_COLUMN:
        runs = _qkv_runs(box.start[0], box.stop[0], geometry)
    else:
        runs = _gated_runs(box)
    if count == 1:  # some families have one tensor for all parts, one below the other
        runs = [
            _Run(0, run.source, run.target + sum(heights[: run.index]), run.length) for run in runs
        ]
        heights = (sum(heights),)
    found = []
    for run in _join_neighbours(runs):
        height = heights[run.index]
        stop = min(run.target + run.length, height)  # the rest is padding
        if stop > run.target:
            at = (run.source - box.start[0], *(0 for _ in box.start[1:]))
            piece = Piece("", (height, *shape[1:]), box.narrow(0, run.target, stop), at)
            found.append((run.index, piece))
    return found


def _join_neighbours(runs: list[_Run]) -> list[_Run]:
    """Join each run with the one before it in the list, if they are neighbours in both tensors."""
    joined: list[_Run] = []
    for run in runs:
        before = joined[-1] if joined else None
        if before is not None and before.next(run.length) == run:
            joined[-1] = replace(before, length=before.length + run.length)
        else:
            joined.append(run)
    return joined


def _heights(role: Role, shape: Shape, geometry: ModelGeometry) -> tuple[int, ...]:
    """Return the rows of each part of a fused tensor, or of a padded one without its padding."""
    rows = shape[0]
    if role is Role.VOCAB_PARALLEL:
        if rows < geometry.vocab:
            raise _Misfit(f"the vocabulary has {geometry.vocab} rows")
        return (geometry.vocab,)
    if role is Role.QKV_COLUMN:
        heights = geometry.query_rows, geometry.key_rows, geometry.key_rows
        if rows != sum(heights):
            raise _Misfit(f"its queries, keys and values have {sum(heights)} rows")
        return heights
    if rows % 2:
        raise _Misfit("gate and up cannot have as many rows")
    return rows // 2, rows // 2


@dataclass(frozen=True, slots=True)
class _Run:
    """Rows of a Megatron tensor, from `source`, that are in HF tensor `index`, from `target`."""

    index: int
    source: int
    target: int
    length: int

    def next(self, length: int) -> _Run:
        """Return the run of this length that begins where this one ends, in both tensors."""
        return _Run(self.index, self.source + self.length, self.target + self.length, length)


def _qkv_runs(start: int, stop: int, geometry: ModelGeometry) -> list[_Run]:
    """Return the runs in rows `start` to `stop` of the fused tensor."""
    d, queries = geometry.head_dim, geometry.heads_per_group * geometry.head_dim
    block = queries + 2 * d
    runs = []
    for group in range(start // block, -(-stop // block)):
        at = group * block
        for part in (
            _Run(0, at, group * queries, queries),
            _Run(1, at + queries, group * d, d),
            _Run(2, at + queries + d, group * d, d),
        ):
            # With more tensor ranks than query groups, a rank's rows begin or end inside a group.
            first, last = max(start, part.source), min(stop, part.source + part.length)
            if first < last:
                target = part.target + first - part.source
                runs.append(_Run(part.index, first, target, last - first))
    return runs


def _gated_runs(box: Box) -> list[_Run]:
    start, rows = box.start[0], box.shape[0]
    if start % 2 or rows % 2:
        raise _Misfit(f"rows {start} to {start + rows} are not as many gates as ups")
    half = rows // 2
    return [_Run(0, start, start // 2, half), _Run(1, start + half, start // 2, half)]


def _cut_legacy(
    role: Role, count: int, shape: Shape, box: Box, geometry: ModelGeometry
) -> list[tuple[int, Piece]]:
    """Return the pieces in a tensor of all local experts; its memory is `[experts, in, out]`."""
    hidden, parts = geometry.hidden, 2 if role is Role.EXPERT_COLUMN else 1  # gate and up, or down
    experts, odd = divmod(count, parts)
    if role is Role.EXPERT_ROW and not shape[0] % count and shape[1:] == (hidden,):
        width, start = box.shape[0] // count, box.start[0] // count
        inside, whole = Box((0, start), (hidden, start + width)), (hidden, shape[0] // count)
        return [(e, Piece("", whole, inside, (e * width, 0), True)) for e in range(count)]
    if role is Role.EXPERT_COLUMN and not odd and shape[0] == experts * hidden:
        width, start = box.shape[1] // parts, box.start[1] // parts
        inside, whole = Box((start, 0), (start + width, hidden)), (shape[1] // parts, hidden)
        return [
            (e * parts + part, Piece("", whole, inside, (e * hidden, part * width), True))
            for e in range(experts)
            for part in range(parts)
        ]
    raise _Misfit(f"it does not hold {experts} experts of width {hidden}")
