"""Disks that fail, and turns to record on them."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from rollway.gateway.journal import Disk
from rollway.gateway.recorder import Recorder, Turn

_numbers = count(1)


class Crash(BaseException):
    """The process was killed here."""


@dataclass
class FaultyDisk:
    """Real files, and system calls that fail on request."""

    free_bytes: int | None = None
    """Bytes until the disk is full; None means no limit."""
    crash_after: int | None = None
    """Bytes until the process dies in the middle of a write."""
    failing: set[str] = field(default_factory=set)
    """The calls that fail: truncate, sync, replace."""
    crash_at_replace: bool = False

    def as_disk(self) -> Disk:
        return Disk(self.write, self.truncate, self.sync, self.replace)

    def write(self, fd: int, data: bytes | memoryview) -> int:
        if self.crash_after is not None:
            written = os.write(fd, data[: self.crash_after])
            self.crash_after -= written
            if not self.crash_after:
                raise Crash
            return written
        if self.free_bytes is None:
            return os.write(fd, data)
        if not self.free_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = os.write(fd, data[: self.free_bytes])
        self.free_bytes -= written
        return written

    def truncate(self, fd: int, length: int) -> None:
        self._fail("truncate", errno.EIO)
        os.ftruncate(fd, length)

    def sync(self, fd: int) -> None:
        self._fail("sync", errno.EIO)

    def replace(self, source: Path, target: Path) -> None:
        self._fail("replace", errno.EDQUOT)
        if self.crash_at_replace:
            raise Crash
        source.replace(target)

    def _fail(self, call: str, number: int) -> None:
        if call in self.failing:
            raise OSError(number, os.strerror(number))


def make_turn(session: str, parent: str | None = None, **fields: Any) -> Turn:
    """Make a turn whose tokens no other turn has."""
    number = next(_numbers)
    values: dict[str, Any] = {
        "model": "m",
        "history": f"history {number}",
        "new_ids": [2 * number],
        "token_ids": [2 * number + 1],
        "logprobs": [-0.5],
        "finish_reason": "stop",
        "version": 0,
        "worker_id": 7,
        "parent": parent,
    }
    return Turn(session=session, **(values | fields))


def record(recorder: Recorder, new: Turn) -> bool:
    return recorder.add(recorder.open(new.session), new)


def kill(recorder: Recorder) -> None:
    """Close the recorder without cleaning up, as a killed process does."""
    assert recorder._journal is not None
    recorder._background.close()
    recorder._journal.close()
