"""The command `rollway bench gpu-engine`: its options, the stack they describe, its figures."""

from __future__ import annotations

import argparse
import asyncio
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import Say
from benchmarks.gpu_load import PROMPT_TOKENS
from rollway.api import make_spec
from rollway.errors import UsageError
from rollway.fleet.report import RefitMode
from rollway.spec import StackSpec

PARTS = (
    "limits", "throughput", "cuda_ipc", "cuda_ipc_in_place", "shm", "files", "delta", "in-flight",
    "keep", "pause-all", "stock", "offline", "lost",
)  # fmt: skip
ON_REQUEST = ("colocated", "by-turns")
"""Parts that run only if they are named: they need another engine, or a second one."""
UNDER_LOAD: tuple[RefitMode, ...] = ("in-flight", "keep", "pause-all")


@dataclass(slots=True)
class Options:
    """The options of a run."""

    model: str = "2b"
    only: tuple[str, ...] = ()
    rollouts: int = 256
    tokens: int = 512
    repeat: int = 2
    steps: int = 20
    """Of the part `colocated`, at each level."""
    filler_gib: float = 0.0
    """Memory of the device that `colocated` fills, so that it is nearly full."""
    eager: bool = False
    in_place: bool = False
    """Whether cuda_ipc publishes the trainer's own memory in the parts under load."""
    gpu_memory_utilization: float = 0.4
    refits_per_hour: float = 60.0
    seconds: float | None = None
    overrides: tuple[str, ...] = ()


def describe_stack(options: Options, path: Path, *, on_gpu: bool) -> StackSpec:
    """Return the spec of a stack with one worker that serves the model at `path`."""
    args: dict[str, Any] = {
        "dtype": "bfloat16",
        "max-model-len": PROMPT_TOKENS + 2 * options.tokens + 64,
        # Explicit, since the defaults of a server differ from those of an offline engine. One more
        # than rollouts: a probe runs beside them.
        "max-num-seqs": options.rollouts + 1,
        "max-num-batched-tokens": 8192,
    }
    if on_gpu:
        args["gpu-memory-utilization"] = options.gpu_memory_utilization
        args["enforce-eager"] = options.eager
        if "colocated" in options.only:
            args["enable-sleep-mode"] = True
    model = {"path": str(path), "name": "policy", "args": args}
    fields = {"name": "bench-gpu", "models": [model]}
    return make_spec(fields, overrides=list(options.overrides))


def run_command(options: argparse.Namespace, say: Say) -> tuple[int, dict[str, Any]]:
    """Run the benchmark; return the exit code and the figures, also after Ctrl-C or SIGTERM."""
    if min(options.rollouts, options.tokens, options.repeat, options.steps) < 1:
        raise UsageError(
            "--rollouts, --tokens, --repeat and --steps must be positive.",
            "Give at least 1 for each.",
        )
    if options.filler_gib < 0:
        raise UsageError("--filler-gib must not be negative.", "0 fills nothing.")
    known = (*PARTS, *ON_REQUEST)
    unknown = [name for name in options.only if name not in known]
    if unknown:
        raise UsageError(f"There is no part `{unknown[0]}`.", f"Use some of {', '.join(known)}.")
    values = {name: getattr(options, name) for name in Options.__slots__ if hasattr(options, name)}
    values |= {"only": tuple(options.only), "overrides": tuple(options.set)}
    from benchmarks.gpu_engine import GpuEngineBench  # it reads the options above

    bench = GpuEngineBench(Options(**values), say)
    code = 0
    # A machine that is lent for a time ends commands by SIGTERM: they still print what they have.
    before = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        asyncio.run(bench.run())
    except KeyboardInterrupt:
        bench.figures["is_interrupted"], code = True, 130
    finally:
        signal.signal(signal.SIGTERM, before)
    return (code or (1 if bench.failed else 0)), bench.as_json()
