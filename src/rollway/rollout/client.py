"""`Rollouts`: token ids in, token ids with log-probs and their weight version out.

    rollouts = stack.rollouts()
    group = await rollouts.generate(prompt_ids, Sampling(max_tokens=64), n=8)

The n rollouts of a call are one group: they carry one session id, which the router keeps on one
worker, so that the prompt is computed once. KV cache is salted with the weight version, so a block
computed under one version is never read under another.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from rollway.errors import RequestFailed, RolloutError, Unreachable, UsageError
from rollway.fleet.versions import VersionBook
from rollway.http import Http, Retry, server_message
from rollway.rollout.sampling import Sampling
from rollway.rollout.wire import Assembly, Completion, FinishReason, completion_request

T = TypeVar("T")

SESSION_HEADER = "x-dynamo-session-id"
# Sampling again is always safe: nothing of the failed attempt is used. In all 9 s, which covers the
# restart of a frontend and the time a dead worker stays listed.
_RETRY = Retry(attempts=6, wait_seconds=0.3)


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sampled completion, with what a trainer needs to use it or to refuse it."""

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float] | None
    """Of each sampled token under the policy that sampled it; None when not asked for."""
    finish_reason: FinishReason
    worker_id: int | None
    weight_version: int | None
    """None when nobody ever declared a version (an attached stack before its first refit)."""
    cached_tokens: int
    """Prompt tokens that came from the worker's prefix cache."""


class Rollouts:
    """A bounded client of one served model."""

    def __init__(
        self,
        http: Http,
        frontend_url: str,
        model: str,
        versions: VersionBook,
        *,
        concurrency: int = 256,
        timeout: float = 3600.0,
    ) -> None:
        self.model = model
        self._http = http
        self._url = f"{frontend_url.rstrip('/')}/v1/completions"
        self._versions = versions
        self._slots = asyncio.Semaphore(concurrency)
        self._timeout = timeout

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling | None = None,
        n: int = 1,
        *,
        group: str | None = None,
    ) -> list[Rollout]:
        """Sample n rollouts of one prompt. Cancelling the call ends them on the workers too."""
        prompt = checked_prompt(prompt_ids)
        if n < 1:
            raise UsageError(f"n is {n}.", "Ask for at least one rollout.")
        session = group or uuid.uuid4().hex
        chosen = sampling or Sampling()
        return await all_or_none(self._one(prompt, chosen, index, session) for index in range(n))

    async def generate_batch(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling | None = None,
        n: int = 1,
    ) -> list[list[Rollout]]:
        """A group of n rollouts for each prompt, in the order of the prompts.

        With a seed, every rollout of the batch gets its own: seed, seed + 1, …"""
        chosen = sampling or Sampling()
        return await all_or_none(
            self.generate(prompt, chosen.shifted(position * n), n)
            for position, prompt in enumerate(prompts)
        )

    async def stream(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling | None = None,
        *,
        group: str | None = None,
    ) -> AsyncIterator[list[int] | Rollout]:
        """Yield token ids as they come, and the whole checked Rollout last.

        A stream that breaks raises; nothing is sampled again behind the reader's back."""
        prompt = checked_prompt(prompt_ids)
        chosen = sampling or Sampling()
        async with self._slots:
            await self._ready_to_sample()
            epoch, salt = self._versions.epoch, self._salt()
            body = completion_request(
                self.model,
                prompt,
                chosen,
                cache_salt=salt,
                required_taint=self._versions.required_taint,
                stream=True,
            )
            assembly = Assembly(chosen, len(prompt))
            headers = {SESSION_HEADER: group or uuid.uuid4().hex}
            async with self._http.stream_lines(
                self._url, body, timeout=self._timeout, headers=headers
            ) as lines:
                async for event in _events(lines):
                    if tokens := assembly.add(event):
                        yield tokens
            rollout = self._stamp(prompt, assembly.finish(), epoch)
        if rollout is None:
            raise RolloutError("The weights changed while this rollout was streamed.")
        yield rollout

    async def _one(
        self, prompt: list[int], sampling: Sampling, index: int, session: str
    ) -> Rollout:
        """Sample until one rollout can be stamped with the version it came from."""
        pins = _Pins(self._versions)
        async with self._slots, self._deadline():
            for attempt in range(_RETRY.attempts):
                await self._ready_to_sample()
                epoch = self._versions.epoch
                try:
                    completion = await self._complete(prompt, sampling, index, session, pins.now)
                except (Unreachable, RequestFailed) as error:
                    if attempt + 1 == _RETRY.attempts or not (pins.now or _temporary(error)):
                        raise _explained(error, self.model) from error
                    pins.failed()
                    await asyncio.sleep(_RETRY.wait(attempt))
                    continue
                rollout = self._stamp(prompt, completion, epoch)
                if rollout is not None:
                    return rollout
                pins.next()
        raise RolloutError(
            f"No rollout could be attributed to one weight version in {_RETRY.attempts} attempts.",
            "A worker serves other weights than the fleet (it restarted, perhaps): refit it, or "
            "see `rollway status`.",
        )

    async def _ready_to_sample(self) -> None:
        """Wait while weights move; refuse where no worker could give a rollout to train on."""
        await self._versions.settled()
        if not self._versions.served:
            raise RolloutError(
                f"No worker is known to serve weight version {self._versions.current}.",
                "The last refit failed or was interrupted, or all workers restarted: refit with "
                "a newer version.",
            )

    @asynccontextmanager
    async def _deadline(self) -> AsyncIterator[None]:
        """One bound over all attempts at a rollout."""
        try:
            async with asyncio.timeout(self._timeout):
                yield
        except TimeoutError as error:
            raise Unreachable(
                f"A rollout took longer than {self._timeout:g} s.",
                "Raise `timeout` of rollouts(), or see whether its worker hangs (rollway status).",
            ) from error

    async def _complete(
        self, prompt: list[int], sampling: Sampling, index: int, session: str, pin: int | None
    ) -> Completion:
        body = completion_request(
            self.model,
            prompt,
            sampling,
            index=index,
            cache_salt=self._salt(),
            required_taint=self._versions.required_taint,
            pin=pin,
        )
        # A session that is bound to one worker outweighs a pin to another.
        headers = {} if pin is not None else {SESSION_HEADER: session}
        answer = await self._http.post(self._url, body, timeout=self._timeout, headers=headers)
        assembly = Assembly(sampling, len(prompt))
        assembly.add(answer)
        return assembly.finish()

    def _stamp(self, prompt: list[int], completion: Completion, epoch: int) -> Rollout | None:
        """The rollout with its version; None when its version cannot be vouched for."""
        book = self._versions
        if book.epoch != epoch:
            return None
        version = book.current
        if version is not None and book.by_worker.get(completion.worker_id or 0) != version:
            return None
        return Rollout(
            prompt_ids=prompt,
            token_ids=completion.token_ids,
            logprobs=completion.logprobs,
            finish_reason=completion.finish_reason,
            worker_id=completion.worker_id,
            weight_version=version,
            cached_tokens=completion.cached_tokens,
        )

    def _salt(self) -> str | None:
        version = self._versions.current
        return None if version is None else f"v{version}"


