"""A Megatron trainer of a family that only Megatron-Bridge knows, by a stand-in for Bridge.

What the ranks hold is cut here by formulas; the Hugging Face tensors must come back byte by byte.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rollway.errors import UsageError
from rollway.weights.layout import Role
from rollway.weights.megatron.geometry import Position
from rollway.weights.megatron.names import NameMap
from rollway.weights.megatron.pieces import MegatronModel
from rollway.weights.megatron.tensors import read_rank
from tests.unit.weights.megatron_bridge import make_module
from tests.unit.weights.megatron_models import numbered
from tests.unit.weights.megatron_shards import to_hf

SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "vocab_size": 12,
}
GLM = {
    **SIZES,
    "model_type": "glm4_moe",
    "architectures": ["Glm4MoeForCausalLM"],
    "n_routed_experts": 2,
}
NEMOTRON = {**SIZES, "model_type": "nemotron", "architectures": ["NemotronForCausalLM"]}
QWEN3_NEXT = {**SIZES, "model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"]}
FFN, MOE_FFN = 8, 4
Parameters = dict[str, tuple[str, Tensor]]
"""By name: the class of Megatron's module, and what the rank has."""


@pytest.fixture
def bridge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron", ModuleType("megatron"))
    monkeypatch.setitem(sys.modules, "megatron.bridge", make_module())


@pytest.fixture
def no_bridge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron.bridge", None)  # an import of it fails


def _attention(hf: str) -> dict[str, tuple[int, ...]]:
    rows = {"q": 8, "k": 4, "v": 4}
    return {
        f"{hf}.input_layernorm.weight": (8,),
        f"{hf}.post_attention_layernorm.weight": (8,),
        **{f"{hf}.self_attn.{part}_proj.weight": (count, 8) for part, count in rows.items()},
        f"{hf}.self_attn.o_proj.weight": (8, 8),
    }


def _cut_attention(truth: dict[str, Tensor], layer: int, rank: int) -> Parameters:
    """The first query group is on rank 0, the second on rank 1."""
    hf, megatron = f"model.layers.{layer}", f"decoder.layers.{layer}.self_attention"
    group = [truth[f"{hf}.self_attn.{part}_proj.weight"].chunk(2)[rank] for part in "qkv"]
    column = "TELayerNormColumnParallelLinear"
    norm, out = truth[f"{hf}.input_layernorm.weight"], truth[f"{hf}.self_attn.o_proj.weight"]
    return {
        f"{megatron}.linear_qkv.weight": (column, torch.cat(group)),
        f"{megatron}.linear_qkv.layer_norm_weight": (column, norm),
        f"{megatron}.linear_proj.weight": ("TERowParallelLinear", out.chunk(2, 1)[rank]),
    }


def _cut_gated(truth: dict[str, Tensor], hf: str, rank: int) -> tuple[Tensor, Tensor]:
    halves = [truth[f"{hf}.{part}_proj.weight"].chunk(2)[rank] for part in ("gate", "up")]
    return torch.cat(halves), truth[f"{hf}.down_proj.weight"].chunk(2, 1)[rank]


def _cut_ends(truth: dict[str, Tensor], rank: int) -> Parameters:
    embedding = truth["model.embed_tokens.weight"].chunk(2)[rank]
    return {
        "embedding.word_embeddings.weight": ("VocabParallelEmbedding", embedding),
        "decoder.final_layernorm.weight": ("RMSNorm", truth["model.norm.weight"]),
        "output_layer.weight": ("ColumnParallelLinear", truth["lm_head.weight"].chunk(2)[rank]),
    }


_ENDS = {"model.embed_tokens.weight": (12, 8), "model.norm.weight": (8,), "lm_head.weight": (12, 8)}
_MLP = {"gate_proj": (FFN, 8), "up_proj": (FFN, 8), "down_proj": (8, FFN)}
_EXPERT = {"gate_proj": (MOE_FFN, 8), "up_proj": (MOE_FFN, 8), "down_proj": (8, MOE_FFN)}
GLM_SHAPES = {
    **_ENDS,
    **_attention("model.layers.0"),
    **{f"model.layers.0.mlp.{name}.weight": shape for name, shape in _MLP.items()},
    **_attention("model.layers.1"),
    "model.layers.1.mlp.gate.weight": (2, 8),
    "model.layers.1.mlp.gate.e_score_correction_bias": (2,),
    **{
        f"model.layers.1.mlp.experts.{expert}.{name}.weight": shape
        for expert in range(2)
        for name, shape in _EXPERT.items()
    },
}


