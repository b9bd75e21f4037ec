"""Plans are exact: every receiver gets its bytes and no others, for every way of sharding."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rollway.weights.checkpoint import TensorHeader
from rollway.weights.layout import Box, Piece
from rollway.weights.planning.plan import Costs, Method, Source, source_from_pieces
from rollway.weights.planning.targets import (
    EngineRank,
    Target,
    TargetPart,
    Targets,
    engine_targets,
    hf_targets,
    part_of,
)
from tests.unit.weights.planned import DTYPE, Model, carried_out, expected, headers, some_model

COSTS = [
    Costs(),
    Costs(read_seconds=0.0),  # strided cuts are free
    Costs(read_seconds=1.0, pack_gb_per_s=0.0),  # nothing but whole shards
    Costs(read_seconds=1e-7, pack_gb_per_s=1e-3, unpack_gb_per_s=1e3, wire_gb_per_s=1.0),
]


def assert_exact(sources: list[Source], wanted: list[Targets], model: Model, c: Costs) -> None:
    received, total = carried_out(sources, model, wanted, c)
    for mine, targets in zip(received, wanted, strict=True):
        should = expected(model, targets)
        assert mine.keys() == should.keys()
        for target, values in should.items():
            np.testing.assert_array_equal(mine[target], values, err_msg=target)
    assert total.needed == sum(
        4 * want.part.box.elements for targets in wanted for want in targets.values()
    )
    # More than needed moves only where a source tensor is read whole.
    assert total.moved == total.needed or total.methods[Method.WHOLE]


# --- sources --------------------------------------------------------------------------------


@st.composite
def bounds(draw: st.DrawFn, size: int, parts: int) -> list[int]:
    inner = draw(st.lists(st.integers(0, size), min_size=parts - 1, max_size=parts - 1))
    return [0, *sorted(inner), size]


@st.composite
def grids(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Boxes that cover a tensor without overlap."""
    axes = [draw(bounds(size, draw(st.integers(1, 3)))) for size in shape]
    boxes = [Box((), ())]
    for axis in axes:
        boxes = [
            Box((*box.start, a), (*box.stop, b))
            for box in boxes
            for a, b in pairwise(axis)
            if a < b
        ]
    return boxes


@st.composite
def trainers(draw: st.DrawFn, model: Model) -> list[Source]:
    """Ranks that hold the model in any way: sharded anywhere, transposed, padded, replicated."""
    count = draw(st.integers(1, 4))
    tensors: list[dict[str, TensorHeader]] = [{} for _ in range(count)]
    pieces: list[list[Piece]] = [[] for _ in range(count)]
    for name, array in model.items():
        for number, box in enumerate(draw(grids(array.shape))):
            transposed = array.ndim > 1 and draw(st.booleans())
            extent = box.shape[::-1] if transposed else box.shape
            ahead, behind = draw(st.integers(0, 2)), draw(st.integers(0, 2))
            front = draw(st.integers(0, 1))  # one dimension more, as stacked experts have
            at = (*(1,) * front, ahead, *(0,) * (len(extent) - 1))
            shape = (*(2,) * front, ahead + extent[0] + behind, *extent[1:])
            for rank in draw(st.sets(st.integers(0, count - 1), min_size=1)):
                source = f"{name}/{number}"
                tensors[rank][source] = TensorHeader(DTYPE, shape)
                pieces[rank].append(Piece(name, box, source, at, transposed))
    if draw(st.booleans()):  # one more rank has everything, as a checkpoint would
        tensors.append(headers(model))
        pieces.append([Piece(n, Box.whole(a.shape), n, (0,) * a.ndim) for n, a in model.items()])
    return [
        source_from_pieces(f"trainer{rank}", tensors[rank], pieces[rank])
        for rank in range(len(tensors))
    ]


@st.composite
def fused_trainers(draw: st.DrawFn, model: Model, fused: list[list[str]]) -> list[Source]:
    """Ranks that fuse rows of several tensors into one, and shard them alike."""
    ranks = draw(st.sampled_from([1, 2, 4]))
    sources = []
    for rank in range(ranks):
        tensors: dict[str, TensorHeader] = {}
        pieces = []
        for names in fused:
            at, columns = 0, model[names[0]].shape[1]
            for name in names:
                rows = model[name].shape[0]
                first, last = rank * rows // ranks, (rank + 1) * rows // ranks
                if first < last:
                    box = Box((first, 0), (last, columns))
                    pieces.append(Piece(name, box, "+".join(names), (at, 0)))
                    at += last - first
            tensors["+".join(names)] = TensorHeader(DTYPE, (at, columns))
        sources.append(source_from_pieces(f"trainer{rank}", tensors, pieces))
    return sources


# --- receivers ------------------------------------------------------------------------------


