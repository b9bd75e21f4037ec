"""`Rollouts`: token ids in, token ids with log-probs and their weight version out.

    rollouts = stack.rollouts()
    group = await rollouts.generate(prompt_ids, Sampling(max_tokens=64), n=8)

The n rollouts of a call are one group: they carry one session id, which the router keeps on one
worker, so that the prompt is computed once. Every request requires the taint of its weight version,
so no worker on another version samples a token of it, and KV cache is salted with the version, so
a block computed under one is never read under another.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from rollway.errors import RequestFailed, RolloutError, Unreachable, UsageError
from rollway.fleet.versions import Ticket, VersionBook
from rollway.http import Http, Retry, server_message
from rollway.rollout.sampling import Sampling
from rollway.rollout.trajectory import Rollout, Span, Trajectory
from rollway.rollout.wire import Assembly, Completion, completion_request

__all__ = ["Rollout", "Rollouts", "Span"]

T = TypeVar("T")

SESSION_HEADER = "x-dynamo-session-id"
PATIENCE_SECONDS = 60.0
"""How long a rollout rides out trouble without any progress: the restart of a frontend (4 s), the
time a dead worker stays listed (10 s), a refit by another process."""
# Sampling again is always safe: nothing of a failed attempt is used.
_RETRY = Retry(wait_seconds=0.2, max_wait_seconds=3.0)


class Rollouts:
    """A bounded client of one served model."""

    def __init__(
        self,
        http: Http,
        frontend_url: str,
        model: str,
        versions: VersionBook,
        *,
        refresh: Callable[..., Awaitable[None]] | None = None,
        confirms: Callable[[Ticket, int | None], Awaitable[bool]] | None = None,
        concurrency: int = 256,
        timeout: float = 3600.0,
        patience: float = PATIENCE_SECONDS,
    ) -> None:
        self.model = model
        self._http = http
        self._url = f"{frontend_url.rstrip('/')}/v1/completions"
        self._versions = versions
        self._refresh = refresh
        self._confirms = confirms
        self._slots = asyncio.Semaphore(concurrency)
        self._timeout = timeout
        self._patience = patience

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling | None = None,
        n: int = 1,
        *,
        group: str | None = None,
        version: int | None = None,
    ) -> list[Rollout]:
        """Sample n rollouts of one prompt, from the current weights or from a `version` that some
        worker still serves. Cancelling the call ends them on the workers too."""
        prompt = checked_prompt(prompt_ids)
        if n < 1:
            raise UsageError(f"n is {n}.", "Ask for at least one rollout.")
        session = group or uuid.uuid4().hex
        chosen = sampling or Sampling()
        return await all_or_none(
            self._one(prompt, chosen.shifted(index), session, version) for index in range(n)
        )

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

        A stream that breaks raises; nothing is sampled again behind the reader's back. One that a
        refit cut short goes on with the new weights."""
        trajectory = Trajectory(checked_prompt(prompt_ids), sampling or Sampling())
        session = group or uuid.uuid4().hex
        async with self._slots, self._deadline():
            while True:
                ticket = await self._ticket(_Trouble(self._patience))
                body, assembly = self._request(trajectory, ticket, stream=True)
                async with self._http.stream_lines(
                    self._url, body, timeout=self._timeout, headers={SESSION_HEADER: session}
                ) as lines:
                    async for event in _events(lines):
                        if tokens := assembly.add(event):
                            yield tokens
                rollout = await self._take(trajectory, assembly.finish(), ticket, streamed=True)
                if rollout is not None:
                    break
        yield rollout

    async def _one(
        self, prompt: list[int], sampling: Sampling, session: str, version: int | None
    ) -> Rollout:
        """Sample until the rollout is whole and every token of it has a version."""
        trajectory = Trajectory(prompt, sampling)
        trouble = _Trouble(self._patience)
        pins = _Pins(self._versions)
        async with self._slots, self._deadline():
            while True:
                ticket = await self._ticket(trouble, version)
                body, assembly = self._request(trajectory, ticket, pin=pins.now)
                # A session that is bound to one worker outweighs a pin to another.
                headers = {} if pins.now is not None else {SESSION_HEADER: session}
                try:
                    answer = await self._http.post(
                        self._url, body, timeout=self._timeout, headers=headers
                    )
                except (Unreachable, RequestFailed) as error:
                    if not (pins.now or _temporary(error)):
                        raise _explained(error, self.model) from error
                    pins.failed(ticket)
                    # The session may be bound to a worker that has fallen behind or died.
                    session = uuid.uuid4().hex
                    await trouble.wait(_explained(error, self.model))
                    await self._look_again()
                    continue
                assembly.add(answer)
                before = len(trajectory.token_ids)
                rollout = await self._take(trajectory, assembly.finish(), ticket)
                if rollout is not None:
                    return rollout
                if len(trajectory.token_ids) > before:
                    trouble = _Trouble(self._patience)
                else:
                    pins.next(ticket)
                    await trouble.wait(_cannot_be_attributed())

    async def _take(
        self,
        trajectory: Trajectory,
        completion: Completion,
        ticket: Ticket,
        *,
        streamed: bool = False,
    ) -> Rollout | None:
        """Add a leg; the rollout if it is whole, None if there is more to sample."""
        book, by = self._versions, completion.worker_id
        if not await self._vouched(ticket, by):
            if streamed:
                raise RolloutError("The weights changed while this rollout was streamed.")
            return None
        trajectory.add(completion, ticket.version)
        if completion.finish_reason != "aborted":
            return trajectory.rollout(completion.finish_reason, ticket.version)
        if trajectory.full:
            return trajectory.rollout("length", ticket.version)
        await self._look_again(now=True)
        if ticket.version == book.current and not book.changing and self._serves(ticket, by):
            return trajectory.rollout("aborted", ticket.version)  # somebody meant this rollout
        if streamed and trajectory.sampling.penalised and trajectory.token_ids:
            raise RolloutError("A refit cut a streamed rollout that penalties keep from going on.")
        trajectory.cut()
        return None

    def _serves(self, ticket: Ticket, worker: int | None) -> bool:
        """Whether a worker is as it was; if not, another process is changing its weights."""
        return ticket.version is None or worker in self._versions.served_by(ticket.version)

    def _request(
        self,
        trajectory: Trajectory,
        ticket: Ticket,
        *,
        pin: int | None = None,
        stream: bool = False,
    ) -> tuple[dict[str, Any], Assembly]:
        prompt, sampling = trajectory.next_leg()
        body = completion_request(
            self.model,
            prompt,
            sampling,
            cache_salt=ticket.salt,
            required_taint=ticket.taint,
            pin=pin,
            stream=stream,
        )
        return body, Assembly(sampling, len(prompt))

    async def _ticket(self, trouble: _Trouble, version: int | None = None) -> Ticket:
        """Wait while weights move, and a while for a worker that serves what is asked for."""
        while True:
            await self._versions.settled()
            try:
                return self._versions.ticket(version)
            except RolloutError as error:
                if self._refresh is None:
                    raise
                await self._look_again()
                await trouble.wait(error)

    async def _vouched(self, ticket: Ticket, worker: int | None) -> bool:
        """What this process knows, and what the others may have done."""
        if not self._versions.vouches(ticket, worker):
            return False
        if ticket.version is None or self._confirms is None:
            return True
        return await self._confirms(ticket, worker)

    async def _look_again(self, *, now: bool = False) -> None:
        if self._refresh is not None:
            await self._refresh(now=now)

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


