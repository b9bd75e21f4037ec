"""What vLLM's sleep mode holds in this process, and what must not be touched while it sleeps.

vLLM allocates inside a pool of its own allocator (`CuMemAllocator`) in two places:

| tag | holds | level 1 | level 2 |
|---|---|---|---|
| `weights` | parameters, buffers, LoRA slots, the draft model | moved to the host | forgotten |
| `kv_cache` | the KV cache | forgotten | forgotten |

(Buffers are saved by vLLM itself at level 2.) Everything else is outside: captured graphs and their
scratch, Triton's, NCCL's, what Rollway stages, and pinned host buffers. A sleeping allocation keeps
its address and loses the memory behind it: a `LoadPlan` and captured graphs stay valid, but a copy
to such an address ends the process. So every swap asks here first. Without the allocator (CPU, or
an engine without sleep mode) nothing ever sleeps.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import torch

from rollway.engine.fingerprint import Proof
from rollway.engine.memory import count_free_bytes
from rollway.engine.patching import set_served
from rollway.weights.checkpoint import TensorHeader

_STOP_SECONDS = 60.0
_ALLOCATOR = "vllm.device_allocator.cumem"


def find_asleep() -> list[tuple[int, int, str]]:
    """Return what sleeps in the pools of this process: addresses, bytes and tags."""
    # By name, because importing it would load CUDA's library.
    allocator = getattr(sys.modules.get(_ALLOCATOR), "CuMemAllocator", None)
    pools = getattr(getattr(allocator, "instance", None), "pointer_to_data", {})
    return [
        (address, int(data.handle[1]), str(data.tag))
        for address, data in pools.items()
        if data.is_asleep
    ]


def refuse_sleeping(model: torch.nn.Module) -> None:
    """Raise if memory of a parameter or buffer is gone."""
    asleep = find_asleep()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()] if asleep else ():
        if any(start <= tensor.data_ptr() < start + nbytes for start, nbytes, _ in asleep):
            raise RuntimeError(f"{name} sleeps: nothing may be copied into it before it is woken")


def describe_memory(worker: Any, served: Mapping[str, TensorHeader] | None, level: int) -> Any:
    """Return the memory of this rank as JSON types, and why it may not sleep at the level."""
    device = next(worker.model_runner.get_model().parameters()).device
    sleeping: dict[str, int] = {}
    for _, nbytes, tag in find_asleep():
        sleeping[tag] = sleeping.get(tag, 0) + nbytes
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        device = torch.device("cuda", device.index or 0)
    else:
        free, total = count_free_bytes(), _read_status("/proc/meminfo", "MemTotal")
    return {
        "device": str(device),
        "free": int(free),
        "total": int(total),
        "resident": _read_status("/proc/self/status", "VmRSS"),
        "asleep_bytes": sleeping,
        "releases": bool(worker.model_config.enable_sleep_mode),
        "refusal": explain_no_sleep(worker, served, level) if level else "",
    }


def explain_no_sleep(worker: Any, served: Mapping[str, TensorHeader] | None, level: int) -> str:
    """Return why this rank may not sleep at a level; "" if it may."""
    model = worker.model_runner.get_model()
    on_cpu = next(model.parameters()).device.type == "cpu"
    if not worker.model_config.enable_sleep_mode and not on_cpu:
        return (
            "the engine was started without sleep mode: set `enable-sleep-mode: true` in the "
            "model's args, and start it again"
        )
    if level != 2:
        return ""
    reasons = {
        "adapters are enabled": worker.vllm_config.lora_config is not None,
        "a draft model is served": getattr(worker, "get_draft_model", lambda: None)() is not None,
        f"the model is quantised ({worker.model_config.quantization})": (
            worker.model_config.quantization is not None
        ),
    }
    for reason, holds in reasons.items():
        if holds:
            return (
                f"{reason}, and a refit would not bring back all that level 2 forgets: use level 1"
            )
    missing = Proof(model).list_missing(served) if served is not None else []
    if missing:
        return f"the checkpoint lacks {missing[0]}, so no refit would bring it back: use level 1"
    return ""


def prepare_sleep(worker: Any, level: int) -> None:
    """Discard staged weights, and forget what will not be true after the sleep."""
    staging = getattr(worker, "_rollway_staging", None)
    if staging is not None:
        # Of a refit whose process was killed. Its background task may read parameters: they must
        # not vanish meanwhile.
        staging.discard()
        if not wait([staging.task], _STOP_SECONDS).done:
            raise RuntimeError("weights are still being staged")
        worker._rollway_staging = None
    if torch.cuda.is_available():
        worker._rollway_kv_in_doubt = False  # the device takes the memory of the KV cache
    if level == 2:
        set_served(worker, None)  # a patch needs the old weights


def _read_status(path: str, field: str) -> int:
    """Return a field of a file of /proc in bytes."""
    lines = Path(path).read_text().splitlines()
    values = (line.split()[1] for line in lines if line.startswith(f"{field}:"))
    return int(next(values, "0")) * 1024
