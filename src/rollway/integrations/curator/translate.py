"""Translate Curator's configs into the spec of a stack.

    DynamoVLLMModelConfig   -> models[i]: path, name, replicas, parallel sizes, args, env
      mode="disagg"         -> serving: disaggregated, prefill, decode
    DynamoServerConfig      -> planes, etcd and NATS, env; `router` -> router and frontend.args
    InferenceServer         -> name, frontend.port, start_seconds

Everything here is a pure function of its arguments, and reads Curator's objects by their attributes
only. What Curator's backend gets wrong and this does not is named in docs/curator.md.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollway.errors import SpecError
from rollway.model_spec import RawArgs, slug

NAME_LENGTH = 40
MIGRATIONS = 3
"""How often a request moves to another worker when its worker dies."""
WORKERS_OF_FILE_DISCOVERY = 16
"""File discovery loses registrations when some 32 workers register at once."""
PARALLEL_SIZES = {
    "tensor-parallel-size": "tensor_parallel",
    "pipeline-parallel-size": "pipeline_parallel",
    "data-parallel-size": "data_parallel",
}
"""vLLM's options that are fields of a model in the spec: they say how many GPUs a worker needs."""
MANAGED_ENV = frozenset(
    {
        *("ETCD_ENDPOINTS", "NATS_SERVER"),
        *("DYN_NAMESPACE", "DYN_DISCOVERY_BACKEND", "DYN_FILE_KV"),
        *("DYN_REQUEST_PLANE", "DYN_EVENT_PLANE"),
    }
)
"""Variables that follow from the config; the same keys in `subprocess_env` have no effect. Curator
has the last five as command-line options, which override variables as well."""
DEFAULT_ENV = {
    # Prefix hashes of the frontend and of all workers must agree for KV-aware routing.
    "PYTHONHASHSEED": "0",
    # Dynamo's workers wait 5 s for requests when they stop; a pipeline has ended by then.
    "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0.5",
}
NO_EVENTS = {"enable_kv_cache_events": False}


class ConfigError(SpecError, ValueError):
    """A config of Curator's that cannot be served. Curator raises ValueError for most of these."""


def make_fields(
    models: Sequence[Any],
    backend: Any,
    *,
    name: str,
    port: int = 0,
    start_seconds: float = 300.0,
    python: str | None = None,
) -> dict[str, Any]:
    """Return the fields of a spec for these model configs and this `DynamoServerConfig`.

    Args:
        models: objects with the fields of `DynamoVLLMModelConfig`.
        backend: an object with the fields of `DynamoServerConfig`.
        name: the name of the stack; `make_stack_name` makes one.
        port: the frontend's port; 0 for a free one.
        start_seconds: how long the start may take, until all replicas are ready.
        python: the engines' interpreter, unless a model names one.

    Raises:
        ConfigError: the configs contradict each other or cannot work.
    """
    check_models(models)
    mode, has_events = choose_router(models, backend.router)
    fields: dict[str, Any] = {
        "name": name,
        "preset": "plain",
        "models": [make_model(model, backend, has_events=has_events) for model in models],
        "frontend": {"port": port, "args": _name_args(backend.router.router_kwargs)},
        "router": {"mode": mode},
        "request_plane": backend.request_plane,
        "event_plane": backend.event_plane,
        "env": _make_env(backend.subprocess_env),
        "start_seconds": start_seconds,
    }
    if mode == "kv":
        fields["frontend"]["args"]["router-kv-events"] = has_events
    if "migration-limit" not in fields["frontend"]["args"]:
        fields["migration_limit"] = MIGRATIONS
    fields.update(_make_services(backend, models))
    interpreter = choose_python(models, python)
    if interpreter is not None:
        fields["python"] = interpreter
    return fields


def make_stack_name(namespace: str, name: str, run: str) -> str:
    """Return a stack's name: Curator's namespace and name, and the id of this start.

    With the id, two drivers that both call their server "default" have two stacks."""
    room = NAME_LENGTH - len(run) - 1
    readable = f"{slug(namespace)}-{slug(name)}"[:room].rstrip("-")
    return f"{readable}-{run}"