@dataclass(slots=True)
class _Trouble:
    """Waits longer each time, and gives up with the error when it has lasted too long."""

    patience: float
    _since: float | None = None
    _times: int = 0

    async def wait(self, error: RolloutError | Unreachable) -> None:
        now = time.monotonic()
        if self._since is None:
            self._since = now
        wait = _RETRY.wait(self._times)
        if now + wait - self._since > self.patience:
            raise error
        self._times += 1
        await asyncio.sleep(wait)


@dataclass(slots=True)
class _Pins:
    """Where to send a rollout again, without taints, after one from a worker with other weights.

    The router would choose the same worker once more, so the next one goes to a worker known to
    serve the version. That one may have died since: then another is tried. With taints the router
    itself keeps to the version, and nothing is pinned."""

    versions: VersionBook
    now: int | None = None
    _dead: set[int] = field(default_factory=set)

    def next(self, ticket: Ticket) -> None:
        self.now = None
        if ticket.version is not None and ticket.taint is None:
            good = [i for i in self.versions.served_by(ticket.version) if i not in self._dead]
            self.now = random.choice(good) if good else None

    def failed(self, ticket: Ticket) -> None:
        if self.now is not None:
            self._dead.add(self.now)
            self.next(ticket)


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
    return isinstance(error, Unreachable) or error.status in (404, 429, 499, 500, 502, 503, 504)


def _explained(error: Unreachable | RequestFailed, model: str) -> RolloutError | Unreachable:
    if isinstance(error, Unreachable):
        return error
    hints = {
        404: f"Does the stack serve `{model}`? `rollway status` lists what it serves.",
        500: "Perhaps no worker serves the current weight version any more: see `rollway status`.",
        400: "The prompt must fit the model's context, and every token id its vocabulary.",
    }
    return RolloutError(error.message, hints.get(error.status, ""))


def _cannot_be_attributed() -> RolloutError:
    return RolloutError(
        "No rollout could be attributed to one weight version.",
        "A worker serves other weights than the fleet (it restarted, perhaps): refit it, or see "
        "`rollway status`.",
    )
