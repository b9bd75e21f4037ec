"""`rollway bench rollout`: what the client and the gateway cost, against others in the same run.

The same requests, to the same stack, with the same number at once: through `Rollouts`, through a
bare aiohttp loop that checks nothing, and through the `openai` client. Rounds of the three take
turns, every round has prompts that nobody has sent before, and a ratio is the median of the ratios
of the rounds: a machine that slows down slows down all of them.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

from rollway.api import Stack, up
from rollway.config import StackSpec
from rollway.gateway.recorder import Recorder
from rollway.gateway.server import Gateway, create_gateway
from rollway.gateway.template import Template
from rollway.rollout.sampling import Sampling
from rollway.rollout.wire import completion_request

ROUNDS = 5
Say = Callable[[str], None]
Send = Callable[[list[int]], Awaitable[int]]
"""Sends one prompt, and tells how many tokens came back."""


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent."""

    name: str
    requests: int
    at_once: int
    prompt_tokens: int
    max_tokens: int


LOADS = (
    Load("short", 300, 64, 128, 16),
    Load("long answers", 128, 64, 512, 256),
    Load("32k prompts", 24, 8, 32_000, 8),
)
REAL_LOADS = (Load("short", 128, 64, 128, 16), Load("long answers", 64, 64, 512, 64))
"""A real engine on CPU is slow, and its context is short."""


@dataclass(slots=True)
class ClientFigures:
    """One load, by each client: medians of some rounds."""

    engine: str
    load: str
    requests_per_second: dict[str, float] = field(default_factory=dict)
    tokens_per_second: dict[str, float] = field(default_factory=dict)
    cpu_ms_per_request: dict[str, float] = field(default_factory=dict)
    """Of this process."""
    ratio_to_bare: float = 0.0
    ratio_to_openai: float = 0.0
    cpu_ratio_to_openai: float = 0.0


@dataclass(slots=True)
class GatewayFigures:
    """Chat requests through the gateway against the frontend itself."""

    sessions: int
    prompt_tokens: int
    direct_ms: float
    """Wall time of all, by the number of requests."""
    gateway_ms: float
    overhead_ms: float


@dataclass(slots=True)
class RolloutFigures:
    clients: list[ClientFigures] = field(default_factory=list)
    gateway: list[GatewayFigures] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        engines = dict.fromkeys(one.engine for one in self.clients)
        return {**asdict(self), "engines": {engine: self._over_all(engine) for engine in engines}}

    def _over_all(self, engine: str) -> dict[str, float]:
        """The geometric mean over the loads. One where the engine itself takes nearly all of the
        time cannot tell clients apart, and counts as it is."""
        rows = [one for one in self.clients if one.engine == engine]

        def mean(ratios: list[float]) -> float:
            return round(math.exp(sum(map(math.log, ratios)) / len(ratios)), 3)

        return {
            "ratio_to_bare": mean([one.ratio_to_bare for one in rows]),
            "ratio_to_openai": mean([one.ratio_to_openai for one in rows]),
            "cpu_ratio_to_openai": mean([one.cpu_ratio_to_openai for one in rows]),
        }


async def bench_rollout(spec: StackSpec, say: Say) -> list[ClientFigures]:
    """All clients on one stack."""
    found: list[ClientFigures] = []
    engine = spec.models[0].engine
    say(f"{engine}: starting the stack")
    async with up(spec) as stack:
        for load in LOADS if engine == "mocker" else REAL_LOADS:
            say(f"{engine}: {load.name}")
            found.append(await _clients(stack, engine, load))
            say(f"{engine}: {load.name}: {found[-1].requests_per_second} requests/s")
    return found


async def _clients(stack: Stack, engine: str, load: Load) -> ClientFigures:
    logprobs = engine != "mocker"
    sampling = Sampling(max_tokens=load.max_tokens, ignore_eos=True, logprobs=logprobs)
    model = stack.models[0]
    prompts = _Prompts(load)
    from openai import AsyncOpenAI

    connector = aiohttp.TCPConnector(limit=0)
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        AsyncOpenAI(
            base_url=f"{stack.frontend_url}/v1", api_key="-", max_retries=0, timeout=600.0
        ) as openai,
    ):
        senders = {
            "bare": _bare(session, stack, model, sampling),
            "rollway": _rollway(stack, sampling),
            "openai": _openai(openai, model, sampling),
        }
        rounds = []
        for turn in range(ROUNDS + 1):
            order = [list(senders)[(place + turn) % len(senders)] for place in range(len(senders))]
            rounds.append(
                {name: await _timed(senders[name], prompts.fresh(), load.at_once) for name in order}
            )
    return _figures(engine, load, rounds[1:])  # the first warmed up


class _Prompts:
    """Never the same twice: what a cache saves one client is not to be saved by another."""

    def __init__(self, load: Load) -> None:
        self._load, self._random = load, random.Random(0)

    def fresh(self) -> list[list[int]]:
        values, count = range(10, 200), self._load.prompt_tokens
        return [self._random.choices(values, k=count) for _ in range(self._load.requests)]


