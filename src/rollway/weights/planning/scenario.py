"""Plan from a short description: `megatron:tp=2,ep=8` to `vllm:tp=2`, for a model on disk.

Neither has to run. A `config.json` is enough: the tensors of the Llama and Qwen families (dense and
mixtures of experts) follow from it, also for models that would not fit on this machine. What the
ranks of a Megatron trainer hold of them follows from its parallel sizes (`describe`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from rollway.errors import UsageError
from rollway.weights.checkpoint import TensorHeader, read_config, read_headers
from rollway.weights.layout import Box, Role, Shape, Shard
from rollway.weights.megatron.geometry import ModelGeometry, Position, Topology
from rollway.weights.megatron.names import NameMap, role_of_name
from rollway.weights.megatron.pieces import MegatronModel, RankLayout, is_legacy, sharding
from rollway.weights.planning.plan import plan
from rollway.weights.planning.recipe import Costs
from rollway.weights.planning.sources import Source, fsdp_sources, megatron_sources
from rollway.weights.planning.targets import engine_ranks, engine_targets, hf_target
from rollway.weights.planning.transfers import Plan

_SOURCES = {
    "hf": (),
    "fsdp": ("ranks",),
    "megatron": ("tp", "pp", "ep", "etp", "world", "padded_vocab"),
}
_TARGETS = {"hf": (), "vllm": ("tp", "ep")}
"""The sizes that a layout may have; the one without a name is `ranks`."""
_QK_NORM = ("qwen3", "qwen3_moe")
_QKV_BIAS = ("qwen2", "qwen2_moe")
_KNOWN = ("llama", "mistral", *_QK_NORM, *_QKV_BIAS)
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_FUSED_NORM = ".layer_norm_"
_OTHER_EXPERTS = (".experts.local_experts.", ".experts.weight")
Config = Mapping[str, Any]
Headers = dict[str, TensorHeader]


def plan_scenario(model: Path, source: str, target: str, costs: Costs | None = None) -> Plan:
    """Plan how a trainer laid out as `source` would refit one engine laid out as `target`.

    Parameters:
        model: a checkpoint directory, or a `config.json`.
        source: hf, fsdp:RANKS, or megatron:tp=..,pp=..,ep=..,etp=..
        target: hf, or vllm:tp=..,ep=..
        costs: speeds of the machines.
    """
    kind, sizes = _parse(target, _TARGETS)
    config, headers = read_model(model)
    sources = _make_sources(source, config, headers)
    if kind == "hf":
        return plan(sources, ["receiver"], hf_target(headers), costs)
    ranks = engine_ranks(config, **sizes)
    receivers = [f"rank{number}" for number in range(len(ranks))]
    return plan(sources, receivers, engine_targets(ranks, headers), costs)


def _parse(spec: str, kinds: Mapping[str, tuple[str, ...]]) -> tuple[str, dict[str, int]]:
    """Parse `kind:a=1,b=2`, or `kind:8` for a number of ranks."""
    kind, _, rest = spec.partition(":")
    if kind not in kinds:
        raise UsageError(f"`{spec}` is no layout that Rollway knows.", f"Use {', '.join(kinds)}.")
    sizes = {}
    for word in filter(None, rest.split(",")):
        name, _, number = word.rpartition("=")
        name = name or "ranks"
        if name not in kinds[kind] or not number.isdecimal() or int(number) < 1:
            known = ", ".join(kinds[kind]) or "no sizes"
            raise UsageError(f"`{word}` in `{spec}` is no size.", f"{kind} accepts {known}.")
        sizes[name] = int(number)
    return kind, sizes


def _make_sources(spec: str, config: Config, headers: Headers) -> list[Source]:
    kind, sizes = _parse(spec, _SOURCES)
    if kind != "megatron":
        return fsdp_sources(headers, sizes.get("ranks", 1))
    geometry = ModelGeometry.from_hf_config(config)
    geometry = replace(geometry, padded_vocab=sizes.pop("padded_vocab", 0))
    names = NameMap(str(config.get("model_type", "")), geometry)
    return megatron_sources(describe(headers, names, Topology(**sizes)))


# --- the tensors of a model, from its config.json ------------------------------------------------


def read_model(path: Path) -> tuple[dict[str, Any], Headers]:
    """Return config and tensors of a checkpoint directory, or of a `config.json` alone."""
    config = read_config(path / "config.json" if path.is_dir() else path)
    has_weights = path.is_dir() and any(path.glob("model*.safetensors*"))
    return config, read_headers(path) if has_weights else hf_headers(config)


def hf_headers(config: Config) -> Headers:
    """Return name, dtype and shape of the tensors of the model that `config` describes."""
    kind = str(config.get("model_type", ""))
    if kind not in _KNOWN:
        raise UsageError(
            f"Rollway does not know the tensors of a model of type {kind!r}.",
            f"Give a directory with its weight files, or one of {', '.join(_KNOWN)}.",
        )
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    if dtype not in _DTYPES:
        raise UsageError(
            f"The model's config.json has the unknown dtype {dtype}.",
            f"Use one of {', '.join(_DTYPES)}.",
        )
    geometry = ModelGeometry.from_hf_config(config)
    step, dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or []
    if type(step) is not int or step < 1 or not isinstance(dense, list):
        raise UsageError(
            "The model's config.json has an invalid decoder_sparse_step or mlp_only_layers.",
            "Save the model's config again.",
        )
    return {
        name: TensorHeader(_DTYPES[dtype], shape, "")
        for name, shape in _list_tensors(config, geometry)
    }


def _list_tensors(config: Config, size: ModelGeometry) -> Iterator[tuple[str, Shape]]:
    yield "model.embed_tokens.weight", (size.vocab, size.hidden)
    for layer in range(size.layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (size.hidden,)
        yield from _list_attention(f"{prefix}.self_attn", config, size)
        yield f"{prefix}.post_attention_layernorm.weight", (size.hidden,)
        if size.experts and not _is_dense(layer, config):
            yield f"{prefix}.mlp.gate.weight", (size.experts, size.hidden)
            for expert in range(size.experts):
                yield from _list_mlp(f"{prefix}.mlp.experts.{expert}", size.moe_ffn, size.hidden)
        else:
            yield from _list_mlp(f"{prefix}.mlp", size.ffn, size.hidden)
    yield "model.norm.weight", (size.hidden,)
    if not size.tied_embeddings:
        yield "lm_head.weight", (size.vocab, size.hidden)


def _is_dense(layer: int, config: Config) -> bool:
    step = int(config.get("decoder_sparse_step") or 1)
    return layer in (config.get("mlp_only_layers") or ()) or (layer + 1) % step != 0


def _list_attention(
    prefix: str, config: Config, size: ModelGeometry
) -> Iterator[tuple[str, Shape]]:
    rows = {"q": size.query_rows, "k": size.key_rows, "v": size.key_rows}
    for part, count in rows.items():
        yield f"{prefix}.{part}_proj.weight", (count, size.hidden)
        if config.get("attention_bias") or config["model_type"] in _QKV_BIAS:
            yield f"{prefix}.{part}_proj.bias", (count,)
    yield f"{prefix}.o_proj.weight", (size.hidden, size.heads * size.head_dim)
    if config.get("attention_bias"):
        yield f"{prefix}.o_proj.bias", (size.hidden,)
    if config["model_type"] in _QK_NORM:
        yield f"{prefix}.q_norm.weight", (size.head_dim,)
        yield f"{prefix}.k_norm.weight", (size.head_dim,)


def _list_mlp(prefix: str, width: int, hidden: int) -> Iterator[tuple[str, Shape]]:
    yield f"{prefix}.gate_proj.weight", (width, hidden)
    yield f"{prefix}.up_proj.weight", (width, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, width)


# --- a trainer that does not run ---------------------------------------------------------------


def describe(
    hf: Mapping[str, TensorHeader],
    names: NameMap,
    topology: Topology,
    templates: Sequence[str] | None = None,
) -> MegatronModel:
    """Return what the ranks of a trainer hold of a model with these Hugging Face tensors.

    `templates` are the names of `names.table` that its modules have, by default those with
    Transformer Engine: norms in the linear layer that follows, grouped experts. Of two names for
    one tensor, the first counts. The second copy of tied embeddings, on the last pipeline stage, is
    left out."""
    if templates is None:
        chosen = (name for name in names.table if not any(mark in name for mark in _OTHER_EXPERTS))
        templates = sorted(chosen, key=lambda name: _FUSED_NORM not in name)
    layouts: dict[int, RankLayout] = {}
    shared: dict[tuple[int, int], list[tuple[Shard, tuple[str, ...]]]] = {}
    for rank, position in enumerate(topology.positions()):
        place = position.pp, position.ep  # the names of a rank's tensors depend only on these
        if place not in shared:
            shared[place] = list(_list_shards(hf, names, position, templates))
        shards = {tensor.name: _make_shard(tensor, position) for tensor, _ in shared[place]}
        hf_names = {tensor.name: parts for tensor, parts in shared[place]}
        layouts[rank] = RankLayout(position, shards, hf_names)
    return MegatronModel(names.geometry, layouts)


def _list_shards(
    hf: Mapping[str, TensorHeader], names: NameMap, position: Position, templates: Sequence[str]
) -> Iterator[tuple[Shard, tuple[str, ...]]]:
    """Yield Megatron's tensors, all tensor-parallel ranks joined, and the HF tensors in each."""
    used: set[str] = set()
    for template, name in _list_names(templates, names.geometry, position):
        hf_names = names.hf_names(name, position)
        if not hf_names or any(n not in hf or n in used for n in hf_names):
            continue
        if _FUSED_NORM in name:
            # A norm is fused only into a linear layer that the model has.
            linear = name.rpartition(_FUSED_NORM)[0] + ".weight"
            if not all(n in hf for n in names.hf_names(linear, position)):
                continue
        used.update(hf_names)
        role = role_of_name(template, gated=names.geometry.gated)
        shapes = [hf[n].shape for n in hf_names]
        shape = _join_shapes(name, role, shapes, names.geometry, position)
        yield Shard(name, hf[hf_names[0]].dtype, shape, Box.whole(shape), role), hf_names


