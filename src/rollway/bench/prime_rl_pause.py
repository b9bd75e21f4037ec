"""Measure how long running rollouts get no token: during a broadcast, and during Dynamo's update.

A stream that a swap cuts starts again, and waits for its prompt to be computed under the new
weights. Dynamo's own update keeps streams, whose KV cache is then of the old weights.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

from rollway.aio import Stack, up
from rollway.api import make_spec
from rollway.bench import Say
from rollway.bench.refit import build_model, change_all
from rollway.errors import RollwayError
from rollway.http import Http
from rollway.integrations.prime_rl.broadcast import BroadcastSender
from rollway.integrations.prime_rl.check import make_headers
from rollway.rollout.client import events
from rollway.rollout.sampling import Sampling
from rollway.rollout.wire import completion_request
from rollway.weights.transports.files import read_tensors

Serve = Callable[[str, Path], AbstractAsyncContextManager[str]]
"""Runs `rollway prime-rl serve` for a stack, with an output directory; gives its address."""
MODEL = "bench"
_ANSWER_SECONDS = 600.0
PAUSE_ROUNDS = 5
_MEGABYTES = 520
_STREAMS = 4
_AFTERWARDS_SECONDS = 3.0
"""How long streams are watched after an update: the worker packs its layers until then."""


async def measure(scratch: Path, say: Say, serve: Serve) -> dict[str, Any]:
    """Broadcast to one worker and update another by Dynamo's own call, by turns."""
    say(f"pause: building a model of about {_MEGABYTES} MB, starting two stacks")
    model = build_model(scratch / "model", _MEGABYTES)
    first = {name: tensor.clone() for name, tensor in read_tensors(model)}
    sender = BroadcastSender(scratch / "runs", keep_recent=9)
    directories = [
        sender.send(i, state.items()) for i, state in enumerate((first, change_all(first)))
    ]
    for directory in directories:  # Dynamo's update needs it, the server does not
        (directory / "config.json").write_bytes((model / "config.json").read_bytes())
        (directory / "STABLE").touch()
    args = {"dtype": "bfloat16", "max-model-len": 512, "max-num-seqs": 16, "stream-interval": 1}
    served = {"path": str(model), "name": MODEL, "args": args}

    def spec(name: str) -> Any:
        return make_spec({"name": name, "models": [served]})

    async with (
        up(spec("bench-stock")) as stock,
        up(spec("bench-broadcast")) as ours,
        serve(ours.name, scratch) as server,
    ):
        rounds = []
        for number in range(PAUSE_ROUNDS + 1):
            directory = directories[(number + 1) % 2]
            by_stock = _watch(stock, partial(_update, stock, directory, number + 1))
            by_server = _watch(ours, partial(_broadcast, server, directory))
            pair = (by_stock, by_server) if number % 2 else (by_server, by_stock)
            seen = [await each for each in pair]
            row = dict(zip(("stock", "rollway"), seen if number % 2 else seen[::-1], strict=True))
            say(f"pause: {row['rollway'].pause:.3f} s, stock {row['stock'].pause:.3f} s")
            rounds.append(row)
    return compare_pauses(rounds[1:], sum(tensor.nbytes for tensor in first.values()))


@dataclass(slots=True)
class Seen:
    """What streams saw of an update."""

    gap: float
    """The longest time without a token, the median over the streams."""
    usual: float
    """The median time between two tokens before the update."""
    closed: float
    """Seconds from the pause to the resume, in which new requests wait."""
    first_token: float = 0.0
    """Seconds until the same streams have a first token when nothing is updated: what a stream that
    a swap cuts must wait for at least."""

    @property
    def pause(self) -> float:
        return max(self.gap - self.usual, 0.001)


