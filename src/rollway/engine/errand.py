"""Work of a worker that takes a while, beside generation, and is asked about by name."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import socket
import threading
from collections.abc import Callable

import torch

from rollway.weights.offer import STILL


class Errand:
    """A thread; whoever waits for it may ask, or have it knock at a socket of this machine."""

    def __init__(self, what: str, work: Callable[[], None]) -> None:
        self._what = what
        self._work = work
        self._error: BaseException | None = None
        self._done = threading.Event()
        self._tell: set[str] = set()
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="rollway-errand", daemon=True).start()

    @property
    def failed(self) -> bool:
        return self._error is not None

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def check(self) -> None:
        """Raise while it is not done, and for ever if it failed."""
        if not self._done.is_set():
            raise RuntimeError(f"{STILL} {self._what}")
        if self._error is not None:
            raise RuntimeError(f"{self._error}") from self._error

    def when_done(self, name: str) -> None:
        with self._lock:
            self._tell.add(name)
            done = self._done.is_set()
        if done:
            self._knock()

    def wait(self, seconds: float) -> bool:
        return self._done.wait(seconds)

    def _run(self) -> None:
        try:
            torch.get_num_threads()  # settles what this thread starts with
            share_cores(alone=False)
            with torch.no_grad():
                self._work()
        except BaseException as error:  # noqa: BLE001 (it is told to whoever asks)
            self._error = error
        finally:
            with self._lock:
                self._done.set()
            self._knock()

    def _knock(self) -> None:
        with self._lock:
            names, self._tell = self._tell - {""}, set()
        for name in names:
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as line:
                line.settimeout(1.0)
                line.connect(f"\0{name}")


@functools.cache
def _all_threads() -> int:
    return int(torch.get_num_threads())


def share_cores(*, alone: bool) -> None:
    """Have this thread compute with all cores, or with half of them while others generate: two
    teams of threads that fill the same cores wait for each other at every step, and a copy takes
    ten times as long."""
    threads = _all_threads() if alone else max(1, _all_threads() // 2)
    with contextlib.suppress(AttributeError):  # torch without OpenMP
        ctypes.CDLL(None).omp_set_num_threads(threads)  # of this thread alone
