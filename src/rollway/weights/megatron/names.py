"""Map Megatron's tensor names to the Hugging Face names of the tensors in them.

The tables have `{layer}` and `{expert}` for numbers. Megatron counts both from 0 on every rank,
Hugging Face over the whole model, so a name has a meaning only together with a `Position`.
Overrides are written the same way; `*` in them matches any one part of a name:

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
    """Names from elsewhere, for example `megatron.bridge`; they come before the tables here."""

    def hf_names(self, name: str) -> tuple[str, ...] | None:
        """Return names for a name with global layer and expert numbers, or None if unknown."""
        ...


def _make_table(mlp: str, gate: str, up: str, down: str, shared: str) -> Table:
    """Return the names of a family, by its MoE block and the names of its experts' matrices."""
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


def _add_latent_attention(table: Table) -> Table:
    """Add DeepSeek's attention: queries, keys and values through low-rank matrices."""
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


_PLAIN = _make_table("mlp", "gate_proj", "up_proj", "down_proj", "shared_expert")
_MIXTRAL = _make_table("block_sparse_moe", "w1", "w3", "w2", "shared_expert")
_DEEPSEEK = _add_latent_attention(
    _make_table("mlp", "gate_proj", "up_proj", "down_proj", "shared_experts")
)

FAMILIES: dict[str, Table] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), _PLAIN),
    "mixtral": _MIXTRAL,
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2"), _DEEPSEEK),
}
"""Keys are the `model_type` of the model's config.json."""


def plain_name(name: str) -> str:
    """Return the name without the prefixes of wrappers (DDP, Float16Module, torch.compile)."""
    while name.startswith(_WRAPPERS):
        name = name.split(".", 1)[1]
    return name


@dataclass(frozen=True)
class NameMap:
    """The Hugging Face names of one model: from overrides, then a registry, then our table."""

    model_type: str
    geometry: ModelGeometry
    overrides: Overrides = field(default_factory=dict)
    registry: Registry | None = None

    def __post_init__(self) -> None:
        if self.model_type not in FAMILIES and self.registry is None:
            raise UsageError(
                f"Rollway has no Megatron names for models of type {self.model_type!r}.",
                f"Use a similar one of {', '.join(sorted(FAMILIES))}, with overrides.",
            )

    @property
    def table(self) -> Table:
        return FAMILIES.get(self.model_type, {})

    def hf_names(self, name: str, position: Position) -> tuple[str, ...]:
        """Return the tensors in Megatron's `name`, in canonical order: q, k, v; gate, up; by
        expert. The second copy of tied embeddings has none."""
        plain = plain_name(name)
        names = self._look_up_override(plain, position)
        if names is None:
            names = self._look_up(plain, position)
        if names is None:
            raise UsageError(
                f"Rollway does not know the Hugging Face name of Megatron's {plain}.",
                'Add an override: {"decoder.layers.{layer}.some.weight": '
                '["model.layers.{layer}.other.weight"]}.',
            )
        return names

    def _look_up_override(self, name: str, position: Position) -> tuple[str, ...] | None:
        for pattern, targets in self.overrides.items():
            match = _compile(pattern).fullmatch(name)
            if match:
                numbers = match.groupdict()
                named = set(match.re.groupindex.values())
                stars = [text for n, text in enumerate(match.groups(), 1) if n not in named]
                filled = [_fill_stars(target, stars) for target in targets]
                return self._fill(filled, numbers.get("layer"), numbers.get("expert"), position)
        return None

    def _look_up(self, name: str, position: Position) -> tuple[str, ...] | None:
        if name == "output_layer.weight" and self.geometry.tied_embeddings:
            return ()
        template, layer, expert = _split_numbers(name)
        if self.registry is not None:
            full = self._fill([template], layer, expert, position)
            names = self.registry.hf_names(full[0]) if full else None
            if names is not None:
                return names
        targets = self.table.get(template)
        return None if targets is None else self._fill(targets, layer, expert, position)

    def _fill(
        self, targets: Sequence[str], layer: str | None, expert: str | None, position: Position
    ) -> tuple[str, ...]:
        """Fill in global numbers; a tensor of many experts names all experts of its rank."""
        number = int(layer) + position.layer_offset(self.geometry) if layer is not None else None
        if number is not None and number >= self.geometry.layers:
            raise UsageError(
                f"Layer {number} does not exist in a model of {self.geometry.layers} layers.",
                "Check the number of layers, and the position's pipeline stage.",
            )
        if not any("{expert}" in target for target in targets):
            experts: Sequence[int] = (0,)
        else:
            first = position.expert_offset(self.geometry)
            count = position.local_experts(self.geometry)
            if expert is not None and int(expert) >= count:
                raise UsageError(
                    f"Expert {expert} does not exist on a rank of {count} experts.",
                    "Check the number of experts, and the position's expert parallel size.",
                )
            experts = range(first, first + count) if expert is None else [first + int(expert)]
        return tuple(
            target.replace("{layer}", str(number)).replace("{expert}", str(e))
            for e in experts
            for target in targets
        )


def _split_numbers(name: str) -> tuple[str, str | None, str | None]:
    """Return a name with `{layer}` and `{expert}` for its numbers, and these numbers."""
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
def _compile(pattern: str) -> re.Pattern[str]:
    text = re.escape(pattern).replace(r"\{layer\}", r"(?P<layer>\d+)")
    text = text.replace(r"\{expert\}", r"(?P<expert>\d+)").replace(r"\*", r"(.+?)")
    return re.compile(text)


def _fill_stars(target: str, texts: Sequence[str]) -> str:
    for text in texts:
        target = target.replace("*", text, 1)
    return target
