"""What the tests of the shared stack have in common: prompts, policies served, processes killed."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import urllib.request
from concurrent.futures import ThreadPoolExecutor, wait

import torch
from safetensors.torch import load_file

import rollway
from rollway.fleet.workers import Worker
from rollway.http import Http
from rollway.rollout.client import Rollout
from rollway.rollout.sampling import Sampling
from rollway.rollout.sender import events
from rollway.rollout.wire import completion_request
from rollway.stack.state import ProcessState, StackDir, StackState
from tests.stack.policies import Policy
from tests.waiting import wait_until

TOLERANCE = 1e-4
SHORT = Sampling(max_tokens=8, ignore_eos=True)
LONG = Sampling(max_tokens=400, ignore_eos=True)
_random = random.Random(7)


def fresh_prompt(length: int = 100) -> list[int]:
    """Return a prompt that nobody has sent before, so that nothing of it is cached."""
    return [_random.randrange(10, 200) for _ in range(length)]


def worst(policy: Policy, rollouts: list[Rollout]) -> float:
    """Return the largest distance of a sampled log-prob from the policy's own."""
    return max(policy.distance(r.prompt_ids, r.token_ids, r.logprobs or []) for r in rollouts)


def tensors(policy: Policy) -> dict[str, torch.Tensor]:
    return load_file(policy.path / "model.safetensors")


def assert_serves(stack: rollway.Stack, policy: Policy, version: int) -> None:
    """Log-probs are a fresh model's, on every worker, and nothing of older weights is cached."""
    for rollout in some_rollouts(stack, 6):
        assert rollout.weight_version == version
        assert rollout.logprobs is not None
        assert policy.distance(rollout.prompt_ids, rollout.token_ids, rollout.logprobs) < TOLERANCE


def some_rollouts(stack: rollway.Stack, count: int = 4) -> list[Rollout]:
    groups = stack.rollouts().generate_batch([fresh_prompt() for _ in range(count)], SHORT)
    return [rollout for group in groups for rollout in group]


def generated_tokens(stack: rollway.Stack) -> float:
    """Return how many tokens the engines have sampled so far."""
    total = 0.0
    for worker in stack.fleet.workers():
        if worker.error is not None:
            continue
        with urllib.request.urlopen(f"{worker.admin_url}/metrics", timeout=10) as answer:
            for line in answer.read().decode().splitlines():
                if line.startswith("vllm:generation_tokens_total"):
                    total += float(line.split()[-1])
    return total


def count_started_requests(frontend_url: str) -> float:
    """Return how many requests have reached the frontend so far."""
    with urllib.request.urlopen(f"{frontend_url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    started = (line for line in lines if line.startswith("dynamo_frontend_requests_started_total"))
    return sum(float(line.split()[-1]) for line in started)


def wait_for_version(stack: rollway.Stack, version: int, seconds: float = 120.0) -> None:
    """Wait until restarted workers have been admitted, which nobody has to ask for."""
    wait_until(
        lambda: list(stack.fleet.read_versions().values()) == [version] * 2,
        seconds,
        every=0.5,
        what=f"both workers on version {version}",
    )


def read_state(name: str = "shared") -> StackState:
    state = StackDir(name).read()
    assert state is not None
    return state


def find_process(name: str) -> ProcessState:
    return next(process for process in read_state().processes if process.name == name)


def kill(name: str) -> None:
    os.kill(find_process(name).pid or 0, signal.SIGKILL)


async def first_tokens(frontend_url: str, workers: list[Worker], count: int = 48) -> None:
    """Return when a request to each worker, sent after all others, has got some tokens.

    vLLM's own gauge of running requests is refreshed too rarely to wait for.
    """
    await asyncio.gather(*(_some_tokens(frontend_url, w.instance_id, count) for w in workers))


async def _some_tokens(frontend_url: str, worker: int, count: int) -> None:
    body = completion_request("tiny", fresh_prompt(), LONG, pin=worker, stream=True)
    url, seen = f"{frontend_url}/v1/completions", 0
    async with Http() as http, http.stream_lines(url, body, timeout=60.0) as lines:
        async for event in events(lines):
            seen += len((event.get("nvext") or {}).get("completion_token_ids") or [])
            if seen >= count:
                return


class LongRollouts:
    """Rollouts under way while the block runs; afterwards each has ended in one way or another."""

    count = 32

    def __init__(self, stack: rollway.Stack) -> None:
        self._stack = stack
        self._pool = ThreadPoolExecutor(self.count)

    def __enter__(self) -> LongRollouts:
        rollouts = self._stack.rollouts(timeout=90.0)
        self._futures = [
            self._pool.submit(rollouts.generate, fresh_prompt(), LONG) for _ in range(self.count)
        ]
        asyncio.run(first_tokens(self._stack.frontend_url, self._stack.fleet.workers()))
        assert not all(future.done() for future in self._futures)
        return self

    def __exit__(self, *_: object) -> None:
        wait(self._futures)
        self._pool.shutdown()

    def finished(self) -> list[Rollout]:
        return [future.result()[0] for future in self._futures if future.exception() is None]

    def failures(self) -> list[BaseException]:
        return [error for future in self._futures if (error := future.exception()) is not None]
