"""Read Megatron's tensor names: the Hugging Face tensors in each, and how it is sharded.

The tables have `{layer}` and `{expert}` for numbers. A layer has the same number in both here;
Megatron counts experts from 0 on every rank, so a name has a meaning only together with a
`Position`. Overrides are further entries:

    {"decoder.layers.{layer}.self_attention.sinks": ["model.layers.{layer}.self_attn.sinks"]}

A parameter's role follows from the class of its module. Transformer Engine, the inference layers
and the quantisers add prefixes and suffixes to the names of Megatron's own classes, but keep the
part that matters: `TELayerNormColumnParallelLinear`, `QuantRowParallelLinear`. `partition_stride ==
2` marks a gated matrix, but Transformer Engine sets 1 for gated ones as well, so the family
decides. A parameter that cannot be classified is an error: if a sharded tensor were treated as
replicated, one rank would publish its part as the whole.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from rollway.errors import UsageError
from rollway.weights.layout import Role
from rollway.weights.megatron.bridge import Bridge
from rollway.weights.megatron.geometry import ModelGeometry, Position

Table = dict[str, tuple[str, ...]]
NameOverrides = Mapping[str, Sequence[str]]
RoleOverrides = Mapping[str, Role]  # Roles by glob pattern of the parameter's name

_LAYER, _HF_LAYER = "decoder.layers.{layer}.", "model.layers.{layer}."
_LAYER_NUMBER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT_NUMBER = re.compile(
    r"(?<=\.experts\.)(local_experts\.|linear_fc[12]\.(?:weight|bias))(\d+)(?=\.|$)"
)
_WRAPPERS = ("module.", "_orig_mod.")
_KINDS = (
    (re.compile(r"VocabParallelEmbedding"), Role.VOCAB_PARALLEL),
    (re.compile(r"ColumnParallel\w*Linear"), Role.COLUMN),
    (re.compile(r"RowParallel\w*Linear"), Role.ROW),
    (
        re.compile(r"Norm(Impl)?$|Router$|^(Quant)?(TE|Inference)?Linear$|^SharedExpertMLP$"),
        Role.REPLICATED,
    ),
)
"""Roles by the class of the module; `_refine` adds the fused ones."""
_LEGACY_EXPERTS = re.compile(r"(^|[a-z])GroupedMLP$")
_CLASSES = (
    (r"\.experts\.weight", "GroupedMLP"),
    (r"(linear_qkv|linear_fc1|linear_q_proj|_up_proj|output_layer)\.", "ColumnParallelLinear"),
    (r"(linear_proj|linear_fc2)\.", "RowParallelLinear"),
    (r"word_embeddings", "VocabParallelEmbedding"),
    (r"(norm|router)\.\w+$|shared_experts\.gate_weight$|_down_proj\.", "TopKRouter"),
)
"""The classes that Megatron uses, by the name of the parameter."""


def _make_table(mlp: str, gate: str, up: str, down: str, shared: str) -> Table:
    """Return the names of a family, by its MoE block and the names of its experts' matrices."""
    expert = f"{mlp}.experts.{{expert}}"
    gate_up, last = (f"{expert}.{gate}.", f"{expert}.{up}."), (f"{expert}.{down}.",)
    layer: Table = {
        "input_layernorm.": ("input_layernorm.",),
        "self_attention.linear_qkv.layer_norm_": ("input_layernorm.",),
        "self_attention.linear_qkv.": tuple(f"self_attn.{part}_proj." for part in "qkv"),
        "self_attention.linear_proj.": ("self_attn.o_proj.",),
        "self_attention.q_layernorm.": ("self_attn.q_norm.",),
        "self_attention.k_layernorm.": ("self_attn.k_norm.",),
        "pre_mlp_layernorm.": ("post_attention_layernorm.",),
        "mlp.linear_fc1.layer_norm_": ("post_attention_layernorm.",),
        "mlp.linear_fc1.": ("mlp.gate_proj.", "mlp.up_proj."),
        "mlp.linear_fc2.": ("mlp.down_proj.",),
        "mlp.router.": (f"{mlp}.gate.",),
        "mlp.shared_experts.linear_fc1.": (f"mlp.{shared}.gate_proj.", f"mlp.{shared}.up_proj."),
        "mlp.shared_experts.linear_fc2.": (f"mlp.{shared}.down_proj.",),
        "mlp.experts.local_experts.{expert}.linear_fc1.": gate_up,
        "mlp.experts.local_experts.{expert}.linear_fc2.": last,
    }
    grouped = {"mlp.experts.linear_fc1.": gate_up, "mlp.experts.linear_fc2.": last}
    table: Table = {"embedding.word_embeddings.weight": ("model.embed_tokens.weight",)}
    for kind in ("weight", "bias"):
        names = {f"{name}{kind}": hf for name, hf in layer.items()}
        names |= {f"{name}{kind}{{expert}}": hf for name, hf in grouped.items()}
        if kind == "weight":
            names |= {"mlp.experts.weight1": gate_up, "mlp.experts.weight2": last}
        for name, hf in names.items():
            table[_LAYER + name] = tuple(f"{_HF_LAYER}{part}{kind}" for part in hf)
        table[f"decoder.final_layernorm.{kind}"] = (f"model.norm.{kind}",)
        table[f"output_layer.{kind}"] = (f"lm_head.{kind}",)
    table[f"{_LAYER}mlp.router.expert_bias"] = (f"{_HF_LAYER}{mlp}.gate.e_score_correction_bias",)
    table[f"{_LAYER}mlp.shared_experts.gate_weight"] = (
        f"{_HF_LAYER}mlp.shared_expert_gate.weight",
    )
    return table


