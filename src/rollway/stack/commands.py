"""The command lines of frontends and workers, and their environment, wherever they run.

`rollway.stack.plan` runs them on this machine, with ports that it has reserved;
`rollway.kubernetes.render` writes them into pods.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rollway.config import StackSpec, is_loopback
from rollway.model_spec import ModelSpec, RawArgs
from rollway.observe.otlp import find_endpoint, read_protocol
from rollway.ranks import PlacedWorker, normalise_option
from rollway.stack import workers
from rollway.stack.preset import (
    Machine,
    get_frontend_defaults,
    get_worker_defaults,
    merge_args,
)

LOOPBACK = "127.0.0.1"
TRACES_ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
WILDCARDS = ("0.0.0.0", "::", "")


@dataclass(frozen=True, slots=True)
class Command:
    """What a process runs, and the environment that it needs for it."""

    argv: list[str]
    env: dict[str, str]


def make_frontend_command(
    spec: StackSpec, python: str, ports: Mapping[str, int], machine: Machine
) -> Command:
    """Return the frontend's command. `ports` has `http` and `rl`."""
    defaults, frontend = get_frontend_defaults(spec, machine), spec.frontend
    argv = [
        *(python, "-m", "dynamo.frontend"),
        *("--http-host", frontend.host, "--http-port", str(ports["http"])),
        *("--router-mode", spec.router.mode),
        *make_flags(merge_args(defaults.args, {**spec.router.args, **frontend.args})),
    ]
    env = {
        "DYN_ENABLE_RL": "true",
        "DYN_RL_HOST": frontend.host,
        "DYN_RL_PORT": str(ports["rl"]),
        "DYN_VLLM_ENABLE_INFERENCE_V1_GENERATE": "1",
        **defaults.env,
    }
    return Command(argv, env)


def make_worker_command(
    spec: StackSpec,
    model: ModelSpec,
    placed: PlacedWorker,
    *,
    python: str,
    path: str,
    endpoint: str,
    ports: Mapping[str, int],
    run_dir: Path,
    machine: Machine,
) -> Command:
    """Return a worker's command. `model` has the settings of the worker's role; `ports` has
    `system` unless the worker is headless, and `kv` if others fetch KV from it. Without an
    `endpoint` the worker is told its own where it starts."""
    defaults = get_worker_defaults(spec, model, machine)
    is_mocker = model.engine == "mocker"
    argv = [python, *workers.choose_module(spec, model)]
    argv += ["--model-path" if is_mocker else "--model", path]
    env = dict(defaults.env)
    if not placed.is_headless:
        argv += ["--model-name" if is_mocker else "--served-model-name", model.name]
        argv += ["--endpoint", endpoint] if endpoint else []
        env |= {"DYN_SYSTEM_HOST": spec.admin_host, "DYN_SYSTEM_PORT": str(ports["system"])}
    if "kv" in ports:
        side_host = get_dial_address(spec.admin_host)
        env |= workers.make_role_env(side_host, ports["kv"], machine)
    role_args = workers.make_role_args(model, placed.role, machine)
    args = merge_args({**defaults.args, **role_args}, model.args)
    if placed.is_headless:
        args = {n: v for n, v in args.items() if normalise_option(n) != "kv-events-config"}
    argv += workers.make_engine_flags(spec, model, placed, run_dir)
    return Command([*argv, *make_flags(args)], env)


def make_planes_env(spec: StackSpec, host: str) -> dict[str, str]:
    """Return which planes carry requests and events, and the address at which this process is
    reached."""
    env: dict[str, str] = {
        "DYN_REQUEST_PLANE": spec.request_plane,
        "DYN_EVENT_PLANE": spec.event_plane,
    }
    if host not in WILDCARDS:
        # Requests between our processes use the network of the spec; on loopback they do not
        # leave the machine.
        for name in ("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "VLLM_HOST_IP"):
            env[name] = host
        if not is_loopback(host):
            env["DYN_EVENT_PLANE_HOST"] = host
    return env


def make_traces_env(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what makes Dynamo send its spans where OpenTelemetry's variables say; empty if they
    name no place. Dynamo then sends its logs, too, and by default to a port of this machine."""
    url = find_endpoint(environment)
    if url is None:
        return {}
    protocol, logs = read_protocol(environment), url.replace("/v1/traces", "/v1/logs")
    return {
        "OTEL_EXPORT_ENABLED": "true",
        TRACES_ENDPOINT: url,
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": protocol,
        "OTEL_EXPORTER_OTLP_LOGS_ENDPOINT": environment.get(
            "OTEL_EXPORTER_OTLP_LOGS_ENDPOINT", logs
        ),
        "OTEL_EXPORTER_OTLP_LOGS_PROTOCOL": environment.get(
            "OTEL_EXPORTER_OTLP_LOGS_PROTOCOL", protocol
        ),
    }


def make_flags(args: RawArgs) -> list[str]:
    """Return raw arguments as a command line; `rollway.model_spec.RawArgs` has the rules."""
    flags: list[str] = []
    for name, value in args.items():
        if value is True:
            flags.append(f"--{name}")
        elif value is False:
            flags.append(f"--no-{name}")
        elif isinstance(value, dict):
            flags += [f"--{name}", json.dumps(value)]
        elif isinstance(value, list):
            flags += [f"--{name}", *(str(item) for item in value)]
        else:
            flags += [f"--{name}", str(value)]
    return flags


def get_dial_address(host: str) -> str:
    """Return the address to dial for a server that binds `host`."""
    if host in WILDCARDS:
        return LOOPBACK
    return f"[{host}]" if ":" in host else host
