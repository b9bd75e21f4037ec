"""The journal: a file of lines that are written completely or not at all.

    path               one line per entry, appended before the client receives its answer
    name.lock          locked by the gateway that writes (the path with this suffix)
    path.new           the next journal during compaction; it replaces the old one atomically
    path.unreadable    unreadable lines, kept when compaction drops them

If a write fails, the file is truncated to its earlier length, so a line is never appended to half
of another. This module does not interpret lines: `entries` and `recorder` do.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rollway.errors import RollwayError, UsageError

log = logging.getLogger(__name__)

_SPARE_ROOM = 2**20  # for turns that arrive during a compaction
_CHUNK = 256 * 2**10  # small enough that copying one delays no request
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
MAX_LINE = 2**30
"""The longest line that is read, in bytes."""

Write = Callable[[int, bytes | memoryview], int]


class JournalFull(RollwayError):
    """The journal could not be written, so nothing was recorded."""

    http_status = 507


@dataclass(frozen=True, slots=True)
class Disk:
    """The system calls that fail on a full or broken disk. Tests replace them."""

    write: Write = os.write
    truncate: Callable[[int, int], None] = os.ftruncate
    sync: Callable[[int], None] = os.fdatasync
    replace: Callable[[Path, Path], None] = os.replace


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the file, with its position."""

    number: int
    start: int
    end: int
    raw: bytes | None
    """The line without its newline; None if it is longer than `MAX_LINE`."""
    whole: bool
    """Whether it ends with a newline. If not, it was never acknowledged."""