def _cut_glm(truth: dict[str, Tensor], rank: int) -> Parameters:
    """A dense layer, and one of experts."""
    dense, moe = "decoder.layers.0.mlp", "decoder.layers.1.mlp"
    norms = [truth[f"model.layers.{n}.post_attention_layernorm.weight"] for n in (0, 1)]
    first, second = _cut_gated(truth, "model.layers.0.mlp", rank)
    column = "TELayerNormColumnParallelLinear"
    parameters = {
        **_cut_ends(truth, rank),
        **_cut_attention(truth, 0, rank),
        **_cut_attention(truth, 1, rank),
        f"{dense}.linear_fc1.weight": (column, first),
        f"{dense}.linear_fc1.layer_norm_weight": (column, norms[0]),
        f"{dense}.linear_fc2.weight": ("TERowParallelLinear", second),
        "decoder.layers.1.pre_mlp_layernorm.weight": ("RMSNorm", norms[1]),
        f"{moe}.router.weight": ("TopKRouter", truth["model.layers.1.mlp.gate.weight"]),
        f"{moe}.router.expert_bias": (
            "TopKRouter",
            truth["model.layers.1.mlp.gate.e_score_correction_bias"],
        ),
    }
    for expert in range(2):
        first, second = _cut_gated(truth, f"model.layers.1.mlp.experts.{expert}", rank)
        fc1, fc2 = f"{moe}.experts.linear_fc1", f"{moe}.experts.linear_fc2"
        parameters[f"{fc1}.weight{expert}"] = "TEColumnParallelGroupedLinear", first
        parameters[f"{fc2}.weight{expert}"] = "TERowParallelGroupedLinear", second
    return parameters


NEMOTRON_SHAPES = {
    **_ENDS,
    **{
        name: shape
        for layer in range(2)
        for name, shape in {
            **_attention(f"model.layers.{layer}"),
            f"model.layers.{layer}.mlp.up_proj.weight": (FFN, 8),
            f"model.layers.{layer}.mlp.down_proj.weight": (8, FFN),
        }.items()
    },
}


def _cut_nemotron(truth: dict[str, Tensor], rank: int) -> Parameters:
    """Its MLP has no gate: each rank has half of the rows."""
    parameters = _cut_ends(truth, rank)
    for layer in range(2):
        hf, mlp = f"model.layers.{layer}", f"decoder.layers.{layer}.mlp"
        column = "TELayerNormColumnParallelLinear"
        norm = truth[f"{hf}.post_attention_layernorm.weight"]
        up, down = truth[f"{hf}.mlp.up_proj.weight"], truth[f"{hf}.mlp.down_proj.weight"]
        parameters |= {
            **_cut_attention(truth, layer, rank),
            f"{mlp}.linear_fc1.weight": (column, up.chunk(2)[rank]),
            f"{mlp}.linear_fc1.layer_norm_weight": (column, norm),
            f"{mlp}.linear_fc2.weight": ("TERowParallelLinear", down.chunk(2, 1)[rank]),
        }
    return parameters


def _build(parameters: Parameters) -> nn.Module:
    """Return a tree of modules, which have only the names of Megatron's classes."""
    root = nn.Module()
    for name, (kind, tensor) in parameters.items():
        module = root
        *path, owner, leaf = name.split(".")
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
            if part.isdecimal():
                module.layer_number = int(part) + 1  # type: ignore[assignment]
        if owner not in module._modules:
            module.add_module(owner, type(kind, (nn.Module,), {})())
        if leaf == "expert_bias":
            module.get_submodule(owner).register_buffer(leaf, tensor)
        else:
            parameter = nn.Parameter(tensor, requires_grad=False)
            module.get_submodule(owner).register_parameter(leaf, parameter)
    return root


def _collect(config: dict[str, Any], parameters: list[Parameters]) -> dict[str, Tensor]:
    """Return the Hugging Face tensors that a worker makes of what two tensor ranks publish."""
    names = NameMap.from_hf_config(config)
    layouts, tensors = {}, {}
    for rank, held in enumerate(parameters):
        position = Position(tp=rank, tp_size=2, etp=rank, etp_size=2)
        layouts[rank], tensors[rank] = read_rank(_build(held), names, position)
    return dict(to_hf(MegatronModel(names.geometry, layouts), tensors))