_PLAIN = _make_table("mlp", "gate_proj", "up_proj", "down_proj", "shared_expert")
_MIXTRAL = _make_table("block_sparse_moe", "w1", "w3", "w2", "shared_expert")
_LATENT_ATTENTION = {
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
"""DeepSeek's attention: queries, keys and values through low-rank matrices."""
_DEEPSEEK = _make_table("mlp", "gate_proj", "up_proj", "down_proj", "shared_experts") | {
    f"{_LAYER}self_attention.{name}": (f"{_HF_LAYER}self_attn.{hf}",)
    for name, hf in _LATENT_ATTENTION.items()
}

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


def name_experts(name: str, pattern: str) -> str:
    """Return a parameter's name with Megatron's own name of the module that has the experts, if
    the model calls it otherwise: the part of the path in which `pattern` occurs."""
    if not pattern or ".experts." in name:
        return name
    part = rf"(?<=\.)[^.]*{re.escape(pattern)}[^.]*(?=\.)"
    return re.sub(part, "experts", name, count=1)


@dataclass(frozen=True)
class NameMap:
    """The Hugging Face names of one model: from overrides, then our table, then Megatron-Bridge."""

    model_type: str
    geometry: ModelGeometry
    overrides: NameOverrides = field(default_factory=dict)
    bridge: Bridge | None = None

    def __post_init__(self) -> None:
        if self.model_type not in FAMILIES and self.bridge is None:
            raise UsageError(
                f"Rollway has no Megatron names for models of type {self.model_type!r}.",
                f"Use NameMap.from_hf_config(config), which asks Megatron-Bridge, or a similar one "
                f"of {', '.join(sorted(FAMILIES))}, with overrides.",
            )

    @classmethod
    def from_hf_config(
        cls, config: Mapping[str, Any], overrides: NameOverrides | None = None
    ) -> NameMap:
        """Return the names of the model that a `config.json` describes.

        Names that Rollway's own table lacks are those of Megatron-Bridge, where it is installed."""
        geometry = ModelGeometry.from_hf_config(config)
        return cls(str(config.get("model_type")), geometry, overrides or {}, Bridge(config))

    @cached_property
    def table(self) -> Mapping[str, Sequence[str]]:
        return {**FAMILIES.get(self.model_type, {}), **self.overrides}

    @property
    def gated(self) -> bool:
        """Whether the model's MLPs have a gate, as all families of our table have."""
        return self.bridge is None or self.model_type in FAMILIES or self.bridge.gated

    def hf_names(self, name: str, position: Position) -> tuple[str, ...]:
        """Return the tensors in Megatron's `name`, in canonical order: q, k, v; gate, up; by
        expert. The second copy of tied embeddings has none."""
        plain = plain_name(name)
        names = self._look_up(plain, position)
        if names is None:
            raise UsageError(
                f"Rollway does not know the Hugging Face name of Megatron's {plain}, and neither "
                "does Megatron-Bridge.",
                'Add an override: {"decoder.layers.{layer}.some.weight": '
                '["model.layers.{layer}.other.weight"]}.',
            )
        return names

    def _look_up(self, name: str, position: Position) -> tuple[str, ...] | None:
        if name == "output_layer.weight" and self.geometry.tied_embeddings:
            return ()
        template, layer, expert = _split_numbers(name)
        if template in self.table:
            return self._fill(self.table[template], layer, expert, position)
        if self.bridge is None:
            return None
        (full_name,) = self._fill([template], layer, expert, position)
        return self.bridge.hf_names(full_name)

    def _fill(
        self, targets: Sequence[str], layer: str | None, expert: str | None, position: Position
    ) -> tuple[str, ...]:
        """Fill in global numbers; a tensor of many experts names all experts of its rank."""
        if layer is not None and int(layer) >= self.geometry.layers:
            raise UsageError(
                f"Layer {layer} does not exist in a model of {self.geometry.layers} layers.",
                "Check the number of layers in the model's config.",
            )
        if not any("{expert}" in target for target in targets):
            experts: Sequence[int] = (0,)
        else:
            count = position.local_experts(self.geometry)
            first = position.ep * count
            if expert is not None and int(expert) >= count:
                raise UsageError(
                    f"Expert {expert} does not exist on a rank of {count} experts.",
                    "Check the number of experts, and the position's expert parallel size.",
                )
            experts = range(first, first + count) if expert is None else [first + int(expert)]
        return tuple(
            target.replace("{layer}", str(layer)).replace("{expert}", str(e))
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


# --- roles -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter's name and module class, and the partition attributes that Megatron gives it."""

    name: str
    module_class: str = ""
    tensor_parallel: bool | None = None
    partition_dim: int | None = None
    partition_stride: int | None = None


def classify(
    parameter: Parameter, *, gated: bool = True, overrides: RoleOverrides | None = None
) -> Role:
    """Return the role of a parameter; `gated` says whether the model's MLPs are gated."""
    name = plain_name(parameter.name)
    for pattern, role in (overrides or {}).items():
        if fnmatch.fnmatchcase(name, pattern):
            return role
    kind = _find_kind(name, parameter)
    if kind is None:
        raise UsageError(
            f"It is unknown how {name} (of a {parameter.module_class or 'nameless module'}) is "
            "sharded over the ranks.",
            f"Add an override: roles={{{name!r}: Role.REPLICATED}}, or the role it has.",
        )
    return _refine(name, kind, gated=gated or parameter.partition_stride == 2)


@lru_cache
def role_of_name(name: str) -> Role:
    """Return the role by the name alone, for a model that does not run."""
    cls = next((cls for pattern, cls in _CLASSES if re.search(pattern, name)), "")
    return classify(Parameter(name, cls))


def _find_kind(name: str, parameter: Parameter) -> Role | None:
    leaf = name.rsplit(".", 1)[-1]
    if leaf.startswith("layer_norm_"):
        return Role.REPLICATED  # fused into the linear layer after it
    cls = parameter.module_class.lstrip("_")
    if _LEGACY_EXPERTS.search(cls) and leaf in ("weight1", "weight2"):
        return Role.COLUMN if leaf == "weight1" else Role.ROW
    # Before the attributes: those of a duplicated TELinear are wrong.
    for pattern, role in _KINDS:
        if pattern.search(cls):
            return role
    if parameter.tensor_parallel and parameter.partition_dim in (0, 1):
        return Role.ROW if parameter.partition_dim else Role.COLUMN
    return None


def _refine(name: str, kind: Role, *, gated: bool) -> Role:
    module, _, leaf = name.rpartition(".")
    if ".experts." in name:
        if not gated:
            raise UsageError(
                f"Rollway reads experts with a gate only, and {name} has none.",
                "Publish this model as a checkpoint directory.",
            )
        # Also for an expert's bias, which is on all its tensor ranks: other ranks have other
        # experts, so it is not replicated over all of them.
        return Role.EXPERT_COLUMN if kind is Role.COLUMN else Role.EXPERT_ROW
    if kind is Role.ROW and leaf == "bias":
        return Role.REPLICATED
    if kind is not Role.COLUMN:
        return kind
    if module.endswith("linear_qkv"):
        return Role.QKV_COLUMN
    if module.endswith("linear_fc1"):
        return Role.GATED_MLP_COLUMN if gated else Role.COLUMN
    return Role.VOCAB_PARALLEL if module.endswith("output_layer") else Role.COLUMN
