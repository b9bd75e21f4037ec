"""Named locks of this user on this machine, and the ports and GPUs of a stack.

The kernel releases a lock when its holder dies.

A lock is a `flock` on a file in a directory that only this user can enter, so no other user can
hold it. An abstract Unix socket would need no file, but every user may bind its name, and every
user can read in /proc/net/unix which names are in use, even names derived from a secret.

The directory belongs to the user and not to ROLLWAY_HOME: stacks of two homes must not choose the
same port. A lock is valid for one boot of one machine and one network namespace, which is the scope
of a TCP port: several machines may mount one home directory.

Users share no lock, because one of them could hold it for ever: between them the bind of a port
decides.
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
import random
import socket
import sys
import time
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from rollway import private_files
from rollway.errors import PortInUse, StartError
from rollway.processes import ProcessId, boot_id, raise_file_limit, read_command, this_process
from rollway.stack.state import home

_POLL_SECONDS = 0.05
_SILENT_SECONDS = 10.0
_ABANDONED_SECONDS = 86400.0
_locks: weakref.WeakSet[NamedLock] = weakref.WeakSet()


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
            note = private_files.read_file(get_lock_directory() / self._file_name, 100)
            pid, start = map(int, note.split())
        except (OSError, ValueError):
            return None
        process = ProcessId(pid, start)
        return process if process.alive else None


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
    return private_files.make_directory(private_files.make_directory(base) / "locks")


@functools.cache
def _supports_locks(directory: Path) -> bool:
    """Return whether the filesystem supports `flock`; some network filesystems do not."""
    try:
        handle = private_files.open_file(directory / ".probe", os.O_RDWR)
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
    handle = private_files.open_file(path, os.O_RDWR)
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


# --- ports and GPUs ------------------------------------------------------------------------------
#
# Binding port 0, closing the socket and passing the number on is a race: two stacks that start
# together can get the same port. Here the supervisor holds a lock of this user for every port, so
# two stacks of one user never choose the same, and it probes the port by binding it, so it never
# chooses a port of another program.
#
# Stacks of two users cannot share a lock. If they choose one port at the same moment, one start
# fails with "address already in use".
#
# The range stays below 32768: Dynamo keeps the system port in a signed 16-bit number, and the
# kernel uses ports from 32768 upwards for outgoing connections, which could occupy a port before
# its owner binds it.

FIRST, LAST = 20000, 32000
_OPEN_FILES = 65536
"""Each port needs one, and the usual limit is 1,024."""


class Lease:
    """Reserves ports and GPUs until `release`."""

    def __init__(self) -> None:
        raise_file_limit(_OPEN_FILES)
        self._locks: list[NamedLock] = []
        self._candidates = random.SystemRandom().sample(range(FIRST, LAST), LAST - FIRST)

    def reserve_port(self, wanted: int, host: str, what: str) -> int:
        """Reserve `wanted`, or any free port when it is 0."""
        if wanted:
            if not self._reserve(wanted, host):
                raise PortInUse(
                    f"Port {wanted} on {host}, requested as {what}, is in use.",
                    f"Choose another, or 0 for a free one; `ss -ltnp 'sport = :{wanted}'` "
                    "shows who has it.",
                )
            return wanted
        while self._candidates:
            port = self._candidates.pop()
            if self._reserve(port, host):
                return port
        raise PortInUse(f"No port from {FIRST} to {LAST} is free on {host}.", "Stop some stacks.")

    def reserve_gpus(self, available: list[str], count: int) -> list[str]:
        """Reserve `count` of these GPUs, in order, or fewer if other stacks have the rest."""
        chosen: list[str] = []
        for gpu in available:
            if len(chosen) < count and self._hold(NamedLock(f"gpu/{gpu}")):
                chosen.append(gpu)
        return chosen

    def release(self) -> None:
        for lock in self._locks:
            lock.release()
        self._locks.clear()

    def _reserve(self, port: int, host: str) -> bool:
        if not self._hold(NamedLock(f"port/{port}")):
            return False
        if not can_bind(port, host):
            self._locks.pop().release()
            return False
        return True

    def _hold(self, lock: NamedLock) -> bool:
        if lock.acquire():
            self._locks.append(lock)
            return True
        return False


def can_bind(port: int, host: str) -> bool:
    """Return whether a server could listen there now. Connections in TIME_WAIT do not matter."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except (OSError, ValueError) as error:  # ValueError: a malformed host name
            if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
                return False
            reason = getattr(error, "strerror", None) or str(error)
            raise StartError(
                f"Nothing can listen on {host} port {port}: {reason}.",
                "Use an address of this machine (127.0.0.1, or 0.0.0.0 for all) and a port above "
                "1023.",
            ) from error
    return True