@st.composite
def engines(draw: st.DrawFn) -> tuple[list[EngineRank], Model]:
    """A small model, and an engine of any tensor and expert parallelism for it."""
    tp = draw(st.sampled_from([1, 2, 4]))
    ep = draw(st.sampled_from([1, tp, 2 * tp]))
    kv_heads = draw(st.sampled_from([1, 2, 4]))
    experts = draw(st.sampled_from([3, 4])) if draw(st.booleans()) else 0
    heads, d, h, f = 4, 2, 6, 8
    vocab = draw(st.integers(1, 70))
    attention = "model.layers.0.self_attn"
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, h),
        f"{attention}.q_proj.weight": (heads * d, h),
        f"{attention}.k_proj.weight": (kv_heads * d, h),
        f"{attention}.v_proj.weight": (kv_heads * d, h),
        f"{attention}.q_proj.bias": (heads * d,),
        f"{attention}.k_proj.bias": (kv_heads * d,),
        f"{attention}.v_proj.bias": (kv_heads * d,),
        f"{attention}.o_proj.weight": (h, heads * d),
        f"{attention}.q_norm.weight": (d,),
        "lm_head.weight": (vocab, h),
    }
    for expert in range(experts):
        shapes |= _mlp(f"model.layers.0.mlp.experts.{expert}", f, h)
    shapes |= {"model.layers.0.mlp.gate.weight": (experts, h)} if experts else {}
    shapes |= _mlp("model.layers.1.mlp", f, h)
    ranks = [
        EngineRank(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=d,
            experts=experts,
            tp_size=tp,
            tp_rank=rank % tp,
            ep_size=ep,
            ep_rank=rank if ep > 1 else 0,
        )
        for rank in range(max(tp, ep))
    ]
    return ranks, some_model(shapes)


def _mlp(prefix: str, f: int, h: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.gate_proj.weight": (f, h),
        f"{prefix}.up_proj.weight": (f, h),
        f"{prefix}.down_proj.weight": (h, f),
    }


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_trainer_to_any_engine(data: st.DataObject) -> None:
    ranks, model = data.draw(engines())
    sources = data.draw(trainers(model))
    wanted = [engine_targets(rank, headers(model)) for rank in ranks]
    assert_exact(sources, wanted, model, data.draw(st.sampled_from(COSTS)))


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_fused_trainers_to_any_engine(data: st.DataObject) -> None:
    ranks, model = data.draw(engines())
    model = {name: array for name, array in model.items() if array.ndim == 2}
    groups: dict[str, list[str]] = {}
    for name in model:
        short = name.replace(".up_proj", ".gate_proj")
        for part in ("k_proj", "v_proj"):
            short = short.replace(part, "q_proj")
        groups.setdefault(short, []).append(name)
    sources = data.draw(fused_trainers(model, list(groups.values())))
    wanted = [engine_targets(rank, headers(model)) for rank in ranks]
    assert_exact(sources, wanted, model, data.draw(st.sampled_from(COSTS)))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_boxes_of_any_shape(data: st.DataObject) -> None:
    model = some_model({"a": (5, 4), "b": (6,), "c": (2, 3, 4), "scalar": ()})
    every = data.draw(trainers({n: a for n, a in model.items() if a.ndim in (1, 2)}))
    rest = {n: a for n, a in model.items() if a.ndim not in (1, 2)}
    holder = [Piece(n, Box.whole(a.shape), n, (0,) * a.ndim) for n, a in rest.items()]
    sources = [*every, source_from_pieces("rest", headers(rest), holder)]
    wanted: list[Targets] = []
    for _ in range(2):
        mine: dict[str, Target] = {}
        for name, array in model.items():
            box = data.draw(st.sampled_from([None, *data.draw(grids(array.shape))]))
            if box is not None:
                mine[name] = Target(name, DTYPE, TargetPart(box, (0,) * array.ndim, box.shape))
        wanted.append(mine)
    assert_exact(sources, wanted, model, data.draw(st.sampled_from(COSTS)))


def test_the_part_of_a_rank_is_what_it_needs() -> None:
    model = some_model({"model.embed_tokens.weight": (100, 4), "model.norm.weight": (4,)})
    for number in (0, 1):
        rank = EngineRank(heads=4, kv_heads=1, head_dim=2, tp_size=2, tp_rank=number)
        for name, target in engine_targets(rank, headers(model)).items():
            assert part_of(name, headers(model), rank) == (target.parameter, target.part)


def test_a_checkpoint_is_received_as_it_is() -> None:
    model = some_model({"a": (3, 4), "b": (5,)})
    pieces = [Piece(n, Box.whole(a.shape), n, (0,) * a.ndim) for n, a in model.items()]
    sources = [source_from_pieces("trainer", headers(model), pieces)]
    assert_exact(sources, [hf_targets(headers(model))] * 2, model, Costs())
