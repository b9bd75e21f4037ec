"""What the ranks of a vLLM engine want of a Hugging Face checkpoint, parameter by parameter.

    q_proj, k_proj, v_proj   qkv_proj      [q of this rank; k; v], heads of k and v repeated when
                                           there are fewer of them than ranks
    gate_proj, up_proj       gate_up_proj  [gate of this rank; up of this rank]
    o_proj, down_proj        the same      columns of this rank, a bias whole
    embed_tokens, lm_head    the same      rows of this rank, after padding to a multiple of 64
    experts.N.*              w13_weight    [experts here, gate and up, hidden]
                             w2_weight     [experts here, hidden, down]
    norms, router            the same      whole

Experts are cut as dense layers are, or, with expert parallelism, owned whole by one rank. These
are the rules of Llama, Qwen3 and Qwen3-MoE in vLLM 0.31; a tensor without a rule is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any

from rollway.errors import UsageError
from rollway.weights.layout import Box, Need, Shape
from rollway.weights.planning.wants import Described, Part, Parts, Want, needs_of

Headers = Mapping[str, Described]
"""Of the Hugging Face tensors, by name."""

_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.([^.]+)\.weight")
_REPLICATED = re.compile(r"(.*norm|gate|shared_expert_gate)\.(weight|bias)|e_score_correction_bias")


class Kind(StrEnum):
    """How vLLM cuts a tensor."""

    Q = "q"
    K = "k"
    V = "v"
    FIRST_HALF = "first_half"
    SECOND_HALF = "second_half"
    COLUMN = "column"
    ROW = "row"
    VOCAB = "vocab"
    REPLICATED = "replicated"
    EXPERT_GATE = "expert_gate"
    EXPERT_UP = "expert_up"
    EXPERT_DOWN = "expert_down"


_MODULES = {
    "q_proj": (Kind.Q, "qkv_proj"),
    "k_proj": (Kind.K, "qkv_proj"),
    "v_proj": (Kind.V, "qkv_proj"),
    "gate_proj": (Kind.FIRST_HALF, "gate_up_proj"),
    "up_proj": (Kind.SECOND_HALF, "gate_up_proj"),
    "o_proj": (Kind.ROW, "o_proj"),
    "down_proj": (Kind.ROW, "down_proj"),
    "embed_tokens": (Kind.VOCAB, "embed_tokens"),
    "lm_head": (Kind.VOCAB, "lm_head"),
}
_EXPERT_MODULES = {
    **dict.fromkeys(("gate_proj", "w1"), (Kind.EXPERT_GATE, "w13_weight")),
    **dict.fromkeys(("up_proj", "w3"), (Kind.EXPERT_UP, "w13_weight")),
    **dict.fromkeys(("down_proj", "w2"), (Kind.EXPERT_DOWN, "w2_weight")),
}


@dataclass(frozen=True, slots=True)
class EngineTarget:
    """One rank of an engine, and the sizes of the model that decide its cuts."""

    heads: int
    kv_heads: int
    head_dim: int
    experts: int = 0
    tp_size: int = 1
    tp_rank: int = 0
    ep_size: int = 1
    """1: no expert parallelism, experts are cut by tensor rank."""
    ep_rank: int = 0
    vocab_multiple: int = 64
    tied: bool = False
    """The output layer is the embedding, so a checkpoint's `lm_head` goes nowhere."""
    experts_module: str = "routed_experts"
    """Where vLLM keeps the weights below `experts`; empty for versions before 0.31."""

    def __post_init__(self) -> None:
        if not 0 <= self.tp_rank < self.tp_size or not 0 <= self.ep_rank < self.ep_size:
            raise UsageError(
                f"There is no rank {self.tp_rank} of {self.tp_size} tensor ranks with "
                f"{self.ep_rank} of {self.ep_size} expert ranks."
            )
        if self.heads % self.tp_size:
            raise UsageError(f"{self.heads} heads cannot be shared by {self.tp_size} ranks.")
        if self.kv_heads % self.tp_size and self.tp_size % self.kv_heads:
            raise UsageError(f"{self.kv_heads} KV heads cannot be shared by {self.tp_size} ranks.")

    @property
    def owned(self) -> range:
        """The experts of this rank: as even as possible, the first ranks take one more."""
        base, more = divmod(self.experts, self.ep_size)
        start = self.ep_rank * base + min(self.ep_rank, more)
        return range(start, start + base + (self.ep_rank < more))


