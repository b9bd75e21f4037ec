"""Objects by key in a directory, as an object store would keep them: whole, or not there.

A key appears at once with all its bytes, on the disk of every machine that shares the directory.
Nothing here locks or appends: both fail on network file systems. A reader may lose an object that
its publisher removed; that is a `WeightsError`, never a crash, as long as the store is not mapped.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from rollway.errors import UsageError, WeightsError
from rollway.processes import SHM
from rollway.weights import leftovers
from rollway.weights.checkpoint import sync

Buffer = bytes | bytearray | memoryview
_KEY = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*")
_SHARED = "rollway-deltas-"
_GONE = (errno.ENOENT, errno.ESTALE)
# Ends when its standard input does, which is when the publisher does, by whatever death.


class Carrier(Protocol):
    """What a publisher writes to and readers read from."""

    root: Path

    def put(self, key: str, data: Buffer | Iterable[Buffer]) -> int: ...
    def get(self, key: str) -> bytes: ...
    def open(self, key: str) -> Blob: ...
    def keys(self, prefix: str = "") -> list[str]: ...
    def delete(self, key: str) -> None: ...
    def idle_seconds(self, key: str) -> float: ...
    def sweep(self) -> None: ...


class Store:
    """A directory as a `Carrier`.

    `mapped` readers get views of the file instead of copies: right for shared memory, where a
    removed file stays readable, and wrong on NFS, where it would kill them."""

    def __init__(self, root: Path, *, private: bool = False, mapped: bool = False) -> None:
        self.root = root
        self.mapped = mapped
        self._private = private

    def put(self, key: str, data: Buffer | Iterable[Buffer]) -> int:
        """Write an object; readers see all of it or what was there before. Returns its size."""
        path = self._path(key)
        chunks = [data] if isinstance(data, Buffer) else data
        scratch = path.with_name(leftovers.scratch_name(f"{path.name}.{secrets.token_hex(4)}"))
        try:
            self._make(path.parent)
            with scratch.open("xb") as file:
                if self._private:
                    os.fchmod(file.fileno(), 0o600)
                for chunk in chunks:
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
                size = file.tell()
            scratch.replace(path)
            sync(path.parent)
        except OSError as error:
            raise WeightsError(
                f"{path} cannot be written: {error.strerror}.",
                "Make room, or let fewer versions be kept."
                if error.errno in (errno.ENOSPC, errno.EDQUOT)
                else "",
            ) from error
        finally:
            scratch.unlink(missing_ok=True)
        return size

    def get(self, key: str) -> bytes:
        with self.open(key) as blob:
            return bytes(blob.read(0, blob.size))

    def open(self, key: str) -> Blob:
        """An object to read pieces of."""
        return Blob(self._path(key), self.mapped)

    def keys(self, prefix: str = "") -> list[str]:
        """All keys that begin so, in order; what is being written is not among them."""
        found = []
        for directory, below, names in os.walk(self.root):  # what vanishes meanwhile is left out
            below[:] = [name for name in below if not name.startswith(".")]
            where = Path(directory).relative_to(self.root)
            found += [(where / name).as_posix() for name in names if not name.startswith(".")]
        return sorted(key for key in found if key.startswith(prefix))

    def delete(self, key: str) -> None:
        """Remove an object; one that is not there is removed already."""
        with contextlib.suppress(OSError):
            self._path(key).unlink()

    def idle_seconds(self, key: str) -> float:
        """Since an object was written."""
        return _idle(self._path(key))

    def sweep(self) -> None:
        """Remove what dead writers left half-written."""
        for path in self.root.rglob(f".*.{leftovers.PARTIAL}"):
            if leftovers.gone(path.name, _idle(path)):
                path.unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        if not _KEY.fullmatch(key):
            raise UsageError(f"{key[:200]!r} cannot be the key of an object.")
        return self.root / key

    def _make(self, directory: Path) -> None:
        if not directory.is_dir():
            self._make(directory.parent)
            directory.mkdir(mode=0o700 if self._private else 0o777, exist_ok=True)
            sync(directory.parent)


class SharedMemory(Store):
    """A store in memory, for readers on this machine and of this user.

    It goes with `close`, and with the publisher however that ends: a guard process waits for it.
    Readers make a `Store(path, mapped=True)` of its `root`."""

    def __init__(self, label: str = "delta") -> None:
        sweep_shared_memory()
        super().__init__(
            SHM / f"{_SHARED}{label}.{leftovers.mark()}.{secrets.token_hex(4)}",
            private=True,
            mapped=True,
        )
        self._path(label)  # refuse what is no plain name
        self._make(self.root)
        self._guard = leftovers.Guard(self.root)

    def close(self) -> None:
        """Give the memory back."""
        self._guard.close()
        shutil.rmtree(self.root, ignore_errors=True)  # somebody may have ended the guard

    def __enter__(self) -> SharedMemory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Blob:
    """An object that is open for reading."""

    def __init__(self, path: Path, mapped: bool) -> None:
        self._name = path
        try:
            self._file = _open(path)
        except OSError as error:
            raise self._lost(error) from error
        found = os.fstat(self._file)
        if not stat.S_ISREG(found.st_mode):
            os.close(self._file)
            raise WeightsError(f"{path} is no plain file.", "Publish the version again.")
        self.size = found.st_size
        # A private mapping: torch wants memory it could write to.
        self._map = (
            mmap.mmap(self._file, self.size, access=mmap.ACCESS_COPY)
            if mapped and self.size
            else None
        )

    def read(self, start: int, size: int) -> Buffer:
        """So many bytes from there on; all of them, or an error."""
        if start < 0 or size < 0 or start + size > self.size:
            raise WeightsError(f"{self._name} is cut short: it has {self.size} bytes.")
        if self._map is not None:
            return memoryview(self._map)[start : start + size]
        data = bytearray(size)
        view, done = memoryview(data), 0
        try:
            while done < size:
                count = os.preadv(self._file, [view[done:]], start + done)
                if count == 0:
                    raise WeightsError(f"{self._name} became shorter while it was read.")
                done += count
        except OSError as error:
            raise self._lost(error) from error
        return data

    def close(self) -> None:
        os.close(self._file)
        self._map = None  # closed with the last view of it

    def __enter__(self) -> Blob:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _lost(self, error: OSError) -> WeightsError:
        if error.errno in _GONE:
            return WeightsError(
                f"{self._name} is not there.",
                "It was never whole, or has been removed since; look at the versions again.",
            )
        return WeightsError(f"{self._name} cannot be read: {error.strerror}.")


def sweep_shared_memory() -> None:
    """Remove the stores of publishers that died together with their guards."""
    for path in SHM.glob(f"{_SHARED}*"):
        if leftovers.gone(path.name, _idle(path)):
            shutil.rmtree(path, ignore_errors=True)


def _open(path: Path) -> int:
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # a FIFO must not hang the reader
    try:
        return os.open(path, flags)
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
    return os.open(path, flags)  # NFS had remembered a file that was replaced


def _idle(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0
