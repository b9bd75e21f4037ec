"""The options of `rollway bench gpu-engine`, and the stack that they describe."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollway.api import make_spec
from rollway.bench.gpu_load import PROMPT_TOKENS
from rollway.config import StackSpec

PARTS = (
    "limits", "throughput", "cuda_ipc", "cuda_ipc_in_place", "shm", "files", "delta", "in-flight",
    "keep", "pause-all", "stock", "offline", "lost",
)  # fmt: skip
ON_REQUEST = ("colocated",)
"""Parts that run only if they are named: they need another engine."""
UNDER_LOAD = ("in-flight", "keep", "pause-all")


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
