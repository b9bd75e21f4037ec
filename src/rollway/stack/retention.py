"""Limits what a stack leaves on disk, while it runs and after it has ended.

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
from collections.abc import Iterable
from pathlib import Path

from rollway import private
from rollway.errors import StartError
from rollway.stack.locks import NamedLock
from rollway.stack.state import StackDir, home, list_stacks

EVENTS_BYTES = 2**20
_BLOCK = 2**20
_NAMES = ".processes"
_EARLIER = "earlier"
_PLAIN_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{0,200}")
_RUN_TIME = re.compile(r"\d{8}-\d{6}(\.\d+)?")
_ONE_RUN_NAME = re.compile(r"(?=.{1,40}$)(verl-[a-z0-9-]+)-[0-9a-f]{8}(-[0-9]+)?")
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
        while block := os.read(source, _BLOCK):
            view = memoryview(block)
            while view:
                view = view[copy.write(view) :]
        os.ftruncate(source, 0)


def list_rotated(path: Path) -> list[Path]:
    """List the files that hold a log's older lines, newest first."""
    files: list[Path] = []
    while (file := _add_suffix(path, len(files) + 1)).is_file():
        files.append(file)
    return files


def record_names(log_dir: Path, names: Iterable[str]) -> None:
    """Record whose logs this directory gets: a user's own directory may hold other files."""
    private.replace_file(log_dir / _NAMES, "".join(f"{name}\n" for name in names).encode())


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
    """Whether a directory is that of a stack that has ended and was cleared."""
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
