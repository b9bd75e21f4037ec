"""Process logs: their end, new lines, rotation and removal.

<log directory>/
    tiny-0.log            the current log of a process
    tiny-0.log.1, .2, …   older lines, newest first (`logs.keep` files)
    .processes            the names of the processes whose logs Rollway may move
    earlier/<time>/       the logs of an ended run (`keep_runs` directories)
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from rollway import private_files
from rollway.errors import StartError
from rollway.stack.locks import NamedLock
from rollway.stack.state import StackDir, home, list_stacks

_LINE_END = re.compile(r"\r\n|\r|\n")
_BLOCK = 2**16
_TRUNCATED_POLLS = 50  # how often to look for the copy of a truncated log
_ERROR = re.compile(r"(?i)error\b|exception|traceback|fatal|killed|panic")


def tail(path: Path, lines: int = 20, *, before: int | None = None) -> list[str]:
    """Return the last lines of a log, including those that a rotation has moved.

    `before` is a position in the log; lines after it are left out."""
    last_lines = _read_last_lines(path, lines, before)
    for file in list_rotated(path):
        if len(last_lines) >= lines:
            break
        last_lines = _read_last_lines(file, lines - len(last_lines)) + last_lines
    return last_lines


def read_error_tail(path: Path) -> list[str]:
    """Return 15 lines up to the last error, or the last ones if there is none."""
    end = tail(path, 400)
    errors = [index for index, line in enumerate(end) if _ERROR.search(line)]
    if errors:
        end = end[: errors[-1] + 3]
    return end[-15:]


def follow(
    path: Path, *, lines: int = 20, poll_seconds: float = 0.2, ended: Callable[[], bool]
) -> Iterator[str]:
    """Yield the last lines, then new ones as they come, until `ended()` is true and all is read."""
    follower = LogFollower(path, lines)
    has_ended = False
    try:
        while True:
            new = follower.read()
            yield from new
            if new:
                continue
            if has_ended:
                yield from follower.read_rest()
                return
            if ended():
                has_ended = True  # read once more: lines may have come since the last read
            else:
                time.sleep(poll_seconds)
    finally:
        follower.close()


class LogFollower:
    """Reads a log line by line as it grows: its last lines first, then new ones."""

    def __init__(self, path: Path, lines: int) -> None:
        self._reader = _Reader(path)
        self._reader.skip_whole_lines()
        self._first = tail(path, lines, before=self._reader.position)
        self._pending = b""

    def read(self) -> list[str]:
        """Return the whole lines since the last call; empty if there is none at the moment."""
        first, self._first = self._first, []
        if first:
            return first
        self._pending += self._reader.read()
        # A carriage return at the very end may be half of a line end.
        cut = 1 + max(self._pending.rfind(b"\n"), self._pending.rfind(b"\r", 0, -1))
        complete, self._pending = self._pending[:cut], self._pending[cut:]
        return _split(complete)

    def read_rest(self) -> list[str]:
        """Return a last line without an end."""
        rest, self._pending = self._pending, b""
        return _split(rest)

    def close(self) -> None:
        self._reader.close()


class _Reader:
    """Reads what is appended to a log, across rotations and across runs of the stack."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._truncated = 0
        self._open()

    def _open(self) -> None:
        self._file = os.open(self._path, os.O_RDONLY)
        # The newest rotated file; when it changes, a rotation has moved lines.
        self._newest = _get_inode(list_rotated(self._path)[:1])
        self.position = 0

    def skip_whole_lines(self) -> None:
        """Move to the end of the last complete line."""
        size = os.fstat(self._file).st_size
        start = max(0, size - _BLOCK)
        last = os.pread(self._file, size - start, start).rfind(b"\n")
        self.position = start + last + 1 if last >= 0 else start

    def close(self) -> None:
        os.close(self._file)

    def read(self) -> bytes:
        """Return what was appended since the last call."""
        if _get_inode([self._path]) not in (None, os.fstat(self._file).st_ino):
            return self._open_next_run()
        if _get_inode(list_rotated(self._path)[:1]) != self._newest:
            return self._read_rotated()
        unread = os.fstat(self._file).st_size - self.position
        if unread < 0:
            # The log was truncated. The rotation's copy appears a moment later; if it does not,
            # another program has emptied the log.
            self._truncated += 1
            if self._truncated > _TRUNCATED_POLLS:
                self.position, self._truncated = 0, 0
            return b""
        self._truncated = 0
        block = os.pread(self._file, unread, self.position)
        self.position += len(block)
        return block

    def _read_rotated(self) -> bytes:
        """Read the lines that rotations have moved and that were not read yet."""
        files = list_rotated(self._path)
        inodes = [_get_inode([file]) for file in files]
        count = inodes.index(self._newest) if self._newest in inodes else len(files)
        try:
            blocks = [file.read_bytes() for file in reversed(files[:count])]
        except OSError:
            return b""
        if [_get_inode([file]) for file in list_rotated(self._path)] != inodes:
            # A rotation has renamed the files meanwhile, so that a name may have meant two of
            # them. The next call reads them all again.
            return b""
        self._newest = inodes[0] if inodes else None
        if not blocks:
            return b""
        blocks[0] = blocks[0][self.position :]
        self.position = 0
        return b"".join(blocks) or self.read()

    def _open_next_run(self) -> bytes:
        """Read the rest of the old run's log, and open the log of the new run."""
        unread = os.fstat(self._file).st_size - self.position
        rest = os.pread(self._file, max(0, unread), self.position)
        self.close()
        self._open()
        return rest or self.read()


