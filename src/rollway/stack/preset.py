"""What Rollway adds to a user's spec: the RL preset and the CPU or GPU profile.

Everything here is a default that the same key in the user's `args` or `env` overrides; `null`
removes it. `rollway up --dry-run` prints the outcome. Figures: docs/stack.md.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollway.config import ModelSpec, RawArgs, StackSpec
from rollway.stack import machine

LONGEST_ROLLOUT_SECONDS = 24 * 3600
UNIPROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
# What Dynamo 1.6.1 logs for every request at level `info`: four fifths of 2.4 KB, with the first
# token ids of the prompt. Warnings and errors of these stay, and all that the others say. One line
# of 0.5 KB remains, of the target `request_span`: Dynamo enables it after it has read the filter.
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


def frontend_defaults(spec: StackSpec) -> Defaults:
    migration = spec.migration_limit
    if spec.preset == "plain":
        return Defaults({} if migration is None else {"migration-limit": migration})
    args: RawArgs = {
        # A request whose worker dies goes on elsewhere instead of failing with 503.
        "migration-limit": 3 if migration is None else migration,
        # The rollouts of one group carry one session id and stay where their prefix is cached:
        # 0.85 prefix hits against 0.63 with the router's own choice (32 workers, G=8, 3 turns).
        "router-session-affinity-ttl-secs": 3600,
        # A group prefers its worker, but is not chained to it. With Dynamo's own `hard`, requests
        # of a group whose worker died fail for the 10 s that it stays listed (384 requests, 4 of 8
        # workers killed, retried every 0.3 s: 1,380 to 1,932 failed attempts; with `soft` 0 to
        # 2), and above a busy threshold they are refused (529) where `soft` sends them elsewhere.
        # Without either, both hit alike. No threshold is set: above it on all workers, everything
        # is refused.
        "router-session-affinity-mode": "soft",
    }
    if spec.router.mode == "kv":
        # Hold a burst back until a worker has room: siblings then follow the first of their group
        # instead of spreading before its prefix is cached (hits 0.20 -> 0.76 on a burst).
        args["router-queue-threshold"] = 1.0
    env = {
        # The router forgets the load of requests older than this; rollouts last longer than the
        # 300 s it assumes.
        "DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS": str(LONGEST_ROLLOUT_SECONDS),
        # The RL listing probes every worker: all at once, rather than 32 after 32.
        "DYN_RL_MAX_CONCURRENT_PROBES": "512",
        **_quiet_requests(),
    }
    return Defaults(args, env)


def worker_defaults(spec: StackSpec, model: ModelSpec) -> Defaults:
    quiet = _quiet_requests() if spec.preset == "rl" else {}
    if model.engine != "vllm":
        return Defaults(env=quiet)
    args: RawArgs = {}
    env = {
        # Prefix hashes must agree between workers and restarts for KV-aware routing.
        "PYTHONHASHSEED": "0",
        "VLLM_NO_USAGE_STATS": "1",
        **quiet,
    }
    if spec.preset == "rl":
        # Trainers read whole completions: chunks of 64 tokens instead of 1 cut the frontend's
        # CPU per token 13 times. The first token is still sent at once.
        args["stream-interval"] = 64
        # With tools in a request Dynamo forces calls into a grammar; what is sampled then is not
        # the policy, and the log-probs are those of the grammar (off by 2 in one seen).
        env["DYN_STRUCTURAL_TAG"] = "false"
        # A stack that ends has nothing to drain for; Dynamo would wait 5 s.
        env["DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS"] = "0.5"
    if not machine.gpus():
        _cpu_profile(spec, model, args, env)
    return Defaults(args, env)


def _quiet_requests() -> dict[str, str]:
    """Return Dynamo's log filter, unless the user has set one in the environment."""
    if "DYN_LOG" in os.environ:
        return {}
    return {"DYN_LOG": ",".join(["info", *(f"{target}=warn" for target in _REQUEST_LOGS)])}


def _cpu_profile(spec: StackSpec, model: ModelSpec, args: RawArgs, env: dict[str, str]) -> None:
    """vLLM on a machine without GPUs: for trying things out and for tests."""
    args.update(
        {
            "enforce-eager": True,  # compiling costs minutes here and gains little
            "block-size": 32,  # the CPU attention needs a multiple of 32
            "kv-cache-memory-bytes": 512 * 2**20,  # vLLM would take gigabytes per worker
        }
    )
    if model.tensor_parallel == 1 and not any("parallel" in name for name in model.args):
        # The model runs in the engine's process, as on a GPU. vLLM would start a third process for
        # it on CPU, to bind its threads, which Rollway does not: 10 s of CPU time for each start,
        # and two processes that spin while they wait for each other. The name "uni" is overruled.
        args["distributed-executor-backend"] = UNIPROCESS
    if model.args.get("enforce-eager", True):
        # The sampler has a function that is compiled all the same, at the first request: 17 s the
        # first time ever, 3 s from the cache.
        env["TORCH_COMPILE_DISABLE"] = "1"
    workers = sum(m.replicas * m.tensor_parallel for m in spec.models if m.engine == "vllm")
    env.update(
        {
            # The default binding pins every worker to the same core.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(max(1, machine.cores() // workers)),
            # Without `enforce-eager` the first start compiles; kept, later starts skip it.
            "TORCHINDUCTOR_CACHE_DIR": str(cache_dir() / "torchinductor"),
        }
    )


def cache_dir() -> Path:
    """Things that only cost time when lost: compiled kernels, the demo's base checkpoint."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "rollway"


def merged(defaults: RawArgs, given: RawArgs) -> dict[str, Any]:
    """The user's value wins; `null` removes a default."""
    return {name: value for name, value in {**defaults, **given}.items() if value is not None}
