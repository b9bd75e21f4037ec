"""Measure what a GPU can do at best, and how much of its memory is used while something runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from typing import Any, Self

import torch
from torch import Tensor

_REPEATS = 5
_PINNED = 1 << 30
_GIB = 2**30
_SAMPLE_SECONDS = 0.005


def synchronize(device: torch.device) -> None:
    """Wait for the kernels that were started: they run asynchronously."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_limits(weights: Collection[Tensor], device: torch.device) -> dict[str, Any]:
    """Return the seconds in which these tensors could be copied, at best.

    `device_copy` copies all of them by one `_foreach_copy_` within the device. Host copies move the
    same number of bytes between the device and pinned memory, or pageable memory without a GPU."""
    size = sum(tensor.nbytes for tensor in weights)
    copy = _measure_device_copy(list(weights), device)
    to_device, to_host = _measure_host_copies(size, device)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the engine needs the memory
    rows = {
        "device_copy": copy,
        "pinned_host_to_device": to_device,
        "device_to_pinned_host": to_host,
    }
    return {
        "gigabytes": size / 1e9,
        **{f"{name}_seconds": seconds for name, seconds in rows.items()},
        **{f"{name}_gb_per_s": size / 1e9 / seconds for name, seconds in rows.items()},
    }


def _measure_device_copy(sources: list[Tensor], device: torch.device) -> float:
    copies = [torch.empty_like(tensor) for tensor in sources]
    return _time_best(lambda: torch._foreach_copy_(copies, sources), device)


def _measure_host_copies(size: int, device: torch.device) -> tuple[float, float]:
    """Return the seconds to the device and back. A part is copied: pinning 14 GB takes seconds."""
    part = min(size, _PINNED)
    host = torch.empty(part, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.empty_like(host, device=device)
    to_device = _time_best(lambda: there.copy_(host, non_blocking=True), device)
    to_host = _time_best(lambda: host.copy_(there, non_blocking=True), device)
    return to_device * size / part, to_host * size / part


def _time_best(work: Callable[[], object], device: torch.device) -> float:
    work()
    times = []
    for _ in range(_REPEATS):
        synchronize(device)
        began = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - began)
    return min(times)


class MemoryWatch:
    """Samples the used memory of a GPU, of all processes together, while a block runs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._samples: list[int] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="memory-watch", daemon=True)

    def __enter__(self) -> Self:
        if self._device.type == "cuda":
            self._samples.append(read_used(self._device))
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._device.type == "cuda":
            self._stop.set()
            self._thread.join()
            self._samples.append(read_used(self._device))

    @property
    def figures(self) -> dict[str, float] | None:
        """GiB before, at the peak, and after; None without a GPU."""
        if not self._samples:
            return None
        before, peak, after = self._samples[0], max(self._samples), self._samples[-1]
        figures = {"before": before, "peak": peak, "after": after, "extra": peak - before}
        return {f"{name}_gib": value / _GIB for name, value in figures.items()}

    def _sample(self) -> None:
        while not self._stop.wait(_SAMPLE_SECONDS):
            self._samples.append(read_used(self._device))


def read_used(device: torch.device) -> int:
    """Return the bytes of the device that are in use, by any process."""
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free)
