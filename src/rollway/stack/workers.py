"""The workers of a stack: which of them run on this machine, and the options of their engines.

`rollway.stack.plan` makes processes of them. A launcher that has placed workers itself gives them
in `StackSpec.placed`; otherwise `place_here` places all of them. Prefill and decode workers:

    request ─► frontend ─► prefill worker: computes the KV of the prompt, keeps the blocks
                  │            │ where they are: side channel host:port, block ids
                  │ ◄──────────┘
                  └──────► decode worker: fetches the blocks over NIXL, generates

The workers of a role have a component of their own, by whose name discovery tells the role.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rollway.config import StackSpec, is_loopback
from rollway.errors import PortInUse, SpecError, StartError
from rollway.model_spec import ModelSpec, RawArgs, WorkerRole, name_workers, slug
from rollway.ranks import PlacedWorker, normalise_option
from rollway.stack import preset
from rollway.stack.locks import Lease

WORKER_EXTENSION = "rollway.engine.worker.WorkerExtension"
GUARD = Path(__file__).parents[1] / "engine" / "guard.py"
"""Starts a worker whose admin routes accept signed orders only."""


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


NIXL_CONNECTOR = "NixlConnector"
NIXL_ADVICE = (
    "Install it with `pip install nixl`; on a machine without CUDA `pip install nixl-cu12` and "
    "`pip install --no-deps nixl` are enough."
)
_FIND_NIXL = "from importlib.util import find_spec; print(find_spec('nixl') is not None)"


def make_role_args(model: ModelSpec, role: WorkerRole, machine: preset.Machine) -> RawArgs:
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


def make_role_env(host: str, port: int, machine: preset.Machine) -> dict[str, str]:
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
    if needs_nixl and not has_nixl(python):
        raise StartError(
            f"`{model.name}` is served disaggregated, and {python} has no module `nixl`, over "
            "which its workers hand over KV.",
            NIXL_ADVICE,
        )


@cache
def has_nixl(python: str = sys.executable) -> bool:
    """Return whether an interpreter finds the module `nixl`. The package nixl-cu12 alone has it
    under another name, which vLLM does not look for."""
    if python == sys.executable:
        return find_spec("nixl") is not None
    try:
        answer: Any = subprocess.run(
            [python, "-c", _FIND_NIXL], capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return True  # the start of the worker says what is wrong with this interpreter
    return str(answer.stdout).strip() != "False"
