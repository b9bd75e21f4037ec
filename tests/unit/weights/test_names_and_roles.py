"""Names and roles of Megatron's tensors: from our table and from overrides."""

from __future__ import annotations

import pytest

from rollway.errors import UsageError
from rollway.weights.layout import Role
from rollway.weights.megatron.geometry import ModelGeometry, Position
from rollway.weights.megatron.names import (
    NameMap,
    Parameter,
    classify,
    plain_name,
    role_of_name,
)

GEOMETRY = ModelGeometry(
    layers=8, hidden=8, heads=4, query_groups=2, head_dim=4, vocab=10, experts=8
)
QWEN = NameMap("qwen3_moe", GEOMETRY)
LATER = Position(ep=1, ep_size=4)
"""The second of four groups of two experts."""


@pytest.mark.parametrize(
    ("name", "hf"),
    [
        ("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
        ("output_layer.weight", "lm_head.weight"),
        ("decoder.final_layernorm.weight", "model.norm.weight"),
        ("decoder.layers.5.input_layernorm.weight", "model.layers.5.input_layernorm.weight"),
        (
            "decoder.layers.5.self_attention.linear_qkv.layer_norm_weight",
            "model.layers.5.input_layernorm.weight",
        ),
        (
            "decoder.layers.5.mlp.linear_fc1.layer_norm_weight",
            "model.layers.5.post_attention_layernorm.weight",
        ),
        (
            "decoder.layers.5.pre_mlp_layernorm.weight",
            "model.layers.5.post_attention_layernorm.weight",
        ),
        (
            "decoder.layers.4.self_attention.q_layernorm.weight",
            "model.layers.4.self_attn.q_norm.weight",
        ),
        (
            "decoder.layers.4.self_attention.linear_proj.weight",
            "model.layers.4.self_attn.o_proj.weight",
        ),
        ("decoder.layers.4.mlp.router.weight", "model.layers.4.mlp.gate.weight"),
        (
            "decoder.layers.4.mlp.shared_experts.gate_weight",
            "model.layers.4.mlp.shared_expert_gate.weight",
        ),
        (
            "decoder.layers.4.mlp.experts.linear_fc2.weight1",
            "model.layers.4.mlp.experts.3.down_proj.weight",
        ),
        (
            "decoder.layers.4.mlp.experts.local_experts.1.linear_fc2.weight",
            "model.layers.4.mlp.experts.3.down_proj.weight",
        ),
    ],
)
def test_experts_get_their_global_numbers(name: str, hf: str) -> None:
    assert QWEN.hf_names(name, LATER) == (hf,)
    assert QWEN.hf_names(f"module.module.{name}", LATER) == (hf,)


def test_parts_come_in_canonical_order() -> None:
    layer, first = "decoder.layers.0.", Position()
    assert QWEN.hf_names(f"{layer}self_attention.linear_qkv.bias", first) == tuple(
        f"model.layers.0.self_attn.{part}_proj.bias" for part in "qkv"
    )
    assert QWEN.hf_names(f"{layer}mlp.linear_fc1.weight", first) == (
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
    )
    assert QWEN.hf_names("decoder.layers.4.mlp.experts.weight1", LATER) == tuple(
        f"model.layers.4.mlp.experts.{expert}.{part}_proj.weight"
        for expert in (2, 3)
        for part in ("gate", "up")
    )


def test_mixtral_numbers_its_matrices() -> None:
    mixtral = NameMap("mixtral", GEOMETRY)
    assert mixtral.hf_names("decoder.layers.0.mlp.experts.linear_fc1.weight0", Position()) == (
        "model.layers.0.block_sparse_moe.experts.0.w1.weight",
        "model.layers.0.block_sparse_moe.experts.0.w3.weight",
    )
    assert mixtral.hf_names("decoder.layers.0.mlp.router.weight", Position()) == (
        "model.layers.0.block_sparse_moe.gate.weight",
    )


def test_the_second_copy_of_tied_embeddings_has_no_name() -> None:
    tied = ModelGeometry(
        layers=1, hidden=8, heads=4, query_groups=2, head_dim=4, vocab=10, tied_embeddings=True
    )
    assert NameMap("qwen2", tied).hf_names("output_layer.weight", Position()) == ()


def test_unknown_names_are_refused() -> None:
    with pytest.raises(UsageError, match=r"decoder.layers.0.strange.weight, and neither"):
        QWEN.hf_names("module.decoder.layers.0.strange.weight", Position())
    with pytest.raises(UsageError, match="no Megatron names for models of type 'strange'"):
        NameMap("strange", GEOMETRY)
    with pytest.raises(UsageError, match="Layer 9 does not exist"):
        QWEN.hf_names("decoder.layers.9.mlp.router.weight", LATER)


def test_overrides_come_before_the_table() -> None:
    overrides = {
        "decoder.layers.{layer}.mlp.router.weight": ["model.layers.{layer}.router.weight"],
        "decoder.layers.{layer}.mlp.experts.linear_fc2.weight{expert}": ["{layer}.down.{expert}"],
        "vision.blocks.3.fc.weight": ["visual.3.fc.weight"],
    }
    names = NameMap("qwen3_moe", GEOMETRY, overrides)
    for name, hf in (
        ("decoder.layers.6.mlp.router.weight", "model.layers.6.router.weight"),
        ("decoder.layers.4.mlp.experts.linear_fc2.weight1", "4.down.3"),
        ("vision.blocks.3.fc.weight", "visual.3.fc.weight"),
        ("output_layer.weight", "lm_head.weight"),
    ):
        assert names.hf_names(name, LATER) == (hf,)


COLUMN = [
    *("ColumnParallelLinear", "TEColumnParallelLinear", "TELayerNormColumnParallelLinear"),
    *("TEColumnParallelGroupedLinear", "InferenceColumnParallelLinear"),
    *("InferenceLayerNormColumnParallelLinear", "QuantColumnParallelLinear"),
    *("QuantTEColumnParallelLinear", "QuantTELayerNormColumnParallelLinear"),
    *("QuantTEColumnParallelGroupedLinear", "_RealQuantColumnParallelLinear"),
    *("ColumnParallelLinearGathered", "TELayerNormColumnParallelLinearGathered"),
]
REPLICATED = [
    *("RMSNorm", "LayerNorm", "TENorm", "FusedLayerNorm", "MixedFusedRMSNorm", "L2Norm"),
    *("WrappedTorchNorm", "TopKRouter", "QuantTopKRouter", "TELinear", "QuantTELinear", "Linear"),
    *("SharedExpertMLP", "InferenceTopKRouter"),
]


@pytest.mark.parametrize("cls", COLUMN)
def test_column_parallel_classes(cls: str) -> None:
    row = cls.replace("Column", "Row")
    layer = "module.decoder.layers.0."

    def role(name: str, cls: str, stride: int = 1) -> Role:
        return classify(Parameter(f"{layer}{name}", cls, True, 0, stride))

    assert role("self_attention.linear_qkv.weight", cls) is Role.QKV_COLUMN
    assert role("self_attention.linear_qkv.bias", cls) is Role.QKV_COLUMN
    assert role("self_attention.linear_qkv.layer_norm_weight", cls) is Role.REPLICATED
    assert role("mlp.linear_fc1.weight", cls) is Role.GATED_MLP_COLUMN
    assert role("mlp.shared_experts.linear_fc1.weight", cls) is Role.GATED_MLP_COLUMN
    assert role("mlp.experts.linear_fc1.weight7", cls) is Role.EXPERT_COLUMN
    assert role("mlp.experts.local_experts.1.linear_fc1.weight", cls) is Role.EXPERT_COLUMN
    assert role("self_attention.linear_q_up_proj.weight", cls) is Role.COLUMN
    assert role("self_attention.linear_proj.weight", row) is Role.ROW
    assert role("self_attention.linear_proj.bias", row) is Role.REPLICATED
    assert role("mlp.experts.linear_fc2.weight0", row) is Role.EXPERT_ROW
    assert role("mlp.experts.linear_fc2.bias0", row) is Role.EXPERT_ROW
    assert classify(Parameter("output_layer.weight", cls)) is Role.VOCAB_PARALLEL


@pytest.mark.parametrize("cls", REPLICATED)
def test_replicated_classes(cls: str) -> None:
    # Transformer Engine marks the weight of every linear layer as sharded, even a duplicated one.
    assert classify(Parameter("decoder.layers.0.some.weight", cls, True, 0, 1)) is Role.REPLICATED


def test_a_stride_of_two_marks_a_gate_and_the_config_decides_otherwise() -> None:
    fc1, cls = "decoder.layers.0.mlp.linear_fc1.weight", "ColumnParallelLinear"
    assert classify(Parameter(fc1, cls, True, 0, 2), gated=False) is Role.GATED_MLP_COLUMN
    assert classify(Parameter(fc1, cls, True, 0, 1), gated=False) is Role.COLUMN
    assert classify(Parameter(fc1, cls, True, 0, 1), gated=True) is Role.GATED_MLP_COLUMN


def test_partition_attributes_decide_where_the_class_does_not() -> None:
    assert classify(Parameter("a.b.weight", "Strange", True, 0)) is Role.COLUMN
    assert classify(Parameter("a.b.weight", "Strange", True, 1)) is Role.ROW
    with pytest.raises(UsageError, match=r"a\.b\.weight \(of a Strange\).*override"):
        classify(Parameter("a.b.weight", "Strange", False))
    with pytest.raises(UsageError):
        classify(Parameter("a.b.weight", "Strange"))
    overrides = {"a.*.weight": Role.REPLICATED}
    assert classify(Parameter("module.a.b.weight", "Strange"), overrides=overrides) is (
        Role.REPLICATED
    )


def test_roles_of_the_old_grouped_mlp() -> None:
    name = "decoder.layers.0.mlp.experts.weight"
    assert classify(Parameter(f"{name}1", "GroupedMLP", True, 1)) is Role.EXPERT_COLUMN
    assert classify(Parameter(f"{name}2", "GroupedMLP", True, 0)) is Role.EXPERT_ROW


def test_every_name_of_our_table_has_a_role() -> None:
    for name in QWEN.table:
        assert role_of_name(name.replace("{layer}", "0").replace("{expert}", "0"))


def test_wrappers_are_not_part_of_a_name() -> None:
    assert plain_name("module.module._orig_mod.decoder.x") == "decoder.x"
    assert plain_name("decoder.module.x") == "decoder.module.x"