# --- checks --------------------------------------------------------------------------------------


def check_models(models: Sequence[Any]) -> None:
    """Refuse an empty list, and names that cannot be told apart."""
    if not models:
        raise ConfigError(
            "At least one DynamoVLLMModelConfig is required.",
            "Give `models=[DynamoVLLMModelConfig(model_identifier=…)]`.",
        )
    names: dict[str, int] = {}
    components: dict[str, tuple[int, str]] = {}
    for index, model in enumerate(models):
        name = model.resolved_model_name
        if name in names:
            raise ConfigError(
                f"Duplicate model name {name!r} at index {index} (first seen at index "
                f"{names[name]}).",
                "When one model_identifier is deployed several times, give each its own "
                "model_name.",
            )
        names[name] = index
        if model.mode not in ("aggregated", "disagg"):
            raise ConfigError(
                f"The mode of {name!r} is {model.mode!r}, which Curator does not have.",
                "Write mode='aggregated' or mode='disagg'.",
            )
        if not re.search("[a-z0-9]", name.lower()):
            raise ConfigError(
                f"Model name {name!r} produces an empty component slug.",
                "Give a model_name with letters or digits.",
            )
        component = slug(name)
        if component in components:
            first, other = components[component]
            raise ConfigError(
                f"Model names {other!r} (index {first}) and {name!r} (index {index}) both "
                f"sanitize to component {component!r}.",
                "Use more distinct model_name values.",
            )
        components[component] = index, name


def choose_router(models: Sequence[Any], router: Any) -> tuple[str, bool]:
    """Return Dynamo's router mode, and whether workers publish KV events.

    Without a mode, a disaggregated model gets `kv` with events, and others Dynamo's own default."""
    if router.mode is not None:
        # Curator's words have underscores, Dynamo's have dashes.
        return str(router.mode).replace("_", "-"), router.mode == "kv" and router.kv_events
    if any(model.mode == "disagg" for model in models):
        return "kv", True
    return "round-robin", False


def choose_python(models: Sequence[Any], default: str | None) -> str | None:
    """Return the engines' interpreter: `runtime_env["py_executable"]`, the same for all models."""
    interpreters = {
        model.resolved_model_name: model.runtime_env["py_executable"]
        for model in models
        if model.runtime_env.get("py_executable")
    }
    distinct = sorted(set(interpreters.values()))
    if len(distinct) > 1:
        listing = ", ".join(f"{name}: {path}" for name, path in interpreters.items())
        raise ConfigError(
            f"The models name different interpreters ({listing}).",
            "One frontend serves them all: give the same runtime_env['py_executable'] to each.",
        )
    if not distinct:
        return default
    if " " in distinct[0] and not Path(distinct[0]).exists():
        raise ConfigError(
            f"runtime_env['py_executable'] is a command with arguments: {distinct[0]!r}.",
            "Give the path of an interpreter whose environment has Dynamo and the engine.",
        )
    return shutil.which(distinct[0]) or str(distinct[0])


# --- models --------------------------------------------------------------------------------------


def make_model(model: Any, backend: Any, *, has_events: bool) -> dict[str, Any]:
    """Return one entry of `models`."""
    args = _make_args(model, model.engine_kwargs)
    fields: dict[str, Any] = {
        "path": model.model_identifier,
        "name": model.resolved_model_name,
        **_pop_parallel_sizes(args),
    }
    if model.mode == "disagg":
        fields["serving"] = "disaggregated"
        fields["prefill"] = _make_role(model, "prefill")
        fields["decode"] = _make_role(model, "decode")
    else:
        fields["replicas"] = model.num_replicas
        _add_kv_events(model, args, has_events)
    if model.kv_transfer_config:
        args.setdefault("kv-transfer-config", dict(model.kv_transfer_config))
    fields["args"] = args
    fields.update(_make_runtime_env(model, backend.subprocess_env))
    return fields