class _Pins:
    """Where to send a rollout again after one from a worker with other weights.

    The router would choose the same worker once more, so the next one goes to a worker known to
    serve the current version. That one may have died since: then another is tried."""

    def __init__(self, versions: VersionBook) -> None:
        self._versions = versions
        self._dead: set[int] = set()
        self.now: int | None = None

    def next(self) -> None:
        book = self._versions
        good = [i for i, v in book.by_worker.items() if v == book.current and i not in self._dead]
        self.now = random.choice(good) if good else None

    def failed(self) -> None:
        """Also for a request that was not pinned: its session may be bound to a worker that has
        fallen behind."""
        if self.now is not None:
            self._dead.add(self.now)
        self.next()


async def all_or_none(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order; the first failure cancels the others and is raised as itself."""
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(one) for one in work]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in running]


def checked_prompt(prompt_ids: Sequence[int]) -> list[int]:
    """Plain ints, as JSON needs them: a tensor's or array's items are converted exactly."""
    ids = [int(token) for token in prompt_ids]
    if not ids:
        raise UsageError("The prompt has no token.", "Give at least one token id.")
    if min(ids) < 0 or any(a != b for a, b in zip(ids, prompt_ids, strict=True)):
        raise UsageError("A prompt token id is negative or not a whole number.")
    return ids


async def _events(lines: AsyncIterator[bytes]) -> AsyncIterator[object]:
    """The JSON objects of a server-sent event stream, up to [DONE]; anything less is an error."""
    async for line in lines:
        text = line.strip()
        if not text.startswith(b"data:"):
            continue
        data = text[5:].strip()
        if data == b"[DONE]":
            return
        try:
            event = msgspec.json.decode(data)
        except msgspec.DecodeError as error:
            raise RolloutError(f"The stream holds something that is not JSON: {error}.") from error
        if isinstance(event, dict) and "choices" not in event:
            said = server_message(data.decode(errors="replace"))
            raise RolloutError(f"The stream ended with an error: {said}")
        yield event
    raise RolloutError("The stream broke off before it was done.")


def _temporary(error: Unreachable | RequestFailed) -> bool:
    """404 too: the model was served when this client was made, and a frontend that restarts does
    not know its models for a moment."""
    return isinstance(error, Unreachable) or error.status in (404, 429, 500, 502, 503, 504)


def _explained(error: Unreachable | RequestFailed, model: str) -> RolloutError | Unreachable:
    if isinstance(error, Unreachable):
        return error
    hints = {
        404: f"Does the stack serve `{model}`? `rollway status` lists what it serves.",
        500: "Perhaps no worker serves the current weight version any more: see `rollway status`.",
        400: "The prompt must fit the model's context, and every token id its vocabulary.",
    }
    return RolloutError(error.message, hints.get(error.status, ""))
