"""Resolve a NeMo-RL recipe, and say what in it will not work with Rollway, and why.

Most of this would show minutes into a run: after the policy is loaded, at the first refit, at the
first validation. `find_problems` reads the recipe alone; it asks no server.
"""

from __future__ import annotations

import functools
import importlib
import operator
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import ValidationError

from rollway.errors import Problem, RollwayError, UsageError
from rollway.integrations.nemo_rl.config import (
    NO_REPLAY,
    WHERE,
    GenerationConfig,
    WeightSync,
    make_stack_fields,
)
from rollway.weights.checkpoint import read_config
from rollway.yaml_input import read_yaml

_GENERATION = "policy.generation"
_SYNC = "cluster.weight_sync"
_LOCAL = ("localhost", "127.0.0.1", "::1", "0.0.0.0")
_SAME_MACHINE = {"shm": "shared memory", "cuda_ipc": "the memory of a GPU"}
_RESOLVERS = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "max": lambda *values: max(values),
}
"""What NeMo-RL's recipes compute with."""
_UNRESOLVED = object()
_NO_OMEGACONF = "omegaconf is not installed here (pip install 'rollway[nemo-rl]')"
_VARIABLE = re.compile(r"\$\{oc\.env:(?P<name>\w+)(?:,(?P<default>[^}]*))?\}")


@dataclass(frozen=True, slots=True)
class Recipe:
    """A resolved recipe, without what could not be resolved of it."""

    values: dict[str, Any]
    unresolved: list[Problem]


# --- resolution ----------------------------------------------------------------------------------


