"""Ask an engine until its answer counts.

Rollouts, streams, scores and the gateway's turns share one loop, `Sender._ask`:

    ticket      wait until no refit blocks requests; take a version, its taint and its salt
    send        the body that the `Question` builds for that ticket
    failed?     wait, drop the session, and begin again
    judge       is every token of a known version (`_is_attributed`), and does the question take it?
    take        what the question makes of it; a cut rollout takes its tokens and asks for the rest

A question that makes no progress for `patience` seconds ends with the last cause. Nothing of an
answer that does not count is used, so asking again is always safe.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypedDict, TypeVar

import msgspec

from rollway.errors import RequestFailed, RolloutError, Unreachable, UsageError
from rollway.http import Http, Retry, read_error_message
from rollway.observe.tally import RolloutTally
from rollway.observe.traces import HEADER, Tracer, TraceSpan
from rollway.rollout.completion import Assembly, Completion
from rollway.rollout.wire import COMPLETIONS, Wire
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
_TEMPORARY = (404, 429, 499, 500, 502, 503, 504, 529)
_RETRY = Retry(wait_seconds=0.2, max_wait_seconds=3.0)


class ClientOptions(TypedDict, total=False):
    """Options of `Stack.rollouts` and `Stack.teacher`, which describe them."""

    concurrency: int
    timeout: float
    patience: float
    wire: str | Wire
    adapter: str | None


@dataclass(slots=True, kw_only=True)
class Question(Generic[T]):
    """What one call asks, and which answers count: by default, whole ones of one version."""

    session: str | None = None
    version: int | None = None
    span: TraceSpan | None = None
    is_streamed: bool = False
    began: float = 0.0
    """When its first request could be sent."""

    def build(self, ticket: Ticket) -> tuple[dict[str, Any], Assembly]:
        """Return the body of a request, and what collects the answer."""
        raise NotImplementedError

    def counts(self, completion: Completion) -> bool:
        """Return whether an answer can be used, if its versions are known."""
        return completion.finish_reason != "aborted" and not completion.is_mixed

    def take(self, completion: Completion, ticket: Ticket, raw: Any) -> T | None:
        """Use an answer that counts; return the result, or None if there is more to ask. `raw` is
        the answer as it came, of a stream the last chunk."""
        raise NotImplementedError

    def count_kept(self) -> int:
        """Return how many tokens of earlier answers are kept."""
        return 0


class Chunk(NamedTuple):
    """A part of a streamed answer."""

    raw: Any
    token_ids: list[int]


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

    async def _answer(self, question: Question[T]) -> T:
        """Return the result of a question."""
        (result,) = [part async for part in self._ask(question)]
        return result  # type: ignore[no-any-return]

    async def _ask(self, question: Question[T]) -> AsyncGenerator[Any]:
        """Yield each `Chunk` of a streamed answer, and last the result of the question. A stream
        that breaks raises: its caller has seen tokens, which cannot be sampled again."""
        result, span = None, question.span
        session, trouble = question.session, Trouble(self._patience)
        try:
            async with self._slots, asyncio.timeout(self._timeout):
                question.began = time.monotonic()
                while result is None:
                    ticket = await self._ticket(trouble, question.version)
                    body, assembly = question.build(ticket)
                    headers = self._make_headers(session, span)
                    failure: Unreachable | RequestFailed | None = None
                    before = question.count_kept()
                    with self._count_in_flight():
                        try:
                            if question.is_streamed:
                                async with self._http.stream_lines(
                                    self._url, body, timeout=self._timeout, headers=headers
                                ) as lines:
                                    async for raw in events(lines):
                                        if tokens := assembly.add(raw):
                                            trouble = Trouble(self._patience)
                                        yield Chunk(raw, tokens)
                            else:
                                raw = await self._http.post(
                                    self._url, body, timeout=self._timeout, headers=headers
                                )
                                assembly.add(raw)
                        except (Unreachable, RequestFailed) as error:
                            # A refusal comes before the first token; a broken stream may have some.
                            if question.is_streamed and isinstance(error, Unreachable):
                                raise
                            failure = error
                        else:
                            completion = assembly.finish()
                            result = await self._judge(question, completion, ticket, raw)
                    if failure is not None:
                        if not await self._recover(failure, headers, trouble, span):
                            session = None
                    elif result is None:
                        if span is not None:
                            span.add_event("retry", cause=completion.finish_reason)
                        if question.count_kept() > before:
                            trouble = Trouble(self._patience)
                        else:
                            await trouble.wait(make_retry_error(completion))
        except TimeoutError as error:
            raise Unreachable(
                f"A rollout took longer than {self._timeout:g} s.",
                "Raise `timeout` of rollouts(), or check `rollway status` for a hung worker.",
            ) from error
        yield result

    async def _recover(
        self,
        failure: Unreachable | RequestFailed,
        headers: Mapping[str, str],
        trouble: Trouble,
        span: TraceSpan | None,
    ) -> bool:
        """Wait after a failed request, or raise if no later one can succeed. Return whether its
        session can be kept: it may be bound to a worker that died or serves an older version."""
        if not is_temporary(failure):
            raise describe_error(failure, self.model)
        self._count_retry(failure, span)
        if self._is_session_refused(failure, headers):
            return True
        await trouble.wait(describe_error(failure, self.model))
        await self._refresh_workers()
        return False

    async def _judge(
        self, question: Question[T], completion: Completion, ticket: Ticket, raw: Any
    ) -> T | None:
        """Return the result, or None if the engine must be asked again."""
        is_used = question.counts(completion)
        if is_used and not await self._is_attributed(ticket, completion):
            is_used = False
            if self.tally is not None:
                self.tally.add_not_believed()
        if not is_used:
            if question.is_streamed:
                raise await self._make_stream_error(ticket)
            return None
        result = question.take(completion, ticket, raw)
        if result is None:
            # Nobody ends a rollout through an engine: a caller cancels its call. What did cut it
            # may have left no trace by now, such as a refit that was cancelled and put the old
            # version back, so there is nothing to ask before it is continued.
            versions = self._versions
            if ticket.version == versions.current and not versions.changing:
                # Another process may have refitted the worker. Otherwise this process knows of the
                # refit, and hundreds of cut rollouts need not ask.
                await self._refresh_workers(now=True)
        return result

    def _make_headers(self, session: str | None, span: TraceSpan | None = None) -> dict[str, str]:
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

    def _count_retry(self, error: Unreachable | RequestFailed, span: TraceSpan | None) -> None:
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

    async def _ticket(self, trouble: Trouble, version: int | None = None) -> Ticket:
        """Wait until no refit blocks requests and a worker serves the version; return a ticket."""
        is_fresh = self._refresh is None
        while True:
            await self._versions.wait_open(trouble.patience)
            try:
                ticket = self._versions.ticket(version)
                return ticket if self.wire.routed else replace(ticket, taint=None)
            except RolloutError as error:
                if is_fresh:
                    is_over = version is not None and self._versions.is_over(version)
                    if self._refresh is None or is_over:
                        raise
                    await trouble.wait(error)
            # Another process may have refitted or resumed the workers meanwhile.
            await self._refresh_workers()
            is_fresh = True

    async def _is_attributed(self, ticket: Ticket, answer: Completion) -> bool:
        """Return whether the versions of an answer's tokens are known: the worker has named them,
        or it is a foreign worker that has served the ticket's version all the time."""
        if ticket.version is None or answer.versions is not None:
            return True
        worker = answer.worker_id
        if worker is None and self.wire.routed:
            return False  # it migrated, and only the last worker's part may have been stamped
        if worker is not None and worker not in self._versions.by_worker:
            await self._refresh_workers()  # another process may have admitted it
        # With prefill and decode apart, both have to be of the version.
        for each in {worker, answer.prefill_worker_id or worker}:
            if self._still_serves is None:
                has_served = self._versions.has_served(ticket, each)
            else:
                has_served = await self._still_serves(ticket, each)
            if not has_served:
                return False
        return True

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
    """Return the ids as plain ints for JSON; items of integer tensors and arrays are ints too."""
    if isinstance(prompt_ids, str | bytes | bytearray):
        raise UsageError("A prompt is a list of token ids, not text.")
    try:
        ids = array("I", prompt_ids).tolist()
    except (TypeError, OverflowError) as error:
        raise UsageError("A prompt token id is not an int from 0 to 2**32 - 1.") from error
    if not ids:
        raise UsageError("The prompt has no token.", "Give at least one token id.")
    return ids


