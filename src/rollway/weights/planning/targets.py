"""Describe what the ranks of an engine receive: vLLM's shards of Hugging Face tensors.

    q_proj, k_proj, v_proj   qkv_proj      [q of this rank; k; v]; k and v heads are repeated if
                                           there are fewer of them than ranks
    gate_proj, up_proj       gate_up_proj  [gate of this rank; up of this rank]
    o_proj, down_proj        the same      columns of this rank, a bias whole
    embed_tokens, lm_head    the same      rows of this rank, after padding to a multiple of 64
    experts.N.*              w13_weight    [experts here, gate and up, hidden]
                             w2_weight     [experts here, hidden, down]
    norms, router            the same      whole

Experts are sharded like dense layers or, with expert parallelism, held whole by one rank. These are
the rules of Llama, Qwen3 and Qwen3-MoE in vLLM 0.31 (tests/unit/weights/test_vllm_layout.py
compares them with vLLM's own loaders). A tensor without a rule is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from rollway.errors import UsageError
from rollway.weights.checkpoint import TensorHeader
from rollway.weights.layout import Box, Shape
from rollway.weights.megatron.geometry import ModelGeometry

_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.([^.]+)\.weight")
_EXPERTS_MODULE = "routed_experts"  # The module below `experts` that has the weights
_REPLICATED = re.compile(r"(.*norm|gate|shared_expert_gate)\.(weight|bias)|e_score_correction_bias")
_VOCAB_MULTIPLE = 64
_OTHER_SIZES = "Use a parallel size that divides it."

Headers = Mapping[str, TensorHeader]  # Hugging Face tensors by name


class TargetPart(NamedTuple):
    """The box of a tensor that a rank needs, and the shape of the parameter that it goes into."""

    box: Box
    shape: Shape


class Kind(StrEnum):
    """How vLLM shards a tensor."""

    Q = "q"
    KV = "kv"
    HALF = "half"  # By rows, as one of two tensors in a parameter
    COLUMN = "column"
    ROW = "row"
    VOCAB = "vocab"
    REPLICATED = "replicated"


_MODULES = {
    "q_proj": (Kind.Q, "qkv_proj"),
    **dict.fromkeys(("k_proj", "v_proj"), (Kind.KV, "qkv_proj")),
    **dict.fromkeys(("gate_proj", "up_proj"), (Kind.HALF, "gate_up_proj")),
    "o_proj": (Kind.ROW, "o_proj"),
    "down_proj": (Kind.ROW, "down_proj"),
    "embed_tokens": (Kind.VOCAB, "embed_tokens"),
    "lm_head": (Kind.VOCAB, "lm_head"),
}
_EXPERT_MODULES = {
    **dict.fromkeys(("gate_proj", "up_proj", "w1", "w3"), (Kind.HALF, "w13_weight")),
    **dict.fromkeys(("down_proj", "w2"), (Kind.ROW, "w2_weight")),
}


@dataclass(frozen=True, slots=True)
class EngineRank:
    """One rank of an engine, and the sizes of the model that decide how it is sharded."""

    heads: int
    kv_heads: int
    head_dim: int
    experts: int = 0
    tp_size: int = 1
    tp_rank: int = 0
    ep_size: int = 1  # 1: no expert parallelism; experts are sharded over the tensor-parallel ranks
    ep_rank: int = 0

    @property
    def owned(self) -> range:
        """The experts of this rank: as even as possible, the first ranks have one more."""
        base, more = divmod(self.experts, self.ep_size)
        start = self.ep_rank * base + min(self.ep_rank, more)
        return range(start, start + base + (self.ep_rank < more))


def engine_ranks(config: Mapping[str, Any], tp: int = 1, ep: int = 1) -> list[EngineRank]:
    """Return the ranks of an engine that serves the model of this `config.json`.

    In vLLM all ranks are expert ranks: `ep` is `tp` times the data-parallel ranks, or 1."""
    if tp < 1 or ep < 1 or (ep > 1 and ep % tp):
        raise UsageError(
            f"An engine of tp={tp} cannot have ep={ep}.",
            "Use a multiple of tp for ep, or 1 for no expert parallelism.",
        )
    size = ModelGeometry.from_hf_config(config)
    heads, kv_heads = size.heads, size.query_groups
    if heads % tp or (kv_heads % tp and tp % kv_heads):
        raise UsageError(
            f"{heads} heads with {kv_heads} KV heads cannot be shared by {tp} ranks.", _OTHER_SIZES
        )
    return [
        EngineRank(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=size.head_dim,
            experts=size.experts,
            tp_size=tp,
            tp_rank=rank % tp,
            ep_size=ep,
            ep_rank=rank if ep > 1 else 0,
        )
        for rank in range(max(tp, ep))
    ]


def part_of(name: str, headers: Headers, rank: EngineRank) -> tuple[str, TargetPart | None]:
    """Return the parameter that a tensor goes into, and the part of it that a rank needs."""
    kind, expert, parameter = _find_rule(name, headers)
    try:
        return parameter, _find_part(kind, expert, headers[name].shape, rank)
    except UsageError as error:
        raise UsageError(f"{name}: {error.message}", error.hint) from error


def cells(name: str, headers: Headers, ranks: int) -> tuple[Box, ...]:
    """Split a tensor at every seam that engines of up to `ranks` tensor ranks have.

    So each rank needs some of the boxes, and these whole. The tensor stays in one box if it has no
    rule or is not sharded."""
    shape = headers[name].shape
    whole = Box.whole(shape)
    try:
        kind = _find_rule(name, headers)[0]
    except UsageError:
        return (whole,)
    if _is_replicated(kind, shape) or not whole.elements:
        return (whole,)
    axis = 1 if kind is Kind.ROW else 0
    padded = _pad_vocab(shape[axis]) if kind is Kind.VOCAB else shape[axis]
    # If `ranks` does not divide the size, only the divisors that both have are seams.
    step = padded // math.gcd(padded, ranks)
    seams = [*range(0, shape[axis], step), shape[axis]]
    return tuple(whole.narrow(axis, start, stop) for start, stop in pairwise(seams))


def _find_rule(name: str, headers: Headers) -> tuple[Kind, int | None, str]:
    """Return how a tensor is sharded, its expert's number if it has one, and its parameter."""
    if match := _EXPERT.fullmatch(name):
        prefix, expert, module = match.groups()
        if module in _EXPERT_MODULES:
            kind, parameter = _EXPERT_MODULES[module]
            return kind, int(expert), f"{prefix}.{_EXPERTS_MODULE}.{parameter}"
    front, _, leaf = name.rpartition(".")
    prefix, dot, module = front.rpartition(".")
    if module in _MODULES and leaf in ("weight", "bias"):
        kind, parameter = _MODULES[module]
        if kind is Kind.HALF and f"{prefix}.gate_proj.{leaf}" not in headers:
            return Kind.COLUMN, None, name  # an MLP without a gate
        return kind, None, f"{prefix}{dot}{parameter}.{leaf}"
    if _REPLICATED.fullmatch(f"{module}.{leaf}") or _REPLICATED.fullmatch(leaf):
        return Kind.REPLICATED, None, name
    raise UsageError(
        f"There is no rule for where vLLM keeps {name}.",
        "Refit this model from a checkpoint directory: then the engine's own loader places it.",
    )


