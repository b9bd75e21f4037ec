"""What the admin calls of a worker share: labels, facts, errors, and calls on many workers.

    none, since v ◄── leaves service ── v ◄── enters service, last of all
    (`leaving_label`)                   (its version)

A worker has one label: its version while it serves one, else a negative number, or none at all
before anybody has labelled it.

`dynamo_admin` has the calls to Dynamo's workers, `vllm_admin` those to plain vLLM servers.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from rollway.errors import AdminError, RollwayError, UsageError
from rollway.fleet.workers import Worker, is_dead
from rollway.weights.offer import STILL

if TYPE_CHECKING:
    from rollway.fleet.dynamo_admin import DynamoAdmin

T = TypeVar("T")
W = TypeVar("W")

PauseMode = Literal["wait", "keep", "abort"]
MAX_PARALLEL_CALLS = 128
IN_DOUBT = -1
"""The label of a worker whose weights are unknown. Every negative label means that no version is
served; see `leaving_label`."""
UNVERIFIED = -2
"""The label of a foreign worker that has loaded an update, and of which nobody knows yet whether it
is the right one."""
ASK_SECONDS = 0.5
"""The first wait before a worker that sent no notification is asked; later waits are longer."""

_FAILED_CALL = re.compile(r"^Call to \w+ method failed: ")
# The end is missing where a long message was cut.
_WRAPPED = re.compile(r"Worker failed with error '(.*?)(?:'(?:, please check|$)|$)", re.DOTALL)
_NO_METHOD = "has no attribute '{0}'", "Method '{0}' is not implemented"


class NoSuchMethod(AdminError):
    """The worker lacks the route, or its engine lacks the method."""


class RefitRefused(AdminError):
    """The worker did not begin a refit: it serves what it served before."""


class StillAsleep(AdminError):
    """The worker has new weights, but not the memory of its KV cache."""


class OtherSecret(AdminError):
    """The worker takes no orders that are signed with this stack's secret."""


class AnotherProcess(AdminError):
    """Another process answers at a worker's address."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a worker says of itself."""

    label: int | None
    """Its version, None if nobody has labelled it, or a negative number while it serves none."""
    enforces: bool = False
    """Whether its engine refuses requests of other versions, so that its answers are stamped."""
    sleep_level: int = 0
    is_paused: bool = False
    """Whether it is paused, and neither asleep nor in a refit."""


@dataclass(frozen=True, slots=True)
class StageReply:
    """What a worker answers to the order to stage weights."""

    label: int | None
    ranks: Sequence[Mapping[str, Any]]
    """The state of the weights in every rank; empty if the worker is still starting and has staged
    nothing."""
    sleep_level: int = 0


async def call_all(
    workers: Iterable[W], call: Callable[[W], Awaitable[T]]
) -> list[T | BaseException]:
    """Make one call on every worker, a bounded number at once. Return the results in order; the
    result of a call that failed is its exception."""
    slots = asyncio.Semaphore(MAX_PARALLEL_CALLS)

    async def call_one(worker: W) -> T:
        async with slots:
            return await call(worker)

    return await asyncio.gather(*map(call_one, workers), return_exceptions=True)


async def collect_failures(
    workers: Sequence[W], call: Callable[[W], Awaitable[object]]
) -> list[tuple[W, BaseException]]:
    """Make one call on every worker, and return those that failed with their errors."""
    results = zip(workers, await call_all(workers, call), strict=True)
    return [(worker, error) for worker, error in results if isinstance(error, BaseException)]


async def call_all_or_raise(workers: Sequence[W], call: Callable[[W], Awaitable[object]]) -> None:
    """Make one call on every worker, and raise the first failure when all have ended."""
    for _, error in await collect_failures(workers, call):
        raise error


async def call_living(
    workers: Sequence[Worker], call: Callable[[Worker], Awaitable[object]]
) -> None:
    """Make one call on every worker, and raise the first failure, unless its worker has died."""
    for worker, error in await collect_failures(workers, call):
        if not (isinstance(error, AdminError) and await is_dead(worker)):
            raise error


async def run_to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Run to the end even if cancelled, and raise the cancellation afterwards: until the work is
    done, the caller's lock must not be released."""
    task = asyncio.create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    task.result()


Call = tuple[str, Mapping[str, Any]]
"""An engine method and its arguments."""


async def start_and_wait(
    admin: DynamoAdmin,
    worker: Worker,
    start: Call,
    check: Callable[[], Awaitable[None]],
    seconds: float,
    poll_seconds: float = 2.0,
) -> None:
    """Start a background task in a worker and wait until `check` does not raise any more. A worker
    on another machine is asked at least every `poll_seconds`."""
    method, arguments = start
    deadline, wait = time.monotonic() + seconds, ASK_SECONDS
    try:
        async with _notifications(worker.world_size) as (socket_name, notified):
            await admin.call(worker, method, {**arguments, "tell": socket_name})
            while True:
                # A worker on another machine cannot reach the socket, so it is asked repeatedly.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(notified.wait(), wait)
                try:
                    return await check()
                except AdminError as error:
                    if STILL not in error.message:
                        raise
                if time.monotonic() > deadline:
                    raise AdminError(f"{worker} has not got the weights within {seconds:g} s.")
                notified.clear()
                wait = min(poll_seconds, 2 * wait)
    except NoSuchMethod:
        raise
    except AdminError as error:
        raise as_usage_error(error) from error


@asynccontextmanager
async def _notifications(expected: int) -> AsyncIterator[tuple[str, asyncio.Event]]:
    """Yield the name of a unix socket, and an event that is set after `expected` connections."""
    name, notified, count = f"rollway/staged/{secrets.token_hex(8)}", asyncio.Event(), 0

    async def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        count += 1
        if count >= expected:
            notified.set()
        writer.close()

    server = await asyncio.start_unix_server(accept, f"\0{name}")
    try:
        yield name, notified
    finally:
        server.close()


def as_usage_error(error: AdminError) -> RollwayError:
    """Return a worker's refusal as a mistake of the caller."""
    # An error with a cause is no refusal: the call or its answer was lost.
    is_refusal = error.__cause__ is None and not isinstance(error, OtherSecret)
    return UsageError(error.message, error.hint) if is_refusal else error


def leaving_label(version: int) -> int:
    """Return the label of a worker that has served nothing since `version`."""
    return UNVERIFIED - 1 - version


def version_left(label: int | None) -> int | None:
    """Return the version of a `leaving_label`; None for any other label."""
    return None if label is None or label >= UNVERIFIED else UNVERIFIED - 1 - label


def parse_label(label: Any) -> int | None:
    """Return a label as a version; a label that is no number was set by another tool."""
    if label is None:
        return None
    is_int = isinstance(label, int) and not isinstance(label, bool)
    has_digits = isinstance(label, str) and re.fullmatch(r"-?\d+", label) is not None
    return int(label) if is_int or has_digits else IN_DOUBT


def unwrap_engine_error(message: str) -> str:
    """Return the message that an engine method raised, without vLLM's text around it."""
    message = _FAILED_CALL.sub("", message)
    wrapped = _WRAPPED.search(message)
    return wrapped.group(1) if wrapped else message


def is_missing_method(method: str, message: str) -> bool:
    return any(text.format(method) in message for text in _NO_METHOD)
