"""A stand-in for Megatron-Bridge's registry of names; the real one needs Transformer Engine.

It has the interface of megatron-bridge 0.3.1 as far as Rollway uses it: `AutoBridge.from_hf_config`
takes a transformers config and refuses families that it does not know with a ValueError; the
registry finds the mapping of a name with global numbers (`*` matches digits), or None; a mapping
has `hf_param`, a name or a dict of names, and its class says how it converts. The tables of GLM and
Nemotron are the real ones: `tests/megatron/test_bridge.py` compares them with the package.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

HfParam = str | dict[str, str]


class Mapping:
    """Bridge's MegatronParamMapping."""

    def __init__(self, megatron_param: str, hf_param: HfParam) -> None:
        self.megatron_param, self.hf_param = megatron_param, hf_param

    def resolve(self, captures: tuple[str, ...]) -> Mapping:
        def fill(name: str) -> str:
            for text in captures:
                name = name.replace("*", text, 1)
            return name

        hf = self.hf_param
        resolved = type(self).__new__(type(self))
        resolved.__dict__ |= self.__dict__
        resolved.megatron_param = fill(self.megatron_param)
        resolved.hf_param = (
            fill(hf) if isinstance(hf, str) else {part: fill(name) for part, name in hf.items()}
        )
        return resolved


class AutoMapping(Mapping):
    def __init__(
        self, megatron_param: str, hf_param: str, permute_dims: tuple[int, ...] | None = None
    ) -> None:
        super().__init__(megatron_param, hf_param)
        self.permute_dims = permute_dims


class QKVMapping(Mapping):
    def __init__(self, megatron_param: str, q: str, k: str, v: str) -> None:
        super().__init__(megatron_param, {"q": q, "k": k, "v": v})


class ConcatenatedQKVMapping(Mapping):
    pass


class GatedMLPMapping(Mapping):
    def __init__(self, megatron_param: str, gate: str, up: str) -> None:
        super().__init__(megatron_param, {"gate": gate, "up": up})


class RMSNorm2ZeroCenteredRMSNormMapping(AutoMapping):
    """Qwen3-Next's: it adds one."""


class Registry:
    """Bridge's MegatronMappingRegistry."""

    def __init__(self, *mappings: Mapping) -> None:
        self._mappings = mappings

    def __iter__(self) -> Iterator[Mapping]:
        return iter(self._mappings)

    def megatron_to_hf_lookup(self, megatron_param_name: str) -> Mapping | None:
        for mapping in self._mappings:
            pattern = re.escape(mapping.megatron_param).replace(r"\*", r"(\d+)")
            match = re.fullmatch(pattern, megatron_param_name)
            if match:
                return mapping.resolve(match.groups())
        return None


_LAYER, _HF = "decoder.layers.*.", "model.layers.*."


def _auto(names: dict[str, str]) -> list[Mapping]:
    return [AutoMapping(_LAYER + name, _HF + hf) for name, hf in names.items()]


def _qkv(kind: str) -> QKVMapping:
    parts = {part: f"{_HF}self_attn.{part}_proj.{kind}" for part in "qkv"}
    return QKVMapping(f"{_LAYER}self_attention.linear_qkv.{kind}", **parts)


def _gated(name: str, hf: str) -> GatedMLPMapping:
    up = f"{_HF}{hf}.up_proj.weight"
    return GatedMLPMapping(_LAYER + name, f"{_HF}{hf}.gate_proj.weight", up)


_ENDS = [
    AutoMapping("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
    AutoMapping("decoder.final_layernorm.weight", "model.norm.weight"),
    AutoMapping("output_layer.weight", "lm_head.weight"),
]
_SHARED = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
}
GLM4_MOE = Registry(
    *_ENDS,
    *_auto(_SHARED),
    *_auto({
        "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
        "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
        "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
        "mlp.shared_experts.linear_fc2.weight": "mlp.shared_experts.down_proj.weight",
        "mlp.experts.linear_fc2.weight*": "mlp.experts.*.down_proj.weight",
        "mlp.router.weight": "mlp.gate.weight",
        "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
    }),
    _qkv("weight"),
    _qkv("bias"),
    _gated("mlp.linear_fc1.weight", "mlp"),
    _gated("mlp.shared_experts.linear_fc1.weight", "mlp.shared_experts"),
    _gated("mlp.experts.linear_fc1.weight*", "mlp.experts.*"),
)  # fmt: skip
NEMOTRON = Registry(
    *_ENDS,
    *_auto({**_SHARED, "mlp.linear_fc1.weight": "mlp.up_proj.weight"}),
    _qkv("weight"),
)
"""Its MLP has no gate."""
QWEN3_NEXT = Registry(
    *_ENDS,
    RMSNorm2ZeroCenteredRMSNormMapping(
        f"{_LAYER}self_attention.out_norm.weight", f"{_HF}linear_attn.norm.weight"
    ),
    AutoMapping("vision_projection.weight", "projector.weight", permute_dims=(1, 0)),
    _gated("mlp.linear_fc1.weight", "mlp"),
    AutoMapping(f"{_LAYER}self_attention.linear_qkv.weight", f"{_HF}self_attn.qkv.weight"),
)
"""What Rollway must refuse, gathered from several families."""
_FAMILIES = {
    "Glm4MoeForCausalLM": GLM4_MOE,
    "NemotronForCausalLM": NEMOTRON,
    "Qwen3NextForCausalLM": QWEN3_NEXT,
}


class AutoBridge:
    @classmethod
    def from_hf_config(cls, config: Any) -> SimpleNamespace:
        (architecture,) = config.architectures or ("",)
        if architecture not in _FAMILIES:
            raise ValueError(f"\n✗ Model architecture '{architecture}' is not yet supported\n\n")
        registry = _FAMILIES[architecture]
        return SimpleNamespace(_model_bridge=SimpleNamespace(mapping_registry=lambda: registry))


def make_module() -> ModuleType:
    """Return `megatron.bridge`."""
    module = ModuleType("megatron.bridge")
    module.AutoBridge = AutoBridge  # type: ignore[attr-defined]
    return module