def engine_ranks(config: Mapping[str, Any], tp: int = 1, ep: int = 1) -> list[EngineTarget]:
    """The ranks of an engine that serves the model of this `config.json`.

    vLLM's expert ranks are all its ranks: `ep` is `tp` times the data-parallel ranks, or 1."""
    config = config.get("text_config") or config
    if tp < 1 or ep < 1 or (ep > 1 and ep % tp):
        raise UsageError(
            f"An engine of tp={tp} cannot have ep={ep}.",
            "With expert parallelism ep is a multiple of tp; without it is 1.",
        )
    try:
        heads = int(config["num_attention_heads"])
        head_dim = config.get("head_dim") or int(config["hidden_size"]) // heads
    except KeyError as error:
        raise UsageError(f"The model's config.json lacks {error.args[0]}.") from error
    experts = next((config[key] for key in _EXPERT_COUNTS if config.get(key)), 0)
    return [
        EngineTarget(
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(head_dim),
            experts=int(experts),
            tp_size=tp,
            tp_rank=rank % tp,
            ep_size=ep,
            ep_rank=rank if ep > 1 else 0,
            tied=bool(config.get("tie_word_embeddings", False)),
        )
        for rank in range(max(tp, ep))
    ]


_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


def needs(target: EngineTarget, headers: Headers) -> list[Need]:
    """What one rank wants, as plain needs."""
    return needs_of(wants([target], headers), 0)


def wants(targets: Sequence[EngineTarget], headers: Headers) -> dict[str, list[Want]]:
    """What all ranks of an engine want; layers of equal geometry share their parts."""
    shared: dict[tuple[Kind, int, Shape], Parts] = {}
    found = {}
    for name, tensor in headers.items():
        if targets[0].tied and name.endswith("lm_head.weight"):
            continue
        kind, expert, target = _rule(name, headers, targets[0])
        key = kind, expert, tensor.shape
        parts = shared.get(key)
        if parts is None:
            parts = tuple(_part(name, kind, expert, tensor.shape, rank) for rank in targets)
            shared[key] = parts
        found[name] = [Want(target, tensor.dtype, parts)]
    return found


def part_of(name: str, headers: Headers, target: EngineTarget) -> tuple[str, Part | None]:
    """The parameter that one tensor goes into, and what a rank takes of it."""
    kind, expert, parameter = _rule(name, headers, target)
    return parameter, _part(name, kind, expert, headers[name].shape, target)


def cells(name: str, headers: Headers, ranks: int) -> tuple[Box, ...]:
    """A tensor, divided where engines of up to so many tensor ranks cut it: what a rank takes is
    some of these, whole. One box when nobody knows, or when nobody cuts it."""
    shape = headers[name].shape
    try:
        kind = _rule(name, headers, _ANY)[0]
    except UsageError:
        return (Box.whole(shape),)
    if kind is Kind.REPLICATED or not shape or (kind is Kind.ROW and len(shape) == 1):
        return (Box.whole(shape),)
    axis = 1 if kind in (Kind.ROW, Kind.EXPERT_DOWN) else 0
    return _divided_along(axis, shape, ranks, _ANY.vocab_multiple if kind is Kind.VOCAB else 1)