def is_temporary(error: Unreachable | RequestFailed) -> bool:
    """Return whether a retry may succeed. A 404 is temporary too: the model was served when this
    client was created, and a restarting frontend does not know its models for a moment."""
    return isinstance(error, Unreachable) or error.status in _TEMPORARY


def describe_error(error: Unreachable | RequestFailed, model: str) -> RolloutError | Unreachable:
    """Return the error with a hint for its status; the gateway looks for the status in its
    cause."""
    if isinstance(error, Unreachable):
        return error
    hints = {
        404: f"Does the stack serve `{model}`? `rollway status` lists what it serves.",
        500: "Possibly no worker serves the current weight version: see `rollway status`.",
        400: "The prompt and `max_tokens` together must fit the model's context, and every token "
        "id its vocabulary.",
    }
    described = RolloutError(error.message, hints.get(error.status, ""))
    described.__cause__ = error
    return described


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


async def events(lines: AsyncIterator[bytes]) -> AsyncIterator[object]:
    """Yield the JSON objects of a server-sent event stream; raise if it ends before [DONE]."""
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
            raise RolloutError(f"The stream contains invalid JSON: {error}.") from error
        if isinstance(event, dict) and "choices" not in event:
            message = read_error_message(data.decode(errors="replace"))
            raise RolloutError(f"The stream ended with an error: {message}")
        yield event
    raise RolloutError("The stream broke off before [DONE].")
