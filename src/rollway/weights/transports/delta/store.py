"""Objects by key in a directory, with the guarantees of an object store: whole, or absent.

A key appears at once with all its bytes, on every machine that shares the directory. Nothing here
locks or appends, because both fail on network file systems. Nothing is mapped: if a publisher
removes an object while it is read over NFS, the reader gets a `WeightsError`, not a SIGBUS.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import stat
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

from rollway.errors import UsageError, WeightsError
from rollway.processes import SHM
from rollway.weights import leftovers
from rollway.weights.checkpoint import sync

Buffer = bytes | bytearray | memoryview
_KEY = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*")
_SHARED = "rollway-deltas-"
_WRITTEN_BYTES = 8 << 20
"""What is written together."""
_MOST_WAITING = 4
_GONE = (errno.ENOENT, errno.ESTALE)


class Store:
    """Objects in a directory; in a `private` one, only this user can read them."""

    def __init__(self, root: Path, *, private: bool = False) -> None:
        self.root = root
        self._private = private

    def put(self, key: str, data: Buffer | Iterable[Buffer], *, durable: bool = True) -> int:
        """Write an object and return its size; readers see all of it, or the previous one.

        After a power loss, an object that is not `durable` may be cut short. Writing is faster, as
        it does not wait for the disk."""
        path = self._path(key)
        chunks = [data] if isinstance(data, Buffer) else data
        scratch = path.with_name(leftovers.scratch_name(f"{path.name}.{secrets.token_hex(4)}"))
        try:
            self._make_directory(path.parent)
            with scratch.open("xb") as file:
                if self._private:
                    os.fchmod(file.fileno(), 0o600)
                _write_beside(file, chunks)
                file.flush()
                if durable:
                    # Before the rename: after a power loss, the name must not point at nothing.
                    os.fsync(file.fileno())
                size = file.tell()
            scratch.replace(path)
            if durable:
                sync(path.parent)
        except OSError as error:
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            raise WeightsError(
                f"{path} cannot be written: {error.strerror}.",
                "Free some space, or keep fewer versions." if is_full else "",
            ) from error
        finally:
            scratch.unlink(missing_ok=True)
        return size

    def get(self, key: str) -> bytes:
        with self.open(key) as blob:
            return bytes(blob.read(0, blob.size))

    def open(self, key: str) -> Blob:
        """Open an object to read parts of it."""
        return Blob(self._path(key))

    def keys(self, prefix: str = "") -> list[str]:
        """Return all keys with this prefix in order, without objects that are being written."""
        keys = []
        for directory, subdirectories, names in os.walk(self.root):  # skips what vanishes meanwhile
            subdirectories[:] = [name for name in subdirectories if not name.startswith(".")]
            parent = Path(directory).relative_to(self.root)
            keys += [(parent / name).as_posix() for name in names if not name.startswith(".")]
        return sorted(key for key in keys if key.startswith(prefix))

    def delete(self, key: str) -> None:
        """Remove an object; a missing one is no error."""
        with contextlib.suppress(OSError):
            self._path(key).unlink()

    def idle_seconds(self, key: str) -> float:
        """Return the seconds since an object was written."""
        return _idle_seconds(self._path(key))

    def sweep(self) -> None:
        """Remove the partial files of dead writers."""
        for path in self.root.rglob(f".*.{leftovers.PARTIAL}"):
            if leftovers.is_abandoned(path.name, _idle_seconds(path)):
                path.unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        if not _KEY.fullmatch(key):
            raise UsageError(f"{key[:200]!r} cannot be the key of an object.")
        return self.root / key

    def _make_directory(self, directory: Path) -> None:
        if not directory.is_dir():
            self._make_directory(directory.parent)
            directory.mkdir(mode=0o700 if self._private else 0o777, exist_ok=True)
            sync(directory.parent)


def _write_beside(file: BinaryIO, chunks: Iterable[Buffer]) -> None:
    """Write chunks in a thread, while the caller's generator works on the next ones."""
    waiting: deque[Future[None]] = deque()
    group: list[Buffer] = []
    size = 0
    with ThreadPoolExecutor(1) as writer:
        for chunk in chunks:
            group.append(chunk)
            size += len(chunk)
            if size >= _WRITTEN_BYTES:
                waiting.append(writer.submit(file.writelines, group))
                group, size = [], 0
            if len(waiting) > _MOST_WAITING:
                waiting.popleft().result()
        waiting.append(writer.submit(file.writelines, group))
        for written in waiting:
            written.result()


class SharedMemory(Store):
    """A store in memory, for readers of this user on this machine.

    `close` removes it. If the publisher dies before, a guard process removes it."""

    def __init__(self, label: str = "delta") -> None:
        sweep_shared_memory()
        name = f"{_SHARED}{label}.{leftovers.writer_mark()}.{secrets.token_hex(4)}"
        super().__init__(SHM / name, private=True)
        self._path(label)  # raises for a label that is not a plain name
        self._make_directory(self.root)
        self._guard = leftovers.Guard(self.root)

    def close(self) -> None:
        """Free the memory."""
        self._guard.close()
        shutil.rmtree(self.root, ignore_errors=True)  # in case the guard was killed

    def __enter__(self) -> SharedMemory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Blob:
    """An object that is open for reading."""

    def __init__(self, path: Path) -> None:
        self._name = path
        try:
            self._file = _open(path)
        except OSError as error:
            raise self._describe_error(error) from error
        status = os.fstat(self._file)
        if not stat.S_ISREG(status.st_mode):
            os.close(self._file)
            raise WeightsError(f"{path} is no plain file.", "Publish the version again.")
        self.size = status.st_size

    def read(self, start: int, size: int) -> bytearray:
        """Return `size` bytes from `start`, or raise."""
        if size < 0 or start + size > self.size:  # before memory is allocated for it
            raise WeightsError(f"{self._name} is cut short: it has {self.size} bytes.")
        data = bytearray(size)
        self.read_into(start, memoryview(data))
        return data

    def read_into(self, start: int, view: memoryview) -> None:
        """Fill memory with the bytes from `start`, or raise. It is called from several threads."""
        size, done = len(view), 0
        if start < 0 or start + size > self.size:
            raise WeightsError(f"{self._name} is cut short: it has {self.size} bytes.")
        try:
            while done < size:
                count = os.preadv(self._file, [view[done:]], start + done)
                if count == 0:
                    raise WeightsError(f"{self._name} became shorter while it was read.")
                done += count
        except OSError as error:
            raise self._describe_error(error) from error

    def close(self) -> None:
        os.close(self._file)

    def __enter__(self) -> Blob:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _describe_error(self, error: OSError) -> WeightsError:
        if error.errno in _GONE:
            return WeightsError(
                f"{self._name} is not there.",
                "It was never complete, or was removed; list the versions again.",
            )
        return WeightsError(f"{self._name} cannot be read: {error.strerror}.")


def sweep_shared_memory() -> None:
    """Remove the stores of publishers that died together with their guards."""
    for path in SHM.glob(f"{_SHARED}*"):
        if leftovers.is_abandoned(path.name, _idle_seconds(path)):
            shutil.rmtree(path, ignore_errors=True)


def _open(path: Path) -> int:
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # a FIFO must not hang the reader
    try:
        return os.open(path, flags)
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
    return os.open(path, flags)  # NFS had cached a file that was replaced


def _idle_seconds(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0