def _make_role(model: Any, role: str) -> dict[str, Any]:
    config = getattr(model, role)
    if config is None:
        raise ConfigError(
            f"mode='disagg' requires both prefill and decode; {role!r} is not configured.",
            "Give `prefill=DynamoRoleConfig(…)` and `decode=DynamoRoleConfig(…)`.",
        )
    # The role's options override the model's; `dynamo_kwargs` come last on the command line.
    managed = _name_args(model.dynamo_kwargs)
    args = {k: v for k, v in _name_args(config.engine_kwargs).items() if k not in managed}
    return {"replicas": config.num_replicas, **_pop_parallel_sizes(args), "args": args}


def _make_args(model: Any, engine_kwargs: Mapping[str, Any]) -> RawArgs:
    args = {**_name_args(engine_kwargs), **_name_args(model.dynamo_kwargs)}
    served = args.pop("served-model-name", None)
    if served not in (None, model.resolved_model_name, [model.resolved_model_name]):
        raise ConfigError(
            f"engine_kwargs name the model {served!r}, and the config {model.resolved_model_name!r}"
            ": the server would wait for a name that is never served.",
            "Give the name as model_name only.",
        )
    return args


def _name_args(kwargs: Mapping[str, Any]) -> RawArgs:
    """Return options under their names on the command line."""
    return {key.replace("_", "-"): value for key, value in kwargs.items()}


def _pop_parallel_sizes(args: RawArgs) -> dict[str, Any]:
    sizes = {field: args.pop(option, None) for option, field in PARALLEL_SIZES.items()}
    return {field: size for field, size in sizes.items() if size is not None}


def _add_kv_events(model: Any, args: RawArgs, has_events: bool) -> None:
    """Say whether the workers publish KV events. Without the option, they compete for a port."""
    template = dict(model.kv_events_config)
    if "kv-events-config" in args:
        return
    if not has_events:
        template.pop("endpoint", None)
        args["kv-events-config"] = {**template, **NO_EVENTS}
    elif template.keys() - {"publisher", "topic", "endpoint", "enable_kv_cache_events"}:
        raise ConfigError(
            f"kv_events_config of {model.resolved_model_name!r} has options of its own, and the "
            "router wants events, whose address each worker must have for itself.",
            "Leave kv_events_config empty, or set kv_events=False.",
        )
    # With events, the plan gives each worker an address of its own.


def _make_runtime_env(model: Any, subprocess_env: Mapping[str, Any]) -> dict[str, Any]:
    """Return `env` and `runtime_env` of a model.

    In Curator a variable of the server overrides the same one of a model; in a stack it is the
    other way round, so the server's are left out of the model's."""
    rest = {k: v for k, v in model.runtime_env.items() if k not in ("env_vars", "py_executable")}
    if rest.get("pip") and rest.get("uv"):
        raise ConfigError(
            f"The runtime_env of {model.resolved_model_name!r} has both `pip` and `uv`.",
            "Ray takes one of them: put all packages under one key.",
        )
    variables = model.runtime_env.get("env_vars") or {}
    own = {k: v for k, v in variables.items() if k not in subprocess_env and k not in MANAGED_ENV}
    return {"env": own, **({"runtime_env": rest} if rest else {})}


# --- the server ----------------------------------------------------------------------------------


def _make_env(subprocess_env: Mapping[str, Any]) -> dict[str, str]:
    own = {key: str(value) for key, value in subprocess_env.items() if key not in MANAGED_ENV}
    return {**DEFAULT_ENV, **own}


def _make_services(backend: Any, models: Sequence[Any]) -> dict[str, Any]:
    """Return discovery, etcd and NATS. Addresses are used as they are written."""
    fields: dict[str, Any] = {}
    if backend.etcd_endpoint:
        fields.update(discovery="etcd", etcd_endpoints=backend.etcd_endpoint)
    elif sum(map(_count_workers, models)) > WORKERS_OF_FILE_DISCOVERY:
        fields["discovery"] = "etcd"
    if backend.nats_url and "nats" in (backend.request_plane, backend.event_plane):
        fields["nats_server"] = backend.nats_url
    return fields


def _count_workers(model: Any) -> int:
    if model.mode == "disagg" and model.prefill is not None and model.decode is not None:
        return int(model.prefill.num_replicas + model.decode.num_replicas)
    return int(model.num_replicas)