@dataclass(frozen=True, slots=True)
class _Round:
    """What one client took for one round."""

    seconds: float
    cpu_seconds: float
    tokens: int


def _figures(engine: str, load: Load, rounds: list[dict[str, _Round]]) -> ClientFigures:
    figures = ClientFigures(engine, load.name)
    for name in rounds[0]:
        mine = [one[name] for one in rounds]
        rate = median(load.requests / one.seconds for one in mine)
        figures.requests_per_second[name] = round(rate, 1)
        figures.tokens_per_second[name] = round(median(o.tokens / o.seconds for o in mine), 1)
        cpu = median(one.cpu_seconds for one in mine)
        figures.cpu_ms_per_request[name] = round(cpu * 1000 / load.requests, 3)

    def ratio(other: str) -> float:
        return round(median(one[other].seconds / one["rollway"].seconds for one in rounds), 3)

    cpus = figures.cpu_ms_per_request
    figures.ratio_to_bare, figures.ratio_to_openai = ratio("bare"), ratio("openai")
    figures.cpu_ratio_to_openai = round(cpus["openai"] / max(cpus["rollway"], 1e-6), 3)
    return figures


async def _timed(send: Send, prompts: list[list[int]], at_once: int) -> _Round:
    slots = asyncio.Semaphore(at_once)

    async def one(prompt: list[int]) -> int:
        async with slots:
            return await send(prompt)

    began, used = time.monotonic(), time.process_time()
    tokens = sum(await asyncio.gather(*map(one, prompts)))
    return _Round(time.monotonic() - began, time.process_time() - used, tokens)


def _rollway(stack: Stack, sampling: Sampling) -> Send:
    rollouts = stack.rollouts(concurrency=1_000_000)

    async def send(prompt: list[int]) -> int:
        (rollout,) = await rollouts.generate(prompt, sampling)
        return len(rollout.token_ids)

    return send


def _bare(session: aiohttp.ClientSession, stack: Stack, model: str, sampling: Sampling) -> Send:
    """The same body, sent and read as anybody would."""
    url = f"{stack.frontend_url}/v1/completions"

    async def send(prompt: list[int]) -> int:
        body = completion_request(model, prompt, sampling)
        async with session.post(url, json=body) as response:
            response.raise_for_status()
            answer = await response.json()
        return len(answer["nvext"]["completion_token_ids"])

    return send


def _openai(client: Any, model: str, sampling: Sampling) -> Send:
    """The documented way to send ids and to get them back."""

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


# --- the gateway ----------------------------------------------------------------------------------


async def bench_gateway(
    spec: StackSpec, scratch: Path, say: Say, sessions: tuple[int, ...] = (1, 100, 1000)
) -> list[GatewayFigures]:
    """In this process, so that both ways have the same cores; over real HTTP all the same."""
    from aiohttp import web

    found = []
    async with up(spec) as stack:
        template = Template(spec.models[0].path)
        recorder = Recorder(scratch / "journal.jsonl")
        gateway = await create_gateway(stack, template, recorder)
        runner = web.AppRunner(gateway.app(), access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=4096)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        try:
            for words in (64, 1_500):
                for count in sessions:
                    if words > 1000 and count > 100:
                        continue  # what it costs shows with fewer
                    say(f"gateway: {count} sessions, prompts of about {words} tokens")
                    found.append(await _overhead(stack, gateway, url, count, words))
                    say(f"gateway: {found[-1].overhead_ms} ms more per request")
        finally:
            await runner.cleanup()
            recorder.close()
    return found


async def _overhead(
    stack: Stack, gateway: Gateway, url: str, sessions: int, words: int
) -> GatewayFigures:
    messages = [{"role": "user", "content": "7" * words}]
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
    ways = [(f"{stack.frontend_url}/v1/chat/completions", direct)]
    ways.append((f"{url}/chat/completions", through))
    # One session has one request at a time, and few of them would be noise.
    rounds, turns = (40, 1) if sessions == 1 else (ROUNDS, 1)
    taken: list[list[float]] = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        for round_ in range(rounds + 1):
            names = [f"s{sessions}-{words}-{round_}-{number}" for number in range(sessions)]
            ordered = ways if round_ % 2 else ways[::-1]
            found = [await _many(session, *way, names, turns) for way in ordered]
            taken.append(found if round_ % 2 else found[::-1])
    first, second = (median(column) for column in zip(*taken[1:], strict=True))
    more = median(through - direct for direct, through in taken[1:])
    return GatewayFigures(sessions, len(prompt), round(first, 3), round(second, 3), round(more, 3))


async def _many(
    http: aiohttp.ClientSession, url: str, body: dict[str, Any], names: list[str], turns: int
) -> float:
    """Milliseconds of wall time per request, all sessions at once."""

    async def talk(name: str) -> None:
        for _ in range(turns):
            async with http.post(url, json=body, headers={"x-rollway-session": name}) as answer:
                answer.raise_for_status()
                await answer.read()

    began = time.monotonic()
    await asyncio.gather(*map(talk, names))
    return (time.monotonic() - began) * 1000 / (len(names) * turns)
