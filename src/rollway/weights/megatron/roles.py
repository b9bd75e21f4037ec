"""Find how a parameter is sharded over the ranks, from the class of its module.

Transformer Engine, the inference layers and the quantisers add prefixes and suffixes to the names
of Megatron's own classes, but keep the part that matters: `TELayerNormColumnParallelLinear`,
`QuantRowParallelLinear`. `partition_stride == 2` marks a gated matrix, but Transformer Engine sets
1 for gated ones as well, so the model's config decides. A parameter that cannot be classified is an
error: if a sharded tensor were treated as replicated, one rank would publish its part as the whole.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass

from rollway.errors import UsageError
from rollway.weights.layout import Role
from rollway.weights.megatron.names import plain_name

_COLUMN = re.compile(r"ColumnParallel\w*Linear")
_ROW = re.compile(r"RowParallel\w*Linear")
_VOCAB = re.compile(r"VocabParallelEmbedding")
_REPLICATED = re.compile(r"Norm(Impl)?$|Router$|^(Quant)?(TE|Inference)?Linear$|^SharedExpertMLP$")
_LEGACY_EXPERTS = re.compile(r"(^|[a-z])GroupedMLP$")
_EXPERTS = ".experts."

Overrides = Mapping[str, Role]  # Roles by glob pattern of the parameter's name


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter's name and module class, and the partition attributes that Megatron gives it."""

    name: str
    module_class: str = ""
    tensor_parallel: bool | None = None
    partition_dim: int | None = None
    partition_stride: int | None = None


def classify(
    parameter: Parameter, *, gated: bool = True, overrides: Overrides | None = None
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


def role_of_name(name: str, *, gated: bool = True) -> Role:
    """Return the role by the name alone, for a model that does not run."""
    return classify(Parameter(name, _guess_class(plain_name(name))), gated=gated)


def _find_kind(name: str, parameter: Parameter) -> Role | None:
    """Return column, row, vocabulary or replicated; `_refine` adds the fused kinds."""
    leaf = name.rsplit(".", 1)[-1]
    if leaf.startswith("layer_norm_"):
        return Role.REPLICATED  # fused into the linear layer after it
    cls = parameter.module_class.lstrip("_")
    if _VOCAB.search(cls):
        return Role.VOCAB_PARALLEL
    if _COLUMN.search(cls):
        return Role.COLUMN
    if _ROW.search(cls):
        return Role.ROW
    if _LEGACY_EXPERTS.search(cls) and leaf in ("weight1", "weight2"):
        return Role.COLUMN if leaf == "weight1" else Role.ROW
    if _REPLICATED.search(cls):
        # Before the attributes: those of a duplicated TELinear are wrong.
        return Role.REPLICATED
    if parameter.tensor_parallel and parameter.partition_dim in (0, 1):
        return Role.ROW if parameter.partition_dim else Role.COLUMN
    return None


def _refine(name: str, kind: Role, *, gated: bool) -> Role:
    module, _, leaf = name.rpartition(".")
    if _EXPERTS in name:
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


def _guess_class(name: str) -> str:
    """Return the class that Megatron uses for a module of this name."""
    if ".experts.weight" in name:
        return "GroupedMLP"
    if re.search(r"(linear_qkv|linear_fc1|linear_q_proj|_up_proj|output_layer)\.", name):
        return "ColumnParallelLinear"
    if re.search(r"(linear_proj|linear_fc2)\.", name):
        return "RowParallelLinear"
    if "word_embeddings" in name:
        return "VocabParallelEmbedding"
    if re.search(r"(norm|router)\.\w+$|shared_experts\.gate_weight$|_down_proj\.", name):
        return "TopKRouter"
    return ""
