"""`rollway bench disaggregated`: prefill and decode apart, against two workers that do both.

Both stacks have two workers and get the same prompts, greedily, with the same number in flight.
Tokens and log-probs must agree: the benchmark raises otherwise.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from rollway.aio import Stack, up
from rollway.bench import Say, round_floats
from rollway.config import StackSpec
from rollway.errors import RolloutError
from rollway.http import Http
from rollway.rollout.client import events
from rollway.rollout.completion import Completion
from rollway.rollout.sampling import Sampling
from rollway.rollout.wire import DynamoAssembly, completion_request

TOLERANCE = 1e-5
"""The largest difference of two log-probs of the same token."""


@dataclass(frozen=True, slots=True)
class Load:
    """Equal requests, a bounded number at once."""

    requests: int = 64
    at_once: int = 8
    prompt_tokens: int = 256
    max_tokens: int = 32


@dataclass(slots=True)
class Arm:
    """The figures of one stack."""

    serving: str
    first_token_ms: float
    """Median time to the first token."""
    requests_per_second: float
    tokens_per_second: float
    answers: list[Completion] = field(default_factory=list, repr=False)


async def bench_disaggregated(
    apart: StackSpec, whole: StackSpec, say: Say, load: Load | None = None
) -> dict[str, Any]:
    """Return the figures of both stacks, their ratios, and the largest difference of a log-prob."""
    load = load or Load()
    arms = []
    for spec in (whole, apart):  # one after the other: they would share the cores
        serving = spec.models[0].serving
        say(f"{serving}: starting the stack")
        async with up(spec) as stack:
            # Other prompts first: the first requests and the first hand-overs take longer.
            await _measure(stack, serving, load, seed=1)
            arms.append(await _measure(stack, serving, load, seed=0))
        say(f"{serving}: first token after {arms[-1].first_token_ms:.1f} ms")
    difference = compare(arms[0].answers, arms[1].answers)
    figures = {
        "arms": [{k: v for k, v in asdict(arm).items() if k != "answers"} for arm in arms],
        "first_token_ratio": arms[1].first_token_ms / arms[0].first_token_ms,
        "tokens_per_second_ratio": arms[1].tokens_per_second / arms[0].tokens_per_second,
        "largest_logprob_difference": difference,
        "requests": load.requests,
    }
    return round_floats(figures, ".4g")


def compare(whole: list[Completion], apart: list[Completion]) -> float:
    """Return the largest difference of a log-prob; raise if tokens or log-probs do not agree."""
    largest = 0.0
    for number, (expected, answer) in enumerate(zip(whole, apart, strict=True)):
        if expected.token_ids != answer.token_ids:
            raise RolloutError(f"Prompt {number} got other tokens with prefill and decode apart.")
        pairs = zip(expected.logprobs or [], answer.logprobs or [], strict=True)
        largest = max([largest, *(abs(a - b) for a, b in pairs)])
    if largest > TOLERANCE:
        raise RolloutError(f"Log-probs differ by {largest:.2g} with prefill and decode apart.")
    return largest


async def _measure(stack: Stack, serving: str, load: Load, seed: int) -> Arm:
    source = random.Random(seed)
    prompts = [
        [source.randrange(10, 200) for _ in range(load.prompt_tokens)] for _ in range(load.requests)
    ]
    slots = asyncio.Semaphore(load.at_once)
    sampling = Sampling(max_tokens=load.max_tokens, temperature=0.0, ignore_eos=True)
    async with Http() as http:

        async def ask(prompt: list[int]) -> tuple[float, Completion]:
            async with slots:
                return await _time_first_token(http, stack, prompt, sampling)

        began = time.monotonic()
        results = await asyncio.gather(*map(ask, prompts))
        seconds = time.monotonic() - began
    tokens = sum(len(answer.token_ids) for _, answer in results)
    return Arm(
        serving,
        first_token_ms=1000.0 * median(first for first, _ in results),
        requests_per_second=load.requests / seconds,
        tokens_per_second=tokens / seconds,
        answers=[answer for _, answer in results],
    )


async def _time_first_token(
    http: Http, stack: Stack, prompt: list[int], sampling: Sampling
) -> tuple[float, Completion]:
    """Stream one answer; return the seconds to its first token, and the answer."""
    url = f"{stack.frontend_url}/v1/completions"
    body = completion_request(stack.models[0], prompt, sampling, stream=True)
    assembly, began, first = DynamoAssembly(sampling, len(prompt)), time.monotonic(), 0.0
    async with http.stream_lines(url, body, timeout=300.0) as lines:
        async for event in events(lines):
            if assembly.add(event) and not first:
                first = time.monotonic() - began
    return first, assembly.finish()


def format_figures(figures: dict[str, Any]) -> str:
    """Format the figures as text."""
    arms = "\n".join(
        f"{arm['serving']}: first token {arm['first_token_ms']} ms, "
        f"{arm['requests_per_second']} requests/s, {arm['tokens_per_second']} tokens/s"
        for arm in figures["arms"]
    )
    difference = figures["largest_logprob_difference"]
    return f"{arms}\nsame tokens; largest difference of a log-prob {difference}"