def _read_last_lines(path: Path, lines: int, before: int | None = None) -> list[str]:
    try:
        with path.open("rb") as file:
            start, end = file.seek(0, os.SEEK_END), b""
            start = start if before is None else min(start, before)
            while start > 0 and end.count(b"\n") <= lines:
                size = min(start, max(_BLOCK, len(end)))  # each pass reads as much as all before
                start -= size
                file.seek(start)
                end = file.read(size) + end
    except OSError:
        return []
    return _split(end)[-lines:] if lines > 0 else []


def _split(data: bytes) -> list[str]:
    """Split whole lines; carriage returns end a line too, as progress bars use them."""
    if not data:
        return []
    lines = _LINE_END.split(data.decode(errors="replace"))
    return lines[:-1] if not lines[-1] else lines


def _get_inode(paths: list[Path]) -> int | None:
    try:
        return paths[0].stat().st_ino if paths else None
    except OSError:
        return None


# --- rotation and removal ------------------------------------------------------------------------


_COPY_BYTES = 2**20
_NAMES = ".processes"
_EARLIER = "earlier"
_PLAIN_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{0,200}")
_RUN_TIME = re.compile(r"\d{8}-\d{6}(\.\d+)?")
_ONE_RUN_NAME = re.compile(r"(?=.{1,40}$)((?:verl|ray)-[a-z0-9-]+)-[0-9a-f]{8}(-[0-9]+)?")
"""Names that Rollway itself makes for one run. (A user's name may end in a date.)"""
_SETTLING_SECONDS = 60.0


def prepare_directory(log_dir: Path) -> None:
    """Create the log directory, and check that it can be written."""
    try:
        log_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        probe = log_dir / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise StartError(
            f"The log directory {log_dir} cannot be written: {error.strerror or error}.",
            "Choose another with `log_dir` (or --set log_dir=PATH), or correct its permissions.",
        ) from error


def rotate(path: Path, max_bytes: float, keep: int) -> bool:
    """Move a log's lines to `NAME.1` when it has reached `max_bytes`; drop `NAME.<keep>`.

    The lines are copied and the file is truncated, which needs no help from the writer: after a
    rename it would have to open its log again, and a pipe would block it when the reader is dead.
    The writer's descriptor is O_APPEND, so its next line goes to the new end of the file and not
    behind a hole. The truncation follows the end of the copy at once: only a line that is written
    between these two system calls is lost."""
    try:
        source = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return False
    scratch = _add_suffix(path, "new")
    try:
        if os.fstat(source).st_size < max_bytes:
            return False
        _add_suffix(path, keep).unlink(missing_ok=True)  # first: the disk may be full
        _move_lines(source, scratch)
    except OSError:
        scratch.unlink(missing_ok=True)
        return False
    finally:
        os.close(source)
    # From here on the scratch file has the only copy of the lines and is never removed.
    with contextlib.suppress(OSError):
        for number in range(keep - 1, 0, -1):
            with contextlib.suppress(FileNotFoundError):
                _add_suffix(path, number).replace(_add_suffix(path, number + 1))
        # Last: to a reader that follows the log, a new `NAME.1` means that the log is empty.
        scratch.replace(_add_suffix(path, 1))
    return True


def _move_lines(source: int, target: Path) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    with os.fdopen(os.open(target, flags, 0o600), "wb", buffering=0) as copy:
        while block := os.read(source, _COPY_BYTES):
            view = memoryview(block)
            while view:
                view = view[copy.write(view) :]
        os.ftruncate(source, 0)


