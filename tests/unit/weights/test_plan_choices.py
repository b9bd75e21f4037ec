"""What a plan decides: the method, the source, and which inputs it refuses."""

from __future__ import annotations

import pytest

from rollway.errors import UsageError
from rollway.weights.checkpoint import TensorHeader
from rollway.weights.layout import Box, Piece
from rollway.weights.planning.plan import (
    Costs,
    Method,
    Source,
    Total,
    Transfer,
    plan,
    source_from_pieces,
)
from rollway.weights.planning.scenario import fsdp_sources
from rollway.weights.planning.targets import (
    EngineRank,
    Target,
    TargetPart,
    Targets,
    engine_ranks,
    engine_targets,
    hf_targets,
    part_of,
)
from tests.unit.weights.megatron_plans import DENSE

MB = 1 << 20


def whole(name: str, shape: tuple[int, ...], source: str = "") -> Piece:
    return Piece(name, Box.whole(shape), source or name, (0,) * len(shape))


def holder(name: str, shapes: dict[str, tuple[int, ...]]) -> Source:
    tensors = {tensor: TensorHeader("BF16", shape) for tensor, shape in shapes.items()}
    pieces = [whole(tensor, shape) for tensor, shape in shapes.items()]
    return source_from_pieces(name, tensors, pieces)


def held(source: Source) -> dict[str, TensorHeader]:
    return {name: TensorHeader(t.dtype, t.shape) for name, t in source.tensors.items()}


def plan_one(sources: list[Source], targets: Targets, costs: Costs | None = None) -> list[Transfer]:
    """Return the transfers to one receiver."""
    return list(plan(sources, [("r", targets)], costs))


def plan_box(box: Box, shape: tuple[int, ...], source_shape: tuple[int, ...], c: Costs) -> Transfer:
    """One receiver that needs a box of one tensor, as all of its parameter."""
    target = Target("x", "BF16", TargetPart(box, (0,) * len(shape), shape))
    (transfer,) = plan_one([holder("t", {"w": source_shape})], {"w": target}, c)
    return transfer


# --- the method --------------------------------------------------------------------------------


def test_rows_are_read_at_once() -> None:
    transfer = plan_box(Box((2, 0), (4, 768)), (2, 768), (2048, 768), Costs())
    assert (transfer.method, transfer.reads) == (Method.DIRECT, 1)


def test_columns_are_packed_when_blocks_are_small() -> None:
    transfer = plan_box(Box((0, 384), (2048, 768)), (2048, 384), (2048, 768), Costs())
    assert (transfer.method, transfer.reads) == (Method.PACKED, 1)
    assert transfer.moved == transfer.needed


def test_columns_are_read_block_by_block_when_blocks_are_large() -> None:
    transfer = plan_box(Box((0, 0), (2, 4 * MB)), (2, 4 * MB), (2, 8 * MB), Costs())
    assert (transfer.method, transfer.reads) == (Method.DIRECT, 2)


def test_whole_shards_move_when_the_source_cannot_pack() -> None:
    costs = Costs(pack_gb_per_s=0.0)
    transfer = plan_box(Box((0, 384), (2048, 768)), (2048, 384), (2048, 768), costs)
    assert transfer.method is Method.WHOLE
    assert transfer.moved == 2 * transfer.needed


def test_a_whole_shard_that_is_needed_whole_is_placed_by_the_receiver() -> None:
    """A trainer with narrower cuts than the engine: nothing to pack, and no byte too many."""
    transfer = plan_box(Box.whole((2048, 192)), (2048, 384), (2048, 192), Costs())
    assert transfer.method is Method.WHOLE
    assert transfer.moved == transfer.needed


