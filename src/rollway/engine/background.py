"""Run slow work of a worker in a background thread, beside generation."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import socket
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import torch

from rollway.weights.offer import STILL


class BackgroundTask(Future[None]):
    """The outcome of work in a thread. Callers poll it, or have it notify a socket at its end."""

    def __init__(
        self, what: str, work: Callable[[], None], device: torch.device | None = None
    ) -> None:
        """On a GPU, `work` has a stream of its own on `device`, and ends when that is idle."""
        super().__init__()
        self._what = what
        arguments = work, device or torch.device("cpu")
        threading.Thread(
            target=self._run, args=arguments, name="rollway-background", daemon=True
        ).start()

    @property
    def has_failed(self) -> bool:
        return self.done() and self.exception() is not None

    def check(self) -> None:
        """Raise while it is running, and its error if it failed."""
        if not self.done():
            raise RuntimeError(f"{STILL} {self._what}")
        if (error := self.exception()) is not None:
            raise RuntimeError(f"{error}") from error

    def notify_when_done(self, name: str) -> None:
        """Connect to the abstract Unix socket of that name at the end; "" is none."""
        if name:
            self.add_done_callback(lambda _: _connect(name))

    def _run(self, work: Callable[[], None], device: torch.device) -> None:
        try:
            torch.get_num_threads()  # initialises this thread's setting, which share_cores changes
            share_cores(alone=False)
            with torch.no_grad(), use_own_stream(device):
                work()
        except BaseException as error:  # noqa: BLE001 (`check` raises it)
            release_frames(error)
            self.set_exception(error)
        else:
            self.set_result(None)


def _connect(name: str) -> None:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(1.0)
        connection.connect(f"\0{name}")


@contextlib.contextmanager
def use_own_stream(device: torch.device) -> Iterator[None]:
    """Let this thread use a stream of its own on a GPU, so that it never waits for the engine's
    work or delays it; leave when everything on it is complete."""
    if device.type != "cuda":
        yield
        return
    # A new thread begins on the first GPU, whichever GPU the engine's thread uses.
    stream = torch.cuda.Stream(device)
    with torch.cuda.device(device), torch.cuda.stream(stream):
        try:
            yield
        finally:
            stream.synchronize()


def release_frames(error: BaseException) -> None:
    """Release the local variables of an error's traceback: tensors there would keep memory for as
    long as the error is kept."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__


@functools.cache
def _count_threads() -> int:
    return int(torch.get_num_threads())


def share_cores(*, alone: bool) -> None:
    """Let this thread compute with all cores, or with half of them while the engine generates. Two
    teams of threads on the same cores wait for each other at every step: a copy then takes ten
    times as long."""
    threads = _count_threads() if alone else max(1, _count_threads() // 2)
    with contextlib.suppress(AttributeError):  # torch without OpenMP
        ctypes.CDLL(None).omp_set_num_threads(threads)  # only for this thread
