"""Place the workers that chaos starts by itself: on the machine's GPUs, or on its CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollway.demo.placement import Device, choose_device, choose_shared_gpu, make_float32_env

_GPU_SHARE = 0.05
"""Of the GPU's memory, for each worker. The tiny model needs less, and the KV cache has its own
size; a worker that joins or restarts must find as much free."""


def place_workers(
    model: Mapping[str, Any], device: Device | None, gpus: Sequence[str]
) -> dict[str, Any]:
    """Return the model's spec with what its workers need on these GPUs; unchanged without GPUs.

    The judge computes in float32 on the CPU, so that it shares no kernel with the engines; hence
    workers on a GPU must not round to TF32."""
    if choose_device(device, gpus) == "cpu":
        return dict(model)
    args = {
        **model["args"],
        "gpu-memory-utilization": _GPU_SHARE,
        "enforce-eager": True,  # a worker that was killed is back in 50 s instead of 90 to 170 s
    }
    env = {**make_float32_env(), **choose_shared_gpu(gpus, model["replicas"])}
    return {**model, "args": args, "env": env}