def _divided_along(axis: int, shape: Shape, ranks: int, multiple: int) -> tuple[Box, ...]:
    whole = Box.whole(shape)
    if not whole.elements:
        return (whole,)
    padded = -(-shape[axis] // multiple) * multiple
    step = padded // math.gcd(padded, ranks)  # no seams where not even fewer ranks have one
    seams = [*range(0, shape[axis], step), shape[axis]]
    return tuple(
        Box(
            (*whole.start[:axis], start, *whole.start[axis + 1 :]),
            (*shape[:axis], stop, *shape[axis + 1 :]),
        )
        for start, stop in pairwise(seams)
    )


_ANY = EngineTarget(heads=1, kv_heads=1, head_dim=1)
"""Which dimension is cut is the same for all."""


def _rule(name: str, headers: Headers, target: EngineTarget) -> tuple[Kind, int, str]:
    """How a tensor is cut, its expert's number (0 where it has none), and its parameter."""
    if match := _EXPERT.fullmatch(name):
        prefix, expert, module = match.groups()
        if module in _EXPERT_MODULES:
            kind, parameter = _EXPERT_MODULES[module]
            below = f"{target.experts_module}." if target.experts_module else ""
            return kind, int(expert), f"{prefix}.{below}{parameter}"
    front, _, leaf = name.rpartition(".")
    prefix, dot, module = front.rpartition(".")
    if module in _MODULES and leaf in ("weight", "bias"):
        kind, parameter = _MODULES[module]
        if kind is Kind.SECOND_HALF and f"{prefix}.gate_proj.{leaf}" not in headers:
            return Kind.COLUMN, 0, name  # an MLP without a gate
        return kind, 0, f"{prefix}{dot}{parameter}.{leaf}"
    if _REPLICATED.fullmatch(f"{module}.{leaf}") or _REPLICATED.fullmatch(leaf):
        return Kind.REPLICATED, 0, name
    raise UsageError(
        f"There is no rule for where vLLM keeps {name}.",
        "Refit this model from a checkpoint directory: then the engine's own loader places it.",
    )


def _part(name: str, kind: Kind, expert: int, shape: Shape, rank: EngineTarget) -> Part | None:
    if kind is Kind.REPLICATED or (kind is Kind.ROW and len(shape) == 1):
        return Part(Box.whole(shape), (0,) * len(shape), shape)
    if kind in (Kind.Q, Kind.K, Kind.V):
        return _qkv(name, kind, shape, rank)
    if kind is Kind.VOCAB:
        return _vocab(shape, rank)
    if kind in (Kind.EXPERT_GATE, Kind.EXPERT_UP, Kind.EXPERT_DOWN):
        return _expert(name, kind, expert, shape, rank)
    tp, t = rank.tp_size, rank.tp_rank
    if kind is Kind.ROW:
        columns = _divided(shape[1], tp, name)
        return Part(
            Box((0, t * columns), (shape[0], (t + 1) * columns)), (0, 0), (shape[0], columns)
        )
    rows = _divided(shape[0], tp, name)
    halves = 1 if kind is Kind.COLUMN else 2
    at = rows if kind is Kind.SECOND_HALF else 0
    return _rows(shape, t * rows, rows, at, halves * rows)


def _rows(shape: Shape, start: int, rows: int, at: int, of: int) -> Part:
    """These rows of a tensor, to row `at` of a parameter of `of` rows."""
    rest = shape[1:]
    zeros = (0,) * len(rest)
    return Part(Box((start, *zeros), (start + rows, *rest)), (at, *zeros), (of, *rest))


def _qkv(name: str, kind: Kind, shape: Shape, rank: EngineTarget) -> Part:
    tp, t, d = rank.tp_size, rank.tp_rank, rank.head_dim
    heads = rank.heads if kind is Kind.Q else rank.kv_heads
    if shape[0] != heads * d:
        raise UsageError(
            f"{name} has {shape[0]} rows; {heads} heads of {d} have {heads * d}.",
            "Check heads, KV heads and head_dim against the model's config.json.",
        )
    q_rows = rank.heads // tp * d
    kv_rows = max(1, rank.kv_heads // tp) * d
    fused = q_rows + 2 * kv_rows
    if kind is Kind.Q:
        return _rows(shape, t * q_rows, q_rows, 0, fused)
    replicas = max(1, tp // rank.kv_heads)
    at = q_rows if kind is Kind.K else q_rows + kv_rows
    return _rows(shape, t // replicas * kv_rows, kv_rows, at, fused)


def _vocab(shape: Shape, rank: EngineTarget) -> Part | None:
    """Rows that only pad are in no checkpoint; a rank that has nothing else wants nothing."""
    padded = -(-shape[0] // rank.vocab_multiple) * rank.vocab_multiple
    if padded % rank.tp_size:
        raise UsageError(f"{padded} vocabulary rows cannot be shared by {rank.tp_size} ranks.")
    rows = padded // rank.tp_size
    start = rank.tp_rank * rows
    held = min(shape[0], start + rows) - start
    return _rows(shape, start, held, 0, rows) if held > 0 else None


def _expert(name: str, kind: Kind, expert: int, shape: Shape, rank: EngineTarget) -> Part | None:
    if expert >= rank.experts:
        raise UsageError(f"{name} is beyond the model's {rank.experts} experts.")
    if expert not in rank.owned:
        return None
    here = expert - rank.owned.start
    # With expert parallelism the tensor ranks cut no experts.
    tp, t = (rank.tp_size, rank.tp_rank) if rank.ep_size == 1 else (1, 0)
    count = len(rank.owned)
    if kind is Kind.EXPERT_DOWN:
        width = _divided(shape[1], tp, name)
        box = Box((0, t * width), (shape[0], (t + 1) * width))
        return Part(box, (here, 0, 0), (count, shape[0], width))
    width = _divided(shape[0], tp, name)
    at = 0 if kind is Kind.EXPERT_GATE else width
    box = Box((t * width, 0), ((t + 1) * width, shape[1]))
    return Part(box, (here, at, 0), (count, 2 * width, shape[1]))


def _divided(size: int, ranks: int, name: str) -> int:
    if size % ranks:
        raise UsageError(f"{name} cannot be cut into {ranks} equal parts along {size}.")
    return size // ranks
