"""Runs in the environment of prime-rl's clients, as a script: it has no Rollway.

    python prime_rl_driver.py episodes JOB.json     sample with the released `renderers` client
    python prime_rl_driver.py controller JOB.json   drive prime-rl's own concurrency controller

Each run prints one line of JSON.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
_TURN_TOKENS = 32
"""Tokens that an environment adds before the next turn."""
_TURNOVERS = 60
"""Prime-rl multiplies the cap by 1.25 for each turnover of the pool: enough for 1 to 1024."""


# --- episodes -------------------------------------------------------------------------------------


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


# --- the concurrency controller -------------------------------------------------------------------


class StandIns:
    """Answers imports of packages that prime-rl imports and the controller never calls."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] not in ("torch", "wandb"):
            return None
        return importlib.util.spec_from_loader(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> Any:
        module = MagicMock(name=spec.name)
        module.__path__, module.__spec__ = [], spec
        return module

    def exec_module(self, module: Any) -> None:
        pass


async def run_controller(job: dict[str, Any]) -> None:
    """Let prime-rl's own collector read each address once a turnover, for its own controller."""
    sys.meta_path.append(StandIns())
    import httpx
    from prime_rl.configs.orchestrator import ConcurrencyConfig
    from prime_rl.orchestrator.concurrency import ConcurrencyController
    from prime_rl.orchestrator.inference_metrics import InferenceMetricsCollector

    for arm, url in job["urls"].items():
        controller = ConcurrencyController(ConcurrencyConfig(), fallback_cost=job["seq_len"])
        # The pool is always as full as the controller allows; a completed episode has left it.
        in_flight = [0]
        controller.bind(set_limit=lambda _: None, get_inflight=lambda held=in_flight: held[0] - 1)
        headers = {"Authorization": f"Bearer {os.environ['VLLM_API_KEY']}"}
        async with httpx.AsyncClient(base_url=url, headers=headers) as client:
            collector = InferenceMetricsCollector(
                [client], on_load=controller.observe, log_to_wandb=False
            )
            for _ in range(_TURNOVERS):
                await collector.collect_and_log()
                in_flight[0] = controller.max_inflight
                for _ in range(int(controller.max_inflight)):
                    controller.record_episode("bench", "train", 100, 1.0)
                    in_flight[0] = controller.max_inflight
        allowed = {
            "allowed": int(controller.max_inflight),
            "maximum": controller.config.max_inflight,
        }
        print(json.dumps({"arm": arm, **allowed}), flush=True)


if __name__ == "__main__":
    parts = {"episodes": run_episodes, "controller": run_controller}
    asyncio.run(parts[sys.argv[1]](json.loads(Path(sys.argv[2]).read_text())))
