"""Send a request until its answer can be attributed to one weight version.

Rollouts and scores share this: a ticket for a version, a bounded number of requests at once,
retries while a frontend restarts or a worker dies, and the check afterwards that the worker served
that version throughout.
"""

from __future__ import annotations

import asyncio
import random
import time
from array import array
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict, TypeVar

from rollway.errors import RequestFailed, RolloutError, Unreachable, UsageError
from rollway.http import Http, Retry
from rollway.observe.tally import RolloutTally
from rollway.observe.traces import HEADER, Span, Tracer
from rollway.rollout.completion import Completion
from rollway.rollout.wire import COMPLETIONS, GENERATE, Wire, has_route
from rollway.versions import FleetVersions, Ticket

T = TypeVar("T")

SESSION_HEADER = "x-dynamo-session-id"
FULL = 529
"""Dynamo's frontend holds 65,536 sessions, each until it was idle for the router's
`session-affinity-ttl-secs`. Then it refuses every request with a new session by this status."""
FULL_SECONDS = 10.0
"""For how long requests have no session after that."""
PATIENCE_SECONDS = 60.0
"""How long a rollout retries without progress. A frontend restarts in 4 s, a dead worker stays
listed for 10 s, and another process may be refitting."""
# Sampling again is always safe: Rollway uses nothing of a failed attempt.
_TEMPORARY = (404, 429, 499, 500, 502, 503, 504, 529)
_RETRY = Retry(wait_seconds=0.2, max_wait_seconds=3.0)


class ClientOptions(TypedDict, total=False):
    """Options of `Stack.rollouts` and `Stack.teacher`, which describe them."""

    concurrency: int
    timeout: float
    patience: float
    wire: str | Wire
    adapter: str | None


