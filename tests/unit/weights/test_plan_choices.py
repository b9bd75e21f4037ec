"""What a plan decides: the way, the source, the order, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rollway.errors import UsageError
from rollway.weights.layout import Box, Need, Piece
from rollway.weights.planning.cache import PlanCache, signature
from rollway.weights.planning.costs import Costs, Load, Method, choose
from rollway.weights.planning.fanout import Edge, tree
from rollway.weights.planning.holdings import ANYWHERE, Place, Source, source_of_pieces
from rollway.weights.planning.plan import Receiver, plan
from rollway.weights.planning.trainers import fsdp_sources
from rollway.weights.planning.transfers import Plan
from rollway.weights.planning.vllm_layout import EngineTarget, engine_ranks, wants
from rollway.weights.planning.wants import LocalTensor, hf_target, wants_of_needs

MB = 1 << 20


def whole(name: str, shape: tuple[int, ...], source: str = "") -> Piece:
    return Piece(name, Box.whole(shape), source or name, (0,) * len(shape))


def holder(name: str, shapes: dict[str, tuple[int, ...]], place: Place = ANYWHERE) -> Source:
    tensors = {tensor: LocalTensor("BF16", shape) for tensor, shape in shapes.items()}
    pieces = [whole(tensor, shape) for tensor, shape in shapes.items()]
    return source_of_pieces(name, tensors, pieces, place)


def held(source: Source) -> dict[str, LocalTensor]:
    return {
        name: LocalTensor(offer.holding.dtype, offer.holding.shape)
        for name, offer in source.offers.items()
    }


def needing(box: Box, shape: tuple[int, ...], source_shape: tuple[int, ...], c: Costs) -> Plan:
    """One receiver that needs a box of one tensor."""
    need = [Need("w", box, "w", (0,) * len(shape))]
    wanted = wants_of_needs([need], [{"w": LocalTensor("BF16", shape)}])
    return plan([holder("t", {"w": source_shape})], [Receiver("r")], wanted, c)


# --- the way --------------------------------------------------------------------------------


def test_rows_are_a_range() -> None:
    made = needing(Box((2, 0), (4, 768)), (2, 768), (2048, 768), Costs())
    (transfer,) = made.transfers("r")
    assert transfer.method is Method.RANGE
    assert (made.total.descriptors, made.total.blocks) == (1, 1)


def test_columns_are_packed_when_blocks_are_small() -> None:
    made = needing(Box((0, 384), (2048, 768)), (2048, 384), (2048, 768), Costs())
    (transfer,) = made.transfers("r")
    assert transfer.method is Method.PACKED
    assert not transfer.staged
    assert made.total.ratio == 1.0
    assert "2048 blocks of 768 B" in transfer.reason


def test_columns_are_strided_when_blocks_are_large() -> None:
    made = needing(Box((0, 0), (2, 4 * MB)), (2, 4 * MB), (2, 8 * MB), Costs())
    assert set(made.total.methods) == {Method.STRIDED}
    assert (made.total.descriptors, made.total.blocks) == (1, 2)


def test_whole_shards_come_when_the_source_cannot_pack_and_the_plan_says_so() -> None:
    costs = Costs(pack_gb_per_s=0.0)
    made = needing(Box((0, 384), (2048, 768)), (2048, 384), (2048, 768), costs)
    assert set(made.total.methods) == {Method.WHOLE}
    assert made.total.ratio == 2.0
    ((reason, extra),) = made.total.reasons.items()
    assert extra == made.total.moved - made.total.needed
    assert "more than needed" in reason


def test_a_whole_shard_that_is_needed_whole_is_placed_by_the_receiver() -> None:
    """A trainer with narrower cuts than the engine: nothing to pack, and no byte too many."""
    made = needing(Box.whole((2048, 192)), (2048, 384), (2048, 192), Costs())
    assert set(made.total.methods) == {Method.WHOLE}
    assert made.total.ratio == 1.0


def test_a_transposed_piece_is_never_read_element_by_element() -> None:
    piece = Piece("w", Box.whole((64, 32)), "w", (0, 0), transposed=True)
    source = source_of_pieces("t", {"w": LocalTensor("BF16", (32, 64))}, [piece])
    wanted = hf_target({"w": LocalTensor("BF16", (64, 32))})
    for costs in (Costs(), Costs(pack_gb_per_s=0), Costs(block_seconds=0)):
        (transfer,) = plan([source], [Receiver("r")], wanted, costs).transfers("r")
        assert transfer.method in (Method.PACKED, Method.WHOLE)
        assert transfer.reason.startswith("transposed")
        assert transfer.copies[0].transposed


def test_the_cheapest_way_is_the_one_with_the_fewest_seconds() -> None:
    load = Load(needed=MB, whole=2 * MB, cuts=1, blocks=1000, landings=1)
    slow_wire = choose(load, Costs(wire_gb_per_s=0.001, block_seconds=1.0))
    assert slow_wire.method is Method.PACKED
    slow_pack = choose(load, Costs(pack_gb_per_s=0.1, block_seconds=1.0))
    assert slow_pack.method is Method.WHOLE
    free_blocks = choose(load, Costs(block_seconds=0.0))
    assert free_blocks.method is Method.STRIDED


def test_ranges_are_not_given_up_for_bytes_that_nobody_needs() -> None:
    """Two small ranges would cost more operations than their small tensor as a whole."""
    load = Load(needed=64, whole=128, cuts=2, blocks=2, landings=2)
    assert choose(load, Costs()).method is Method.RANGE
    assert choose(replace(load, needed=128), Costs()).method is Method.WHOLE
    assert choose(replace(load, blocks=4), Costs(pack_gb_per_s=0)).method is Method.WHOLE


def test_neighbours_become_one() -> None:
    """Gate and up of one rank, fused in the trainer as in the engine."""
    f, h = 8, 4
    pieces = [
        Piece("mlp.gate_proj.weight", Box((0, 0), (f, h)), "fc1", (0, 0)),
        Piece("mlp.up_proj.weight", Box((0, 0), (f, h)), "fc1", (f, 0)),
    ]
    source = source_of_pieces("t", {"fc1": LocalTensor("BF16", (2 * f, h))}, pieces)
    tensors = {piece.name: LocalTensor("BF16", (f, h)) for piece in pieces}
    rank = EngineTarget(heads=1, kv_heads=1, head_dim=1)
    made = plan([source], [Receiver("r")], wants([rank], tensors))
    (copy,) = made.copies("r")
    assert copy.target == "mlp.gate_up_proj.weight"
    assert copy.box == Box((0, 0), (2 * f, h))


def test_equal_layers_share_one_recipe() -> None:
    shapes = {f"model.layers.{n}.self_attn.o_proj.weight": (8, 8) for n in range(50)}
    ranks = [EngineTarget(heads=4, kv_heads=4, head_dim=2, tp_size=2, tp_rank=t) for t in (0, 1)]
    source = holder("t", shapes)
    made = plan([source], [Receiver("a"), Receiver("b")], wants(ranks, held(source)))
    assert len(made.recipes) == 1
    assert len(list(made.copies("a"))) == 50


# --- the source -----------------------------------------------------------------------------


def test_sources_that_hold_the_same_are_equally_busy() -> None:
    shapes = {f"w{n}": (n + 1, 64) for n in range(24)}
    sources = [holder(f"t{n}", shapes) for n in range(4)]
    receivers = [Receiver(f"r{n}") for n in range(3)]
    made = plan(sources, receivers, hf_target(held(sources[0]), 3))
    busy = made.total.sources
    assert sum(busy.values()) == made.total.moved
    assert max(busy.values()) < 1.1 * min(busy.values())
    served: dict[str, int] = {}
    for receiver in receivers:
        for transfer in made.transfers(receiver.name):
            served[transfer.source] = served.get(transfer.source, 0) + transfer.moved
    assert served == busy


def test_a_source_that_alone_has_much_gets_less_of_the_rest() -> None:
    shared = {f"w{n}": (64, 64) for n in range(12)}
    busy = holder("busy", {**shared, "alone": (64 * 12, 64)})
    idle = holder("idle", shared)
    made = plan([busy, idle], [Receiver("r")], hf_target(held(busy)))
    assert made.total.sources["busy"] == made.total.sources["idle"]


def test_the_same_device_goes_before_the_same_node_before_the_rest() -> None:
    shapes = {"w": (8, 8), "v": (8, 8)}
    here, near = Place("node0", "gpu0"), Place("node0", "gpu1")
    sources = [
        holder("far", shapes, Place("node1", "gpu0")),
        holder("near", shapes, near),
        holder("here", shapes, here),
    ]
    wanted = hf_target(held(sources[0]))
    made = plan(sources, [Receiver("r", here)], wanted)
    assert set(made.total.sources) == {"here"}
    made = plan(sources[:2], [Receiver("r", here)], wanted)
    assert set(made.total.sources) == {"near"}


def test_a_near_source_goes_first_also_when_it_holds_more_than_the_others() -> None:
    half = Piece("w", Box((0, 0), (4, 8)), "half", (0, 0))
    far = source_of_pieces("far", {"half": LocalTensor("BF16", (4, 8))}, [half])
    near = holder("near", {"w": (8, 8)}, Place("n"))
    wanted = hf_target({"w": LocalTensor("BF16", (8, 8))})
    made = plan([far, near], [Receiver("r", Place("n"))], wanted)
    assert set(made.total.sources) == {"near"}


# --- what is refused ------------------------------------------------------------------------


def test_fsdp_cuts_rows_and_leaves_the_last_rank_what_is_left() -> None:
    headers = {name: LocalTensor("F32", s) for name, s in (("w", (5, 2)), ("one", (1,)), ("s", ()))}
    held_by_rank = [held(source) for source in fsdp_sources(headers, 4)]
    assert [rank["w"].shape for rank in held_by_rank if "w" in rank] == [(2, 2), (2, 2), (1, 2)]
    assert ["one" in rank for rank in held_by_rank] == [True, False, False, False]
    assert all("s" in rank for rank in held_by_rank)


def test_elements_that_nobody_holds_are_named() -> None:
    shape = (8, 4)
    half = Piece("w", Box((0, 0), (3, 4)), "w", (0, 0))
    source = source_of_pieces("t", {"w": LocalTensor("BF16", (3, 4))}, [half])
    wanted = hf_target({"w": LocalTensor("BF16", shape)})
    with pytest.raises(UsageError, match=r"holds w at \[3, 0\] to \[8, 4\]"):
        plan([source], [Receiver("r")], wanted)
    with pytest.raises(UsageError, match="holds v at"):
        plan([source], [Receiver("r")], hf_target({"v": LocalTensor("BF16", shape)}))


def test_elements_that_would_be_written_twice_are_named() -> None:
    needs = [Need("w", Box((0,), (3,)), "x", (0,)), Need("w", Box((3,), (6,)), "x", (2,))]
    wanted = wants_of_needs([needs], [{"x": LocalTensor("BF16", (5,))}])
    with pytest.raises(UsageError, match=r"x of r would be written twice at \[2\] to \[3\]"):
        plan([holder("t", {"w": (6,)})], [Receiver("r")], wanted)


def test_what_does_not_fit_is_refused() -> None:
    needs = [Need("w", Box((0,), (6,)), "x", (0,))]
    wanted = wants_of_needs([needs], [{"x": LocalTensor("BF16", (5,))}])
    with pytest.raises(UsageError, match="w does not fit into x"):
        plan([holder("t", {"w": (6,)})], [Receiver("r")], wanted)
    beyond = source_of_pieces("t", {"w": LocalTensor("BF16", (5,))}, [whole("w", (6,))])
    with pytest.raises(UsageError, match="does not fit into w of t"):
        plan([beyond], [Receiver("r")], hf_target({"w": LocalTensor("BF16", (6,))}))


def test_pieces_that_cannot_lie_where_they_say_are_refused() -> None:
    tensors = {"w": LocalTensor("BF16", (6,))}
    flat = Piece("w", Box((0,), (6,)), "w", (0,), transposed=True)
    deep = Piece("w", Box((0,), (6,)), "w", (0, 0))
    for piece, words in ((flat, "is transposed"), (deep, "dimensions")):
        with pytest.raises(UsageError, match=words):
            plan([source_of_pieces("t", tensors, [piece])], [Receiver("r")], hf_target(tensors))
    with pytest.raises(UsageError, match="has no such tensor"):
        source_of_pieces("t", {}, [flat])


def test_a_plan_does_not_cast() -> None:
    wanted = hf_target({"w": LocalTensor("F32", (6,))})
    with pytest.raises(UsageError, match=r"w is BF16 in the source .* F32"):
        plan([holder("t", {"w": (6,)})], [Receiver("r")], wanted)


def test_names_are_used_once() -> None:
    source = holder("t", {"w": (6,)})
    with pytest.raises(UsageError, match="Two of the plan's sources"):
        plan([source, source], [Receiver("r")], hf_target(held(source)))
    with pytest.raises(UsageError, match="no receiver x"):
        list(plan([source], [Receiver("r")], hf_target(held(source))).copies("x"))


# --- engines --------------------------------------------------------------------------------


def test_vocabulary_rows_that_pad_are_wanted_by_nobody() -> None:
    ranks = [EngineTarget(heads=4, kv_heads=4, head_dim=2, tp_size=4, tp_rank=t) for t in range(4)]
    found = wants(ranks, {"lm_head.weight": LocalTensor("BF16", (70, 8))})
    (want,) = found["lm_head.weight"]
    rows = [part and (part.box.start[0], part.box.stop[0], part.shape[0]) for part in want.parts]
    assert rows == [(0, 32, 32), (32, 64, 32), (64, 70, 32), None]


def test_kv_heads_are_repeated_when_there_are_fewer_than_ranks() -> None:
    ranks = [EngineTarget(heads=8, kv_heads=2, head_dim=4, tp_size=4, tp_rank=t) for t in range(4)]
    found = wants(ranks, {"model.layers.0.self_attn.v_proj.weight": LocalTensor("BF16", (8, 16))})
    (want,) = found["model.layers.0.self_attn.v_proj.weight"]
    assert want.target == "model.layers.0.self_attn.qkv_proj.weight"
    assert [part.box.start[0] for part in want.parts if part] == [0, 0, 4, 4]
    assert {(part.at, part.shape) for part in want.parts if part} == {((12, 0), (16, 16))}


def test_uneven_experts_go_to_the_first_ranks() -> None:
    config = {"num_attention_heads": 2, "hidden_size": 4, "num_experts": 5}
    ranks = engine_ranks(config, tp=1, ep=3)
    assert [list(rank.owned) for rank in ranks] == [[0, 1], [2, 3], [4]]
    name = "model.layers.0.mlp.experts.3.up_proj.weight"
    (want,) = wants(ranks, {name: LocalTensor("BF16", (6, 4))})[name]
    assert want.target == "model.layers.0.mlp.experts.routed_experts.w13_weight"
    assert [part and (part.at, part.shape) for part in want.parts] == [
        None,
        ((1, 6, 0), (2, 12, 4)),
        None,
    ]


def test_tied_output_layers_want_nothing() -> None:
    rank = EngineTarget(heads=1, kv_heads=1, head_dim=1, tied=True)
    assert wants([rank], {"lm_head.weight": LocalTensor("BF16", (64, 2))}) == {}


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("model.layers.0.strange.weight", (4, 4), "no rule"),
        ("model.layers.0.self_attn.q_proj.weight", (9, 4), "has 9 rows"),
        ("model.layers.0.mlp.down_proj.weight", (4, 5), "cannot be cut"),
        ("model.layers.0.mlp.experts.7.w1.weight", (4, 4), "beyond the model's 2"),
    ],
)
def test_tensors_that_vllm_would_not_take(name: str, shape: tuple[int, int], words: str) -> None:
    rank = EngineTarget(heads=2, kv_heads=2, head_dim=2, experts=2, tp_size=2)
    with pytest.raises(UsageError, match=words):
        wants([rank], {name: LocalTensor("BF16", shape)})


def test_engines_that_cannot_be() -> None:
    config = {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 12}
    for tp, ep in ((4, 1), (2, 3), (0, 1)):
        with pytest.raises(UsageError):
            engine_ranks(config, tp, ep)


# --- fan-out --------------------------------------------------------------------------------


def test_whoever_has_the_version_gives_it_on() -> None:
    names = [f"r{n}" for n in range(10)]
    made = tree(names, arity=2)
    assert [len(level) for level in made.levels] == [1, 2, 4, 3]
    served: set[str] = set()
    for level in made.levels:
        assert all(edge.source is None or edge.source in served for edge in level)
        served |= {edge.receiver for edge in level}
    assert served == set(names)
    assert made.levels[0] == (Edge(None, "r0"),)
    givers = [edge.source for edge in made.edges()]
    assert max(givers.count(giver) for giver in set(givers)) == 2
    assert made.source_of("r0") is None
    assert made.source_of("r1") == "r0"


def test_fan_outs_that_reach_nobody() -> None:
    assert tree([]).levels == ()
    assert len(tree(["a", "b", "c"], roots=5).levels) == 1
    for names, arity in ((["a", "a"], 2), (["a"], 0)):
        with pytest.raises(UsageError):
            tree(names, arity)


# --- the cache ------------------------------------------------------------------------------


def test_a_plan_is_made_once_until_the_topology_changes() -> None:
    cache = PlanCache(size=2)
    shapes = {"w": (8, 8)}
    sources = [holder("t0", shapes), holder("t1", shapes)]
    wanted = hf_target(held(sources[0]))
    first = cache.plan(sources, [Receiver("r")], wanted)
    again = [holder("t0", shapes), holder("t1", shapes)]
    assert cache.plan(again, [Receiver("r")], hf_target(held(sources[0]))) is first
    assert cache.plan(sources[:1], [Receiver("r")], wanted) is not first
    assert cache.made == 2
    cache.plan(sources, [Receiver("other")], wanted)
    assert cache.plan(sources, [Receiver("r")], wanted) is not first  # only two are kept
    cache.clear()
    cache.plan(sources, [Receiver("r")], wanted)
    assert cache.made == 5


def test_signatures_tell_every_change() -> None:
    source = holder("t", {"w": (8, 8)})
    receivers = [Receiver("r")]
    wanted = hf_target(held(source))
    turned = Piece("w", Box.whole((8, 8)), "w", (0, 0), transposed=True)
    moved = source_of_pieces("t", held(source), [turned])
    signatures = [
        signature([source], receivers, wanted),
        signature([moved], receivers, wanted),
        signature([replace(source, place=Place("n"))], receivers, wanted),
        signature([source], receivers, wanted, Costs(wire_gb_per_s=1)),
        signature([source], receivers, wanted, fanout=tree(["r", "s"])),
        signature([source], receivers, hf_target({"w": LocalTensor("F16", (8, 8))})),
    ]
    assert len(set(signatures)) == len(signatures)
