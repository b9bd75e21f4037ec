"""What stays on disk of a stack that runs, and of those that have ended.

<log directory>/
    tiny-0.log            what the process writes now
    tiny-0.log.1, .2, …   older lines, newest first (`logs.keep` of them)
    .processes            the names whose logs are Rollway's to move
    earlier/<time>/       the logs of an ended run (`keep_runs` of them)
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
from rollway.stack.locks import NamedLock
from rollway.stack.state import StackDir, StackState, home, known_stacks

EVENTS_BYTES = 2**20
_BLOCK = 2**20
_NAMES = ".processes"
_EARLIER = "earlier"
_PLAIN_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{0,200}")
_RUN_TIME = re.compile(r"\d{8}-\d{6}(\.\d+)?")
_ONE_RUN_NAME = re.compile(r"(?=.{1,40}$)(verl-[a-z0-9-]+)-[0-9a-f]{8}(-[0-9]+)?")
"""Names that Rollway itself made for one run; a user's name may end in a date."""
_SETTLING_SECONDS = 60.0


def rotate(path: Path, max_bytes: float, keep: int) -> bool:
    """Move a log's lines to `NAME.1` when it has reached `max_bytes`; `NAME.<keep>` is dropped.

    The lines are copied and the file is truncated. A rename would need the writer to open its log
    again, and a pipe would block the writer when its reader is dead; this needs nothing of it. The
    writer's descriptor appends (O_APPEND), so its next line goes to the new end of the file and not
    behind a hole. The copy goes on to the end of the file and the truncation follows at once: only
    a line that is written between these two system calls is lost."""
    try:
        source = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return False
    scratch = _number(path, "new")
    try:
        if os.fstat(source).st_size < max_bytes:
            return False
        _number(path, keep).unlink(missing_ok=True)  # first: the disk may be full
        _move_lines(source, scratch)
    except OSError:
        scratch.unlink(missing_ok=True)
        return False
    finally:
        os.close(source)
    # From here on the scratch file has the only copy of the lines: whatever fails, it stays.
    with contextlib.suppress(OSError):
        for number in range(keep - 1, 0, -1):
            with contextlib.suppress(FileNotFoundError):
                _number(path, number).replace(_number(path, number + 1))
        # Last: whoever follows the log takes a new `NAME.1` for a sign that the log is empty.
        scratch.replace(_number(path, 1))
    return True


def list_rotated(path: Path) -> list[Path]:
    """List the files that hold a log's older lines, newest first."""
    files: list[Path] = []
    while (file := _number(path, len(files) + 1)).is_file():
        files.append(file)
    return files


def record_names(log_dir: Path, names: Iterable[str]) -> None:
    """Write down whose logs this directory gets: a user's own directory may hold other files."""
    private.replace_file(log_dir / _NAMES, "".join(f"{name}\n" for name in names).encode())


def set_aside(log_dir: Path, stack: str) -> None:
    """Move the logs of the previous run to a directory of their own below `earlier`."""
    if any(_writes_to(log_dir, state) for state in known_stacks() if state.name != stack):
        return
    files = [file for name in _recorded_names(log_dir) for file in _files_of(log_dir, name)]
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
        for run in _directories(earlier, _RUN_TIME)[keep:]:
            shutil.rmtree(run, ignore_errors=True)
    family = _family(stack)
    if family is None:
        return
    kin = [
        path
        for path in _directories(home() / "stacks", _ONE_RUN_NAME)
        if path.name != stack and _family(path.name) == family and _has_ended(path)
    ]
    for path in kin[keep:]:
        _remove_stack(path)


def _family(stack: str) -> str | None:
    name = _ONE_RUN_NAME.fullmatch(stack)
    return None if name is None else name[1]


def remove_run(stack: str, log_dir: Path) -> None:
    """Remove what the run that has just ended leaves: its logs, its history, its directory."""
    for name in _recorded_names(log_dir):
        for file in _files_of(log_dir, name):
            file.unlink(missing_ok=True)
    (log_dir / _NAMES).unlink(missing_ok=True)
    shutil.rmtree(StackDir(stack).path, ignore_errors=True)  # refuses a link


def _writes_to(log_dir: Path, state: StackState) -> bool:
    return state.supervised and Path(state.log_dir) == log_dir


def _has_ended(path: Path) -> bool:
    """Tell whether a stack's directory is of one that has ended and was cleared."""
    try:
        started = (path / "supervisor.log").stat().st_mtime
    except OSError:
        return False  # not a stack's directory
    settled = time.time() - started > _SETTLING_SECONDS  # one that starts has no state yet
    return settled and not os.path.lexists(path / "state.json")


def _remove_stack(path: Path) -> None:
    lock = NamedLock(StackDir(path.name).lock_name)
    if not lock.acquire():
        return
    try:
        if _has_ended(path):
            shutil.rmtree(path, ignore_errors=True)
    finally:
        lock.release()


def _move_lines(source: int, target: Path) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    with os.fdopen(os.open(target, flags, 0o600), "wb", buffering=0) as copy:
        while block := os.read(source, _BLOCK):
            view = memoryview(block)
            while view:
                view = view[copy.write(view) :]
        os.ftruncate(source, 0)


def _recorded_names(log_dir: Path) -> list[str]:
    """Read the names back; only plain ones, so that nothing outside the directory is touched."""
    try:
        lines = (log_dir / _NAMES).read_text(errors="replace").splitlines()
    except OSError:
        return []
    return [line for line in lines if _PLAIN_NAME.fullmatch(line)]


def _files_of(log_dir: Path, name: str) -> list[Path]:
    """List a process's log and its older lines; also a copy that a killed supervisor left."""
    pattern = re.compile(re.escape(f"{name}.log") + r"(\.(\d+|new))?")
    with os.scandir(log_dir) as entries:
        return [
            Path(entry.path)
            for entry in entries
            if pattern.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)
        ]


def _directories(parent: Path, names: re.Pattern[str]) -> list[Path]:
    """List real directories of matching names, the newest first."""
    found: list[tuple[float, Path]] = []
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if names.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                    found.append((entry.stat(follow_symlinks=False).st_mtime, Path(entry.path)))
    return [path for _, path in sorted(found, reverse=True)]


def _number(path: Path, suffix: int | str) -> Path:
    return path.with_name(f"{path.name}.{suffix}")
