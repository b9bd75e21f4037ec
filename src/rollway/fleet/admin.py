"""The admin calls of a worker: the `AdminAPI` protocol, labels, errors, and calls on many workers.

    none, since v ◄── leaves service ── v ◄── enters service, last of all
    (`leaving_label`)                   (its version)

A worker has one label: its version while it serves one, else a negative number, or none at all
before anybody has labelled it.

`dynamo_admin` implements the protocol for Dynamo's workers, `vllm_admin` for plain vLLM servers.
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
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from rollway.errors import AdminError, RollwayError, UsageError
from rollway.fleet.workers import Worker, is_dead
from rollway.weights.offer import STILL

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


class AdminAPI(Protocol):
    """The admin calls of every worker. Each raises `AdminError` with the worker and the reason.
    Workers that take no orders raise `NoSuchMethod` for those below `pin`."""

    taints: bool
    """Whether a router respects `set_taints`."""

    async def health(self, worker: Worker) -> bool: ...

    async def pause(
        self, worker: Worker, mode: PauseMode = "wait", *, clear_cache: bool = True
    ) -> None:
        """Stop generating. `wait` lets running requests finish, `keep` freezes them, `abort` ends
        running and queued ones. Blocks of one policy must not serve the next, so the KV cache is
        cleared by default."""
        ...

    async def resume(self, worker: Worker) -> None: ...

    async def flush_cache(self, worker: Worker) -> None:
        """Drop cached prefixes, except blocks that running requests hold."""
        ...

    async def update_from_disk(self, worker: Worker, path: Path, version: int) -> None:
        """Load a checkpoint directory by the engine's own method. The worker must be paused."""
        ...

    async def update_distributed(
        self, worker: Worker, version: int, method: str, arguments: Mapping[str, Any]
    ) -> None:
        """Run an engine method that receives weights. The worker must be paused."""
        ...

    async def call(self, worker: Worker, method: str, arguments: Mapping[str, Any]) -> None:
        """Run an engine method that changes no weights; raise `NoSuchMethod` if it is missing."""
        ...

    async def load_lora(
        self, worker: Worker, name: str, path: Path, *, fresh: bool = False
    ) -> int | None:
        """Load an adapter; reload it if the name is in use. `fresh` promises that this name and
        path never stood for other weights, so neither a reload nor a cache flush is needed. Return
        the engine's number of the adapter, or None if the engine does not report it."""
        ...

    async def unload_lora(self, worker: Worker, name: str) -> None: ...

    async def read(self, worker: Worker) -> Facts:
        """Return the worker's label, and what state it is in."""
        ...

    async def declare_version(self, worker: Worker, version: int) -> None:
        """Set the label only; `IN_DOUBT` means that the worker's weights are unknown."""
        ...

    async def set_taints(self, worker: Worker, taints: Sequence[str]) -> None:
        """Set the taints: the router sends requests here that require one of them, or none."""
        ...

    def pin(self) -> AbstractAsyncContextManager[AdminAPI]:
        """Return a client for one worker that is pinned to one connection. Once that breaks, its
        calls fail: they never reach another process at the same address."""
        ...

    async def init_group(
        self, worker: Worker, arguments: Mapping[str, Any], *, method: str | None = None
    ) -> None:
        """Join a group for weight transfer; the trainer must join it at the same time."""
        raise refuse_order(worker)

    async def stage(self, worker: Worker, order: Mapping[str, Any]) -> StageReply:
        """Have a worker stage weights, and return its answer when that has ended, or after the
        order's `seconds`. May be repeated. A worker that sleeps takes the memory of its weights
        back. Raise `NoSuchMethod` if the worker is a foreign one."""
        raise refuse_order(worker)

    async def refit(self, worker: Worker, order: Mapping[str, Any]) -> dict[str, Any]:
        """Have a worker move to its staged weights, and return its report. Raise `RefitRefused` if
        it has not begun, `AnotherProcess` if it is gone, and `StillAsleep` if it has the weights
        and cannot serve them."""
        raise refuse_order(worker)

    async def cancel_refit(self, worker: Worker) -> None:
        """End a refit that still waits for running requests; it is then refused."""
        raise refuse_order(worker)

    async def discard(self, worker: Worker, identity: str) -> None:
        """Have a worker free weights that it staged; one that slept sleeps again."""
        raise refuse_order(worker)

    async def memory(self, worker: Worker, level: int = 0) -> list[dict[str, Any]]:
        """Return the memory of every rank; with a level, also why it may not sleep at it."""
        raise refuse_order(worker)

    async def sleep(self, worker: Worker, order: Mapping[str, Any]) -> dict[str, Any]:
        """Have a worker leave the routing, stop generating, drop its KV cache and release memory.
        Level 1 keeps the weights in the host's memory, level 2 forgets them. Return seconds, and
        the memory before and after."""
        raise refuse_order(worker)

    async def wake(self, worker: Worker) -> dict[str, Any]:
        """Have a worker take its memory back and serve the version from before its sleep. Return
        the same as `sleep` and the version; or `is_awake`, if there was nothing to do or nothing
        but a refit helps."""
        raise refuse_order(worker)


def refuse_order(worker: Worker) -> NoSuchMethod:
    return NoSuchMethod(f"{worker} takes no orders of Rollway.", "Start the workers by Rollway.")


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
    admin: AdminAPI,
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