def _is_replicated(kind: Kind, shape: Shape) -> bool:
    return kind is Kind.REPLICATED or not shape or (kind is Kind.ROW and len(shape) == 1)


@lru_cache(maxsize=65536)  # the layers of a model are sharded alike
def _find_part(kind: Kind, expert: int | None, shape: Shape, rank: EngineRank) -> TargetPart | None:
    if expert is not None:
        return _find_expert(kind, expert, shape, rank)
    if _is_replicated(kind, shape):
        return TargetPart(Box.whole(shape), shape)
    if kind in (Kind.Q, Kind.KV):
        return _find_qkv(kind, shape, rank)
    if kind is Kind.VOCAB:
        return _find_vocab(shape, rank)
    return _find_shard(kind, shape, rank.tp_size, rank.tp_rank)


def _find_shard(kind: Kind, shape: Shape, tp: int, rank: int) -> TargetPart:
    axis = 1 if kind is Kind.ROW else 0
    size = _divide(shape[axis], tp)
    return _make_part(shape, axis, rank * size, size, 2 * size if kind is Kind.HALF else size)


def _make_part(shape: Shape, axis: int, start: int, size: int, of: int) -> TargetPart:
    """Return `size` rows (or columns) of a tensor, for a parameter that has `of`."""
    box = Box.whole(shape).narrow(axis, start, start + size)
    return TargetPart(box, (*shape[:axis], of, *shape[axis + 1 :]))


def _find_qkv(kind: Kind, shape: Shape, rank: EngineRank) -> TargetPart:
    tp, t, d = rank.tp_size, rank.tp_rank, rank.head_dim
    heads = rank.heads if kind is Kind.Q else rank.kv_heads
    if shape[0] != heads * d:
        raise UsageError(
            f"It has {shape[0]} rows; {heads} heads of {d} have {heads * d}.",
            "Check heads, KV heads and head_dim against the model's config.json.",
        )
    q_rows = rank.heads // tp * d
    kv_rows = max(1, rank.kv_heads // tp) * d
    fused = q_rows + 2 * kv_rows
    if kind is Kind.Q:
        return _make_part(shape, 0, t * q_rows, q_rows, fused)
    replicas = max(1, tp // rank.kv_heads)  # so many neighbouring ranks hold the same KV head
    return _make_part(shape, 0, t // replicas * kv_rows, kv_rows, fused)


def _find_vocab(shape: Shape, rank: EngineRank) -> TargetPart | None:
    """Return this rank's rows without padding, or None if it holds padding alone."""
    rows = _divide(_pad_vocab(shape[0]), rank.tp_size)
    start = rank.tp_rank * rows
    real = min(shape[0], start + rows) - start
    return _make_part(shape, 0, start, real, rows) if real > 0 else None


def _pad_vocab(rows: int) -> int:
    return -(-rows // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE


def _find_expert(kind: Kind, expert: int, shape: Shape, rank: EngineRank) -> TargetPart | None:
    if expert >= rank.experts:
        raise UsageError(
            f"It is beyond the model's {rank.experts} experts.",
            "Check the number of experts in the model's config.json.",
        )
    if expert not in rank.owned:
        return None
    # With expert parallelism, an expert is whole on its rank.
    tp, t = (rank.tp_size, rank.tp_rank) if rank.ep_size == 1 else (1, 0)
    part = _find_shard(kind, shape, tp, t)
    return TargetPart(part.box, (len(rank.owned), *part.shape))


def _divide(size: int, ranks: int) -> int:
    if size % ranks:
        raise UsageError(f"{size} cannot be cut into {ranks} equal parts.", _OTHER_SIZES)
    return size // ranks
