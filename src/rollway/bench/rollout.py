"""`rollway bench rollout`: what the client and the gateway cost, against others in the same run.

The same requests, to the same stack, with the same number at once: through `Rollouts`, through a
bare aiohttp loop that checks nothing, and through the `openai` client. Rounds of the three take
turns, so that a machine that slows down slows down all of them.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from rollway.api import Stack, up
from rollway.config import StackSpec
from rollway.gateway.recorder import Recorder
from rollway.gateway.server import Gateway, made_gateway
from rollway.gateway.template import Template
from rollway.rollout.sampling import Sampling
from rollway.rollout.wire import completion_request

ROUNDS = 2
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
    Load("short", 400, 64, 128, 16),
    Load("long answers", 128, 64, 512, 256),
    Load("32k prompts", 24, 8, 32_000, 8),
)


@dataclass(slots=True)
class ClientFigures:
    """One load, by each client: the best of some rounds."""

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
        return asdict(self)


async def bench_rollout(
    spec: StackSpec, say: Say, loads: tuple[Load, ...] = LOADS
) -> list[ClientFigures]:
    """All clients on one stack."""
    found: list[ClientFigures] = []
    engine = spec.models[0].engine
    say(f"{engine}: starting the stack")
    async with up(spec) as stack:
        room = await stack.context_length()
        for load in loads:
            if load.prompt_tokens + load.max_tokens <= room:
                say(f"{engine}: {load.name}")
                found.append(await _clients(stack, engine, load))
                say(f"{engine}: {load.name}: {found[-1].requests_per_second} requests/s")
    return found


async def _clients(stack: Stack, engine: str, load: Load) -> ClientFigures:
    logprobs = engine != "mocker"
    sampling = Sampling(max_tokens=load.max_tokens, ignore_eos=True, logprobs=logprobs)
    figures = ClientFigures(engine, load.name)
    model = stack.models[0]
    rng = random.Random(0)
    prompts = [
        [rng.randrange(10, 200) for _ in range(load.prompt_tokens)] for _ in range(load.requests)
    ]
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
        for round_ in range(ROUNDS + 1):  # the first warms up
            for name, send in senders.items():
                seconds, cpu, tokens = await _timed(send, prompts, load.at_once)
                rate = load.requests / seconds
                if round_ and rate > figures.requests_per_second.get(name, 0.0):
                    figures.requests_per_second[name] = round(rate, 1)
                    figures.tokens_per_second[name] = round(tokens / seconds, 1)
                    figures.cpu_ms_per_request[name] = round(cpu * 1000 / load.requests, 3)
    rates, cpus = figures.requests_per_second, figures.cpu_ms_per_request
    figures.ratio_to_bare = round(rates["rollway"] / rates["bare"], 3)
    figures.ratio_to_openai = round(rates["rollway"] / rates["openai"], 3)
    figures.cpu_ratio_to_openai = round(cpus["openai"] / max(cpus["rollway"], 1e-6), 3)
    return figures


async def _timed(send: Send, prompts: list[list[int]], at_once: int) -> tuple[float, float, int]:
    """Wall seconds, CPU seconds of this process, and tokens."""
    slots = asyncio.Semaphore(at_once)

    async def one(prompt: list[int]) -> int:
        async with slots:
            return await send(prompt)

    began, used = time.monotonic(), time.process_time()
    tokens = sum(await asyncio.gather(*map(one, prompts)))
    return time.monotonic() - began, time.process_time() - used, tokens


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
        gateway = await made_gateway(stack, template, recorder)
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
    turns = max(2, 60 // sessions)
    content = "7" * words
    messages = [{"role": "user", "content": content}]
    prompt = await gateway.template.prompt({}, messages, None)
    direct_body = {
        "model": gateway.model,
        "messages": [{"role": "user", "content": "-"}],
        "max_tokens": 8,
        "logprobs": True,
        "ignore_eos": True,
        "nvext": {"token_data": prompt, "extra_fields": ["completion_token_ids"]},
    }
    through_body = {"messages": messages, "max_tokens": 8, "ignore_eos": True}
    direct = await _many(f"{stack.frontend_url}/v1/chat/completions", direct_body, sessions, turns)
    through = await _many(f"{url}/chat/completions", through_body, sessions, turns)
    return GatewayFigures(
        sessions, len(prompt), round(direct, 3), round(through, 3), round(through - direct, 3)
    )


async def _many(url: str, body: dict[str, Any], sessions: int, turns: int) -> float:
    """Milliseconds of wall time per request, the better of two rounds."""

    async def talk(session: aiohttp.ClientSession, name: str) -> None:
        for _ in range(turns):
            async with session.post(url, json=body, headers={"x-rollway-session": name}) as answer:
                answer.raise_for_status()
                await answer.read()

    best = float("inf")
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        for round_ in range(3):
            began = time.monotonic()
            await asyncio.gather(*(talk(session, f"s{round_}-{n}") for n in range(sessions)))
            seconds = time.monotonic() - began
            if round_:
                best = min(best, seconds)
    return best * 1000 / (sessions * turns)
