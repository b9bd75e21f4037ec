"""Run rollouts while weights change, and note what their callers see of it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from rollway.aio import Stack
from rollway.errors import RollwayError
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
class Load:
    """Rollouts that run at once, and short probes beside them, one after the other."""

    stack: Stack
    rollouts: int
    tokens: int
    turn: int
    is_running: bool = False
    """Whether the engine ran all of them when the block began."""
    is_over: bool = False
    metrics_url: str = ""
    answers: list[tuple[float, int | None]] = field(default_factory=list)
    """When each probe was answered, and by which version."""
    results: list[Rollout] = field(default_factory=list)
    seconds: float = 0.0
    sampled: float | None = None
    """Tokens that the engine sampled, by its own counter."""

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Enter the block when all rollouts run, and leave when all have ended."""
        (worker,) = await self.stack.fleet.workers()
        self.metrics_url = f"{worker.admin_url}/metrics"
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
        """Read a counter of the engine, summed over its labels; None if it has none."""
        with contextlib.suppress(RollwayError):
            text = await self.stack._http.get_text(self.metrics_url, timeout=10.0)
            lines = [
                line for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} "))
            ]
            return sum(float(line.rpartition(" ")[2]) for line in lines) if lines else None
        return None

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


async def _cancel(task: asyncio.Future[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
