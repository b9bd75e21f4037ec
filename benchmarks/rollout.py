"""`rollway bench rollout`: the cost of the client and the gateway, against others in the same run.

The same requests go to the same stack, with the same number in flight, through `Rollouts`, through
a bare aiohttp loop that checks nothing, and through the `openai` client. The three alternate, every
round sends new prompts, and a ratio is the median of the rounds' ratios: a machine that slows down
affects all three.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import aiohttp
from aiohttp import web

from benchmarks import round_floats
from benchmarks.inputs import build_demo_model
from rollway.aio import Stack, up
from rollway.api import make_spec
from rollway.cli.output import print_progress as say
from rollway.gateway.command import create_gateway
from rollway.gateway.server import Gateway
from rollway.gateway.store import SessionStore
from rollway.gateway.template import Template
from rollway.rollout.sampling import Sampling
from rollway.rollout.wire import completion_request
from rollway.spec import StackSpec

ROUNDS = 5
Figures = dict[str, Any]
Send = Callable[[list[int]], Awaitable[int]]
"""Sends a prompt and returns the number of sampled tokens."""


@dataclass(frozen=True, slots=True)
class RequestLoad:
    """A number of equal requests."""

    name: str
    requests: int
    at_once: int
    prompt_tokens: int
    max_tokens: int


LOADS = (
    RequestLoad("short", 300, 64, 128, 16),
    RequestLoad("long answers", 128, 64, 512, 256),
    RequestLoad("32k prompts", 24, 8, 32_000, 8),
)
REAL_LOADS = (RequestLoad("short", 128, 64, 128, 16), RequestLoad("long answers", 64, 64, 512, 64))
"""A real engine on CPU is slow, and its context is short: fewer and shorter requests."""


def run(options: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    path = str(build_demo_model())
    # A mocker that answers as fast as it can, so that the clients are measured.
    mocked = {"max-model-len": 40_000, "speedup-ratio": 1000.0}
    real = {"dtype": "float32", "max-model-len": 2048, "max-num-seqs": 64}

    def spec(engine: str, args: dict[str, Any]) -> StackSpec:
        model = {"path": path, "name": "tiny", "engine": engine, "replicas": 1, "args": args}
        return make_spec({"name": f"bench-{engine}", "models": [model]})

    clients, gateway = asyncio.run(bench_rollout(spec("mocker", mocked))), []
    if not options.no_real:
        clients += asyncio.run(bench_rollout(spec("vllm", real)))
        with tempfile.TemporaryDirectory(prefix="rollway-bench-") as scratch:
            gateway = asyncio.run(bench_gateway(spec("vllm", real), Path(scratch)))
    engines = {row["engine"]: _summarize(clients, row["engine"]) for row in clients}
    return 0, {"clients": clients, "gateway": gateway, "engines": engines}


def _summarize(clients: list[Figures], engine: str) -> dict[str, float]:
    """Return geometric means over all loads, also those where the engine needs nearly all of the
    time and the clients hardly differ."""
    rows = [row for row in clients if row["engine"] == engine]
    names = ("ratio_to_bare", "ratio_to_openai", "cpu_ratio_to_openai")
    return {name: round(geometric_mean(row[name] for row in rows), 3) for name in names}


async def bench_rollout(spec: StackSpec) -> list[Figures]:
    """Measure all clients on one stack."""
    rows: list[Figures] = []
    engine = spec.models[0].engine
    say(f"{engine}: starting the stack")
    async with up(spec) as stack:
        for load in LOADS if engine == "mocker" else REAL_LOADS:
            say(f"{engine}: {load.name}")
            rows.append(await _measure_clients(stack, engine, load))
            say(f"{engine}: {load.name}: {rows[-1]['requests_per_second']} requests/s")
    return rows


async def _measure_clients(stack: Stack, engine: str, load: RequestLoad) -> Figures:
    from openai import AsyncOpenAI

    logprobs = engine != "mocker"
    sampling = Sampling(max_tokens=load.max_tokens, ignore_eos=True, logprobs=logprobs)
    model = stack.models[0]
    rng = random.Random(0)
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        AsyncOpenAI(
            base_url=f"{stack.frontend_url}/v1", api_key="-", max_retries=0, timeout=600.0
        ) as openai,
    ):
        senders = {
            "bare": _make_bare(session, stack, model, sampling),
            "rollway": _make_rollway(stack, sampling),
            "openai": _make_openai(openai, model, sampling),
        }
        names = list(senders)
        rounds = []
        for turn in range(ROUNDS + 1):
            first = turn % len(names)
            times = {}
            for name in names[first:] + names[:first]:
                # New prompts every time: no client may profit from another's prefix cache.
                prompts = [
                    rng.choices(range(10, 200), k=load.prompt_tokens) for _ in range(load.requests)
                ]
                times[name] = await _time_round(senders[name], prompts, load.at_once)
            rounds.append(times)
    return _compute_figures(engine, load, rounds[1:])  # the first round is the warm-up


@dataclass(frozen=True, slots=True)
class _Round:
    """The times of one client in one round."""

    seconds: float
    cpu_seconds: float
    tokens: int


def _compute_figures(engine: str, load: RequestLoad, rounds: list[dict[str, _Round]]) -> Figures:
    """Return the figures of one load by client: medians over the rounds."""

    def take(get: Callable[[_Round], float], digits: int) -> dict[str, float]:
        return {
            name: round(median(get(times[name]) for times in rounds), digits) for name in rounds[0]
        }

    def ratio(other: str) -> float:
        return round(median(times[other].seconds / times["rollway"].seconds for times in rounds), 3)

    # CPU time of the client process.
    cpu_ms = take(lambda times: times.cpu_seconds * 1000 / load.requests, 3)
    return {
        "engine": engine,
        "load": load.name,
        "requests_per_second": take(lambda times: load.requests / times.seconds, 1),
        "tokens_per_second": take(lambda times: times.tokens / times.seconds, 1),
        "cpu_ms_per_request": cpu_ms,
        "ratio_to_bare": ratio("bare"),
        "ratio_to_openai": ratio("openai"),
        "cpu_ratio_to_openai": round(cpu_ms["openai"] / max(cpu_ms["rollway"], 1e-6), 3),
    }


async def _time_round(send: Send, prompts: list[list[int]], at_once: int) -> _Round:
    slots = asyncio.Semaphore(at_once)

    async def send_in_slot(prompt: list[int]) -> int:
        async with slots:
            return await send(prompt)

    began, cpu_began = time.monotonic(), time.process_time()
    tokens = sum(await asyncio.gather(*map(send_in_slot, prompts)))
    return _Round(time.monotonic() - began, time.process_time() - cpu_began, tokens)


def _make_rollway(stack: Stack, sampling: Sampling) -> Send:
    rollouts = stack.rollouts(concurrency=1_000_000)

    async def send(prompt: list[int]) -> int:
        (rollout,) = await rollouts.generate(prompt, sampling)
        return len(rollout.token_ids)

    return send


def _make_bare(
    session: aiohttp.ClientSession, stack: Stack, model: str, sampling: Sampling
) -> Send:
    """Send the same body and decode the answer, without retries or checks."""
    url = f"{stack.frontend_url}/v1/completions"

    async def send(prompt: list[int]) -> int:
        body = completion_request(model, prompt, sampling)
        async with session.post(url, json=body) as response:
            response.raise_for_status()
            answer = await response.json()
        return len(answer["nvext"]["completion_token_ids"])

    return send


def _make_openai(client: Any, model: str, sampling: Sampling) -> Send:
    """Send and receive token ids as Dynamo's documentation describes."""

    async def send(prompt: list[int]) -> int:
        answer = await client.completions.create(
            model=model,
            prompt="-",
            max_tokens=sampling.max_tokens,
            temperature=1.0,
            logprobs=0 if sampling.logprobs else None,
            extra_body={
                "ignore_eos": True,
                "nvext": {"token_data": prompt, "extra_fields": ["completion_token_ids"]},
            },
        )
        return len(answer.model_extra["nvext"]["completion_token_ids"])

    return send


