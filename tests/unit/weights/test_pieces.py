"""Compare pieces with formulas on whole tensors, for layouts without golden shards."""

from __future__ import annotations

import pytest
import torch

from rollway.errors import UsageError
from rollway.weights.layout import Box, Piece, Role, Shape
from rollway.weights.megatron.geometry import ModelGeometry, Position, Topology
from rollway.weights.megatron.pieces import local_view, pieces, place

QWEN3_30B = ModelGeometry(
    layers=48, hidden=2048, heads=32, query_groups=4, head_dim=128, vocab=151936
)
SMALL = ModelGeometry(layers=1, hidden=6, heads=4, query_groups=2, head_dim=4, vocab=10, experts=4)


def _filled(
    name: str, whole: torch.Tensor, role: Role, hf: list[str], geometry: ModelGeometry, size: int
) -> dict[str, torch.Tensor]:
    """Return the Hugging Face tensors that the ranks' pieces give, for a tensor sharded by rows."""
    held: dict[str, list[tuple[Piece, torch.Tensor]]] = {}
    for rank, local in enumerate(whole.chunk(size)):
        position = Position(tp=rank, tp_size=size)
        shard = place(name, "F32", tuple(local.shape), role, position)
        for piece in pieces(shard, hf, geometry):
            held.setdefault(piece.name, []).append((piece, local[piece.slices]))
    result = {}
    for hf_name, parts in held.items():
        (shape,) = {piece.shape for piece, _ in parts}
        result[hf_name] = torch.full(shape, -1.0)
        for piece, part in parts:
            result[hf_name][piece.box.slices] = part
    return result


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("columns", [(), (6,)], ids=["bias", "weight"])
def test_fused_qkv_is_split_by_query_group(size: int, columns: Shape) -> None:
    whole = torch.arange(32.0 * (columns[0] if columns else 1)).view(32, *columns)
    result = _filled("linear_qkv.weight", whole, Role.QKV_COLUMN, ["q", "k", "v"], SMALL, size)
    blocks = whole.view(2, 4, 4, *columns)  # groups; two queries, key and value; head_dim
    assert torch.equal(result["q"], blocks[:, :2].reshape(16, *columns))
    assert torch.equal(result["k"], blocks[:, 2].reshape(8, *columns))
    assert torch.equal(result["v"], blocks[:, 3].reshape(8, *columns))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_each_rank_has_its_gate_above_its_up(size: int) -> None:
    gate, up = torch.arange(48.0).view(8, 6), torch.arange(48.0, 96.0).view(8, 6)
    ranks = zip(gate.chunk(size), up.chunk(size), strict=True)
    whole = torch.cat([torch.cat(pair) for pair in ranks])
    result = _filled("linear_fc1.weight", whole, Role.GATED_MLP_COLUMN, ["g", "u"], SMALL, size)
    assert torch.equal(result["g"], gate) and torch.equal(result["u"], up)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_family_may_have_one_tensor_for_all_fused_parts(size: int) -> None:
    gate, up = torch.arange(48.0).view(8, 6), torch.arange(48.0, 96.0).view(8, 6)
    ranks = zip(gate.chunk(size), up.chunk(size), strict=True)
    whole = torch.cat([torch.cat(pair) for pair in ranks])
    result = _filled("linear_fc1.weight", whole, Role.GATED_MLP_COLUMN, ["gate_up"], SMALL, size)
    assert torch.equal(result["gate_up"], torch.cat([gate, up]))


def test_padding_of_the_vocabulary_has_no_piece() -> None:
    whole = torch.arange(16.0 * 6).view(16, 6)
    result = _filled("embedding", whole, Role.VOCAB_PARALLEL, ["embed"], SMALL, 4)
    assert torch.equal(result["embed"], whole[:10])
    last = place("embedding", "F32", (4, 6), Role.VOCAB_PARALLEL, Position(tp=3, tp_size=4))
    assert pieces(last, ["embed"], SMALL) == []  # this rank has nothing but padding


def test_neighbouring_rows_are_one_piece() -> None:
    whole = place("linear_fc1.weight", "F32", (16, 6), Role.GATED_MLP_COLUMN, Position())
    assert len(pieces(whole, ["gate_up"], SMALL)) == 1
    one_group = ModelGeometry(layers=1, hidden=6, heads=4, query_groups=1, head_dim=4, vocab=10)
    qkv = place("linear_qkv.weight", "F32", (24, 6), Role.QKV_COLUMN, Position())
    assert len(pieces(qkv, ["qkv"], one_group)) == 1