class Sender:
    """A client of one served model, with a bounded number of requests at once."""

    tally: RolloutTally | None = None
    """Counts what is returned and what is repeated, for the record of the run."""
    tracer: Tracer | None = None
    """Makes a span of each rollout."""

    def __init__(
        self,
        http: Http,
        frontend_url: str,
        model: str,
        versions: FleetVersions,
        *,
        refresh: Callable[..., Awaitable[None]] | None = None,
        still_serves: Callable[[Ticket, int | None], Awaitable[bool]] | None = None,
        concurrency: int = 256,
        timeout: float = 3600.0,
        patience: float = PATIENCE_SECONDS,
        wire: Wire = COMPLETIONS,
        adapter: str | None = None,
    ) -> None:
        """`adapter` is the full name of an adapter's version, `name@version`."""
        self.model = adapter or model
        self.adapter = adapter
        self.wire = wire
        self._http = http
        self._url = f"{frontend_url.rstrip('/')}{wire.path}"
        self._versions = versions
        self._refresh = refresh
        self._still_serves = still_serves
        self._slots = asyncio.Semaphore(concurrency)
        self._timeout = timeout
        self._patience = patience
        self._full_until = 0.0
        self.in_flight = 0
        """Requests whose answers are not processed yet. Their tokens would be lost."""

    def _attempt(self, session: str | None = None, span: Span | None = None) -> Attempt:
        pins = Pins(self._versions, able=self.wire.routed)
        return Attempt(session, Trouble(self._patience), pins, span)

    def _make_headers(self, session: str | None, span: Span | None = None) -> dict[str, str]:
        headers = {}
        if session is not None and time.monotonic() >= self._full_until:
            headers[SESSION_HEADER] = session
        if span is not None:
            headers[HEADER] = span.header
        return headers

    def _is_session_refused(
        self, error: Unreachable | RequestFailed, headers: Mapping[str, str]
    ) -> bool:
        """Return whether the frontend holds as many sessions as it can; then the next requests
        have none. The router finds most prefixes without."""
        is_full = isinstance(error, RequestFailed) and error.status == FULL
        if not (is_full and SESSION_HEADER in headers):
            return False
        self._full_until = time.monotonic() + FULL_SECONDS
        return True

    @contextmanager
    def _trace(self) -> Iterator[Span | None]:
        """Begin a span of a rollout, and end it if the block raises; the block ends it otherwise.
        None without traces."""
        if self.tracer is None:
            yield None
            return
        span = self.tracer.begin("rollway.rollout", is_client=True)
        try:
            yield span
        except BaseException as error:
            span.finish({"rollway.model": self.model}, error=error)
            raise

    async def _send(self, body: dict[str, Any], ticket: Ticket, attempt: Attempt) -> Any:
        """Return the answer, or None after a temporary failure and a wait."""
        pins = attempt.pins
        # Dynamo prefers the worker of a session to a pinned one, so a pinned request has no
        # session.
        session = None if pins.now is not None else attempt.session
        headers = self._make_headers(session, attempt.span)
        try:
            with self._count_in_flight():
                return await self._http.post(
                    self._url, body, timeout=self._timeout, headers=headers
                )
        except (Unreachable, RequestFailed) as error:
            if not (pins.now or is_temporary(error)):
                raise describe_error(error, self.model) from error
            await self._refuse_missing_route(error)
            self._count_retry(error, attempt.span)
            if self._is_session_refused(error, headers):
                return None
            pins.exclude_current(ticket)
            # The session may be bound to a worker that died or serves an older version.
            attempt.session = None
            await attempt.trouble.wait(describe_error(error, self.model))
            await self._refresh_workers()
            return None

    def _count_retry(self, error: Unreachable | RequestFailed, span: Span | None) -> None:
        cause = "unreachable" if isinstance(error, Unreachable) else f"status {error.status}"
        if self.tally is not None:
            self.tally.add_retry(cause)
        if span is not None:
            span.add_event("retry", cause=cause, detail=error.message)

    @contextmanager
    def _count_in_flight(self) -> Iterator[None]:
        """Count a request as in flight, also while its answer is checked."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    async def _refuse_missing_route(self, error: Unreachable | RequestFailed) -> None:
        """Raise if a 404 means that the route is missing. A missing model is temporary."""
        missing = isinstance(error, RequestFailed) and error.status == 404
        if missing and self.wire is GENERATE and not await has_route(self._http, self._url):
            raise RolloutError(
                f"The server has no route {self._url}.",
                "Set DYN_VLLM_ENABLE_INFERENCE_V1_GENERATE=1 for the Dynamo frontend, or use the "
                "wire `completions`.",
            ) from error

    async def _ticket(self, trouble: Trouble, version: int | None = None) -> Ticket:
        """Wait until no refit blocks requests and a worker serves the version; return a ticket."""
        while True:
            await self._versions.wait_open(trouble.patience)
            ticket = self._try_ticket(version)
            if isinstance(ticket, RolloutError) and self._refresh is not None:
                await self._refresh_workers()
                # Another process may have refitted or resumed the workers meanwhile.
                ticket = self._try_ticket(version)
            if isinstance(ticket, Ticket):
                return ticket if self.wire.routed else replace(ticket, taint=None)
            is_over = version is not None and self._versions.is_over(version)
            if self._refresh is None or is_over:
                raise ticket
            await trouble.wait(ticket)

    def _try_ticket(self, version: int | None) -> Ticket | RolloutError:
        try:
            return self._versions.ticket(version)
        except RolloutError as error:
            return error

    async def _is_attributed(self, ticket: Ticket, answer: Completion | int | None) -> bool:
        """Return whether the versions of an answer's tokens are known: the worker has named them,
        or the ticket's version sampled all of them. `answer` may be the worker alone.

        This process may not know of refits by other processes, so `still_serves` asks the
        worker."""
        if ticket.version is None:
            return True
        if not isinstance(answer, Completion):
            return await self._has_version(ticket, answer)
        # What a prefill worker computed is of the version, too: its engine refuses other requests,
        # or it is asked like the worker that decodes.
        prefill = answer.prefill_worker_id
        is_unknown = prefill is not None and not self._versions.is_enforced(prefill)
        if is_unknown and not await self._has_version(ticket, prefill):
            return False
        return answer.versions is not None or await self._has_version(ticket, answer.worker_id)

    async def _has_version(self, ticket: Ticket, worker: int | None) -> bool:
        """Return whether this worker has had the ticket's version for the whole request."""
        if worker is None and ticket.taint is None and self.wire.routed:
            return False  # it migrated, and without a taint possibly to a worker of another version
        if not self._versions.attributes_to(ticket, worker):
            if worker is not None and not self._versions.has_met(worker):
                await self._refresh_workers()  # another process may have admitted it
            return False
        if self._still_serves is None:
            return True
        # An update may have been issued while the worker was asked.
        return await self._still_serves(ticket, worker) and self._versions.attributes_to(
            ticket, worker
        )

    async def _make_stream_error(self, ticket: Ticket) -> RolloutError:
        """Return why the tokens of a stream cannot be attributed to its version."""
        await self._refresh_workers(now=True)
        newest = self._versions.newest
        if self._versions.changing or (newest or 0) > (ticket.version or 0):
            return RolloutError("The weights changed while this answer was streamed.")
        return RolloutError(
            "A worker died while this answer was streamed, so its version is not certain.",
            "Send the request again; `generate` does so by itself.",
        )

    async def _refresh_workers(self, *, now: bool = False) -> None:
        if self._refresh is not None:
            await self._refresh(now=now)

    @asynccontextmanager
    async def _deadline(self) -> AsyncIterator[None]:
        """Bound the time of all attempts together."""
        try:
            async with asyncio.timeout(self._timeout):
                yield
        except TimeoutError as error:
            raise Unreachable(
                f"A rollout took longer than {self._timeout:g} s.",
                "Raise `timeout` of rollouts(), or check `rollway status` for a hung worker.",
            ) from error