def read_recipe(file: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Resolve a recipe: what it inherits (`defaults`), overrides (`a.b=c`), interpolations."""
    values = _load(file.expanduser().resolve(), ())
    for override in overrides:
        _override(values, override)
    return _interpolate(values)


def _load(file: Path, below: tuple[Path, ...]) -> dict[str, Any]:
    if file in below:
        raise UsageError(f"{file} inherits from itself.", "Correct its `defaults`.")
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        fix = f"Check the `defaults` of {below[-1]}." if below else "Check the path."
        raise UsageError(f"{file} cannot be read: {reason}.", fix) from error
    values = read_yaml(text, str(file))
    if not isinstance(values, dict):
        raise UsageError(f"{file} is not a mapping.", "Is it a recipe of NeMo-RL?")
    parents = values.pop("defaults", None) or []
    merged: dict[str, Any] = {}
    for parent in [parents] if isinstance(parents, str) else parents:
        path = _VARIABLE.sub(_read_variable, str(parent))
        _merge(merged, _load((file.parent / path).resolve(), (*below, file)))
    _merge(merged, values)
    return merged


def _read_variable(match: re.Match[str]) -> str:
    name, default = match["name"], match["default"]
    value = os.environ.get(name, default)
    if value is None:
        raise UsageError(f"`defaults` names the variable {name}, which is not set.", "Set it.")
    return value


def _merge(base: dict[str, Any], over: Mapping[str, Any], *, is_top: bool = True) -> None:
    """Merge as NeMo-RL does: mappings key by key, but for those of the top that have
    `_override_: true`; below, that is a key like any other."""
    for key, value in over.items():
        if not isinstance(value, dict):
            base[key] = value
            continue
        replaces = is_top and value.pop("_override_", False)
        if replaces or not isinstance(base.get(key), dict):
            base[key] = {}
        _merge(base[key], value, is_top=False)


def _override(values: dict[str, Any], text: str) -> None:
    """Apply an override of Hydra: `a.b=c`, `+a.b=c` for a key that is not there, `~a.b`."""
    path, has_value, value = text.lstrip("+~").partition("=")
    removes = text.startswith("~")
    if not path or (not has_value and not removes):
        raise UsageError(f"`{text}` is not an override.", "Write a.b=value, +a.b=value or ~a.b.")
    *parents, last = path.split(".")
    target: Any = values
    for key in parents:
        target = target.setdefault(key, {}) if isinstance(target, dict) else None
        if not isinstance(target, dict):
            raise UsageError(f"`{text}`: `{key}` has no fields.", "Set it as a whole.")
    if last not in target and not text.startswith("+"):
        raise UsageError(
            f"`{text}`: the recipe has no `{path}`, and NeMo-RL refuses to add it so.",
            f"Write +{path}=… if it is meant.",
        )
    if removes:
        target.pop(last, None)
    else:
        target[last] = read_yaml(value, f"`{text}`") if value else None


def _interpolate(values: dict[str, Any]) -> Recipe:
    """Replace `${…}`. What cannot be replaced is a problem, and is missing in the result: as text
    it would be taken for a value."""
    recipe, (config, tree) = Recipe({}, []), _open_tree(values)

    def resolve(value: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(value, dict):
            parts = {key: resolve(each, (*path, key)) for key, each in value.items()}
            return {key: each for key, each in parts.items() if each is not _UNRESOLVED}
        if isinstance(value, list):
            return [resolve(each, (*path, index)) for index, each in enumerate(value)]
        if not isinstance(value, str) or "${" not in value:
            return value
        try:
            part = functools.reduce(operator.getitem, path, tree)
            return config.to_container(part, resolve=True) if config.is_config(part) else part
        except Exception as error:  # noqa: BLE001 (resolvers raise what they like)
            reason = " ".join(str(error).split())[:200] if config else _NO_OMEGACONF
            fix = "Correct it, or check the recipe where it runs, with its variables set."
            problem = Problem(
                ".".join(map(str, path)), "error", f"`{value}` cannot be resolved: {reason}.", fix
            )
            recipe.unresolved.append(problem)
            return _UNRESOLVED

    recipe.values.update(resolve(values, ()))
    return recipe


def _open_tree(values: dict[str, Any]) -> tuple[Any, Any]:
    """Return omegaconf's functions and its tree of these values; without it, nothing."""
    try:
        omegaconf = importlib.import_module("omegaconf")
    except ImportError:
        return None, None
    config = omegaconf.OmegaConf
    for name, function in _RESOLVERS.items():
        if not config.has_resolver(name):
            with warnings.catch_warnings(action="ignore"):  # 2.4 has another name for it
                # `register_resolver` of 2.3 would pass numbers as text.
                config.register_new_resolver(name, function)
    return config, config.create(values)


# --- problems ------------------------------------------------------------------------------------


def find_problems(recipe: Mapping[str, Any]) -> list[Problem]:
    """Return what in a resolved recipe will not work."""
    generation = _get(recipe, "policy", "generation")
    if generation.get("backend") != "dynamo":
        cause = f"The backend is {generation.get('backend')!r}, so NeMo-RL generates by itself."
        return [Problem(f"{_GENERATION}.backend", "error", cause, "Set it to dynamo.")]
    problems = [
        *_check_sync(recipe),
        *_check_reach(recipe),
        *_check_ranks(recipe),
        *_check_trainer(recipe),
        *_check_cluster(recipe),
    ]
    given = {**generation, "model_name": _get(recipe, "policy").get("model_name") or ""}
    try:
        config = GenerationConfig.model_validate(given)
    except ValidationError as error:
        return [*(_describe(detail) for detail in error.errors()), *problems]
    return [*_check_stack(config), *problems]


def _get(values: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    """Return a part of a recipe; an empty one where it has none."""
    for key in keys:
        part = values.get(key)
        values = part if isinstance(part, Mapping) else {}
    return values


def _describe(detail: Any) -> Problem:
    """Return the problem of one key; texts of `config.py` have the fix after a semicolon."""
    key = ".".join([_GENERATION, *map(str, detail["loc"])])
    message = str(detail["msg"]).removeprefix("Value error, ")
    if detail["type"] == "extra_forbidden":
        return Problem(key, "error", "There is no such key.", "docs/nemo-rl.md lists them.")
    cause, _, fix = message.partition("; ")
    sentence = fix[:1].upper() + fix[1:] if fix else "Correct it, see docs/nemo-rl.md"
    return Problem(key, "error", f"{cause[:1].upper()}{cause[1:]}.", f"{sentence}.")


def _check_stack(config: GenerationConfig) -> Iterator[Problem]:
    """Check a stack that Rollway would start, as `rollway up` does."""
    from rollway.api import make_spec

    if config.dynamo_cfg.stack is None:
        return
    try:
        fields = make_stack_fields(config)
        name = fields["models"][0]["name"]
        make_spec(fields)
    except RollwayError as error:
        yield Problem(f"{WHERE}.stack", "error", error.message, error.hint)
        return
    if name != config.model_name:
        cause = f"The stack serves {name!r}, and the trainer's model is {config.model_name!r}."
        fix = "Remove the name; the names must be equal to the byte."
        yield Problem(f"{WHERE}.stack.models.0.name", "error", cause, fix)
    yield from _check_shards(config)


def _check_shards(config: GenerationConfig) -> Iterator[Problem]:
    """Check that the ranks of an engine can share the model's heads and experts."""
    path = Path(config.model_name) / "config.json"
    if not path.is_file():
        return
    model, tensor = read_config(path), int(config.vllm_cfg.get("tensor_parallel_size") or 1)
    heads = model.get("num_attention_heads")
    if isinstance(heads, int) and heads % tensor:
        cause = f"{heads} attention heads cannot be divided by {tensor} ranks (q_proj.weight)."
        fix = f"Use a divisor of {heads}."
        yield Problem(f"{_GENERATION}.vllm_cfg.tensor_parallel_size", "error", cause, fix)


def _check_reach(recipe: Mapping[str, Any]) -> Iterator[Problem]:
    """Check that weights can reach engines on other machines."""
    dynamo = _get(recipe, "policy", "generation", "dynamo_cfg")
    host = urlsplit(str(dynamo.get("frontend_url") or "")).hostname
    where = f"pods of {dynamo['dgd_name']}" if dynamo.get("dgd_name") else f"at {host}"
    if where == "at None" or host in _LOCAL:
        return
    sync = _get(recipe, "cluster", "weight_sync") or _get(dynamo, "weight_sync")
    method = sync.get("method")
    if method in _SAME_MACHINE:
        cause = f"`{method}` is {_SAME_MACHINE[method]} of one machine; the engines are {where}."
        yield Problem(f"{_SYNC}.method", "error", cause, "Use nixl, collective, or files.")
    if method in ("files", "delta") and not sync.get("directory"):
        cause = f"`{method}` without a directory writes to this machine; the engines are {where}."
        fix = "Name a directory that the trainer and all engines see."
        yield Problem(f"{_SYNC}.directory", "error", cause, fix)


def _check_sync(recipe: Mapping[str, Any]) -> Iterator[Problem]:
    sync = _get(recipe, "cluster").get("weight_sync")
    own = _get(recipe, "policy", "generation", "dynamo_cfg").get("weight_sync")
    if sync is None:
        return
    if own not in (None, sync):
        cause = f"It differs from {WHERE}.weight_sync."
        yield Problem(_SYNC, "error", cause, "Keep one of them.")
    try:
        WeightSync.model_validate(sync)
    except ValidationError as error:
        for detail in error.errors():
            key = ".".join([_SYNC, *map(str, detail["loc"])])
            shown = f" (got {detail['input']!r:.60})" if detail["loc"] else ""
            yield Problem(
                key, "error", f"{detail['msg']}{shown}.", "docs/nemo-rl.md lists the values."
            )


def _check_ranks(recipe: Mapping[str, Any]) -> Iterator[Problem]:
    """Check that like ranks can read from each other, where a recipe asks for that."""
    sync = _get(recipe, "cluster", "weight_sync")
    mx, policy = _get(sync, "mx_config"), _get(recipe, "policy")
    is_bound = mx.get("enabled") and mx.get("same_rank_only", True)
    if not is_bound or sync.get("method") not in ("nixl", "mx"):
        return
    engine = _get(policy, "generation", "vllm_cfg").get("tensor_parallel_size") or 1
    megatron, cluster = _get(policy, "megatron_cfg"), _get(recipe, "cluster")
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    tensor, pipeline = (megatron.get(size) or 1 for size in sizes)
    if not sync.get("shards"):
        fault = "rank 0 publishes everything" if engine > 1 else ""
    elif megatron.get("enabled"):
        is_like = tensor == engine and pipeline == 1
        fault = "" if is_like else f"its sizes are {tensor} (tensor) and {pipeline} (pipeline)"
    else:
        is_alone = (cluster.get("num_nodes") or 1) * (cluster.get("gpus_per_node") or 1) == 1
        fault = "" if is_alone else "DTensor's ranks divide every tensor among all of them"
    if fault:
        cause = f"Ranks of the trainer and of engines with {engine} are not alike: {fault}."
        fix = "Set it to false if the network connects all cards, or make the sizes equal."
        yield Problem(f"{_SYNC}.mx_config.same_rank_only", "error", cause, fix)


def _check_trainer(recipe: Mapping[str, Any]) -> Iterator[Problem]:
    generation = _get(recipe, "policy", "generation")
    async_grpo = _get(recipe, "grpo", "async_grpo")
    yield from _check_extras(recipe, generation, is_async=bool(async_grpo.get("enabled")))
    mode = _get(generation, "dynamo_cfg").get("refit_mode")
    if async_grpo.get("in_flight_weight_updates"):
        key = "grpo.async_grpo.in_flight_weight_updates"
        if mode == "pause-all":
            cause = f"{WHERE}.refit_mode is pause-all, which waits for running rollouts."
            yield Problem(key, "error", cause, "Set refit_mode to in-flight, or remove it.")
        if not async_grpo.get("enabled"):
            cause = "A synchronous trainer has no rollouts in flight when it updates weights."
            yield Problem(key, "error", cause, "Set it to false, or async_grpo.enabled to true.")
    if async_grpo.get("enabled"):
        loss = _get(recipe, "loss_fn")
        if not loss.get("use_importance_sampling_correction"):
            cause = "NeMo-RL's asynchronous trainer refuses to run without it."
            yield Problem(
                "loss_fn.use_importance_sampling_correction", "error", cause, "Set it to true."
            )
    yield from _check_gym(recipe, generation)


def _check_extras(
    recipe: Mapping[str, Any], generation: Mapping[str, Any], *, is_async: bool
) -> Iterator[Problem]:
    """Check what a version has besides the policy's weights."""
    cache = str(_get(generation, "vllm_cfg").get("kv_cache_dtype") or "")
    is_megatron = bool(_get(recipe, "policy", "megatron_cfg").get("enabled"))
    if cache.startswith("fp8") and not is_async and not is_megatron:
        cause = "The synchronous trainer calibrates an FP8 KV cache, and DTensor workers cannot."
        fix = "Set auto here, or train with policy.megatron_cfg.enabled."
        yield Problem(f"{_GENERATION}.vllm_cfg.kv_cache_dtype", "error", cause, fix)
    if _get(recipe, "policy", "router_replay").get("enabled"):
        yield Problem("policy.router_replay.enabled", "error", *NO_REPLAY)
    dynamo = _get(generation, "dynamo_cfg")
    options = {**_get(generation, "vllm_kwargs"), **_list_engine_args(dynamo)}
    speculative = options.get("speculative_config") or options.get("speculative-config")
    if _get(recipe, "policy", "draft").get("enabled") and dynamo.get("stack") and not speculative:
        cause = (
            "The trainer sends weights of a draft model, and the engines of the stack have none."
        )
        fix = f"Give {_GENERATION}.vllm_kwargs.speculative_config, or set it to false."
        yield Problem("policy.draft.enabled", "error", cause, fix)


def _list_engine_args(dynamo: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the options of the engine that a stack in a recipe gives itself."""
    stack = dynamo.get("stack")
    models = stack.get("models") if isinstance(stack, Mapping) else None
    return _get(models[0], "args") if models and isinstance(models[0], Mapping) else {}


def _check_gym(recipe: Mapping[str, Any], generation: Mapping[str, Any]) -> Iterator[Problem]:
    gym = bool(_get(recipe, "env").get("should_use_nemo_gym"))
    if gym and not _get(generation, "vllm_cfg").get("expose_http_server"):
        cause = "NeMo-Gym sends its requests to an address, and none is served."
        yield Problem(
            f"{_GENERATION}.vllm_cfg.expose_http_server", "error", cause, "Set it to true."
        )
    for name in ("temperature", "top_p", "top_k"):
        key, value = f"val_{name}", generation.get(f"val_{name}")
        if key not in generation or value == generation.get(name) or "${" in f"{value}":
            continue
        if not gym or name == "top_k":
            rest = "for NeMo-Gym only" if name != "top_k" else "not at all"
            cause = f"Validation samples by its own {name} {rest}."
            yield Problem(f"{_GENERATION}.{key}", "error", cause, f"Set it to ${{.{name}}}.")


def _check_cluster(recipe: Mapping[str, Any]) -> Iterator[Problem]:
    cluster = _get(recipe, "cluster")
    resources = _get(recipe, "policy", "generation", "colocated", "resources")
    named = {key: resources.get(key) for key in ("gpus_per_node", "num_nodes")}
    if cluster.get("segment_size") is not None and not any(named.values()):
        cause = "NeMo-RL then counts nodes for generation that this backend does not use."
        yield Problem("cluster.segment_size", "error", cause, "Set it to null.")
    if named["gpus_per_node"] and cluster.get("num_nodes") == 1:
        rest = int(cluster.get("gpus_per_node") or 0) - int(named["gpus_per_node"])
        if rest < 1:
            key = f"{_GENERATION}.colocated.resources.gpus_per_node"
            cause = f"It leaves {rest} of the cluster's GPUs for training."
            yield Problem(key, "error", cause, "Set it to null: all GPUs of the cluster train.")
