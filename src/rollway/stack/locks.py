"""Named locks of this user on this machine that vanish with the process that holds them.

A lock is a `flock` on a file in a directory that only this user can enter, so no other user can
hold it; the kernel releases it however its owner dies. An abstract Unix socket needs no file, but
anybody may bind its name, and everybody reads in /proc/net/unix which names are worth binding,
also those that were derived from a secret.

The directory belongs to the user and not to ROLLWAY_HOME: stacks of two homes must not choose the
same port. A lock counts for one boot of one machine and one network namespace, which is the scope
of a TCP port: a home directory may be mounted by several machines.

Between users there is no lock that one of them could not keep from the other. There is a `Claim`,
which a polite neighbour respects, and the final arbiter: whoever binds the port has it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import functools
import hashlib
import os
import pwd
import socket
import sys
import time
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from rollway import private
from rollway.errors import StartError
from rollway.processes import ProcessId, boot_id, command_of
from rollway.stack.state import home

_POLL_SECONDS = 0.05
_SILENT_SECONDS = 10.0
_ABANDONED_SECONDS = 86400.0
_locks: weakref.WeakSet[NamedLock | Claim] = weakref.WeakSet()


class NamedLock:
    """Held from a successful `acquire` until `release` or the end of the process."""

    def __init__(self, name: str) -> None:
        scoped = f"{boot_id()} {Path('/proc/self/ns/net').stat().st_ino} {name}"
        kind = name.partition("/")[0]
        self._file_name = f"{kind}-{hashlib.sha256(scoped.encode()).hexdigest()[:32]}"
        self._path: Path | None = None
        self._handle: int | None = None
        _locks.add(self)

    def acquire(self) -> bool:
        """Take the lock; False when another process, or another lock of this one, has it."""
        path = lock_directory() / self._file_name
        while True:
            handle = _try_lock(path)
            if handle is None:
                return False
            if _is_file_at(path, handle):
                break
            os.close(handle)  # its last holder removed it between our open and our lock
        self._path, self._handle = path, handle
        with contextlib.suppress(OSError):  # a full disk: the lock holds, its holder has no name
            me = ProcessId.of(os.getpid())
            os.ftruncate(handle, 0)
            os.write(handle, f"{me.pid} {me.start}\n".encode() if me else b"")
        return True

    def release(self) -> None:
        if self._handle is not None and self._path is not None:
            self._path.unlink(missing_ok=True)
            # Not by closing alone: a child that was forked by foreign code has a copy.
            fcntl.flock(self._handle, fcntl.LOCK_UN)
        self.close()

    def close(self) -> None:
        """Let go of this process's copy only."""
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)

    def holder(self) -> ProcessId | None:
        """The living process that has the lock, as it wrote down itself."""
        try:
            note = private.read_file(lock_directory() / self._file_name, 100)
            pid, start = map(int, note.split())
        except (OSError, ValueError):
            return None
        process = ProcessId(pid, start)
        return process if process.alive else None


class Claim:
    """A name that all users of the machine see in use, and that nobody has to respect."""

    def __init__(self, name: str) -> None:
        self._address = f"\0rollway/{name}"
        self._socket: socket.socket | None = None
        _locks.add(self)

    def acquire(self) -> bool:
        """Make the claim; False when another process has made it."""
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

    def close(self) -> None:
        holder, self._socket = self._socket, None
        if holder is not None:
            holder.close()

    release = close


def lock_directory() -> Path:
    """The directory of this user's locks, the same for every ROLLWAY_HOME and every environment.

    It is in ROLLWAY_HOME for an account whose own directory cannot be written or has no locks."""
    with contextlib.suppress(KeyError, StartError):
        account = Path(pwd.getpwuid(os.getuid()).pw_dir, ".local", "state", "rollway").resolve()
        directory = _make_below(account)
        if _has_locks(directory):
            return directory
    return _make_below(home())


def sweep_abandoned() -> None:
    """Remove old files of holders that were killed; they lock nothing, but they pile up."""
    for path in lock_directory().iterdir():
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime < _ABANDONED_SECONDS:
                continue
            handle = _try_lock(path)
            if handle is not None:
                if _is_file_at(path, handle):
                    path.unlink()
                os.close(handle)


def describe(process: ProcessId | None) -> str:
    """A lock's holder in words."""
    return f"process {process.pid} ({command_of(process)})" if process else "an unknown process"


@asynccontextmanager
async def machine_lock(name: str, silent_seconds: float = _SILENT_SECONDS) -> AsyncIterator[None]:
    """Wait for a named lock, and hold it for the block; a long wait is explained on stderr."""
    lock = NamedLock(name)
    notice = time.monotonic() + silent_seconds
    while not lock.acquire():
        if time.monotonic() > notice:
            print(
                f"rollway: waiting for {describe(lock.holder())}, which holds the lock `{name}`",
                file=sys.stderr,
                flush=True,
            )
            notice = time.monotonic() + 6 * silent_seconds
        await asyncio.sleep(_POLL_SECONDS)
    try:
        yield
    finally:
        lock.release()


def _make_below(base: Path) -> Path:
    return private.make_directory(private.make_directory(base) / "locks")


@functools.cache
def _has_locks(directory: Path) -> bool:
    """Whether the filesystem supports `flock`; some network filesystems do not."""
    try:
        handle = private.open_file(directory / ".probe", os.O_RDWR)
    except OSError:  # read only, or over its quota
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


def _try_lock(path: Path) -> int | None:
    handle = private.open_file(path, os.O_RDWR)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    except OSError as error:
        os.close(handle)
        raise StartError(
            f"Files in {path.parent} cannot be locked: {error.strerror}.",
            "Set ROLLWAY_HOME to a directory on a local disk.",
        ) from error
    return handle


def _is_file_at(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(handle))
    except FileNotFoundError:
        return False


def _close_in_child() -> None:
    """In a forked child: the locks are its parent's, and must not outlive them there."""
    for lock in list(_locks):
        lock.close()


os.register_at_fork(after_in_child=_close_in_child)