def _list_names(
    templates: Sequence[str], geometry: ModelGeometry, position: Position
) -> Iterator[tuple[str, str]]:
    """Yield every name that a rank could have, after the template it is made from."""
    first, last = position.pp == 0, position.pp == position.pp_size - 1
    position.layer_offset(geometry)  # raises if the stages cannot share the layers evenly
    layers = range(geometry.layers // position.pp_size)
    experts = range(position.local_experts(geometry)) if geometry.experts else range(0)
    for template in templates:
        if ".experts." in template and not experts:
            continue
        if "{layer}" in template:
            for layer in layers:
                named = template.replace("{layer}", str(layer))
                for expert in experts if "{expert}" in template else (0,):
                    yield template, named.replace("{expert}", str(expert))
        elif first if template.startswith("embedding.") else last:
            yield template, template


def _make_shard(tensor: Shard, position: Position) -> Shard:
    box = _find_box(tensor.role, is_legacy(tensor.name), tensor.shape, position)
    if box is None:
        raise UsageError(
            f"{tensor.name} ({list(tensor.shape)}) cannot be cut evenly at {position}.",
            "Use other parallel sizes, or a padded_vocab that they divide.",
        )
    return replace(tensor, box=box)


@lru_cache(maxsize=65536)
def _find_box(role: Role, legacy: bool, shape: Shape, position: Position) -> Box | None:
    """Return the box of a tensor that a rank holds, or None if it cannot be shared evenly."""
    axis, rank, size = sharding(role, legacy, len(shape), position)
    whole = Box.whole(shape)
    if axis is None:
        return whole
    length, rest = divmod(shape[axis], size)
    return None if rest else whole.narrow(axis, rank * length, (rank + 1) * length)


def _join_shapes(
    name: str, role: Role, shapes: list[Shape], geometry: ModelGeometry, position: Position
) -> Shape:
    """Return the shape of Megatron's tensor, all tensor-parallel ranks joined."""
    if is_legacy(name):
        experts, width = position.local_experts(geometry), shapes[0][role is Role.EXPERT_ROW]
        if role is Role.EXPERT_ROW:
            return experts * width, geometry.hidden
        return experts * geometry.hidden, width * len(shapes) // experts
    if role is Role.VOCAB_PARALLEL:
        return (geometry.padded_vocab or geometry.vocab, *shapes[0][1:])
    if len(shapes) == 1:
        return shapes[0]
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])