@dataclass(slots=True)
class Attempt:
    """The state of the attempts at one rollout."""

    session: str | None
    trouble: Trouble
    pins: Pins
    span: Span | None = None

    async def retry_elsewhere(self, ticket: Ticket, answer: Completion | None = None) -> None:
        """Wait and choose another worker, after an answer that cannot be used."""
        self.pins.next(ticket)
        await self.trouble.wait(make_retry_error(answer))


@dataclass(slots=True)
class Trouble:
    """Waits longer each time, and raises the error when failures have lasted too long."""

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
    """Chooses the worker of a retry when requests have no taint.

    Without taints the router would choose the same worker again, whatever it serves. So a retry is
    pinned to a worker that is known to serve the version. That worker may have died since; then
    another one is tried. With taints the router itself selects by version, and nothing is
    pinned."""

    versions: FleetVersions
    able: bool = True
    now: int | None = None
    _dead: set[int] = field(default_factory=set)

    def next(self, ticket: Ticket) -> None:
        """Pin a worker that serves the ticket's version, if there is one."""
        self.now = None
        is_free = ticket.version is not None and ticket.taint is None
        # Dynamo refuses a pin to a worker that only prefills or only decodes.
        if self.able and is_free and not self.versions.needed_roles:
            assert ticket.version is not None
            good = [i for i in self.versions.list_serving(ticket.version) if i not in self._dead]
            self.now = random.choice(good) if good else None

    def exclude_current(self, ticket: Ticket) -> None:
        """Pin another worker, because the pinned one failed."""
        if self.now is not None:
            self._dead.add(self.now)
            self.next(ticket)


async def all_or_none(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return all results in order; the first failure cancels the others and is raised itself."""
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(coroutine) for coroutine in work]
    except BaseExceptionGroup as failures:
        first = failures.exceptions[0]
        raise first from first.__cause__  # not the group, and with its own cause
    return [task.result() for task in running]


def check_prompt(prompt_ids: Sequence[int]) -> list[int]:
    """Return the ids as plain ints for JSON; items of tensors and arrays are converted exactly."""
    if isinstance(prompt_ids, str | bytes | bytearray):
        raise UsageError("A prompt is a list of token ids, not text.")
    try:
        ids = array("I", prompt_ids).tolist()  # fast, and refuses negative numbers
    except (TypeError, OverflowError):
        ids = _convert_ids(prompt_ids)
    if not ids:
        raise UsageError("The prompt has no token.", "Give at least one token id.")
    return ids


def _convert_ids(prompt_ids: Sequence[Any]) -> list[int]:
    """Convert items that are whole numbers, including floats such as JSON gives."""
    try:
        ids = [int(token) for token in prompt_ids]
        exact = all(a == b for a, b in zip(ids, prompt_ids, strict=True))
    except (TypeError, ValueError, OverflowError):
        exact = False
    if not exact or min(ids) < 0:
        raise UsageError("A prompt token id is negative or not a whole number.")
    return ids


def is_temporary(error: Unreachable | RequestFailed) -> bool:
    """Return whether a retry may succeed. A 404 is temporary too: the model was served when this
    client was created, and a restarting frontend does not know its models for a moment."""
    return isinstance(error, Unreachable) or error.status in _TEMPORARY


def describe_error(error: Unreachable | RequestFailed, model: str) -> RolloutError | Unreachable:
    """Return the error with a hint for its status."""
    if isinstance(error, Unreachable):
        return error
    hints = {
        404: f"Does the stack serve `{model}`? `rollway status` lists what it serves.",
        500: "Possibly no worker serves the current weight version: see `rollway status`.",
        400: "The prompt and `max_tokens` together must fit the model's context, and every token "
        "id its vocabulary.",
    }
    return RolloutError(error.message, hints.get(error.status, ""))


def make_retry_error(answer: Completion | None) -> RolloutError:
    """Return the error to raise if no later answer than this one is usable."""
    if answer is not None and answer.finish_reason == "aborted":
        return RolloutError(
            "Workers abort this rollout whenever it is sent.",
            "Their logs may tell why: see `rollway logs` and `rollway status`.",
        )
    return RolloutError(
        "No rollout could be attributed to one weight version.",
        "A worker serves other weights than the fleet, possibly after a restart: refit it, or see "
        "`rollway status`.",
    )
