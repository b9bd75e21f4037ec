"""Rollouts under way continue by themselves after a refit, in every mode, with nothing beside them.

A single request of somebody else wakes an engine that stands still, so nobody sends one here: each
case waits for its own rollouts alone. `test_models.py` says how to run it on a GPU machine.
"""

from __future__ import annotations

import asyncio
import itertools
import time

import pytest
import torch

import rollway
from benchmarks.gpu_load import make_prompts, read_metric
from benchmarks.real_model import SHAPES, Weights, cache_model, change_all, draw_weights
from rollway.aio import Stack, up
from rollway.fleet.report import RefitMode
from rollway.rollout.client import Rollout
from rollway.stack.preset import cache_dir
from tests.device.stacks import DEVICE, GPUS, describe, home
from tests.waiting import wait_until_async

__all__ = ["home"]  # a fixture
pytestmark = [pytest.mark.stack, pytest.mark.soak]

ROLLOUTS = 16
SAMPLING = rollway.Sampling(max_tokens=600, ignore_eos=True)
MODES: tuple[RefitMode, ...] = ("keep", "in-flight", "pause-all", "rolling")
CUTTING = ("keep", "in-flight")
"""Modes after which a rollout that was under way has tokens of two versions."""
ARGS = {"dtype": "bfloat16", "max-model-len": 2048, "max-num-seqs": 32}
REAL = pytest.mark.skipif(not GPUS, reason="there is no GPU")


async def stream(stack: Stack, prompt: list[int]) -> Rollout:
    """Return the rollout at the end of a stream."""
    async for part in stack.rollouts().stream(prompt, SAMPLING):
        if isinstance(part, Rollout):
            return part
    raise AssertionError("the stream has no rollout")


async def wait_until_all_run(stack: Stack) -> None:
    """Wait for the worker's own counter: a request would not be alone."""
    (worker,) = await stack.fleet.workers()

    async def do_all_run() -> bool:
        return await read_metric(stack, worker, "vllm:num_requests_running") == ROLLOUTS

    await wait_until_async(do_all_run, what="rollouts that run")


async def refit_alone(
    stack: Stack, weights: Weights, version: int, mode: RefitMode, *, is_streamed: bool
) -> None:
    prompts = make_prompts(ROLLOUTS, version)
    if is_streamed:
        work = asyncio.gather(*(stream(stack, prompt) for prompt in prompts))
    else:
        client = stack.rollouts()
        work = asyncio.gather(*(client.generate(prompt, SAMPLING) for prompt in prompts))
    async with stack.publisher("cuda_ipc" if DEVICE == "cuda" else "shm") as publisher:
        await wait_until_all_run(stack)
        change_all(weights, version)
        offer = await publisher.publish(version, list(weights.items()))
        report = await stack.refit(version, offer, mode=mode)
        began = time.monotonic()
        results = await asyncio.wait_for(work, 60.0)
    rollouts = [result if isinstance(result, Rollout) else result[0] for result in results]
    spans = [[span.version for span in rollout.spans] for rollout in rollouts]
    print(
        f"{mode}, {'stream' if is_streamed else 'generate'}: paused {report.paused_seconds:.4f} s, "
        f"all rollouts ended {time.monotonic() - began:.2f} s after the refit",
        flush=True,
    )
    assert [len(rollout.token_ids) for rollout in rollouts] == [SAMPLING.max_tokens] * ROLLOUTS
    assert spans == [[version - 1, version] if mode in CUTTING else [version - 1]] * ROLLOUTS


async def run_all_modes(size: str) -> None:
    weights = draw_weights(SHAPES[size], torch.device(DEVICE))
    path = cache_model(cache_dir() / f"bench-{size}", size, weights)
    args = {**ARGS, "kv-cache-memory-bytes": (64 << 20) if size == "tiny" else (8 << 30)}
    if GPUS:
        args["enforce-eager"] = size == "2b"
    async with up(describe(path, "modes", args=args)) as stack:
        cases = itertools.product(MODES, (False, True))
        for version, (mode, is_streamed) in enumerate(cases, 1):
            await refit_alone(stack, weights, version, mode, is_streamed=is_streamed)


@pytest.mark.parametrize(
    "size", ["tiny", *(pytest.param(name, marks=REAL) for name in ("2b", "8b"))]
)
def test_rollouts_continue_with_nothing_else_running(size: str) -> None:
    asyncio.run(run_all_modes(size))
