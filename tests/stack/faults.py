"""Dynamo without Rollway to compare with, exactness by span, and checkpoints with a fault."""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import Callable, Coroutine, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save_file

from rollway.aio import Stack
from rollway.fleet.dynamo_admin import DynamoAdmin
from rollway.fleet.report import RefitMode
from rollway.fleet.workers import Worker
from rollway.http import Http
from rollway.rollout.client import Rollout
from rollway.rollout.completion import Completion
from rollway.rollout.sampling import Sampling
from rollway.rollout.wire import DynamoAssembly, completion_request
from tests.stack.policies import Policy
from tests.stack.serving import (
    LONG,
    TOLERANCE,
    count_started_requests,
    first_tokens,
    fresh_prompt,
)
from tests.waiting import wait_until_async

T = TypeVar("T")

SHORT = Sampling(max_tokens=6, ignore_eos=True)
LONGER = Sampling(max_tokens=1000, ignore_eos=True)
"""Still under way when something has happened to it, also on a slow machine."""
GREEDY = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)
CLEARLY_OTHER = 0.05
"""Log-probs of two of the policies differ by more than this at some token."""


class Bare:
    """Dynamo without Rollway: no version, no taint, no salt, no check."""

    def __init__(
        self, http: Http, frontend_url: str, secret: str = "", model: str = "tiny"
    ) -> None:
        self.admin = DynamoAdmin(http, secret=secret)
        self._http = http
        self._url = f"{frontend_url}/v1/completions"
        self._model = model

    async def ask(self, prompt: list[int], sampling: Sampling, **options: Any) -> Any:
        timeout = options.pop("timeout", 60.0)
        body = completion_request(self._model, prompt, sampling, **options)
        return await self._http.post(self._url, body, timeout=timeout)

    async def complete(self, prompt: list[int], sampling: Sampling, **options: Any) -> Completion:
        return read(await self.ask(prompt, sampling, **options), prompt, sampling)

    async def load(self, worker: Worker, path: Path, **body: Any) -> Any:
        """Pause, update, resume: the documented way, on one worker."""
        await self.admin.pause(worker, "abort")
        order = {"model_path": str(path), **body}
        answer = await self.admin.send(worker, "update_weights_from_disk", order, timeout=60.0)
        await self.admin.resume(worker)
        return answer

    async def abort(self, worker: Worker, request_id: str) -> None:
        order = {"request_id": request_id}
        answer = await self.admin.send(worker, "abort_request", order, timeout=10.0)
        assert answer["status"] == "ok", answer


def read(answer: Any, prompt: list[int], sampling: Sampling) -> Completion:
    assembly = DynamoAssembly(sampling, len(prompt))
    assembly.add(answer)
    return assembly.finish()


def off(policy: Policy, prompt: list[int], completion: Completion) -> float:
    return policy.distance(prompt, completion.token_ids, completion.logprobs or [])


@dataclass(frozen=True)
class Move:
    """Refits to the next version; neighbours are different policies."""

    versions: Iterator[int]
    policies: list[Policy]

    async def __call__(self, stack: Stack, mode: RefitMode = "pause-all") -> tuple[int, Policy]:
        version = next(self.versions)
        policy = self.policies[version % len(self.policies)]
        await stack.refit(version, policy.path, mode=mode)
        return version, policy


async def under_way(stack: Stack, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Begin some work, and return when requests that were sent to every worker after its own have
    got their first tokens."""
    before = await asyncio.to_thread(count_started_requests, stack.frontend_url)

    async def has_requests() -> bool:
        return await asyncio.to_thread(count_started_requests, stack.frontend_url) > before

    task = asyncio.create_task(work)
    await wait_until_async(has_requests, what="requests of this work at the frontend")
    await first_tokens(stack.frontend_url, await stack.fleet.workers())
    assert not task.done()
    return task


async def tokens_pass(stack: Stack, count: int = 65) -> None:
    """Return when a request beside the others has got that many tokens; they have, too."""
    tokens = 0
    async with aclosing(stack.rollouts().stream(fresh_prompt(), LONG)) as parts:  # type: ignore[type-var]
        async for part in parts:
            tokens += 0 if isinstance(part, Rollout) else len(part)
            if tokens >= count:
                return


def assert_exact(policies: list[Policy], rollout: Rollout) -> None:
    """Every token is of the version that its span names, and no token is in two spans or none."""
    assert rollout.logprobs is not None
    ends = [0, *(span.end for span in rollout.spans)]
    assert [span.start for span in rollout.spans] == ends[:-1]
    assert ends[-1] == len(rollout.token_ids) == len(rollout.logprobs)
    for span in rollout.spans:
        assert span.version is not None
        policy = policies[span.version % len(policies)]
        wanted = policy.logprobs(rollout.prompt_ids, rollout.token_ids)[span.start : span.end]
        reported = rollout.logprobs[span.start : span.end]
        assert (
            max((abs(a - b) for a, b in zip(wanted, reported, strict=True)), default=0) < TOLERANCE
        )


def flat(groups: list[list[Rollout]]) -> list[Rollout]:
    return list(itertools.chain(*groups))


Damage = Callable[[dict[str, torch.Tensor]], None]


def damaged(policy: Policy, directory: Path, damage: Damage = lambda _: None) -> Path:
    shutil.copytree(policy.path, directory)
    tensors = load_file(directory / "model.safetensors")
    damage(tensors)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


def cut(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:32].clone()


def lose_a_layer(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if ".layers.1." in name]:
        del tensors[name]


def lose_a_tensor(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.norm.weight"]


def add_a_tensor(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.extra.weight"] = torch.zeros(4)


def rounded(tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        tensors[name] = tensor.bfloat16()


BAD = {
    "04 missing": (None, "no checkpoint directory"),
    "05 shape": (cut, r"model.norm.weight is F32\[32\], served is F32\[64\]"),
    "06 layer": (lose_a_layer, r"model.layers.1.\S+ is missing"),
    "06 tensor": (lose_a_tensor, "model.norm.weight is missing"),
    "06 extra": (add_a_tensor, "model.extra.weight is not part of the model"),
    "06 dtype": (rounded, r"is BF16\S+, served is F32"),
}