@pytest.mark.parametrize("shape", [(64, 32), (1, 1)])
def test_a_transposed_piece_is_never_read_element_by_element(shape: tuple[int, int]) -> None:
    rows, columns = shape
    piece = Piece("w", Box.whole(shape), "w", (0, 0), transposed=True)
    source = source_from_pieces("t", {"w": TensorHeader("BF16", (columns, 2 * rows))}, [piece])
    wanted = hf_targets({"w": TensorHeader("BF16", shape)})
    for costs in (Costs(), Costs(pack_gb_per_s=0), Costs(read_seconds=0)):
        (transfer,) = plan_one([source], wanted, costs)
        assert transfer.method in (Method.PACKED, Method.WHOLE)
        assert transfer.copies[0][1].transposed


def test_the_method_with_the_fewest_seconds_is_chosen() -> None:
    """A thousand columns of a matrix, by the speeds of the machines."""
    box, shape, all_of_it = Box((0, 0), (1000, 512)), (1000, 512), (1000, 1024)
    slow_wire = plan_box(box, shape, all_of_it, Costs(wire_gb_per_s=0.001, read_seconds=1.0))
    assert slow_wire.method is Method.PACKED
    slow_pack = plan_box(box, shape, all_of_it, Costs(pack_gb_per_s=0.1, read_seconds=1.0))
    assert slow_pack.method is Method.WHOLE
    free_reads = plan_box(box, shape, all_of_it, Costs(read_seconds=0.0))
    assert free_reads.method is Method.DIRECT


def test_few_reads_are_not_replaced_by_one_of_unneeded_bytes() -> None:
    """A small range costs as many operations as its small tensor as a whole."""
    costs = Costs(pack_gb_per_s=0)
    assert plan_box(Box((0,), (32,)), (32,), (64,), costs).method is Method.DIRECT
    assert plan_box(Box((0, 0), (9, 4)), (9, 4), (9, 8), costs).method is Method.WHOLE


def test_what_is_fused_in_the_source_is_one_transfer() -> None:
    """Gate and up of one rank, fused in the trainer as in the engine."""
    f, h = 8, 4
    pieces = [
        Piece("mlp.gate_proj.weight", Box((0, 0), (f, h)), "fc1", (0, 0)),
        Piece("mlp.up_proj.weight", Box((0, 0), (f, h)), "fc1", (f, 0)),
    ]
    source = source_from_pieces("t", {"fc1": TensorHeader("BF16", (2 * f, h))}, pieces)
    tensors = {piece.name: TensorHeader("BF16", (f, h)) for piece in pieces}
    rank = EngineRank(heads=1, kv_heads=1, head_dim=1)
    (transfer,) = plan_one([source], engine_targets(rank, tensors))
    assert {target for target, _ in transfer.copies} == {"mlp.gate_up_proj.weight"}
    assert [cut.at for _, cut in transfer.copies] == [(0, 0), (f, 0)]


# --- the source -----------------------------------------------------------------------------


def test_sources_that_hold_the_same_are_equally_busy() -> None:
    shapes = {f"w{n}": (n + 1, 64) for n in range(24)}
    sources = [holder(f"t{n}", shapes) for n in range(4)]
    total, wanted = Total(), hf_targets(held(sources[0]))
    for transfer in plan(sources, [(f"r{n}", wanted) for n in range(3)]):
        total.add(transfer)
    busy = total.sources
    assert sum(busy.values()) == total.moved
    assert max(busy.values()) < 1.1 * min(busy.values())


def test_a_source_with_much_of_its_own_serves_less_of_the_rest() -> None:
    shared = {f"w{n}": (64, 64) for n in range(12)}
    busy = holder("busy", {**shared, "alone": (64 * 12, 64)})
    total = Total()
    for transfer in plan_one([busy, holder("idle", shared)], hf_targets(held(busy))):
        total.add(transfer)
    assert total.sources["busy"] == total.sources["idle"]


# --- refusals ------------------------------------------------------------------------------


