"""Run slow work in threads with a deadline, so that it delays no other request.

Rendering a chat template runs the model author's code on a client's data, and may never end. It is
Python code, so the interpreter can raise an exception in its thread, which ends a loop at once (a
long call into C returns first). A process pool could always be killed, but each process would load
the tokenizer again (hundreds of MiB) and copy every prompt twice.

A slot is free again only when its thread has really ended. If all slots are busy with work that
does not end, requests that need one are answered with 503, while short requests still work.

Pages of trajectories are built in such threads too, if their session is long: it is too large for
one answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any, Generic, TypeVar

import msgspec

from rollway.errors import UsageError
from rollway.gateway.replies import Refused
from rollway.gateway.tokens import Caller
from rollway.gateway.turns import Session

T = TypeVar("T")

_REAP_SECONDS = 0.5


class Interrupted(BaseException):
    """Raised in a thread whose deadline has passed; not an Exception, so no template catches it."""


class Threads:
    """Runs functions in a bounded number of threads."""

    def __init__(
        self,
        slots: int = max(4, os.cpu_count() or 1),
        *,
        seconds: float = 30.0,
        wait_seconds: float = 60.0,
    ) -> None:
        self.seconds = seconds
        self.wait_seconds = wait_seconds
        self._slots = asyncio.Semaphore(slots)

    async def run(self, work: Callable[[], T], what: str) -> T:
        """Return the result of `work`. `what` names it in the error if it takes too long."""
        try:
            async with asyncio.timeout(self.wait_seconds):
                await self._slots.acquire()
        except TimeoutError:
            raise Refused(
                503, "All threads for long work are busy.", "Try again later.", kind="overloaded"
            ) from None
        try:
            job = _Job(work, self._slots)
        except BaseException:  # no thread could be started
            self._slots.release()
            raise
        try:
            async with asyncio.timeout(self.seconds):
                return await job.outcome
        except TimeoutError:
            if job.outcome.done() and not job.outcome.cancelled():
                raise  # the work itself raised it
            raise UsageError(f"{what} took longer than {self.seconds:g} s.", "Send less.") from None
        finally:
            if not job.ended:
                job.interrupt()


class _Job(Generic[T]):
    """One function in its own thread, so that an interruption hits nothing else."""

    def __init__(self, work: Callable[[], T], slots: asyncio.Semaphore) -> None:
        self._work = work
        self._slots = slots
        self._loop = asyncio.get_running_loop()
        self._interrupted = False
        self.ended = False
        self.outcome: asyncio.Future[T] = self._loop.create_future()
        # A daemon thread does not keep the process alive.
        self._thread = threading.Thread(target=self._run, daemon=True, name="gateway-work")
        self._thread.start()

    def interrupt(self) -> None:
        """Interrupt the thread repeatedly until it has ended; then free its slot."""
        self._interrupted = True
        if not self._thread.is_alive():
            self._slots.release()
            return
        ident = ctypes.c_ulong(self._thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(Interrupted))
        self._loop.call_later(_REAP_SECONDS, self.interrupt)

    def _run(self) -> None:
        result: Any = None
        failure: BaseException | None = None
        try:
            result = self._work()
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody waits
            self._loop.call_soon_threadsafe(self._end, result, failure)

    def _end(self, result: Any, failure: BaseException | None) -> None:
        if self._interrupted:
            return  # `interrupt` frees the slot
        self.ended = True
        self._slots.release()
        if self.outcome.done():
            return
        if failure is None:
            self.outcome.set_result(result)
        elif isinstance(failure, StopIteration):  # a future refuses it
            self.outcome.set_exception(RuntimeError("the work ended its own iteration"))
        else:
            self.outcome.set_exception(failure)


# --- pages of trajectories -----------------------------------------------------------------------


LIMIT = 256
_MOST = 4096
_SECONDS = 300.0
_PAGE_TOKENS = 2_000_000
"""A page ends before it exceeds this, unless a single trajectory does."""


class PageThreads:
    """Threads that build pages: two for operators, and one for each agent's token, so no agent
    delays the trainer or another agent."""

    def __init__(self) -> None:
        self._operators = Threads(2, seconds=_SECONDS)
        self._agents = defaultdict[str, Threads](lambda: Threads(1, seconds=_SECONDS))

    async def run(self, caller: Caller, work: Callable[[], bytes]) -> bytes:
        """Return the page that `work` builds."""
        threads = self._operators if caller.operator else self._agents[caller.scope]
        return await threads.run(work, "Building the trajectories")


def read_bounds(query: Mapping[str, str]) -> tuple[int, int]:
    """Return the offset and limit of a request."""
    values = []
    for name, default, least, most in (("offset", 0, 0, 2**31), ("limit", LIMIT, 1, _MOST)):
        text = query.get(name, str(default))
        if not (text.isascii() and text.isdigit() and len(text) <= 10):
            raise UsageError(f"{name} must be a whole number.")
        if not least <= int(text) <= most:
            raise UsageError(f"{name} must be from {least} to {most}.")
        values.append(int(text))
    return values[0], values[1]


def make_page(session: Session, name: str, offset: int, limit: int) -> bytes:
    """Return a page as JSON. It may run in a thread, while the session grows."""
    shown: list[dict[str, Any]] = []
    tokens, total = 0, session.count_trajectories()
    for sequence in islice(session.trajectories(offset), limit):
        tokens += len(sequence.token_ids)
        if shown and tokens > _PAGE_TOKENS:
            break
        shown.append(sequence.as_json())
    end = offset + len(shown)
    return msgspec.json.encode(
        {
            "session": name,
            "turns": len(session.turns),
            "trajectories": shown,
            "offset": offset,
            "total": total,
            "next": end if shown and end < total else None,
        }
    )
