"""Measure what the gateway of a run costs NeMo-Gym, and what the sampler costs rollouts.

vLLM workers with the demo's model. Gym's agents have two turns each; what an answer's message
holds goes back with the next turn, as Gym sends it.
"""

from __future__ import annotations

import asyncio
import time
from collections import UserDict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import torch

from rollway.bench import Say
from rollway.bench.nemo_rl_refit import make_config
from rollway.integrations.nemo_rl.generation import Generation
from rollway.integrations.nemo_rl.gym import GymServer
from rollway.integrations.nemo_rl.metrics import Sampler

IN_FLIGHT = 256
GYM_ROUNDS, SAMPLER_ROUNDS = 5, 20
WORKERS, TOKENS = 2, 32
_TURNS = 2
_IDLE_SECONDS = 10.0
_ARGS = {"dtype": "float32", "max-model-len": 2048, "max-num-seqs": 128}
_KEY = {"authorization": "Bearer dummy_key"}


class _Batch(UserDict[str, Any]):
    """Stands in for NeMo-RL's BatchedDataDict."""


def measure_traffic(
    model: Path,
    say: Say,
    figures: dict[str, Any],
    parts: Sequence[str],
    *,
    workers: int = WORKERS,
    tokens: int = TOKENS,
) -> None:
    """Measure `gym` and `sampler` on one stack; answers have this many tokens."""
    say(f"traffic: starting vLLM workers ({workers})")
    config = make_config(model, "bench-nemo-rl-traffic", _ARGS, workers)
    generation = Generation(None, {**config, "max_new_tokens": tokens})
    try:
        if "gym" in parts:
            _measure_gym(generation, model, say, figures.setdefault("gym", {"tokens": tokens}))
        if "sampler" in parts:
            _measure_sampler(generation, say, figures.setdefault("sampler", {}))
    finally:
        generation.shutdown()


def compare_rates(rounds: Sequence[dict[str, float]], ours: str, other: str) -> dict[str, Any]:
    """Return the median rate of each arm, and the median of the rounds' ratios."""
    ratios = [row[ours] / row[other] for row in rounds]
    return {
        "tokens_per_second": {arm: median(row[arm] for row in rounds) for arm in (other, ours)},
        "ratio": median(ratios),
        "ratios": ratios,
    }


def _run_rounds(
    arms: dict[str, Callable[[int], float]],
    count: int,
    say: Callable[[dict[str, float]], None],
    keep: Callable[[list[dict[str, float]]], None],
) -> None:
    """Run the arms in turns, each round the other one first; the first round is a warm-up."""
    rounds: list[dict[str, float]] = []
    for number in range(count + 1):
        order = list(arms)[:: 1 if number % 2 else -1]
        row = {arm: arms[arm](number) for arm in order}
        say(row)
        if number:
            rounds.append(row)
            keep(rounds)


# --- gym -------------------------------------------------------------------------------------


def _measure_gym(generation: Generation, model: Path, say: Say, figures: dict[str, Any]) -> None:
    address = generation.connection.find_address()
    server = GymServer(address, generation.cfg, {"name": str(model)})
    urls = {"gateway": server.url, "frontend": f"{address.frontend_url}/v1"}

    def run(arm: str) -> Callable[[int], float]:
        tokens = figures["tokens"]
        return lambda number: asyncio.run(
            _run_agents(urls[arm], address.model, tokens, f"{arm} {number}")
        )

    def keep(rounds: list[dict[str, float]]) -> None:
        figures.update(in_flight=IN_FLIGHT, **compare_rates(rounds, "gateway", "frontend"))

    def tell(row: dict[str, float]) -> None:
        say(f"gym: {row['gateway']:.0f} tokens/s, straight {row['frontend']:.0f}")

    try:
        _run_rounds({arm: run(arm) for arm in urls}, GYM_ROUNDS, tell, keep)
    finally:
        server.close()


async def _run_agents(url: str, model: str, answer_tokens: int, run: str) -> float:
    """Run agents that are all in flight at once; return the tokens per second."""
    is_straight = run.startswith("frontend")
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=600.0)
    async with aiohttp.ClientSession(connector=connector, headers=_KEY, timeout=timeout) as http:

        async def run_agent(agent: int) -> int:
            messages: list[dict[str, Any]] = []
            tokens = 0
            for turn in range(_TURNS):
                # A start of its own for each agent: no arm finds the other's prompts in a cache.
                text = f"{run} {agent}: add {agent} and {turn}"
                messages.append({"role": "user", "content": text})
                body = {
                    "model": model, "messages": messages, "max_tokens": answer_tokens,
                    "temperature": 1.0, "top_p": 1.0, "logprobs": True, "ignore_eos": True,
                }  # fmt: skip
                async with http.post(f"{url}/chat/completions", json=body) as answer:
                    answer.raise_for_status()
                    reply = await answer.json()
                tokens += int(reply["usage"]["completion_tokens"])
                message = reply["choices"][0]["message"]
                if is_straight:  # it knows no other fields
                    message = {"role": "assistant", "content": message.get("content") or ""}
                messages.append(message)
            return tokens

        began = time.perf_counter()
        tokens = sum(await asyncio.gather(*map(run_agent, range(IN_FLIGHT))))
        return tokens / (time.perf_counter() - began)


# --- sampler ---------------------------------------------------------------------------------


def _measure_sampler(generation: Generation, say: Say, figures: dict[str, Any]) -> None:
    connection = generation.connection

    def run_with(number: int) -> float:
        sampler = Sampler(connection, generation.cfg)
        try:
            return _run_rollouts(generation, number)
        finally:
            sampler.close()

    def keep(rounds: list[dict[str, float]]) -> None:
        figures.update(in_flight=IN_FLIGHT, **compare_rates(rounds, "with", "without"))

    def tell(row: dict[str, float]) -> None:
        say(f"sampler: {row['with']:.0f} tokens/s, without {row['without']:.0f}")

    figures["core_share"] = _measure_core_share(generation)
    say(f"sampler: {100 * figures['core_share']:.2f}% of a core")
    arms = {"with": run_with, "without": lambda number: _run_rollouts(generation, number + 1000)}
    _run_rounds(arms, SAMPLER_ROUNDS, tell, keep)


def _measure_core_share(generation: Generation) -> float:
    """Return the CPU time of the connection's thread that the sampler adds while nothing runs."""
    connection = generation.connection

    async def watch() -> float:
        began = time.thread_time()
        await asyncio.sleep(_IDLE_SECONDS)
        return (time.thread_time() - began) / _IDLE_SECONDS

    idle = connection.run(watch())
    sampler = Sampler(connection, generation.cfg)
    try:
        return max(0.0, connection.run(watch()) - idle)
    finally:
        sampler.close()


def _run_rollouts(generation: Generation, seed: int) -> float:
    """Sample a batch that is in flight at once; return the tokens per second."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(10, 40, (IN_FLIGHT, 32), generator=random)
    lengths = torch.full((IN_FLIGHT,), 32)
    began = time.perf_counter()
    output = generation.generate(_Batch({"input_ids": ids, "input_lengths": lengths}))
    return int(output["generation_lengths"].sum()) / (time.perf_counter() - began)
