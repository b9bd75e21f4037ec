"""Named locks of this user on this machine. The kernel releases them when their holder dies.

A lock is a `flock` on a file in a directory that only this user can enter, so no other user can
hold it. An abstract Unix socket would need no file, but every user may bind its name, and every
user can read in /proc/net/unix which names are in use, even names derived from a secret.

The directory belongs to the user and not to ROLLWAY_HOME: stacks of two homes must not choose the
same port. A lock is valid for one boot of one machine and one network namespace, which is the scope
of a TCP port: several machines may mount one home directory.

Between users there is no lock that one of them could not hold for ever. They use a `Claim`, which
other stacks respect while they have a choice; in the end the bind of the port decides.
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
from rollway.processes import ProcessId, boot_id, read_command, this_process
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
        """Return whether the lock is held now; False if another process or object has it."""
        path = get_lock_directory() / self._file_name
        while True:
            handle = _try_lock(path)
            if handle is None:
                return False
            if _is_file_at(path, handle):
                break
            # Its last holder removed the file between our open and our lock: another process may
            # lock a new file of this name, so ours is worth nothing. Try again.
            os.close(handle)
        self._path, self._handle = path, handle
        with contextlib.suppress(OSError):  # a full disk: the lock holds, without a name
            me = this_process()
            os.ftruncate(handle, 0)
            os.write(handle, f"{me.pid} {me.start}\n".encode())
        return True

    def release(self) -> None:
        if self._handle is not None and self._path is not None:
            self._path.unlink(missing_ok=True)
            # Closing alone is not enough: a child that other code forked has a copy.
            fcntl.flock(self._handle, fcntl.LOCK_UN)
        self.close()

    def close(self) -> None:
        """Close this process's copy of the descriptor; other copies keep the lock."""
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)

    def find_holder(self) -> ProcessId | None:
        """Return the living process that has written its name into the lock."""
        try:
            note = private.read_file(get_lock_directory() / self._file_name, 100)
            pid, start = map(int, note.split())
        except (OSError, ValueError):
            return None
        process = ProcessId(pid, start)
        return process if process.alive else None


class Claim:
    """A name that all users of the machine see in use. Nobody has to respect it."""

    def __init__(self, name: str) -> None:
        self._address = f"\0rollway/{name}"
        self._socket: socket.socket | None = None
        _locks.add(self)

    def acquire(self) -> bool:
        """Return whether the claim is held now; False if another process has it."""
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


def get_lock_directory() -> Path:
    """Return the directory of this user's locks, the same for every ROLLWAY_HOME.

    If the account's own directory cannot be written or locked, it is in ROLLWAY_HOME instead."""
    with contextlib.suppress(KeyError, StartError):
        account = Path(pwd.getpwuid(os.getuid()).pw_dir, ".local", "state", "rollway").resolve()
        directory = _make_directory(account)
        if _supports_locks(directory):
            return directory
    return _make_directory(home())


def sweep_abandoned() -> None:
    """Remove old lock files of killed holders, which accumulate."""
    for path in get_lock_directory().iterdir():
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime < _ABANDONED_SECONDS:
                continue
            handle = _try_lock(path)
            if handle is not None:
                if _is_file_at(path, handle):
                    path.unlink()
                os.close(handle)


def describe(process: ProcessId | None) -> str:
    """Return a lock's holder for a message."""
    return f"process {process.pid} ({read_command(process)})" if process else "an unknown process"


@asynccontextmanager
async def hold_machine_lock(
    name: str, silent_seconds: float = _SILENT_SECONDS
) -> AsyncIterator[None]:
    """Hold a named lock for the block; a long wait for it is explained on stderr."""
    lock = NamedLock(name)
    notice = time.monotonic() + silent_seconds
    while not lock.acquire():
        if time.monotonic() > notice:
            holder = describe(lock.find_holder())
            text = f"rollway: waiting for {holder}, which holds the lock `{name}`"
            print(text, file=sys.stderr, flush=True)
            notice = time.monotonic() + 6 * silent_seconds
        await asyncio.sleep(_POLL_SECONDS)
    try:
        yield
    finally:
        lock.release()


def _make_directory(base: Path) -> Path:
    return private.make_directory(private.make_directory(base) / "locks")


@functools.cache
def _supports_locks(directory: Path) -> bool:
    """Whether the filesystem supports `flock`; some network filesystems do not."""
    try:
        handle = private.open_file(directory / ".probe", os.O_RDWR)
    except OSError:  # a read-only filesystem, or over its quota
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
    """Close the locks in a forked child: they belong to the parent and must not outlive it."""
    for lock in list(_locks):
        lock.close()


os.register_at_fork(after_in_child=_close_in_child)
