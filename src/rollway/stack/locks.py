"""Named locks of this machine that vanish with the process that holds them.

An abstract Unix socket can be bound once per name and network namespace, needs no file, and is
released by the kernel however its owner dies. That is exactly the scope of a TCP port, so the same
lock guards ports (between stacks that start at one moment) and stack names.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import socket
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_POLL_SECONDS = 0.05
_LONGEST = 90  # bytes, of the 107 that the address of a socket may have
_locks: weakref.WeakSet[NamedLock] = weakref.WeakSet()


class NamedLock:
    """Held from a successful `acquire` until `release` or the end of the process."""

    def __init__(self, name: str) -> None:
        if len(name) > _LONGEST:
            name = f"{name[:40]}-{hashlib.sha256(name.encode()).hexdigest()[:32]}"
        self._address = f"\0rollway/{name}"
        self._socket: socket.socket | None = None
        _locks.add(self)

    def acquire(self) -> bool:
        """Take the lock; False when somebody else has it."""
        holder = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            holder.bind(self._address)
        except OSError as error:
            holder.close()
            if error.errno == errno.EADDRINUSE:
                return False
            raise
        self._socket = holder
        return True

    def release(self) -> None:
        holder, self._socket = self._socket, None
        if holder is not None:
            holder.close()


def _let_go() -> None:
    """In a forked child: the locks are its parent's, and must not outlive them there."""
    for lock in list(_locks):
        lock.release()


os.register_at_fork(after_in_child=_let_go)


@asynccontextmanager
async def machine_lock(name: str) -> AsyncIterator[None]:
    """Wait for a named lock, and hold it for the block."""
    lock = NamedLock(name)
    while not lock.acquire():  # noqa: ASYNC110 (another process lets go of it)
        await asyncio.sleep(_POLL_SECONDS)
    try:
        yield
    finally:
        lock.release()
