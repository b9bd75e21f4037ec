"""Megatron's names of a model's tensors, and the Hugging Face names of what lies in them.

The tables write `{layer}` and `{expert}` for the numbers. Megatron counts both from 0 on every
rank, Hugging Face over the whole model, so a name means something only together with a `Position`.
Overrides are written the same way, and `*` in them stands for any one part:

    {"decoder.layers.{layer}.self_attention.sinks": ["model.layers.{layer}.self_attn.sinks"]}
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

from rollway.errors import UsageError
from rollway.weights.megatron.geometry import ModelGeometry, Position

Table = dict[str, tuple[str, ...]]
Overrides = Mapping[str, Sequence[str]]

_LAYER, _HF_LAYER = "decoder.layers.{layer}.", "model.layers.{layer}."
_LAYER_NUMBER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT_NUMBER = re.compile(
    r"(?<=\.experts\.)(local_experts\.|linear_fc[12]\.(?:weight|bias))(\d+)(?=\.|$)"
)
_WRAPPERS = ("module.", "_orig_mod.")


class Registry(Protocol):
    """Names from elsewhere, such as `megatron.bridge`; asked before the tables here."""

    def hf_names(self, name: str) -> tuple[str, ...] | None:
        """By the name with global layer and expert numbers; None when it does not know it."""
        ...


def _table(mlp: str, gate: str, up: str, down: str, shared: str) -> Table:
    """A family: where its MoE block is, and what its experts' matrices are called."""
    layer: dict[str, tuple[str, ...]] = {}
    for kind in ("weight", "bias"):
        layer |= {
            f"input_layernorm.{kind}": (f"input_layernorm.{kind}",),
            f"self_attention.linear_qkv.layer_norm_{kind}": (f"input_layernorm.{kind}",),
            f"self_attention.linear_qkv.{kind}": tuple(
                f"self_attn.{part}_proj.{kind}" for part in "qkv"
            ),
            f"self_attention.linear_proj.{kind}": (f"self_attn.o_proj.{kind}",),
            f"self_attention.q_layernorm.{kind}": (f"self_attn.q_norm.{kind}",),
            f"self_attention.k_layernorm.{kind}": (f"self_attn.k_norm.{kind}",),
            f"pre_mlp_layernorm.{kind}": (f"post_attention_layernorm.{kind}",),
            f"mlp.linear_fc1.layer_norm_{kind}": (f"post_attention_layernorm.{kind}",),
            f"mlp.linear_fc1.{kind}": (f"mlp.gate_proj.{kind}", f"mlp.up_proj.{kind}"),
            f"mlp.linear_fc2.{kind}": (f"mlp.down_proj.{kind}",),
            f"mlp.router.{kind}": (f"{mlp}.gate.{kind}",),
            f"mlp.shared_experts.linear_fc1.{kind}": (
                f"mlp.{shared}.gate_proj.{kind}",
                f"mlp.{shared}.up_proj.{kind}",
            ),
            f"mlp.shared_experts.linear_fc2.{kind}": (f"mlp.{shared}.down_proj.{kind}",),
        }
        first = tuple(f"{mlp}.experts.{{expert}}.{part}.{kind}" for part in (gate, up))
        second = (f"{mlp}.experts.{{expert}}.{down}.{kind}",)
        layer |= {
            f"mlp.experts.linear_fc1.{kind}{{expert}}": first,
            f"mlp.experts.linear_fc2.{kind}{{expert}}": second,
            f"mlp.experts.local_experts.{{expert}}.linear_fc1.{kind}": first,
            f"mlp.experts.local_experts.{{expert}}.linear_fc2.{kind}": second,
        }
        if kind == "weight":
            layer |= {"mlp.experts.weight1": first, "mlp.experts.weight2": second}
    layer["mlp.router.expert_bias"] = (f"{mlp}.gate.e_score_correction_bias",)
    layer["mlp.shared_experts.gate_weight"] = ("mlp.shared_expert_gate.weight",)
    return {
        "embedding.word_embeddings.weight": ("model.embed_tokens.weight",),
        **{_LAYER + name: tuple(_HF_LAYER + hf for hf in to) for name, to in layer.items()},
        "decoder.final_layernorm.weight": ("model.norm.weight",),
        "decoder.final_layernorm.bias": ("model.norm.bias",),
        "output_layer.weight": ("lm_head.weight",),
        "output_layer.bias": ("lm_head.bias",),
    }


def _latent_attention(table: Table) -> Table:
    """DeepSeek's attention: queries, keys and values through small matrices."""
    parts = {
        "linear_q_proj.weight": "q_proj.weight",
        "linear_q_down_proj.weight": "q_a_proj.weight",
        "linear_q_up_proj.weight": "q_b_proj.weight",
        "linear_q_up_proj.layer_norm_weight": "q_a_layernorm.weight",
        "q_layernorm.weight": "q_a_layernorm.weight",
        "linear_kv_down_proj.weight": "kv_a_proj_with_mqa.weight",
        "linear_kv_up_proj.weight": "kv_b_proj.weight",
        "linear_kv_up_proj.layer_norm_weight": "kv_a_layernorm.weight",
        "kv_layernorm.weight": "kv_a_layernorm.weight",
    }
    attention = {
        f"{_LAYER}self_attention.{name}": (f"{_HF_LAYER}self_attn.{hf}",)
        for name, hf in parts.items()
    }
    return {**table, **attention}


