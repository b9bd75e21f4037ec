"""The part `colocated` of `rollway bench gpu-engine`: a trainer and an engine share one device.

    sleep ─► train one step ─► wake ─► publish ─► refit ─► generate ─► compare with the trainer
      │          gradients and optimizer state need the memory that the engine released
      └── level 1 keeps the weights in the host's memory; level 2 forgets them: the refit wakes it

Memory is flat if its slope over the steps is about 0: `mib_per_step`. The first steps do not count,
because they load kernels and open memory.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Sequence
from statistics import linear_regression
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import round_floats
from benchmarks.gpu_load import read_used, synchronize
from benchmarks.real_model import Weights

if TYPE_CHECKING:
    from benchmarks.gpu_engine import GpuEngineBench

_WARM_UP = 2
"""Steps that do not count for the slope."""
_MIB, _GIB = 1 << 20, 1 << 30


async def measure_colocated(bench: GpuEngineBench) -> dict[str, Any]:
    """Run the steps at both levels, and return their memory, seconds and checks."""
    on_gpu = bench.device.type == "cuda"
    notes = [] if on_gpu else ["vLLM's engine on CPU stops, but keeps its memory while it sleeps"]
    if bench.options.filler_gib and not on_gpu:
        notes.append("without a GPU there is no filler")
    for note in notes:
        bench.say(f"colocated: {note}")
    filled = 0 if bench.filler is None else bench.filler.nbytes
    figures: dict[str, Any] = {"filler_gib": filled / _GIB, "notes": notes}
    options: dict[str, Any] = {"in_place": True} if on_gpu else {}
    async with bench.stack.publisher("cuda_ipc" if on_gpu else "shm", **options) as publisher:
        for level in (1, 2):
            rows = []
            for step in range(1, bench.options.steps + 1):
                row = await _run_step(bench, publisher, level)
                rows.append(row)
                bench.say(
                    f"colocated, level {level}, step {step}: {json.dumps(round_floats(row, '.4g'))}"
                )
            figures[f"level_{level}"] = _summarize(rows)
    return figures


async def _run_step(bench: GpuEngineBench, publisher: Any, level: int) -> dict[str, Any]:
    stack, seconds = bench.stack, dict[str, float]()
    used = {"before": await _read_used(bench)}
    clock = _Clock(seconds)
    asleep = await stack.sleep(level=level)
    clock.lap("sleep")
    used["asleep"] = await _read_used(bench)
    loss, used["training"] = _train(bench)
    clock.lap("train")
    await stack.wake()  # at level 2 only the refit wakes
    clock.lap("wake")
    row = await bench.refit(publisher, "pause-all", _keep)
    clock.lap("publish_and_refit")
    check = await bench.check_fresh(f"colocated level {level}")
    clock.lap("generate_and_check")
    used["after"] = await _read_used(bench)
    (worker,) = row["report"]["workers"]
    return {
        "version": row["version"],
        "loss": loss,
        "used_gib": {moment: value / _GIB for moment, value in used.items()},
        "released_gib": asleep.released_bytes / _GIB,
        "seconds": seconds,
        "paused_seconds": row["paused_seconds"],
        "refit_seconds": row["refit_seconds"],
        "proof": worker["proof"],
        "strategy": worker["strategy"],
        "mismatch_kl": check["mismatch_kl"],
        "is_of_version": check["is_of_version"],
    }


def _train(bench: GpuEngineBench) -> tuple[float, int]:
    """Take a step of the optimizer; return the loss, and the memory in use at its end."""
    synchronize(bench.device)
    loss = bench.get_reference().train(bench.version)
    synchronize(bench.device)
    used = read_used(bench.device) if bench.device.type == "cuda" else 0
    bench.get_reference().drop_training_state()
    gc.collect()
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()  # the engine takes this memory back
    return loss, used


def _keep(_: Weights, __: int) -> None:
    """Leave the weights as the trainer's step made them."""


async def _read_used(bench: GpuEngineBench) -> int:
    """Return the memory in use: of the device by all processes, or of the engine's process."""
    if bench.device.type == "cuda":
        return read_used(bench.device)
    (worker,) = await bench.stack.fleet.workers(fresh=False)
    ranks = await bench.stack.fleet.admin.memory(worker)
    return sum(int(rank["resident"]) for rank in ranks)


def _summarize(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    counted = rows[_WARM_UP:] if len(rows) > _WARM_UP + 1 else rows
    moments = ("before", "asleep", "after")
    slopes = {m: fit_slope([row["used_gib"][m] * _GIB / _MIB for row in counted]) for m in moments}
    return {
        "mib_per_step": slopes,
        "is_of_version": all(row["is_of_version"] for row in rows),
        "proofs": sorted({row["proof"] for row in rows}),
        "largest_mismatch_kl": max(row["mismatch_kl"] for row in rows),
        "steps": list(rows),
    }


def fit_slope(values: Sequence[float]) -> float:
    """Return by how much values grow from one to the next, by least squares."""
    if len(values) < 2:
        return 0.0
    return linear_regression(range(len(values)), values).slope


class _Clock:
    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds = seconds
        self._began = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self._seconds[name], self._began = now - self._began, now