class Journal:
    """A journal file. `lock` orders its writers; the caller of `append` must hold it."""

    def __init__(self, path: Path, lock: threading.Lock, *, sync: bool, disk: Disk) -> None:
        self.path = path.resolve()
        self.sync = sync
        self.size = 0
        """The end of the last complete line. Bytes after it were never acknowledged."""
        self._lock = lock
        self._disk = disk
        self._fd: int | None = None
        self._lock_fd: int | None = None
        self._dirty = False
        self._torn: tuple[int, int] | None = None
        self._opened = self._writable = self._closed = False
        self._open()
        self._opened = True

    # --- reading ---------------------------------------------------------------------------------

    def lines(self, max_line: int = MAX_LINE) -> Iterator[Line]:
        """Yield the lines of the file from its beginning, without blank ones."""
        if self._fd is None:
            return
        with open(os.dup(self._fd), "rb") as file:  # noqa: PTH123 - of a descriptor
            file.seek(0)
            start, number = 0, 0
            while raw := file.readline(max_line + 1):
                number += 1
                end, whole = start + len(raw), raw.endswith(b"\n")
                content: bytes | None = raw.removesuffix(b"\n")
                while not whole and (rest := file.readline(max_line + 1)):
                    end, whole, content = end + len(rest), rest.endswith(b"\n"), None
                self.size = end
                if content is None or content.strip():
                    yield Line(number, start, end, content, whole)
                start = end

    def drop_torn(self, line: Line) -> None:
        """Save a last line without a newline elsewhere, so that nothing is appended to it."""
        log.warning("The last line of %s is incomplete; it was not acknowledged.", self.path)
        self.size, self._torn, self._dirty = line.start, (line.start, line.end), True
        with contextlib.suppress(OSError):  # the next write tries again
            self._prepare()

    # --- writing ---------------------------------------------------------------------------------

    def append(self, lines: bytes) -> None:
        """Append complete lines, or leave the file unchanged and raise JournalFull."""
        try:
            fd = self._prepare()
            if not os.fstat(fd).st_nlink:
                raise OSError(errno.ESTALE, "Another program removed it; restart the gateway")
            self._dirty = True
            self._write(fd, lines)
            if self.sync:
                self._disk.sync(fd)
        except OSError as error:
            with contextlib.suppress(OSError):  # the next write tries again
                self._prepare()
            raise self._full(error) from error
        self.size += len(lines)
        self._dirty = False

    def save_aside(self, places: Iterable[tuple[int, int]]) -> None:
        """Copy the raw lines at these positions to `path.unreadable`."""
        with self._lock:
            fd = self._prepare()
        self._save(fd, places)

    def compact(self, snapshot: Callable[[], tuple[int, Iterable[bytes]]]) -> None:
        """Replace the file by the lines of a snapshot and everything appended meanwhile.

        `snapshot` is called with the lock held, and returns its approximate size. Other threads may
        append until the last moment, when the lock is held, their lines are copied, and the new
        file replaces the old one.
        """
        with self._lock:
            old = self._prepare()
            start, (size_hint, lines) = self.size, snapshot()
        scratch = self._beside(".new")
        self._check_room(size_hint)
        new = os.open(scratch, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        try:
            size = self._write_lines(new, lines)
            while (end := self.size) - start > _CHUNK:
                size, start = size + self._copy(old, new, start, end), end
            os.fsync(new)
            while (end := self.size) - start > _CHUNK:  # lines appended during the fsync
                size, start = size + self._copy(old, new, start, end), end
            with self._lock:
                size += self._copy(old, new, start, self.size)
                if self.sync:
                    self._disk.sync(new)
                self._disk.replace(scratch, self.path)
                self._fd, self.size, self._dirty = new, size, False
                os.close(old)
                if self.sync:
                    _sync_directory(self.path.parent)
        except BaseException:
            if self._fd is not new:
                os.close(new)
                scratch.unlink(missing_ok=True)
            raise
        _sync_directory(self.path.parent)

    def erase_unreadable(self, keep: Callable[[bytes], bool]) -> None:
        """Remove the lines of `path.unreadable` for which `keep` is false."""
        path, scratch = self._beside(".unreadable"), self._beside(".unreadable.new")
        if not path.exists():
            return
        fd = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            with path.open("rb") as file:
                lines = iter(lambda: file.readline(MAX_LINE), b"")
                self._write_lines(fd, (line for line in lines if keep(line)))
            os.fsync(fd)
        finally:
            os.close(fd)
        self._disk.replace(scratch, path)

    def close(self) -> None:
        for fd in (self._fd, self._lock_fd):
            if fd is not None:
                os.close(fd)
        self._fd = self._lock_fd = None
        self._closed = True

    # --- internals -------------------------------------------------------------------------------

    def _open(self) -> None:
        """Lock and open the file for writing if possible, otherwise for reading."""
        try:
            self._make_directory()
            if self.path.exists() and not stat.S_ISREG(self.path.stat().st_mode):
                raise OSError(errno.EINVAL, "It is not a regular file")
            try:
                self._claim()
            except BlockingIOError:
                raise
            except OSError as error:
                self._open_to_read(error)
        except BlockingIOError as error:
            self.close()
            raise UsageError(
                f"Another gateway uses the journal {self.path}.",
                "Two would overwrite each other: pass another file to one of them with --journal.",
            ) from error
        except OSError as error:
            self.close()
            raise UsageError(
                f"The journal {self.path} cannot be used: {error.strerror}.",
                "Pass another file with --journal.",
            ) from error

    def _make_directory(self) -> None:
        missing = []
        parent = self.path.parent
        while not parent.exists():
            missing.append(parent)
            parent = parent.parent
        for directory in reversed(missing):
            directory.mkdir(mode=0o700, exist_ok=True)

    def _claim(self) -> None:
        """Lock the file, then open it for appending."""
        if self._lock_fd is None:
            # Earlier versions used this name, and one of them may run on this file.
            name = self.path.with_suffix(".lock")
            name = self._beside(".lock") if name == self.path else name
            self._lock_fd = _open_locked(name, os.O_RDWR | os.O_CREAT)
        fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            if self._opened:
                self._check_unchanged(fd)
            os.fchmod(fd, 0o600)
            os.fchmod(self._lock_fd, 0o600)
            for suffix in (".new", ".unreadable.new"):  # left by an interrupted compaction
                self._beside(suffix).unlink(missing_ok=True)
        except OSError:
            os.close(fd)
            raise
        if self._fd is not None:
            os.close(self._fd)
        self._fd, self._writable = fd, True
        if self.sync:
            _sync_directory(self.path.parent)  # the file itself may be new

    def _open_to_read(self, cause: OSError) -> None:
        """Open the file for reading, on a disk that is full or read-only."""
        log.warning("The journal %s can only be read: %s.", self.path, cause.strerror)
        if not self.path.exists():
            if cause.errno not in _NO_ROOM:
                raise cause
            return
        self._fd = os.open(self.path, os.O_RDONLY)
        if self._lock_fd is None:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _check_unchanged(self, fd: int) -> None:
        """Raise if another gateway wrote to the file while this one could only read it."""
        now = os.fstat(fd)
        read_end = self._torn[1] if self._torn else self.size
        other = self._fd is not None and os.fstat(self._fd).st_ino != now.st_ino
        if other or now.st_size != read_end:
            raise OSError(errno.ESTALE, "Another program changed it; restart the gateway")

    def _prepare(self) -> int:
        """Return the descriptor of the file, which then ends with a complete line."""
        if self._closed:
            raise OSError(errno.EBADF, "The gateway has closed it")
        if not self._writable:
            self._claim()
        assert self._fd is not None
        if self._torn is not None:
            self._save(self._fd, [self._torn])
            self._torn = None
        if self._dirty:
            self._disk.truncate(self._fd, self.size)
            self._dirty = False
        return self._fd

    def _write(self, fd: int, data: bytes) -> None:
        view = memoryview(data)
        while view:
            count = self._disk.write(fd, view)
            if count <= 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            view = view[count:]

    def _write_lines(self, fd: int, lines: Iterable[bytes]) -> int:
        """Write lines in chunks; return the number of bytes."""
        size, chunk = 0, bytearray()
        for line in lines:
            chunk += line
            if len(chunk) >= _CHUNK:
                self._write(fd, bytes(chunk))
                size += len(chunk)
                chunk.clear()
        self._write(fd, bytes(chunk))
        return size + len(chunk)

    def _copy(self, source: int, target: int, start: int, end: int) -> int:
        for place in range(start, end, _CHUNK):
            data = os.pread(source, min(_CHUNK, end - place), place)
            if len(data) < min(_CHUNK, end - place):
                raise OSError(errno.ESTALE, "Another program cut it")
            self._write(target, data)
        return end - start

    def _save(self, source: int, spans: Iterable[tuple[int, int]]) -> None:
        """Append raw lines to `path.unreadable`, or leave it unchanged and raise OSError."""
        spans = list(spans)
        if not spans:
            return
        name = self._beside(".unreadable")
        fd = os.open(name, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            length = os.fstat(fd).st_size
            try:
                for start, end in spans:
                    self._copy(source, fd, start, end)
                    if os.pread(source, 1, end - 1) != b"\n":
                        self._write(fd, b"\n")
                self._disk.sync(fd)
            except OSError:
                os.ftruncate(fd, length)
                raise
        finally:
            os.close(fd)

    def _check_room(self, size: int) -> None:
        """Raise if a file of this size does not fit: it would use up the space for new turns."""
        disk = os.statvfs(self.path.parent)
        spare = min(_SPARE_ROOM, disk.f_blocks * disk.f_frsize // 16)
        if disk.f_bavail * disk.f_frsize < size + spare:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def _beside(self, suffix: str) -> Path:
        return self.path.with_name(self.path.name + suffix)

    def _full(self, error: OSError) -> JournalFull:
        return JournalFull(
            f"Nothing was recorded: the journal {self.path.name} cannot be written "
            f"({error.strerror or error}).",
            "Free space on its disk; the gateway needs no restart.",
        )


def _open_locked(path: Path, flags: int) -> int:
    fd = os.open(path, flags, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