_PLAIN = _table("mlp", "gate_proj", "up_proj", "down_proj", "shared_expert")
_MIXTRAL = _table("block_sparse_moe", "w1", "w3", "w2", "shared_expert")
_DEEPSEEK = _latent_attention(_table("mlp", "gate_proj", "up_proj", "down_proj", "shared_experts"))

FAMILIES: dict[str, Table] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), _PLAIN),
    "mixtral": _MIXTRAL,
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2"), _DEEPSEEK),
}
"""By `model_type` of the model's config.json."""


def plain_name(name: str) -> str:
    """Without what wrappers (DDP, Float16Module, torch.compile) put in front."""
    while name.startswith(_WRAPPERS):
        name = name.split(".", 1)[1]
    return name


@dataclass(frozen=True)
class NameMap:
    """Hugging Face names for one model; overrides go first, then a registry, then our table."""

    model_type: str
    geometry: ModelGeometry
    overrides: Overrides = field(default_factory=dict)
    registry: Registry | None = None

    def __post_init__(self) -> None:
        if self.model_type not in FAMILIES and self.registry is None:
            raise UsageError(
                f"Rollway has no Megatron names for models of type {self.model_type!r}.",
                f"It knows {', '.join(sorted(FAMILIES))}; name one of them, with overrides.",
            )

    @property
    def table(self) -> Table:
        return FAMILIES.get(self.model_type, {})

    def hf_names(self, name: str, position: Position) -> tuple[str, ...]:
        """The tensors that lie in Megatron's `name`, in canonical order (q, k, v; gate, up; by
        expert). None at all for the second copy of tied embeddings."""
        plain = plain_name(name)
        found = self._overridden(plain, position)
        if found is None:
            found = self._known(plain, position)
        if found is None:
            raise UsageError(
                f"Rollway does not know what Megatron's {plain} is called by Hugging Face.",
                'Add an override: {"decoder.layers.{layer}.some.weight": '
                '["model.layers.{layer}.other.weight"]}.',
            )
        return found

    def _overridden(self, name: str, position: Position) -> tuple[str, ...] | None:
        for pattern, targets in self.overrides.items():
            match = _compiled(pattern).fullmatch(name)
            if match:
                layer, expert = match.groupdict().get("layer"), match.groupdict().get("expert")
                parts = [text for key, text in _parts(match) if key is None]
                return self._filled([_starred(t, parts) for t in targets], layer, expert, position)
        return None

    def _known(self, name: str, position: Position) -> tuple[str, ...] | None:
        if name == "output_layer.weight" and self.geometry.tied_embeddings:
            return ()
        template, layer, expert = template_of(name)
        targets = self.table.get(template)
        if self.registry is not None:
            found = self._from_registry(template, layer, expert, position)
            if found is not None:
                return found
        return None if targets is None else self._filled(targets, layer, expert, position)

    def _from_registry(
        self,
        template: str,
        layer: str | None,
        expert: str | None,
        position: Position,
    ) -> tuple[str, ...] | None:
        assert self.registry is not None
        full = self._filled([template], layer, expert, position)
        return self.registry.hf_names(full[0]) if full else None

    def _filled(
        self, targets: Sequence[str], layer: str | None, expert: str | None, position: Position
    ) -> tuple[str, ...]:
        """With global numbers; a tensor of many experts names those that its rank holds."""
        number = int(layer) + position.layer_offset(self.geometry) if layer is not None else None
        if number is not None and number >= self.geometry.layers:
            raise UsageError(
                f"Layer {number} does not exist in a model of {self.geometry.layers} layers."
            )
        if not any("{expert}" in target for target in targets):
            experts: Sequence[int] = (0,)
        else:
            first = position.expert_offset(self.geometry)
            count = position.local_experts(self.geometry)
            if expert is not None and int(expert) >= count:
                raise UsageError(f"Expert {expert} does not exist on a rank of {count} experts.")
            experts = range(first, first + count) if expert is None else [first + int(expert)]
        return tuple(
            target.replace("{layer}", str(number)).replace("{expert}", str(e))
            for e in experts
            for target in targets
        )


def template_of(name: str) -> tuple[str, str | None, str | None]:
    """A name with `{layer}` and `{expert}` for its numbers, and these numbers."""
    layer = expert = None
    match = _LAYER_NUMBER.match(name)
    if match:
        layer = match[1]
        name = _LAYER + name[match.end() :]
        match = _EXPERT_NUMBER.search(name)
        if match:
            expert = match[2]
            name = f"{name[: match.start(2)]}{{expert}}{name[match.end(2) :]}"
    return name, layer, expert


@lru_cache
def _compiled(pattern: str) -> re.Pattern[str]:
    text = re.escape(pattern).replace(r"\{layer\}", r"(?P<layer>\d+)")
    text = text.replace(r"\{expert\}", r"(?P<expert>\d+)").replace(r"\*", r"(.+?)")
    return re.compile(text)


def _parts(match: re.Match[str]) -> list[tuple[str | None, str]]:
    """What each group of a match found, with the group's name where it has one."""
    named = {index: name for name, index in match.re.groupindex.items()}
    return [(named.get(index), text) for index, text in enumerate(match.groups(), 1)]


def _starred(target: str, parts: Sequence[str]) -> str:
    for part in parts:
        target = target.replace("*", part, 1)
    return target