def list_rotated(path: Path) -> list[Path]:
    """List the files that hold a log's older lines, newest first.

    A rotation renames them one after the other, so a number may be missing for a moment."""
    name = re.compile(re.escape(path.name) + r"\.([0-9]+)")
    with contextlib.suppress(OSError), os.scandir(path.parent) as entries:
        matches = [name.fullmatch(entry.name) for entry in entries if entry.is_file()]
        numbers = sorted(int(match[1]) for match in matches if match)
        return [_add_suffix(path, number) for number in numbers]
    return []


def record_names(log_dir: Path, names: Iterable[str]) -> None:
    """Record whose logs this directory gets: a user's own directory may hold other files."""
    private_files.replace_file(log_dir / _NAMES, "".join(f"{name}\n" for name in names).encode())


def set_aside(log_dir: Path, stack: str) -> None:
    """Move the logs of the previous run to a directory below `earlier`."""
    for state in list_stacks():
        if state.name != stack and state.is_supervised and Path(state.log_dir) == log_dir:
            return  # another stack writes its logs here
    files = _list_logs(log_dir)
    if not files:
        return
    ended = max(file.stat().st_mtime for file in files)
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(ended))
    earlier = log_dir / _EARLIER
    earlier.mkdir(mode=0o700, exist_ok=True)
    target, number = earlier / stamp, 1
    while target.exists():
        target, number = earlier / f"{stamp}.{number}", number + 1
    target.mkdir(mode=0o700)
    for file in files:
        file.replace(target / file.name)


def prune(stack: str, log_dir: Path, keep: int) -> None:
    """Remove all but the newest `keep` of a stack's earlier runs.

    Those are the directories below `earlier`. A name that Rollway made for one run, as it does for
    verl's pools, counts as a run of the name without its random digits: the directories of such
    stacks are removed whole. Links are not followed, and nothing that may run is removed."""
    earlier = log_dir / _EARLIER
    if not log_dir.is_symlink() and not earlier.is_symlink():
        for run in _list_directories(earlier, _RUN_TIME)[keep:]:
            shutil.rmtree(run, ignore_errors=True)
    family = _get_family(stack)
    if family is None:
        return
    ended = [
        path
        for path in _list_directories(home() / "stacks", _ONE_RUN_NAME)
        if path.name != stack and _get_family(path.name) == family and _has_ended(path)
    ]
    for path in ended[keep:]:
        _remove_stack(path)


def _get_family(stack: str) -> str | None:
    name = _ONE_RUN_NAME.fullmatch(stack)
    return None if name is None else name[1]


def remove_run(stack: str, log_dir: Path) -> None:
    """Remove the logs, the history and the directory of the run that has just ended."""
    for file in _list_logs(log_dir):
        file.unlink(missing_ok=True)
    (log_dir / _NAMES).unlink(missing_ok=True)
    shutil.rmtree(StackDir(stack).path, ignore_errors=True)  # it refuses a link


def _has_ended(path: Path) -> bool:
    """Return whether a directory is that of a stack that has ended and was cleared."""
    try:
        started = (path / "supervisor.log").stat().st_mtime
    except OSError:
        return False  # not a stack's directory
    # A stack that is just starting has no state yet.
    has_settled = time.time() - started > _SETTLING_SECONDS
    return has_settled and not os.path.lexists(path / "state.json")


def _remove_stack(path: Path) -> None:
    lock = NamedLock(StackDir(path.name).lock_name)
    if not lock.acquire():
        return
    try:
        if _has_ended(path):  # looked at again, now that nobody else can start it
            shutil.rmtree(path, ignore_errors=True)
    finally:
        lock.release()


def _list_logs(log_dir: Path) -> list[Path]:
    """List the logs of the recorded processes, with their older lines and with a scratch copy that
    a killed supervisor left."""
    try:
        lines = (log_dir / _NAMES).read_text(errors="replace").splitlines()
    except OSError:
        return []
    # Only plain names: the list must not lead out of the directory.
    names = "|".join(re.escape(line) for line in lines if _PLAIN_NAME.fullmatch(line))
    if not names:
        return []
    pattern = re.compile(rf"({names})\.log(\.(\d+|new))?")
    with os.scandir(log_dir) as entries:
        return [
            Path(entry.path)
            for entry in entries
            if pattern.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)
        ]


def _list_directories(parent: Path, names: re.Pattern[str]) -> list[Path]:
    """List the real directories with matching names, newest first."""
    directories: list[tuple[float, Path]] = []
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if names.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                    modified = entry.stat(follow_symlinks=False).st_mtime
                    directories.append((modified, Path(entry.path)))
    return [path for _, path in sorted(directories, reverse=True)]


def _add_suffix(path: Path, suffix: int | str) -> Path:
    return path.with_name(f"{path.name}.{suffix}")
