"""Plan from a short description: `megatron:tp=2,ep=8` to `vllm:tp=2`, for a model on disk.

A `config.json` is enough: the tensors of the Llama and Qwen families (dense and mixtures of
experts) follow from it, also for models that would not fit on this machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollway.errors import UsageError
from rollway.weights.checkpoint import TensorHeader, read_config, read_headers
from rollway.weights.layout import Shape
from rollway.weights.megatron.geometry import ModelGeometry, Topology
from rollway.weights.megatron.model import describe
from rollway.weights.megatron.names import NameMap
from rollway.weights.planning.plan import Receiver, plan
from rollway.weights.planning.recipe import Costs
from rollway.weights.planning.sources import Source, fsdp_sources, megatron_sources
from rollway.weights.planning.targets import Target, engine_ranks, engine_targets, hf_target
from rollway.weights.planning.transfers import Edge, Plan

_SOURCES = "hf, fsdp:8, or megatron:tp=2,pp=1,ep=8,etp=1"
_TARGETS = "hf, or vllm:tp=2,ep=1"
_QK_NORM = ("qwen3", "qwen3_moe")
_QKV_BIAS = ("qwen2", "qwen2_moe")
_KNOWN = ("llama", "mistral", *_QK_NORM, *_QKV_BIAS)
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
Config = Mapping[str, Any]
Headers = dict[str, TensorHeader]


def plan_scenario(
    model: Path, source: str, target: str, costs: Costs | None = None, *, arity: int = 2
) -> Plan:
    """Plan how a trainer laid out as `source` would refit engines laid out as `target`.

    Parameters:
        model: a checkpoint directory, or a `config.json`.
        source: hf, fsdp:RANKS, or megatron:tp=..,pp=..,ep=..,etp=..
        target: hf, or vllm:tp=..,ep=..,replicas=..
        costs: speeds of the machines.
        arity: how many other replicas each replica serves, if there are several.
    """
    config, headers = read_model(model)
    kind, sizes = _parse(target)
    replicas = sizes.pop("replicas", 1)
    if replicas < 1 or arity < 1:
        raise UsageError(
            f"{replicas} replicas that serve {arity} others each cannot be.", "Use 1 or more."
        )
    receivers, targets = _make_targets(kind, sizes, target, config, headers)
    result = plan(_make_sources(source, config, headers), receivers, targets, costs)
    if replicas > 1:
        result.fanout = _fan_out(replicas, arity)
    return result


def _fan_out(replicas: int, arity: int) -> list[list[Edge]]:
    """Return the order in which replicas serve each other: the trainer serves the first one."""
    waiting = [f"replica{number}" for number in range(replicas)]
    levels = [[Edge(None, waiting.pop(0))]]
    while waiting:
        servers = [edge.receiver for edge in levels[-1]]
        # Every server gets one receiver before any gets a second: the last level is rarely full.
        turns = [server for _ in range(arity) for server in servers]
        level = [Edge(server, name) for server, name in zip(turns, waiting, strict=False)]
        levels.append(level)
        waiting = waiting[len(level) :]
    return levels


def _parse(spec: str) -> tuple[str, dict[str, int]]:
    """Parse `kind:a=1,b=2`, or `kind:8` for a number of ranks."""
    kind, _, rest = spec.partition(":")
    sizes = {}
    for word in filter(None, rest.split(",")):
        name, equals, number = word.partition("=")
        if not equals:
            name, number = "ranks", word
        try:
            sizes[name.strip()] = int(number)
        except ValueError:
            raise UsageError(
                f"`{word}` in `{spec}` is not a size.", "Write for example tp=2."
            ) from None
    return kind.strip(), sizes


def _make_sources(spec: str, config: Config, headers: Headers) -> list[Source]:
    kind, sizes = _parse(spec)
    if kind == "hf":
        _check_sizes(sizes, (), spec)
        return fsdp_sources(headers, 1)
    if kind == "fsdp":
        _check_sizes(sizes, ("ranks",), spec)
        return fsdp_sources(headers, sizes.get("ranks", 1))
    if kind == "megatron":
        _check_sizes(sizes, ("tp", "pp", "ep", "etp", "world", "padded_vocab"), spec)
        geometry = ModelGeometry.from_hf_config(config)
        geometry = replace(geometry, padded_vocab=sizes.pop("padded_vocab", 0))
        for name, size in sizes.items():
            if size < 1:
                raise UsageError(
                    f"{name}={size} in `{spec}` is not a number of ranks.", "Use 1 or more."
                )
        names = NameMap(str(config.get("model_type", "")), geometry)
        return megatron_sources(describe(headers, names, Topology(**sizes)))
    raise UsageError(f"`{spec}` is no source that Rollway knows.", f"Use {_SOURCES}.")


def _make_targets(
    kind: str, sizes: dict[str, int], spec: str, config: Config, headers: Headers
) -> tuple[list[Receiver], dict[str, list[Target]]]:
    if kind == "hf":
        _check_sizes(sizes, (), spec)
        return [Receiver("receiver")], hf_target(headers)
    if kind != "vllm":
        raise UsageError(f"`{spec}` is no target that Rollway knows.", f"Use {_TARGETS}.")
    _check_sizes(sizes, ("tp", "ep"), spec)
    ranks = engine_ranks(config, **sizes)
    receivers = [Receiver(f"rank{number}") for number in range(len(ranks))]
    return receivers, engine_targets(ranks, headers)


def _check_sizes(sizes: dict[str, int], allowed: tuple[str, ...], spec: str) -> None:
    unknown = sorted(sizes.keys() - set(allowed))
    if unknown:
        known = f"It accepts {', '.join(allowed)}." if allowed else "It accepts no sizes."
        raise UsageError(f"`{spec}` has the unknown size {unknown[0]}.", known)


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
