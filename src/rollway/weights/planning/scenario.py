"""A plan from a few words: `megatron:tp=2,ep=8` to `vllm:tp=2`, for a model that is described."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollway.errors import UsageError
from rollway.weights.checkpoint import TensorHeader
from rollway.weights.megatron.describe import describe
from rollway.weights.megatron.geometry import ModelGeometry, Topology
from rollway.weights.megatron.names import NameMap
from rollway.weights.planning.costs import Costs
from rollway.weights.planning.fanout import tree
from rollway.weights.planning.hf_model import read_model
from rollway.weights.planning.holdings import Source
from rollway.weights.planning.plan import Receiver, plan
from rollway.weights.planning.trainers import fsdp_sources, hf_source, megatron_sources
from rollway.weights.planning.transfers import Plan
from rollway.weights.planning.vllm_layout import engine_ranks, wants
from rollway.weights.planning.wants import Want, hf_target

_SOURCES = "hf, fsdp:8, or megatron:tp=2,pp=1,ep=8,etp=1"
_TARGETS = "hf, or vllm:tp=2,ep=1"
Config = Mapping[str, Any]
Headers = dict[str, TensorHeader]


def plan_scenario(
    model: Path, source: str, target: str, costs: Costs | None = None, *, arity: int = 2
) -> Plan:
    """What would move when a trainer laid out as `source` refits engines laid out as `target`."""
    config, headers = read_model(model)
    kind, sizes = parse(target)
    replicas = sizes.pop("replicas", 1)
    if replicas < 1:
        raise UsageError(f"There cannot be {replicas} replicas of an engine.")
    receivers, wanted = _target(kind, sizes, target, config, headers)
    fanout = tree([f"replica{n}" for n in range(replicas)], arity) if replicas > 1 else None
    return plan(_sources(source, config, headers), receivers, wanted, costs, fanout=fanout)


def parse(spec: str) -> tuple[str, dict[str, int]]:
    """`kind:a=1,b=2`, or `kind:8` for a number of ranks."""
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


def _sources(spec: str, config: Config, headers: Headers) -> list[Source]:
    kind, sizes = parse(spec)
    if kind == "hf":
        _only(sizes, (), spec)
        return [hf_source(headers)]
    if kind == "fsdp":
        _only(sizes, ("ranks",), spec)
        return fsdp_sources(headers, sizes.get("ranks", 1))
    if kind == "megatron":
        _only(sizes, ("tp", "pp", "ep", "etp", "world", "padded_vocab"), spec)
        geometry = ModelGeometry.from_hf_config(config)
        geometry = replace(geometry, padded_vocab=sizes.pop("padded_vocab", 0))
        for name, size in sizes.items():
            if size < 1:
                raise UsageError(f"{name}={size} in `{spec}` is not a number of ranks.")
        names = NameMap(str(config.get("model_type", "")), geometry)
        return megatron_sources(describe(headers, names, Topology(**sizes)))
    raise UsageError(f"`{spec}` is no source that Rollway knows.", f"Use {_SOURCES}.")


def _target(
    kind: str, sizes: dict[str, int], spec: str, config: Config, headers: Headers
) -> tuple[list[Receiver], dict[str, list[Want]]]:
    if kind == "hf":
        _only(sizes, (), spec)
        return [Receiver("receiver")], hf_target(headers)
    if kind != "vllm":
        raise UsageError(f"`{spec}` is no target that Rollway knows.", f"Use {_TARGETS}.")
    _only(sizes, ("tp", "ep"), spec)
    ranks = engine_ranks(config, sizes.get("tp", 1), sizes.get("ep", 1))
    return [Receiver(f"rank{number}") for number in range(len(ranks))], wants(ranks, headers)


def _only(sizes: dict[str, int], allowed: tuple[str, ...], spec: str) -> None:
    unknown = sorted(sizes.keys() - set(allowed))
    if unknown:
        known = f"It takes {', '.join(allowed)}." if allowed else "It takes no sizes."
        raise UsageError(f"`{spec}` has the size {unknown[0]}, which means nothing there.", known)
