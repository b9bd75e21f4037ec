"""Play episodes with the released `renderers` client: python prime_rl_driver.py JOB.json

It runs in the environment of prime-rl's clients, as a script, without Rollway. Each run prints one
line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
_TURN_TOKENS = 32
"""Tokens that an environment adds before the next turn."""


async def run_episodes(job: dict[str, Any]) -> None:
    from openai import AsyncOpenAI
    from renderers import DefaultRendererConfig, create_renderer
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(job["tokenizer"])
    renderer = create_renderer(tokenizer, DefaultRendererConfig())
    rng = random.Random(0)
    for run in job["runs"]:
        # A new client for every run: httpx is half as fast with hundreds of connections if some of
        # them were kept from the last run, and they are kept for 5 s only.
        url = job["urls"][run["arm"]]
        async with AsyncOpenAI(
            base_url=url, api_key=os.environ["VLLM_API_KEY"], max_retries=0, timeout=600.0
        ) as client:
            seconds, tokens = await _time_run(client, renderer, job, run, rng)
        print(json.dumps({**run, "seconds": seconds, "tokens": tokens}), flush=True)


async def _time_run(
    client: Any, renderer: Any, job: dict[str, Any], run: dict[str, Any], rng: random.Random
) -> tuple[float, int]:
    """Play all episodes of a run, so many at once; return the seconds and the sampled tokens."""
    slots = asyncio.Semaphore(run["in_flight"])

    async def play(number: int) -> int:
        async with slots:
            session = f"{run['name']}-{number}"
            return await _play_episode(client, renderer, job, run["max_tokens"], session, rng)

    began = time.perf_counter()
    counts = await asyncio.gather(*(play(number) for number in range(run["episodes"])))
    return time.perf_counter() - began, sum(counts)


async def _play_episode(
    client: Any, renderer: Any, job: dict[str, Any], count: int, session: str, rng: random.Random
) -> int:
    """Sample the turns of an episode, each from the ids of those before it. Each has `count`
    tokens, whatever is sampled: both arms do the same work."""
    from renderers.client import generate

    prompt, sampled = _draw(rng, job["prompt_tokens"]), 0
    for _ in range(job["turns"]):
        answer = await generate(
            client=client,
            renderer=renderer,
            messages=[{"role": "user", "content": ""}],
            model=job["model"],
            prompt_ids=prompt,
            sampling_params={**SAMPLING, "max_tokens": count, "min_tokens": count},
            cache_salt="0",
            extra_headers={"X-Session-ID": session},
        )
        ids = answer["completion_ids"]
        sampled += len(ids)
        prompt = [*prompt, *ids, *_draw(rng, _TURN_TOKENS)]
    return sampled


def _draw(rng: random.Random, count: int) -> list[int]:
    return rng.choices(range(10, 200), k=count)


if __name__ == "__main__":
    asyncio.run(run_episodes(json.loads(Path(sys.argv[1]).read_text())))