@pytest.mark.parametrize(
    ("config", "shapes", "cut"),
    [(GLM, GLM_SHAPES, _cut_glm), (NEMOTRON, NEMOTRON_SHAPES, _cut_nemotron)],
    ids=["glm4_moe", "nemotron"],
)
def test_a_trainer_of_a_family_that_bridge_knows_is_read(
    bridge: None,
    config: dict[str, Any],
    shapes: dict[str, tuple[int, ...]],
    cut: Callable[[dict[str, Tensor], int], Parameters],
) -> None:
    truth = numbered(shapes)
    back = _collect(config, [cut(truth, rank) for rank in (0, 1)])
    assert back.keys() == truth.keys()
    assert all(torch.equal(back[name], truth[name]) for name in truth)


def test_bridge_gets_global_numbers(bridge: None) -> None:
    names = NameMap.from_hf_config({**GLM, "n_routed_experts": 8})
    position = Position(ep=1, ep_size=4)
    grouped = names.hf_names("module.decoder.layers.1.mlp.experts.linear_fc1.weight1", position)
    assert grouped == tuple(
        f"model.layers.1.mlp.experts.3.{part}_proj.weight" for part in ("gate", "up")
    )


def test_our_own_table_and_overrides_need_no_bridge(no_bridge: None) -> None:
    own = NameMap.from_hf_config({**SIZES, "model_type": "llama"})
    assert own.hf_names("output_layer.weight", Position()) == ("lm_head.weight",)
    assert own.gated
    other = NameMap.from_hf_config(GLM, {"output_layer.weight": ["my.head"]})
    assert other.hf_names("output_layer.weight", Position()) == ("my.head",)


def test_without_bridge_the_error_says_what_to_install(no_bridge: None) -> None:
    names = NameMap.from_hf_config(GLM)
    with pytest.raises(UsageError) as raised:
        read_rank(_build(_cut_glm(numbered(GLM_SHAPES), 0)), names, Position(tp=0, tp_size=2))
    assert "embedding.word_embeddings.weight" in raised.value.message
    assert "'glm4_moe', cannot be imported" in raised.value.message
    assert raised.value.hint and "Install megatron-bridge" in raised.value.hint
    known = NameMap.from_hf_config({**SIZES, "model_type": "qwen3_moe"})
    with pytest.raises(
        UsageError, match=r"decoder\.layers\.0\.strange\.weight.*cannot be imported"
    ):
        known.hf_names("decoder.layers.0.strange.weight", Position())


def test_what_bridge_does_not_know_is_named(bridge: None) -> None:
    unknown = NameMap.from_hf_config({**SIZES, "model_type": "phi3", "architectures": ["Phi3"]})
    with pytest.raises(UsageError, match=r"output_layer\.weight.*'phi3' \(. Model architecture"):
        unknown.hf_names("output_layer.weight", Position())
    names = NameMap.from_hf_config(GLM)
    with pytest.raises(
        UsageError, match=r"decoder\.layers\.0\.strange\.weight, and neither"
    ) as raised:
        names.hf_names("decoder.layers.0.strange.weight", Position())
    assert raised.value.hint and "override" in raised.value.hint
    with pytest.raises(UsageError, match="Layer 2 does not exist"):
        names.hf_names("decoder.layers.2.mlp.router.weight", Position())


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("decoder.layers.0.self_attention.out_norm.weight", "RMSNorm2ZeroCentered"),
        ("vision_projection.weight", "AutoMapping"),  # its axes are permuted
        ("decoder.layers.0.self_attention.linear_qkv.weight", "AutoMapping"),  # it is not divided
    ],
)
def test_names_whose_values_bridge_computes_are_refused(bridge: None, name: str, kind: str) -> None:
    names = NameMap.from_hf_config(QWEN3_NEXT)
    with pytest.raises(UsageError, match=rf"{name} by {kind}.*more than move elements"):
        names.hf_names(name, Position())


def test_experts_without_a_gate_are_refused(bridge: None) -> None:
    held = {
        "decoder.layers.0.mlp.experts.linear_fc2.weight0": ("TERowParallelLinear", torch.ones(2))
    }
    overrides = {"decoder.layers.{layer}.mlp.experts.linear_fc2.weight{expert}": ["x.{expert}"]}
    names = NameMap.from_hf_config({**NEMOTRON, "num_experts": 1}, overrides)
    with pytest.raises(UsageError, match="experts with a gate only"):
        read_rank(_build(held), names, Position())


def test_a_plain_matrix_of_an_mlp_without_a_gate_is_a_column(bridge: None) -> None:
    held = _cut_nemotron(numbered(NEMOTRON_SHAPES), 0)
    layout, _ = read_rank(_build(held), NameMap.from_hf_config(NEMOTRON), Position(tp_size=2))
    assert layout.shards["decoder.layers.0.mlp.linear_fc1.weight"].role is Role.COLUMN
