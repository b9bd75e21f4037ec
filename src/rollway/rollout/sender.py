"""Sending a request until its answer can be attributed to one weight version.

What rollouts and scores have in common: a ticket for a version, one bounded pool of connections,
patience with frontends that restart and workers that die, and the question afterwards whether the
worker had those weights all along.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from array import array
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from rollway.errors import RequestFailed, RolloutError, Unreachable, UsageError
from rollway.http import Http, Retry
from rollway.rollout.wire import COMPLETIONS, GENERATE, Wire, offers
from rollway.versions import Ticket, VersionBook

T = TypeVar("T")

SESSION_HEADER = "x-dynamo-session-id"
PATIENCE_SECONDS = 60.0
"""How long a rollout rides out trouble without any progress: the restart of a frontend (4 s), the
time a dead worker stays listed (10 s), a refit by another process."""
# Sampling again is always safe: nothing of a failed attempt is used.
_TEMPORARY = (404, 429, 499, 500, 502, 503, 504, 529)
_RETRY = Retry(wait_seconds=0.2, max_wait_seconds=3.0)


class Sender:
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
        wire: Wire = COMPLETIONS,
        adapter: str | None = None,
    ) -> None:
        """`adapter` is the full name of one version, `name@version`."""
        self.model = adapter or model
        self.adapter = adapter
        self.wire = wire
        self._http = http
        self._url = f"{frontend_url.rstrip('/')}{wire.path}"
        self._versions = versions
        self._refresh = refresh
        self._confirms = confirms
        self._slots = asyncio.Semaphore(concurrency)
        self._timeout = timeout
        self._patience = patience
        self.in_flight = 0
        """Requests that were sent and are not dealt with: their tokens would be lost."""

    def _attempt(self, session: str | None = None) -> Attempt:
        pins = Pins(self._versions, able=self.wire.routed)
        return Attempt(session or uuid.uuid4().hex, Trouble(self._patience), pins)

    async def _send(self, body: dict[str, Any], ticket: Ticket, attempt: Attempt) -> Any:
        """The answer; None after trouble that may pass, and a wait."""
        pins = attempt.pins
        # A session that is bound to one worker outweighs a pin to another.
        headers = {} if pins.now is not None else {SESSION_HEADER: attempt.session}
        try:
            with self._counted():
                return await self._http.post(
                    self._url, body, timeout=self._timeout, headers=headers
                )
        except (Unreachable, RequestFailed) as error:
            if not (pins.now or temporary(error)):
                raise explained(error, self.model) from error
            await self._refuse_missing_route(error)
            pins.failed(ticket)
            # The session may be bound to a worker that has fallen behind or died.
            attempt.session = uuid.uuid4().hex
            await attempt.trouble.wait(explained(error, self.model))
            await self._look_again()
            return None

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """While a request is on its way, and while its answer is looked at."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    async def _refuse_missing_route(self, error: Unreachable | RequestFailed) -> None:
        """A 404 passes when it is the model that is missing, not when the route is."""
        missing = isinstance(error, RequestFailed) and error.status == 404
        if missing and self.wire is GENERATE and not await offers(self._http, self._url):
            raise RolloutError(
                f"{self._url} is not there.",
                "On a Dynamo frontend it is switched on with "
                "DYN_VLLM_ENABLE_INFERENCE_V1_GENERATE=1; or use the wire `completions`.",
            ) from error

    async def _ticket(self, trouble: Trouble, version: int | None = None) -> Ticket:
        """Wait while weights move, and a while for a worker that serves what is asked for."""
        while True:
            await self._versions.settled()
            try:
                ticket = self._versions.ticket(version)
                return ticket if self.wire.routed else replace(ticket, taint=None)
            except RolloutError as error:
                if self._refresh is None:
                    raise
                await self._look_again()
                await trouble.wait(error)

    async def _vouched(self, ticket: Ticket, worker: int | None) -> bool:
        """What this process knows, and what the others may have done."""
        if ticket.version is None:
            return True
        if worker is None and ticket.taint is None and self.wire.routed:
            return False  # it moved between workers, and nobody kept it to those of its version
        if not self._versions.vouches(ticket, worker):
            return False
        return self._confirms is None or await self._confirms(ticket, worker)

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
class Attempt:
    """What has been tried for one rollout."""

    session: str
    trouble: Trouble
    pins: Pins

    async def not_attributed(self, ticket: Ticket) -> None:
        """An answer came and was of nobody knows which version: wait, and try elsewhere."""
        self.pins.next(ticket)
        await self.trouble.wait(_cannot_be_attributed())


@dataclass(slots=True)
class Trouble:
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
class Pins:
    """Where to send a rollout again, without taints, after one from a worker with other weights.

    The router would choose the same worker once more, so the next one goes to a worker known to
    serve the version. That one may have died since: then another is tried. With taints the router
    itself keeps to the version, and nothing is pinned."""

    versions: VersionBook
    able: bool = True
    now: int | None = None
    _dead: set[int] = field(default_factory=set)

    def next(self, ticket: Ticket) -> None:
        self.now = None
        if self.able and ticket.version is not None and ticket.taint is None:
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
    if isinstance(prompt_ids, str | bytes | bytearray):
        raise UsageError("A prompt is a list of token ids, not text.")
    try:
        ids = array("I", prompt_ids).tolist()  # refuses what is below 0, and is fast
    except (TypeError, OverflowError):
        ids = _converted(prompt_ids)
    if not ids:
        raise UsageError("The prompt has no token.", "Give at least one token id.")
    return ids


def _converted(prompt_ids: Sequence[Any]) -> list[int]:
    """Whole floats too, as JSON makes of ids."""
    try:
        ids = [int(token) for token in prompt_ids]
        exact = all(a == b for a, b in zip(ids, prompt_ids, strict=True))
    except (TypeError, ValueError, OverflowError):
        exact = False
    if not exact or min(ids) < 0:
        raise UsageError("A prompt token id is negative or not a whole number.")
    return ids


def temporary(error: Unreachable | RequestFailed) -> bool:
    """404 too: the model was served when this client was made, and a frontend that restarts does
    not know its models for a moment."""
    return isinstance(error, Unreachable) or error.status in _TEMPORARY


def explained(error: Unreachable | RequestFailed, model: str) -> RolloutError | Unreachable:
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