def compare_pauses(rounds: list[dict[str, Seen]], model_bytes: int) -> dict[str, Any]:
    arms = {}
    for arm in ("stock", "rollway"):
        rows = [row[arm] for row in rounds]
        names = ("pause", "gap", "usual", "closed", "first_token")
        arms[arm] = {name: median(getattr(row, name) for row in rows) for name in names}
    ratios = [row["rollway"].pause / row["stock"].pause for row in rounds]
    closed = [row["rollway"].closed / row["stock"].closed for row in rounds]
    return {
        "model_bytes": model_bytes,
        "seconds": arms,
        "ratio": median(ratios),
        "ratios": ratios,
        "closed_ratio": median(closed),
    }


async def _watch(stack: Stack, update: Callable[[], Awaitable[float]]) -> Seen:
    """Stream rollouts, update the weights meanwhile, and return what the streams saw."""
    streams = [_Stream() for _ in range(_STREAMS)]
    async with aiohttp.ClientSession() as http:
        first_token = await _measure_first_token(http, stack.frontend_url)
        running = [asyncio.create_task(s.run(http, stack.frontend_url)) for s in streams]
        try:
            while min(len(s.moments) for s in streams) < 20:
                await asyncio.sleep(0.05)
                for task in running:
                    if task.done():
                        task.result()
            began = time.perf_counter()
            closed = await update()
            await asyncio.sleep(_AFTERWARDS_SECONDS)
            ended = time.perf_counter()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
    gaps = [stream.measure(began, ended) for stream in streams]
    usual = median(b - a for s in streams for a, b in pairwise(s.moments) if b < began)
    return Seen(median(gaps), usual, closed, first_token)


_PROMPTS = count(100)
"""Where prompts begin that no cache has."""


async def _measure_first_token(http: aiohttp.ClientSession, frontend: str) -> float:
    """Start as many streams as `_watch` does, with a new prompt; return the median time until the
    first token."""
    first = next(_PROMPTS)
    sampling = Sampling(max_tokens=1, ignore_eos=True, logprobs=False)
    body = completion_request(MODEL, list(range(first, first + 32)), sampling, stream=True)

    async def start() -> float:
        began = time.perf_counter()
        async with http.post(f"{frontend}/v1/completions", json=body) as answer:
            answer.raise_for_status()
            async for _ in events(aiter(answer.content)):
                return time.perf_counter() - began
        raise RollwayError("A stream ended without a token.")

    return median(await asyncio.gather(*(start() for _ in range(_STREAMS))))


@dataclass(slots=True)
class _Stream:
    """A rollout that never ends, and when its tokens came."""

    moments: list[float] = field(default_factory=list)

    async def run(self, http: aiohttp.ClientSession, frontend: str) -> None:
        """Stream at Dynamo's frontend; what ends or is cut begins again at once."""
        sampling = Sampling(max_tokens=400, ignore_eos=True, logprobs=False)
        body = completion_request(MODEL, list(range(10, 42)), sampling, stream=True)
        while True:
            async with http.post(f"{frontend}/v1/completions", json=body) as answer:
                answer.raise_for_status()
                async for _ in events(aiter(answer.content)):
                    self.moments.append(time.perf_counter())

    def measure(self, began: float, ended: float) -> float:
        """Return the longest time without a token between two moments."""
        return max(b - a for a, b in pairwise([*self.moments, ended]) if began <= b <= ended)


async def _update(stack: Stack, directory: Path, version: int) -> float:
    """Update as prime-rl does it with Dynamo's own routes; return how long it was paused."""
    (worker,) = await stack.fleet.workers()
    admin, began = stack.fleet.admin, time.perf_counter()
    await admin.pause(worker, "keep", clear_cache=False)
    await admin.update_from_disk(worker, directory, version)
    await admin.resume(worker)
    return time.perf_counter() - began


async def _broadcast(server: str, directory: Path) -> float:
    """Send the calls of prime-rl's orchestrator; return how long its gate was closed."""
    async with Http() as http:
        began = time.perf_counter()
        for path, body in (
            ("/pause?mode=keep&clear_cache=false", None),
            ("/update_weights", {"weight_dir": str(directory)}),
            ("/resume", None),
        ):
            headers = make_headers({})
            await http.post(f"{server}{path}", body, timeout=_ANSWER_SECONDS, headers=headers)
        return time.perf_counter() - began
