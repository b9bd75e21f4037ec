"""The command lines of frontends and workers, and their environment, wherever they run.

`rollway.stack.plan` runs them on this machine, with ports that it has reserved;
`rollway.kubernetes.render` writes them into pods.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollway.model_spec import ModelSpec, PlacedWorker, RawArgs, WorkerRole, normalise_option
from rollway.observe.traces import find_endpoint, read_protocol
from rollway.spec import StackSpec, is_loopback
from rollway.stack.preset import (
    Machine,
    get_frontend_defaults,
    get_worker_defaults,
    merge_args,
)

LOOPBACK = "127.0.0.1"
TRACES_ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
WILDCARDS = ("0.0.0.0", "::", "")
WORKER_EXTENSION = "rollway.engine.worker.WorkerExtension"
GUARD = Path(__file__).parents[1] / "engine" / "guard.py"
"""Starts a worker whose admin routes accept signed orders only."""
NIXL_CONNECTOR = "NixlConnector"


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
    argv = [python, *choose_module(spec, model)]
    argv += ["--model-path" if is_mocker else "--model", path]
    env = dict(defaults.env)
    if not placed.is_headless:
        argv += ["--model-name" if is_mocker else "--served-model-name", model.name]
        argv += ["--endpoint", endpoint] if endpoint else []
        env |= {"DYN_SYSTEM_HOST": spec.admin_host, "DYN_SYSTEM_PORT": str(ports["system"])}
    if "kv" in ports:
        side_host = get_dial_address(spec.admin_host)
        env |= make_role_env(side_host, ports["kv"], machine)
    role_args = make_role_args(model, placed.role, machine)
    args = merge_args({**defaults.args, **role_args}, model.args)
    if placed.is_headless:
        args = {n: v for n, v in args.items() if normalise_option(n) != "kv-events-config"}
    argv += make_engine_flags(spec, model, placed, run_dir)
    return Command([*argv, *make_flags(args)], env)


def choose_module(spec: StackSpec, model: ModelSpec) -> list[str]:
    """Return what Python runs: the worker's module, behind the guard if it has admin routes."""
    module = model.module or f"dynamo.{model.engine}"
    is_guarded = spec.admin_orders == "signed" and model.engine != "mocker"
    return [str(GUARD), module] if is_guarded else ["-m", module]


def make_engine_flags(
    spec: StackSpec, model: ModelSpec, placed: PlacedWorker, run_dir: Path
) -> list[str]:
    """Return the options that Rollway itself sets for the engine of a worker."""
    if model.engine == "mocker":
        return []
    own_args = {normalise_option(name) for name in model.args}
    seed = [] if "seed" in own_args else ["--seed", str(model.seed + placed.replica)]
    flags = _make_rank_flags(model, placed)
    if model.engine == "custom":
        return [*flags, *seed]
    flags = ["--enable-rl", "--tensor-parallel-size", str(model.tensor_parallel), *flags]
    if placed.is_headless or "kv-events-config" not in own_args:
        number = [known.name for known in spec.models].index(model.name)
        events = _make_kv_events(placed, make_kv_events_endpoint(run_dir, number, placed.replica))
        flags += ["--kv-events-config", json.dumps(events)]
    # Another interpreter may lack Rollway. Refits then verify its workers by canaries.
    if spec.python is None and "worker-extension-cls" not in own_args:
        flags += ["--worker-extension-cls", WORKER_EXTENSION]
    return flags + seed


def _make_kv_events(placed: PlacedWorker, endpoint: str) -> dict[str, Any]:
    """Return vLLM's settings for what a worker tells the router about its cache.

    Without them the router does not learn what workers have cached, and two workers of one
    machine compete for a default port."""
    if placed.is_headless or placed.role == "decode":
        # Rank 0 speaks for the replica, and the router looks for prefixes at prefill workers.
        return {"enable_kv_cache_events": False}
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "topic": "kv-events",
        "endpoint": endpoint,
    }


def _make_rank_flags(model: ModelSpec, placed: PlacedWorker) -> list[str]:
    """Return vLLM's options for the ranks of a replica and for the part that runs here."""
    flags = []
    for option, size in (
        ("--pipeline-parallel-size", model.pipeline_parallel),
        ("--data-parallel-size", model.data_parallel),
    ):
        if size > 1:
            flags += [option, str(size)]
    if placed.nodes > 1:
        flags += ["--nnodes", str(placed.nodes), "--node-rank", str(placed.node_rank)]
        flags += ["--master-addr", placed.master_host, "--master-port", placed.master_port]
        if model.data_parallel > 1 and placed.rpc_port:
            flags += ["--data-parallel-rpc-port", str(placed.rpc_port)]
    if placed.is_headless:
        flags.append("--headless")
    return flags


def make_kv_events_endpoint(run_dir: Path, model: int, replica: int) -> str:
    """Return the Unix socket on which a vLLM worker publishes what it has cached.

    The socket is in the run directory, which only this user can enter: the events hold token ids,
    and on TCP vLLM publishes them on all interfaces. Publisher and subscriber are one process tree;
    the router receives the events over the event plane.

    The name must contain `inproc`: for data-parallel ranks vLLM and Dynamo derive one address per
    rank with `ZmqEventPublisher.offset_endpoint_port`, which appends `_dp<rank>` to an address that
    contains this word, and raises for any other that is not TCP. Numbers instead of names keep the
    path below the limit of 107 bytes."""
    return f"ipc://{run_dir}/kv-{model}-{replica}.inproc"


def make_role_args(model: ModelSpec, role: WorkerRole, machine: Machine) -> RawArgs:
    """Return the engine's options for workers of a role; the user's own win."""
    if not role:
        return {}
    args: RawArgs = {"disaggregation-mode": role}
    if model.engine == "vllm":
        # A prefill worker without this option does not start.
        transfer = {"kv_connector": NIXL_CONNECTOR, "kv_role": "kv_both"}
        if not machine.has_gpus:
            transfer["kv_buffer_device"] = "cpu"
        args["kv-transfer-config"] = transfer
    return args


def make_role_env(host: str, port: int, machine: Machine) -> dict[str, str]:
    """Return the environment of a worker whose KV others fetch, or that fetches it."""
    env = {
        # vLLM's own detection fails on machines with a loopback address only.
        "VLLM_NIXL_SIDE_CHANNEL_HOST": host,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
        # vLLM sets this itself (a leak in UCX), but not if NIXL was imported before, as Rollway's
        # extension does.
        "UCX_RCACHE_MAX_UNRELEASED": "1024",
        # A line for each peer, with the transports that UCX chose: `rollway doctor --stack` reads
        # it, and nothing else tells.
        "UCX_LOG_LEVEL": "info",
    }
    if not machine.has_rdma:
        # UCX otherwise tries transports that are not there, and its peers disagree.
        cuda = ",cuda_copy,cuda_ipc" if machine.has_gpus else ""
        env["UCX_TLS"] = f"tcp,sm,self{cuda}"
        if is_loopback(host):
            env["UCX_NET_DEVICES"] = "lo"
    return env


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