@pytest.mark.parametrize("etp", [1, 2])
def test_the_old_grouped_mlp_has_all_experts_transposed_in_one_tensor(etp: int) -> None:
    """Megatron reads `weight1.view(experts, hidden, -1)` and `weight2.view(experts, -1, …)`."""
    gates, ups = torch.randn(2, 4, 6), torch.randn(2, 4, 6)
    downs = torch.randn(2, 6, 4)
    for rank in range(etp):
        position = Position(etp=rank, etp_size=etp, ep=0, ep_size=2)
        halves = [gates.chunk(etp, 1)[rank], ups.chunk(etp, 1)[rank]]
        weight1 = torch.cat(halves, 1).transpose(1, 2).contiguous()  # experts, hidden, 2 * ffn
        weight2 = downs.chunk(etp, 2)[rank].transpose(1, 2).contiguous()  # experts, ffn, hidden
        first, second = "mlp.experts.weight1", "mlp.experts.weight2"
        own = (6, weight1.numel() // 6)
        local1 = weight1.view(local_view(first, own, SMALL, position))
        local2 = weight2.view(local_view(second, (2 * 4 // etp, 6), SMALL, position))
        names = ["g0", "u0", "g1", "u1"]
        shard = place(first, "F32", tuple(local1.shape), Role.EXPERT_COLUMN, position)
        truth = {"g0": gates[0], "u0": ups[0], "g1": gates[1], "u1": ups[1]}
        _check_transposed(pieces(shard, names, SMALL), local1, truth)
        shard = place(second, "F32", tuple(local2.shape), Role.EXPERT_ROW, position)
        _check_transposed(
            pieces(shard, ["d0", "d1"], SMALL), local2, {"d0": downs[0], "d1": downs[1]}
        )


def _check_transposed(
    pieces_here: list[Piece], local: torch.Tensor, truth: dict[str, torch.Tensor]
) -> None:
    assert {piece.name for piece in pieces_here} == truth.keys()
    for piece in pieces_here:
        assert piece.transposed
        assert piece.shape == tuple(truth[piece.name].shape)
        assert torch.equal(local[piece.slices].t(), truth[piece.name][piece.box.slices])


def test_a_row_parallel_bias_is_whole_on_every_rank() -> None:
    shard = place("linear_proj.bias", "F32", (6,), Role.ROW, Position(tp=1, tp_size=2))
    assert pieces(shard, ["b"], SMALL) == [Piece("b", (6,), Box((0,), (6,)), (0,))]


def test_equal_tensors_of_all_layers_share_their_geometry() -> None:
    position = Position(tp=3, tp_size=8)
    shards = [
        place(f"decoder.layers.{n}.qkv", "BF16", (640, 2048), Role.QKV_COLUMN, position)
        for n in (0, 47)
    ]
    first, last = (pieces(shard, ["q", "k", "v"], QWEN3_30B) for shard in shards)
    assert all(one.box is other.box for one, other in zip(first, last, strict=True))


def test_a_shape_that_does_not_fit_the_model_is_refused() -> None:
    shard = place("linear_qkv.weight", "F32", (30, 6), Role.QKV_COLUMN, Position())
    with pytest.raises(UsageError, match=r"linear_qkv.weight.*have 32 rows"):
        pieces(shard, ["q", "k", "v"], SMALL)
    short = place("embedding", "F32", (8, 6), Role.VOCAB_PARALLEL, Position())
    with pytest.raises(UsageError, match="vocabulary has 10 rows"):
        pieces(short, ["e"], SMALL)
    with pytest.raises(UsageError, match="one part, but 2 names"):
        pieces(place("x", "F32", (8, 6), Role.ROW, Position()), ["a", "b"], SMALL)


def test_ranks_are_numbered_as_in_megatron() -> None:
    positions = Topology(tp=2, pp=2, ep=2, etp=1, world=8).positions()
    assert [(p.tp, p.dp, p.pp) for p in positions[:5]] == [
        *((0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0)),
        (0, 0, 1),
    ]
    assert [(p.ep, p.edp) for p in positions[:4]] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    with pytest.raises(UsageError, match="6 ranks cannot form groups"):
        Topology(tp=4, world=6).positions()