def test_fsdp_shards_rows_and_the_last_rank_has_the_rest() -> None:
    shapes = {"w": (5, 2), "one": (1,), "s": ()}
    headers = {name: TensorHeader("F32", shape) for name, shape in shapes.items()}
    held_by_rank = [held(source) for source in fsdp_sources(headers, 4)]
    assert [rank["w"].shape for rank in held_by_rank if "w" in rank] == [(2, 2), (2, 2), (1, 2)]
    assert ["one" in rank for rank in held_by_rank] == [True, False, False, False]
    assert all("s" in rank for rank in held_by_rank)


def test_elements_without_a_source_are_named() -> None:
    shape = (8, 4)
    half = Piece("w", Box((0, 0), (3, 4)), "w", (0, 0))
    source = source_from_pieces("t", {"w": TensorHeader("BF16", (3, 4))}, [half])
    with pytest.raises(UsageError, match=r"holds w at \[3, 0\] to \[8, 4\]"):
        plan_one([source], hf_targets({"w": TensorHeader("BF16", shape)}))
    with pytest.raises(UsageError, match="holds v at"):
        plan_one([source], hf_targets({"v": TensorHeader("BF16", shape)}))


def test_a_plan_does_not_cast() -> None:
    wanted = hf_targets({"w": TensorHeader("F32", (6,))})
    with pytest.raises(UsageError, match=r"w is BF16 in the source .* F32"):
        plan_one([holder("t", {"w": (6,)})], wanted)


# --- engines --------------------------------------------------------------------------------


def test_no_rank_needs_vocabulary_rows_of_padding() -> None:
    ranks = [EngineRank(heads=4, kv_heads=4, head_dim=2, tp_size=4, tp_rank=t) for t in range(4)]
    headers = {"lm_head.weight": TensorHeader("BF16", (70, 8))}
    parts = [part_of("lm_head.weight", headers, rank)[1] for rank in ranks]
    rows = [part and (part.box.start[0], part.box.stop[0], part.shape[0]) for part in parts]
    assert rows == [(0, 32, 32), (32, 64, 32), (64, 70, 32), None]


def test_kv_heads_are_repeated_when_there_are_fewer_than_ranks() -> None:
    ranks = [EngineRank(heads=8, kv_heads=2, head_dim=4, tp_size=4, tp_rank=t) for t in range(4)]
    headers = {"model.layers.0.self_attn.v_proj.weight": TensorHeader("BF16", (8, 16))}
    wants = [
        engine_targets(rank, headers)["model.layers.0.self_attn.v_proj.weight"] for rank in ranks
    ]
    assert {want.parameter for want in wants} == {"model.layers.0.self_attn.qkv_proj.weight"}
    assert [want.part.box.start[0] for want in wants] == [0, 0, 4, 4]
    assert {(want.part.at, want.part.shape) for want in wants} == {((12, 0), (16, 16))}


def test_uneven_experts_go_to_the_first_ranks() -> None:
    config = {**DENSE, "num_experts": 5}
    ranks = engine_ranks(config, tp=1, ep=3)
    assert [list(rank.owned) for rank in ranks] == [[0, 1], [2, 3], [4]]
    name = "model.layers.0.mlp.experts.3.up_proj.weight"
    headers = {name: TensorHeader("BF16", (6, 4))}
    parameters, parts = zip(*(part_of(name, headers, rank) for rank in ranks), strict=True)
    assert set(parameters) == {"model.layers.0.mlp.experts.routed_experts.w13_weight"}
    assert [part and (part.at, part.shape) for part in parts] == [
        None,
        ((1, 6, 0), (2, 12, 4)),
        None,
    ]


def test_tied_output_layers_need_nothing() -> None:
    rank = EngineRank(heads=1, kv_heads=1, head_dim=1, tied=True)
    assert engine_targets(rank, {"lm_head.weight": TensorHeader("BF16", (64, 2))}) == {}


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
        engine_targets(rank, {name: TensorHeader("BF16", shape)})


def test_impossible_engines_are_refused() -> None:
    config = {**DENSE, "num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 12}
    for tp, ep in ((4, 1), (2, 3), (0, 1)):
        with pytest.raises(UsageError):
            engine_ranks(config, tp, ep)
