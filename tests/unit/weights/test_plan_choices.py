"""What a plan decides: the method, the source, and which inputs it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rollway.errors import UsageError
from rollway.weights.layout import Box, Piece
from rollway.weights.planning.plan import plan
from rollway.weights.planning.recipe import Costs, Load, Method, choose
from rollway.weights.planning.sources import (
    Source,
    fsdp_sources,
    source_from_pieces,
)
from rollway.weights.planning.targets import (
    EngineRank,
    LocalTensor,
    Target,
    TargetPart,
    engine_ranks,
    engine_targets,
    hf_target,
)
from rollway.weights.planning.transfers import Plan
from tests.unit.weights.megatron_plans import DENSE

MB = 1 << 20


def whole(name: str, shape: tuple[int, ...], source: str = "") -> Piece:
    return Piece(name, Box.whole(shape), source or name, (0,) * len(shape))


def holder(name: str, shapes: dict[str, tuple[int, ...]]) -> Source:
    tensors = {tensor: LocalTensor("BF16", shape) for tensor, shape in shapes.items()}
    pieces = [whole(tensor, shape) for tensor, shape in shapes.items()]
    return source_from_pieces(name, tensors, pieces)


def held(source: Source) -> dict[str, LocalTensor]:
    return {
        name: LocalTensor(offer.holding.dtype, offer.holding.shape)
        for name, offer in source.offers.items()
    }


def targets_of(
    shape: tuple[int, ...], *boxes: tuple[Box, tuple[int, ...]]
) -> dict[str, list[Target]]:
    """One receiver whose parameter x of this shape gets boxes of the tensor w, each at a place."""
    return {"w": [Target("x", "BF16", (TargetPart(box, at, shape),)) for box, at in boxes]}


def plan_box(box: Box, shape: tuple[int, ...], source_shape: tuple[int, ...], c: Costs) -> Plan:
    """One receiver that needs a box of one tensor."""
    targets = targets_of(shape, (box, (0,) * len(shape)))
    return plan([holder("t", {"w": source_shape})], ["r"], targets, c)


# --- the method --------------------------------------------------------------------------------


def test_rows_are_a_range() -> None:
    result = plan_box(Box((2, 0), (4, 768)), (2, 768), (2048, 768), Costs())
    (transfer,) = result.transfers("r")
    assert transfer.step.choice.method is Method.RANGE
    assert (result.total.descriptors, result.total.blocks) == (1, 1)


def test_columns_are_packed_when_blocks_are_small() -> None:
    result = plan_box(Box((0, 384), (2048, 768)), (2048, 384), (2048, 768), Costs())
    (transfer,) = result.transfers("r")
    assert transfer.step.choice.method is Method.PACKED
    assert not transfer.step.choice.staged
    assert result.total.ratio == 1.0
    assert "2048 blocks of 768 B" in transfer.step.choice.reason


def test_columns_are_strided_when_blocks_are_large() -> None:
    result = plan_box(Box((0, 0), (2, 4 * MB)), (2, 4 * MB), (2, 8 * MB), Costs())
    assert set(result.total.methods) == {Method.STRIDED}
    assert (result.total.descriptors, result.total.blocks) == (1, 2)


def test_whole_shards_move_when_the_source_cannot_pack_and_the_plan_says_why() -> None:
    costs = Costs(pack_gb_per_s=0.0)
    result = plan_box(Box((0, 384), (2048, 768)), (2048, 384), (2048, 768), costs)
    assert set(result.total.methods) == {Method.WHOLE}
    assert result.total.ratio == 2.0
    ((reason, extra),) = result.total.reasons.items()
    assert extra == result.total.moved - result.total.needed
    assert "more than needed" in reason


def test_a_whole_shard_that_is_needed_whole_is_placed_by_the_receiver() -> None:
    """A trainer with narrower cuts than the engine: nothing to pack, and no byte too many."""
    result = plan_box(Box.whole((2048, 192)), (2048, 384), (2048, 192), Costs())
    assert set(result.total.methods) == {Method.WHOLE}
    assert result.total.ratio == 1.0


def test_a_transposed_piece_is_never_read_element_by_element() -> None:
    piece = Piece("w", Box.whole((64, 32)), "w", (0, 0), transposed=True)
    source = source_from_pieces("t", {"w": LocalTensor("BF16", (32, 64))}, [piece])
    wanted = hf_target({"w": LocalTensor("BF16", (64, 32))})
    for costs in (Costs(), Costs(pack_gb_per_s=0), Costs(block_seconds=0)):
        (transfer,) = plan([source], ["r"], wanted, costs).transfers("r")
        assert transfer.step.choice.method in (Method.PACKED, Method.WHOLE)
        assert transfer.step.choice.reason.startswith("transposed")
        assert transfer.step.cuts[0].transposed


def test_the_method_with_the_fewest_seconds_is_chosen() -> None:
    load = Load(needed=MB, whole=2 * MB, cuts=1, blocks=1000, landings=1)
    slow_wire = choose(load, Costs(wire_gb_per_s=0.001, block_seconds=1.0))
    assert slow_wire.method is Method.PACKED
    slow_pack = choose(load, Costs(pack_gb_per_s=0.1, block_seconds=1.0))
    assert slow_pack.method is Method.WHOLE
    free_blocks = choose(load, Costs(block_seconds=0.0))
    assert free_blocks.method is Method.STRIDED


def test_ranges_are_not_replaced_by_reads_of_unneeded_bytes() -> None:
    """Two small ranges would cost more operations than their small tensor as a whole."""
    load = Load(needed=64, whole=128, cuts=2, blocks=2, landings=2)
    assert choose(load, Costs()).method is Method.RANGE
    assert choose(replace(load, needed=128), Costs()).method is Method.WHOLE
    assert choose(replace(load, blocks=4), Costs(pack_gb_per_s=0)).method is Method.WHOLE


def test_neighbouring_cuts_become_one_copy() -> None:
    """Gate and up of one rank, fused in the trainer as in the engine."""
    f, h = 8, 4
    pieces = [
        Piece("mlp.gate_proj.weight", Box((0, 0), (f, h)), "fc1", (0, 0)),
        Piece("mlp.up_proj.weight", Box((0, 0), (f, h)), "fc1", (f, 0)),
    ]
    source = source_from_pieces("t", {"fc1": LocalTensor("BF16", (2 * f, h))}, pieces)
    tensors = {piece.name: LocalTensor("BF16", (f, h)) for piece in pieces}
    rank = EngineRank(heads=1, kv_heads=1, head_dim=1)
    result = plan([source], ["r"], engine_targets([rank], tensors))
    (transfer,) = result.transfers("r")
    ((target, cut),) = transfer.copies()
    assert target == "mlp.gate_up_proj.weight"
    assert cut.box == Box((0, 0), (2 * f, h))


def test_equal_layers_share_one_recipe() -> None:
    shapes = {f"model.layers.{n}.self_attn.o_proj.weight": (8, 8) for n in range(50)}
    ranks = [EngineRank(heads=4, kv_heads=4, head_dim=2, tp_size=2, tp_rank=t) for t in (0, 1)]
    source = holder("t", shapes)
    result = plan([source], ["a", "b"], engine_targets(ranks, held(source)))
    assert len(result.recipes) == 1
    assert len(list(result.transfers("a"))) == 50


# --- the source -----------------------------------------------------------------------------


def test_sources_that_hold_the_same_are_equally_busy() -> None:
    shapes = {f"w{n}": (n + 1, 64) for n in range(24)}
    sources = [holder(f"t{n}", shapes) for n in range(4)]
    receivers = [f"r{n}" for n in range(3)]
    result = plan(sources, receivers, hf_target(held(sources[0]), 3))
    busy = result.total.sources
    assert sum(busy.values()) == result.total.moved
    assert max(busy.values()) < 1.1 * min(busy.values())
    served: dict[str, int] = {}
    for receiver in receivers:
        for transfer in result.transfers(receiver):
            served[transfer.source] = served.get(transfer.source, 0) + transfer.step.choice.moved
    assert served == busy


def test_a_source_with_much_of_its_own_serves_less_of_the_rest() -> None:
    shared = {f"w{n}": (64, 64) for n in range(12)}
    busy = holder("busy", {**shared, "alone": (64 * 12, 64)})
    idle = holder("idle", shared)
    result = plan([busy, idle], ["r"], hf_target(held(busy)))
    assert result.total.sources["busy"] == result.total.sources["idle"]


# --- refusals ------------------------------------------------------------------------------


def test_fsdp_shards_rows_and_the_last_rank_has_the_rest() -> None:
    headers = {name: LocalTensor("F32", s) for name, s in (("w", (5, 2)), ("one", (1,)), ("s", ()))}
    held_by_rank = [held(source) for source in fsdp_sources(headers, 4)]
    assert [rank["w"].shape for rank in held_by_rank if "w" in rank] == [(2, 2), (2, 2), (1, 2)]
    assert ["one" in rank for rank in held_by_rank] == [True, False, False, False]
    assert all("s" in rank for rank in held_by_rank)


def test_elements_without_a_source_are_named() -> None:
    shape = (8, 4)
    half = Piece("w", Box((0, 0), (3, 4)), "w", (0, 0))
    source = source_from_pieces("t", {"w": LocalTensor("BF16", (3, 4))}, [half])
    wanted = hf_target({"w": LocalTensor("BF16", shape)})
    with pytest.raises(UsageError, match=r"holds w at \[3, 0\] to \[8, 4\]"):
        plan([source], ["r"], wanted)
    with pytest.raises(UsageError, match="holds v at"):
        plan([source], ["r"], hf_target({"v": LocalTensor("BF16", shape)}))


def test_elements_that_would_be_written_twice_are_named() -> None:
    wanted = targets_of((5,), (Box((0,), (3,)), (0,)), (Box((3,), (6,)), (2,)))
    with pytest.raises(UsageError, match=r"x of r would be written twice at \[2\] to \[3\]"):
        plan([holder("t", {"w": (6,)})], ["r"], wanted)


def test_boxes_that_do_not_fit_are_refused() -> None:
    wanted = targets_of((5,), (Box((0,), (6,)), (0,)))
    with pytest.raises(UsageError, match="w does not fit into x"):
        plan([holder("t", {"w": (6,)})], ["r"], wanted)
    beyond = source_from_pieces("t", {"w": LocalTensor("BF16", (5,))}, [whole("w", (6,))])
    with pytest.raises(UsageError, match="does not fit into w of t"):
        plan([beyond], ["r"], hf_target({"w": LocalTensor("BF16", (6,))}))


def test_pieces_outside_their_tensor_are_refused() -> None:
    tensors = {"w": LocalTensor("BF16", (6,))}
    flat = Piece("w", Box((0,), (6,)), "w", (0,), transposed=True)
    deep = Piece("w", Box((0,), (6,)), "w", (0, 0))
    for piece, words in ((flat, "is transposed"), (deep, "dimensions")):
        with pytest.raises(UsageError, match=words):
            plan([source_from_pieces("t", tensors, [piece])], ["r"], hf_target(tensors))
    with pytest.raises(UsageError, match="has no such tensor"):
        source_from_pieces("t", {}, [flat])


def test_a_plan_does_not_cast() -> None:
    wanted = hf_target({"w": LocalTensor("F32", (6,))})
    with pytest.raises(UsageError, match=r"w is BF16 in the source .* F32"):
        plan([holder("t", {"w": (6,)})], ["r"], wanted)


def test_names_of_sources_and_receivers_must_be_unique() -> None:
    source = holder("t", {"w": (6,)})
    with pytest.raises(UsageError, match="Two of the plan's sources"):
        plan([source, source], ["r"], hf_target(held(source)))
    with pytest.raises(UsageError, match="no receiver x"):
        list(plan([source], ["r"], hf_target(held(source))).transfers("x"))


# --- engines --------------------------------------------------------------------------------


def test_no_rank_needs_vocabulary_rows_of_padding() -> None:
    ranks = [EngineRank(heads=4, kv_heads=4, head_dim=2, tp_size=4, tp_rank=t) for t in range(4)]
    targets = engine_targets(ranks, {"lm_head.weight": LocalTensor("BF16", (70, 8))})
    (want,) = targets["lm_head.weight"]
    rows = [part and (part.box.start[0], part.box.stop[0], part.shape[0]) for part in want.parts]
    assert rows == [(0, 32, 32), (32, 64, 32), (64, 70, 32), None]


def test_kv_heads_are_repeated_when_there_are_fewer_than_ranks() -> None:
    ranks = [EngineRank(heads=8, kv_heads=2, head_dim=4, tp_size=4, tp_rank=t) for t in range(4)]
    targets = engine_targets(
        ranks, {"model.layers.0.self_attn.v_proj.weight": LocalTensor("BF16", (8, 16))}
    )
    (want,) = targets["model.layers.0.self_attn.v_proj.weight"]
    assert want.target == "model.layers.0.self_attn.qkv_proj.weight"
    assert [part.box.start[0] for part in want.parts if part] == [0, 0, 4, 4]
    assert {(part.at, part.shape) for part in want.parts if part} == {((12, 0), (16, 16))}


def test_uneven_experts_go_to_the_first_ranks() -> None:
    config = {**DENSE, "num_experts": 5}
    ranks = engine_ranks(config, tp=1, ep=3)
    assert [list(rank.owned) for rank in ranks] == [[0, 1], [2, 3], [4]]
    name = "model.layers.0.mlp.experts.3.up_proj.weight"
    (want,) = engine_targets(ranks, {name: LocalTensor("BF16", (6, 4))})[name]
    assert want.target == "model.layers.0.mlp.experts.routed_experts.w13_weight"
    assert [part and (part.at, part.shape) for part in want.parts] == [
        None,
        ((1, 6, 0), (2, 12, 4)),
        None,
    ]


def test_tied_output_layers_need_nothing() -> None:
    rank = EngineRank(heads=1, kv_heads=1, head_dim=1, tied=True)
    assert engine_targets([rank], {"lm_head.weight": LocalTensor("BF16", (64, 2))}) == {}


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("model.layers.0.strange.weight", (4, 4), "no rule"),
        ("model.layers.0.self_attn.q_proj.weight", (9, 4), "has 9 rows"),
        ("model.layers.0.mlp.down_proj.weight", (4, 5), "cannot be cut"),
        ("model.layers.0.mlp.experts.7.w1.weight", (4, 4), "beyond the model's 2"),
    ],
)
def test_tensors_that_vllm_would_not_load_are_refused(
    name: str, shape: tuple[int, int], words: str
) -> None:
    rank = EngineRank(heads=2, kv_heads=2, head_dim=2, experts=2, tp_size=2)
    with pytest.raises(UsageError, match=words):
        engine_targets([rank], {name: LocalTensor("BF16", shape)})


def test_impossible_engines_are_refused() -> None:
    config = {**DENSE, "num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 12}
    for tp, ep in ((4, 1), (2, 3), (0, 1)):
        with pytest.raises(UsageError):
            engine_ranks(config, tp, ep)