async def bench_gateway(spec: StackSpec, scratch: Path) -> list[dict[str, float]]:
    """Compare the gateway with the frontend, over real HTTP.

    The gateway runs in this process, so that both paths use the same cores."""
    rows = []
    async with up(spec) as stack:
        store = SessionStore(scratch / "gateway.sqlite")
        gateway = await create_gateway(stack, Template(spec.models[0].path), store)
        runner = web.AppRunner(gateway.app(), access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        try:
            for length in (64, 1_500):
                for count in (1, 100, 1000):
                    if length > 1000 and count > 100:
                        continue  # the overhead of long prompts shows with fewer sessions
                    say(f"gateway: {count} sessions, prompts of about {length} tokens")
                    rows.append(await _measure_overhead(stack, gateway, url, count, length))
                    say(f"gateway: {rows[-1]['overhead_ms']} ms more per request")
        finally:
            await runner.cleanup()
            store.close()
    return rows


async def _measure_overhead(
    stack: Stack, gateway: Gateway, url: str, sessions: int, length: int
) -> dict[str, float]:
    messages = [{"role": "user", "content": "7" * length}]  # a token per character
    prompt = await gateway.template.prompt({}, messages, None)
    direct = {
        "model": gateway.model,
        "messages": [{"role": "user", "content": "-"}],
        "max_tokens": 8,
        "logprobs": True,
        "ignore_eos": True,
        "nvext": {"token_data": prompt, "extra_fields": ["completion_token_ids"]},
    }
    through = {"messages": messages, "max_tokens": 8, "ignore_eos": True}
    paths = [
        (f"{stack.frontend_url}/v1/chat/completions", direct),
        (f"{url}/chat/completions", through),
    ]
    # A round of one session is a single request: too noisy for few rounds.
    rounds = 40 if sessions == 1 else ROUNDS
    rows: list[list[float]] = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        for number in range(rounds + 1):
            names = [f"s{sessions}-{length}-{number}-{session}" for session in range(sessions)]
            # The two paths alternate in which is first.
            order = 1 if number % 2 else -1
            times = [await _time_requests(http, *path, names) for path in paths[::order]]
            rows.append(times[::order])
    rows = rows[1:]  # the first round is the warm-up
    direct_ms, gateway_ms = (median(column) for column in zip(*rows, strict=True))
    overhead = median(through_ms - alone_ms for alone_ms, through_ms in rows)
    # Wall time of all requests, divided by their number.
    times_ms = {"direct_ms": direct_ms, "gateway_ms": gateway_ms, "overhead_ms": overhead}
    return {"sessions": sessions, "prompt_tokens": len(prompt), **round_floats(times_ms, ".3f")}


async def _time_requests(
    http: aiohttp.ClientSession, url: str, body: dict[str, Any], names: list[str]
) -> float:
    """Send one request per session, all at once; return milliseconds of wall time per request."""

    async def send(name: str) -> None:
        async with http.post(url, json=body, headers={"x-rollway-session": name}) as answer:
            answer.raise_for_status()
            await answer.read()

    began = time.monotonic()
    await asyncio.gather(*map(send, names))
    return (time.monotonic() - began) * 1000 / len(names)
