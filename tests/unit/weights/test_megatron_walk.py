"""Read a Megatron model by module; the classes here have only the names of Megatron's."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from rollway.errors import UsageError
from rollway.weights.layout import Box, Piece, Role
from rollway.weights.megatron.geometry import ModelGeometry, Position
from rollway.weights.megatron.names import NameMap, name_experts
from rollway.weights.megatron.tensors import from_megatron, read_rank

GEOMETRY = ModelGeometry(
    layers=4, hidden=4, heads=2, query_groups=1, head_dim=2, vocab=5, experts=2
)
NAMES = NameMap("qwen3_moe", GEOMETRY)
HALF = Position(tp=1, tp_size=2, etp=1, etp_size=2)


class TELayerNormColumnParallelLinear(nn.Module):
    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, columns))
        self.layer_norm_weight = nn.Parameter(torch.ones(columns))


class TopKRouter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 4))
        self.register_buffer("expert_bias", torch.zeros(2))
        self.register_buffer("local_tokens_per_expert", torch.zeros(2), persistent=False)


class GroupedMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight1 = nn.Parameter(torch.randn(4, 2 * 2 * 1))  # hidden; experts, gate and up, ffn
        self.weight2 = nn.Parameter(torch.randn(2 * 1, 4))


class Layer(nn.Module):
    def __init__(self, number: int | None) -> None:
        super().__init__()
        if number is not None:
            self.layer_number = number
        self.self_attention = nn.Module()
        self.self_attention.linear_qkv = TELayerNormColumnParallelLinear(4, 4)
        self.mlp = nn.Module()
        self.mlp.router = TopKRouter()
        self.mlp.experts = GroupedMLP()


def _chunk(*numbers: int | None) -> nn.Module:
    """Return a chunk as DDP and Float16Module wrap it."""
    chunk = nn.Module()
    chunk.decoder = nn.Module()
    chunk.decoder.layers = nn.ModuleList(Layer(number) for number in numbers)
    for _ in range(2):
        wrapper = nn.Module()
        wrapper.module = chunk
        chunk = wrapper
    return chunk


def test_layers_of_a_virtual_pipeline_have_their_own_numbers() -> None:
    layout, tensors = read_rank([_chunk(1), _chunk(3)], NAMES, HALF)
    assert layout.shards.keys() == tensors.keys()
    assert {name.split(".")[2] for name in layout.shards} == {"0", "2"}
    assert layout.names["decoder.layers.2.mlp.router.expert_bias"] == (
        "model.layers.2.mlp.gate.e_score_correction_bias",
    )
    roles = {name.partition("layers.2.")[2]: s.role for name, s in layout.shards.items()}
    assert (
        roles.items()
        >= {
            "self_attention.linear_qkv.weight": Role.QKV_COLUMN,
            "self_attention.linear_qkv.layer_norm_weight": Role.REPLICATED,
            "mlp.router.weight": Role.REPLICATED,
            "mlp.experts.weight1": Role.EXPERT_COLUMN,
            "mlp.experts.weight2": Role.EXPERT_ROW,
        }.items()
    )


def test_experts_of_another_name_are_found_by_a_part_of_it() -> None:
    """What NRL_MX_EXPERT_TENSOR_PATTERN says, of a module that is not called `experts`."""
    plain, renamed = _chunk(1), _chunk(1)
    mlp = renamed.module.module.decoder.layers[0].mlp
    mlp.moe_bank, mlp.experts = mlp.experts, nn.Module()
    expected, _ = read_rank(plain, NAMES, HALF)
    layout, tensors = read_rank(renamed, NAMES, HALF, experts="bank")
    assert layout.names == expected.names and layout.shards == expected.shards
    name = "decoder.layers.0.mlp.experts.weight1"
    assert tensors[name].data_ptr() == mlp.moe_bank.weight1.data_ptr()
    assert layout.shards[name].role is Role.EXPERT_COLUMN
    with pytest.raises(UsageError, match=r"mlp\.moe_bank\.weight1"):
        read_rank(renamed, NAMES, HALF)
    # Megatron's own names need no pattern, and shared experts are none of these.
    assert read_rank(plain, NAMES, HALF, experts="expert")[0].shards == expected.shards
    assert name_experts("a.shared_experts.x", "") == "a.shared_experts.x"


def test_held_tensors_share_memory_with_the_parameters() -> None:
    chunk = _chunk(2)
    held = {h.shard.name: h for h in from_megatron(chunk, NAMES, HALF)}
    layer = chunk.module.module.decoder.layers[0]
    first = held["decoder.layers.1.mlp.experts.weight1"]
    assert first.tensor.data_ptr() == layer.mlp.experts.weight1.data_ptr()
    assert first.tensor.shape == (8, 2)  # expert after expert
    qkv = held["decoder.layers.1.self_attention.linear_qkv.weight"]
    assert qkv.shard.box == Box((4, 0), (8, 4))
    assert [piece.name.split(".")[-2] for piece in qkv.pieces] == ["k_proj", "v_proj"]
    assert qkv.pieces[1] == Piece(
        "model.layers.1.self_attn.v_proj.weight", (2, 4), Box((0, 0), (2, 4)), (2, 0)
    )
    assert qkv.owned_here


def test_one_of_several_replicas_publishes() -> None:
    norm = "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight"
    positions = [Position(tp=t, tp_size=2, dp=d, dp_size=3) for t in range(2) for d in range(3)]
    owners = [
        held.owned_here
        for position in positions
        for held in from_megatron(_chunk(2), NAMES, position)
        if held.shard.name == norm
    ]
    assert owners.count(True) == 1


def test_unreadable_models_are_refused() -> None:
    with pytest.raises(UsageError, match="does not know its layer_number"):
        read_rank(_chunk(None), NAMES, HALF)
    with pytest.raises(UsageError, match=r"two tensors that are called decoder\.layers\.0"):
        read_rank([_chunk(1), _chunk(1)], NAMES, HALF)
    with pytest.raises(UsageError, match="Layer 8 does not exist"):
        read_rank(_chunk(9), NAMES, HALF)

    class Float8Tensor(torch.Tensor):
        pass

    chunk = _chunk(1)
    chunk.module.module.decoder.layers[0].mlp.router.expert_bias = torch.zeros(2).as_subclass(
        Float8Tensor
    )
    with pytest.raises(UsageError, match="is a Float8Tensor"):
        read_rank(chunk, NAMES, HALF)


# --- a model of 12,627 tensors -------------------------------------------------------------------


def _make_linear(kind: str, weights: int = 1, *, has_norm: bool = False) -> nn.Module:
    """Return a module of a class of Megatron or Transformer Engine; only its name is theirs."""
    linear: nn.Module = type(kind, (nn.Module,), {})()
    for number in range(weights):
        name = "weight" if weights == 1 else f"weight{number}"
        linear.register_parameter(name, nn.Parameter(torch.empty(4, 4, device="meta")))
    if has_norm:
        linear.register_parameter("layer_norm_weight", nn.Parameter(torch.empty(4, device="meta")))
    return linear


def _make_qwen3_moe(layers: int, experts: int) -> nn.Module:
    """Return Qwen3-30B-A3B's tree of modules as Megatron-Core builds it with Transformer Engine."""
    model = nn.Module()
    model.embedding = nn.Module()
    model.embedding.word_embeddings = _make_linear("VocabParallelEmbedding")
    model.decoder = nn.Module()
    model.decoder.layers = nn.ModuleList()
    for number in range(layers):
        layer = nn.Module()
        layer.layer_number = number + 1
        layer.self_attention = nn.Module()
        layer.self_attention.linear_qkv = _make_linear(
            "TELayerNormColumnParallelLinear", has_norm=True
        )
        layer.self_attention.linear_proj = _make_linear("TERowParallelLinear")
        layer.self_attention.q_layernorm = _make_linear("RMSNorm")
        layer.self_attention.k_layernorm = _make_linear("RMSNorm")
        layer.pre_mlp_layernorm = _make_linear("RMSNorm")
        layer.mlp = nn.Module()
        layer.mlp.router = _make_linear("TopKRouter")
        layer.mlp.experts = nn.Module()
        layer.mlp.experts.linear_fc1 = _make_linear("TEColumnParallelGroupedLinear", experts)
        layer.mlp.experts.linear_fc2 = _make_linear("TERowParallelGroupedLinear", experts)
        model.decoder.layers.append(layer)
    model.decoder.final_layernorm = _make_linear("RMSNorm")
    model.output_layer = _make_linear("ColumnParallelLinear")
    wrapper = nn.Module()
    wrapper.module = model
    return wrapper


def test_roles_of_a_large_model_of_experts_by_the_classes_of_its_modules() -> None:
    """Upstream's figures: 6,144 + 6,144 + 241 + 48 + 48 + 1 + 1. It calls the output layer `column`
    where tensors are not split; here it is `vocab_parallel` always, for its padded rows."""
    geometry = ModelGeometry(
        layers=48, hidden=4, heads=2, query_groups=1, head_dim=2, vocab=4, experts=128,
    )  # fmt: skip
    layout, _ = read_rank(
        _make_qwen3_moe(48, 128), NameMap("qwen3_moe", geometry), Position(tp=0, tp_size=1)
    )
    roles = {name: shard.role for name, shard in layout.shards.items()}
    assert roles.pop("output_layer.weight") is Role.VOCAB_PARALLEL
    assert Counter(roles.values()) == {
        Role.EXPERT_COLUMN: 6144,
        Role.EXPERT_ROW: 6144,
        Role.REPLICATED: 241,
        Role.ROW: 48,
        Role.QKV_COLUMN: 48,
        Role.VOCAB_PARALLEL: 1,
    }
    assert len(roles) + 1 == 12_627
