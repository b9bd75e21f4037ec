"""What is measured around refits on a GPU: rollouts under load, memory, the device's limits."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Self

import torch
from torch import Tensor

from rollway.aio import Stack
from rollway.errors import RollwayError
from rollway.fleet.workers import Worker
from rollway.observe.metrics_reader import sum_series
from rollway.rollout.client import Rollout
from rollway.rollout.sampling import Sampling

PROMPT_TOKENS = 64
_START_SECONDS = 20.0
"""How long to wait until the engine runs all rollouts; then the refit begins anyway."""
_RUNNING = "vllm:num_requests_running"
_SAMPLED = "vllm:generation_tokens_total"


def make_prompts(count: int, turn: int) -> list[list[int]]:
    """Return prompts that no other turn has, so that none is cached."""
    return [
        [
            1 + turn % 250,
            *((7 * place * (number + 1) + 3) % 256 for place in range(1, PROMPT_TOKENS)),
        ]
        for number in range(count)
    ]


@dataclass(slots=True)
class ProbedLoad:
    """Rollouts that run at once, and short probes beside them, one after the other."""

    stack: Stack
    rollouts: int
    tokens: int
    turn: int
    is_running: bool = False
    """Whether the engine ran all of them when the block began."""
    is_over: bool = False
    worker: Worker = field(init=False)
    answers: list[tuple[float, int | None]] = field(default_factory=list)
    """When each probe was answered, and by which version."""
    results: list[Rollout] = field(default_factory=list)
    seconds: float = 0.0
    sampled: float | None = None
    """Tokens that the engine sampled, by its own counter."""

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Enter the block when all rollouts run, and leave when all have ended."""
        (self.worker,) = await self.stack.fleet.workers()
        before = await self._read_metric(_SAMPLED)
        client = self.stack.rollouts(concurrency=self.rollouts + 1)
        sampling = Sampling(max_tokens=self.tokens, temperature=1.0, ignore_eos=True)
        began = time.perf_counter()
        batch = asyncio.ensure_future(
            client.generate_batch(make_prompts(self.rollouts, self.turn), sampling)
        )
        try:
            self.is_running = await self._wait_until_running(batch)
            probes = asyncio.create_task(self._probe())
            try:
                yield
                self.results = [group[0] for group in await batch]
                self.seconds = time.perf_counter() - began
                self.is_over = True
                await asyncio.wait_for(probes, 30.0)
            finally:
                await _cancel(probes)
        finally:
            await _cancel(batch)
        after = await self._read_metric(_SAMPLED)
        if before is not None and after is not None:
            self.sampled = after - before

    async def _wait_until_running(self, batch: asyncio.Future[Any]) -> bool:
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline and not batch.done():
            running = await self._read_metric(_RUNNING)
            if running is None:  # no such counter: give them a moment
                await asyncio.sleep(2.0)
                return False
            if running >= self.rollouts:
                return True
            await asyncio.sleep(0.1)
        return False

    async def _probe(self) -> None:
        """Sample one token at a time: what a new caller sees. The last probe begins after all."""
        client, sampling = self.stack.rollouts(), Sampling(max_tokens=1, ignore_eos=True)
        is_last = False
        while not is_last:
            is_last = self.is_over
            (rollout,) = await client.generate([2, 3, 5, 7], sampling)
            self.answers.append((time.perf_counter(), rollout.weight_version))
            await asyncio.sleep(0.005)

    async def _read_metric(self, name: str) -> float | None:
        return await read_metric(self.stack, self.worker, name)

    def get_figures(self, version: int, began: float, paused: float, rate: float) -> dict[str, Any]:
        """Return what the callers saw of a refit that began at `began` and paused so long."""
        received = sum(len(rollout.token_ids) for rollout in self.results)
        new = sum(
            span.end - span.start
            for rollout in self.results
            for span in rollout.spans
            if span.version == version
        )
        times = [moment for moment, answered in self.answers if answered == version]
        moments = [moment for moment, _ in self.answers]
        gaps = [after - before for before, after in pairwise(moments)]
        spans = Counter(len(rollout.spans) for rollout in self.results)
        return {
            "all_running": self.is_running,
            "tokens": received,
            "tokens_of_new_version": new,
            "seconds": self.seconds,
            "tokens_per_second": received / self.seconds,
            "tokens_lost_to_pause": paused * (rate or received / self.seconds),
            "tokens_sampled_and_discarded": self._count_discarded(received),
            "first_new_token_seconds": times[0] - began if times else None,
            "longest_wait_of_a_probe_seconds": max(gaps, default=None),
            "rollouts_by_spans": {str(count): total for count, total in sorted(spans.items())},
        }

    def _count_discarded(self, received: int) -> float | None:
        return None if self.sampled is None else self.sampled - received - len(self.answers)


async def read_metric(stack: Stack, worker: Worker, name: str) -> float | None:
    """Read a counter of the engine, summed over its labels; None if it has none."""
    try:
        page = await stack._http.get_text(f"{worker.admin_url}/metrics", timeout=10.0)
    except RollwayError:
        return None
    return sum_series(page, [name], []).get(name)


async def _cancel(task: asyncio.Future[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


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
