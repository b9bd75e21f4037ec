"""A process group of our own, beside any that the trainer or the engine has.

It is made from a store and from nothing else: `torch.distributed`'s default group, and its list of
groups, never hear of it. What is broadcast is posted first and waited for later, so that the next
bytes travel while the last ones are used; every wait ends within a time that the caller gives.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor

from rollway.errors import WeightsError

Backend = Literal["gloo", "nccl"]
_LOOK_SECONDS = 0.1
_SHORTEST, _LONGEST = 5e-5, 2e-3


class BrokenOff(WeightsError):
    """The others are gone, or slow: seldom this rank's own fault."""


class Group:
    """Rank 0 broadcasts bytes to all others. Nothing but this object holds the group or what is
    under way in it, so that `close` ends both, whoever keeps an error and its frames."""

    def __init__(
        self, store: Any, rank: int, size: int, backend: Backend, address: str, seconds: float
    ) -> None:
        """Returns when all ranks are connected, as far as the backend connects them by now."""
        self._backend = backend
        self._posted: deque[deque[Any]] = deque()
        self._group: Any = None
        make = _nccl if backend == "nccl" else _gloo
        why_not = ""
        try:
            self._group = make(store, rank, size, address, timedelta(seconds=seconds))
        except RuntimeError as error:
            why_not = _brief(error)
        if why_not:  # raised here, so that its frames do not hold half of a group
            raise BrokenOff(f"The group did not form within {seconds:g} s: {why_not}.")

    def post(self, parts: Sequence[Tensor], seconds: float) -> None:
        """Begin to broadcast these, in this order; every rank posts the same."""
        limit = timedelta(seconds=seconds)
        try:
            self._posted.append(deque(self._group.broadcast(part, 0, limit) for part in parts))
        except RuntimeError as error:
            raise BrokenOff(f"The broadcast broke off: {_brief(error)}.") from None

    def finish(self, seconds: float, look: Callable[[], None]) -> None:
        """Wait for what was posted first. `look` is called now and then, and raises to give up:
        gloo leaves a rank that has half of a tensor waiting when its sender is gone."""
        deadline = time.monotonic() + seconds
        next_look = time.monotonic() + _LOOK_SECONDS
        pause = _SHORTEST
        while self._posted[0]:
            if self._first_is_done():
                pause = _SHORTEST
                continue
            now = time.monotonic()
            if now > deadline:
                raise BrokenOff(f"Nothing moved for {seconds:g} s.")
            if now > next_look:
                look()
                next_look = now + _LOOK_SECONDS
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)
        self._posted.popleft()

    def close(self) -> None:
        """Disconnect. What is still under way, or broke off, ends by its own time limit, and not
        in our time: NCCL takes minutes to let go of a group in which a rank died."""
        if self._group is None:
            return
        if self._backend == "nccl":
            self._group.abort()
        unfinished = bool(self._posted)
        held = [self._group, self._posted]
        self._group, self._posted = None, deque()
        if unfinished:
            threading.Thread(target=held.clear, name="rollway-group-end", daemon=True).start()
        else:
            held.clear()

    def _first_is_done(self) -> bool:
        """Whether it is, and if so, let go of it."""
        try:
            if not self._posted[0][0].is_completed():
                return False
            self._posted[0][0].wait()
        except RuntimeError as error:
            raise BrokenOff(f"The broadcast broke off: {_brief(error)}.") from None
        self._posted[0].popleft()
        return True


def address_towards(host: str, port: int) -> str:
    """The address by which this machine reaches another, and is reached from there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # of a datagram socket: sends nothing
        return str(probe.getsockname()[0])


def _brief(error: RuntimeError) -> str:
    """Without the place in the backend's source, and its advice."""
    words = re.sub(r"^\[[^]]*\] ?", "", str(error)).partition("\n")[0]
    return words.partition(". This is typically")[0].rstrip(". ")[:300]


def _gloo(store: Any, rank: int, size: int, address: str, limit: timedelta) -> Any:
    options = dist.ProcessGroupGloo._Options()
    # Left to itself, gloo takes whichever address the host's own name stands for.
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = limit
    return dist.ProcessGroupGloo(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int, address: str, limit: timedelta) -> Any:
    if not dist.is_nccl_available():
        raise WeightsError("This torch has no NCCL.", "Publish tensors in CPU memory.")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    with _watchdog_off():
        return dist.ProcessGroupNCCL(store, rank, size, options)


@contextmanager
def _watchdog_off() -> Iterator[None]:
    """A group that is made meanwhile leaves errors to us: torch's own answer to a rank that died
    is to write a dump and to end the process, and this one serves."""
    names = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_DUMP_ON_TIMEOUT")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "0"))
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
