"""Chaos with prime-rl's calls: pause, update, resume, and rollouts through its generate route.

The server runs in this process, so that faults strike at the steps of its refits. It is asked over
HTTP, as the orchestrator does: a call is repeated after a 5xx, and never after a 4xx.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollway.aio import Stack
from rollway.errors import RefitError, RequestFailed, RollwayError, UsageError
from rollway.gateway.command import GatewayOptions, create_gateway, listen
from rollway.gateway.store import SessionStore
from rollway.gateway.template import Template
from rollway.http import Http, Retry
from rollway.integrations.prime_rl.routes import PrimeRl
from rollway.integrations.prime_rl.serve import ServeOptions, extend
from rollway.rollout.client import Rollout, Span
from rollway.rollout.sampling import Sampling
from rollway.weights.checkpoint import STABLE

_RETRY = Retry(attempts=3, wait_seconds=0.5)
"""prime-rl makes ten attempts, with up to 10 s between them."""


@dataclass(slots=True)
class Server:
    """prime-rl's inference server, and the calls of its orchestrator and of its clients."""

    http: Http
    url: str
    extension: PrimeRl
    token: str
    timeout: float

    @property
    def is_open(self) -> bool:
        """Whether new requests are admitted."""
        return self.extension.updates.is_open

    async def broadcast(self, directory: Path) -> int:
        """Pause, update and resume; return the version that all workers serve then."""
        await self._post("/pause?mode=keep&clear_cache=false", None, _RETRY)
        try:
            body = {"weight_dir": str(directory)}
            answer = await self._post("/update_weights", body, _RETRY)
        except RollwayError:
            # prime-rl resumes in any case; after a failure that may have left two versions the
            # server refuses it, and stays closed until an update succeeds.
            if self.extension.updates.memory.record.phase != "failed":
                await self._post("/resume", None, _RETRY)
            raise
        await self._post("/resume", None, _RETRY)
        return int(answer["weight_version"])

    async def generate(self, prompt: list[int], sampling: Sampling) -> list[Rollout]:
        """Sample as the `renderers` client does."""
        params = {"max_tokens": sampling.max_tokens, "ignore_eos": sampling.ignore_eos}
        body = {"token_ids": prompt, "sampling_params": {**params, "logprobs": 1}}
        answer = await self._post("/inference/v1/generate", body, Retry())
        (choice,) = answer["choices"]
        rollout = Rollout(
            prompt_ids=prompt,
            token_ids=choice["token_ids"],
            logprobs=[entry["logprob"] for entry in choice["logprobs"]["content"]],
            finish_reason=choice["finish_reason"],
            spans=tuple(Span(start, end, version, None) for start, end, version in answer["spans"]),
            cached_tokens=0,
        )
        return [rollout]

    async def _post(self, path: str, body: Any, retry: Retry) -> Any:
        try:
            headers = {"authorization": f"Bearer {self.token}"}
            return await self.http.post(
                f"{self.url}{path}", body, timeout=self.timeout, retry=retry, headers=headers
            )
        except RequestFailed as error:
            if error.status < 500:
                raise UsageError(error.message) from error
            raise RefitError(error.message) if path == "/update_weights" else error from error


@asynccontextmanager
async def serve(
    stack: Stack, tokenizer: Path, scratch: Path, timeout: float
) -> AsyncIterator[Server]:
    """Serve a stack in this process, on a free port."""
    store = SessionStore(scratch / "prime-rl.sqlite")
    plain = await create_gateway(stack, Template(str(tokenizer)), store)
    options = ServeOptions(GatewayOptions(stack.name), output_dir=scratch, gate_seconds=timeout)
    try:
        async with extend(stack, plain, options) as gateway, Http() as http:
            assert isinstance(gateway.extension, PrimeRl)
            listener = await listen(gateway, "127.0.0.1", 0)
            try:
                url = f"http://127.0.0.1:{listener.port}"
                token = gateway.access.operators[0].decode()
                yield Server(http, url, gateway.extension, token, timeout)
            finally:
                await listener.close()
    finally:
        store.close()


def copy_marked(checkpoint: Path, directory: Path) -> Path:
    """Copy a checkpoint to where a trainer would broadcast it, with its marker."""
    shutil.copytree(checkpoint, directory, dirs_exist_ok=True)
    marker = directory / STABLE
    marker.touch()  # the newest file of all, as a trainer writes it last
    return directory
