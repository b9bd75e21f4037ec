"""Work that would hold up every other request, in threads of its own and with a deadline.

Rendering a chat template runs code of the model's author on data of a client, and it can take for
ever. It is Python code, so the interpreter can raise an exception in its thread; that ends a loop
at once. A single long call into C ends first. A process pool could be killed in any case, but each
process would load the tokenizer again (hundreds of MiB) and copy every prompt twice.

A slot is free again only when its thread has really ended. If all are taken by work that does not
end, requests that need one are answered with 503, and short requests go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from rollway.errors import UsageError
from rollway.gateway.replies import Refused

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
        """Return the result of `work`. `what` is for the error when it takes too long."""
        try:
            async with asyncio.timeout(self.wait_seconds):
                await self._slots.acquire()
        except TimeoutError:
            raise Refused(
                503, "All threads for long prompts are busy.", "Try again later.", kind="overloaded"
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
    """One function in one thread: nothing else can be hit by its interruption."""

    def __init__(self, work: Callable[[], T], slots: asyncio.Semaphore) -> None:
        self._work = work
        self._slots = slots
        self._loop = asyncio.get_running_loop()
        self._interrupted = False
        self.ended = False
        self.outcome: asyncio.Future[T] = self._loop.create_future()
        # Daemons do not keep the process from ending.
        self._thread = threading.Thread(target=self._run, daemon=True, name="gateway-work")
        self._thread.start()

    def interrupt(self) -> None:
        """End the thread, again and again until it has ended; then free its slot."""
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
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
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
