"""A separate process group, beside any that the trainer or the engine has, and its messages.

It is made from a store alone: `torch.distributed`'s default group and its registry of groups do not
contain it. Broadcasts are posted first and finished later, so that the next bytes are sent while
the last ones are used. Every wait ends within a time limit of the offer.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from rollway.errors import WeightsError
from rollway.weights.offer import Entry
from rollway.weights.transports.collective_rendezvous import BrokenOff, Location
from rollway.weights.transports.entries import align

_CHECK_SECONDS = 0.1
_SHORTEST_PAUSE, _LONGEST_PAUSE = 5e-5, 2e-3
_ALIGNMENT = 256
_LARGE = 1 << 20
"""A tensor of this many bytes is sent alone, straight from its own memory."""


def split_into_messages(entries: Iterable[Entry], bucket_bytes: int) -> list[list[Entry]]:
    """Return the tensors of each message, with their offsets in it; all ranks must agree on them.

    A large tensor is a message alone, small ones fill a bucket."""
    large = min(_LARGE, bucket_bytes)
    messages: list[list[Entry]] = []
    end = 0
    for entry in entries:
        is_large, size = entry.nbytes >= large, align(entry.nbytes, _ALIGNMENT)
        if not messages or is_large or end + size > bucket_bytes:
            messages.append([])
            end = 0
        messages[-1].append(msgspec.structs.replace(entry, offset=end))
        # Nothing fits behind a large tensor.
        end = bucket_bytes + 1 if is_large else end + size
    return messages


def make_buffers(sizes: Sequence[int], device: torch.device) -> list[Tensor]:
    """Return the memory of each message: in two buffers in turn, so that one is filled while the
    other is in use."""
    largest = [max(sizes[start::2], default=0) for start in range(2)]
    buffers = [torch.empty(size, dtype=torch.uint8, device=device) for size in largest]
    return [buffers[number % 2][:size] for number, size in enumerate(sizes)]


class Group:
    """A group in which rank 0 broadcasts bytes to all others.

    Nothing but this object references the group or its pending work, so that `close` ends both even
    while somebody keeps an exception and the frames in its traceback."""

    def __init__(
        self, store: Any, rank: int, location: Location, address: str, check: Callable[[], None]
    ) -> None:
        """Connect to all ranks, as far as the backend does this in advance.

        `check` raises to give up. It is called regularly: gloo lets a rank that has half of a
        tensor wait for ever when its sender is gone."""
        self._location, self._check = location, check
        self._posted: deque[deque[Any]] = deque()
        self._group: Any = None
        make = _make_nccl if location.backend == "nccl" else _make_gloo
        store, size = dist.PrefixStore("group", store), location.receivers + 1
        seconds, problem = location.init_seconds, ""
        try:
            self._group = make(store, rank, size, address, timedelta(seconds=seconds))
        except RuntimeError as error:
            problem = _shorten(error)
        # Raise outside of `except`: the frames of the first error would keep a half-made group.
        if problem:
            raise BrokenOff(f"The group did not form within {seconds:g} s: {problem}.")

    def post(self, flat: Tensor) -> None:
        """Start to broadcast bytes, a bucket at a time; every rank posts the same."""
        limit = timedelta(seconds=self._location.step_seconds)
        parts = flat.split(self._location.bucket_bytes) if flat.numel() else ()
        try:
            self._posted.append(deque(self._group.broadcast(part, 0, limit) for part in parts))
        except RuntimeError as error:
            raise BrokenOff(f"The broadcast broke off: {_shorten(error)}.") from None

    def finish(self) -> None:
        """Wait for the bytes that were posted first."""
        seconds = self._location.step_seconds
        deadline = time.monotonic() + seconds
        next_check = time.monotonic() + _CHECK_SECONDS
        pause = _SHORTEST_PAUSE
        while self._posted[0]:
            if self._pop_finished():
                pause = _SHORTEST_PAUSE
                continue
            now = time.monotonic()
            if now > deadline:
                raise BrokenOff(f"Nothing moved for {seconds:g} s.")
            if now > next_check:
                self._check()
                next_check = now + _CHECK_SECONDS
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        self._posted.popleft()

    def close(self) -> None:
        """Disconnect.

        Unfinished work ends by its own time limit, on another thread: NCCL takes minutes to release
        a group in which a rank died."""
        if self._group is None:
            return
        if self._location.backend == "nccl":
            self._group.abort()
        last_references = [self._group, self._posted]
        is_unfinished = bool(self._posted)
        self._group, self._posted = None, deque()
        release = last_references.clear
        if is_unfinished:
            threading.Thread(target=release, name="rollway-group-end", daemon=True).start()
        else:
            release()

    def _pop_finished(self) -> bool:
        """Remove the first part if it has arrived; return whether it has."""
        try:
            if not self._posted[0][0].is_completed():
                return False
            self._posted[0][0].wait()  # raises the error of a part that failed
        except RuntimeError as error:
            raise BrokenOff(f"The broadcast broke off: {_shorten(error)}.") from None
        self._posted[0].popleft()
        return True


def _shorten(error: RuntimeError) -> str:
    """Return the message without the backend's source location and advice."""
    message = re.sub(r"^\[[^]]*\] ?", "", str(error)).partition("\n")[0]
    return message.partition(". This is typically")[0].rstrip(". ")[:300]


def _make_gloo(store: Any, rank: int, size: int, address: str, limit: timedelta) -> Any:
    options = dist.ProcessGroupGloo._Options()
    # By default, gloo uses any address that the host's own name resolves to.
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = limit
    return dist.ProcessGroupGloo(store, rank, size, options)


def _make_nccl(store: Any, rank: int, size: int, address: str, limit: timedelta) -> Any:
    if not dist.is_nccl_available():
        raise WeightsError("This torch has no NCCL.", "Publish tensors in CPU memory.")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    with _without_watchdog():
        return dist.ProcessGroupNCCL(store, rank, size, options)


@contextmanager
def _without_watchdog() -> Iterator[None]:
    """Make a group whose errors this module handles.

    After the death of a rank, torch's watchdog writes a dump and ends the process, which serves."""
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
