"""The directories of recorded runs: list them, and remove old ones."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from rollway import processes
from rollway.observe.thinning import SEGMENT

_FRESH_SECONDS = 60.0
"""A run of another node whose files changed this recently may still be recorded."""


def list_runs(directory: Path) -> list[Path]:
    """List the recorded runs below a directory, the one that was written to last first."""
    with contextlib.suppress(OSError):
        runs = [path for path in directory.iterdir() if path.is_dir() and not path.is_symlink()]
        return sorted(runs, key=get_last_write, reverse=True)
    return []


def get_last_write(run: Path) -> float:
    """Return when a run was last written to; 0 if it has no file."""
    return max((_get_time(path) for path in run.glob("*.jsonl")), default=0.0)


def _get_time(path: Path) -> float:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def read_headers(run: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the headers of a run's files, but for those of samples."""
    for path in sorted(run.glob("*.jsonl")):
        if SEGMENT.search(path.name):
            continue
        with contextlib.suppress(OSError, ValueError, msgspec.MsgspecError, RecursionError):
            with path.open("rb") as file:
                header = msgspec.json.decode(file.readline(1 << 16))
            if isinstance(header, dict) and header.get("kind") == "header":
                yield header


def prune_runs(directory: Path, stack: str, keep: int, *, but: str = "") -> None:
    """Remove all but the newest `keep` ended runs of a stack; `but` names a run that stays."""
    runs = [run for run in list_runs(directory) if run.name != but and _has_ended(run, stack)]
    for run in runs[keep:]:
        remove_run(run)


def _has_ended(run: Path, stack: str) -> bool:
    """Return whether a run is one of this stack, and nobody records it any more."""
    headers = list(read_headers(run))
    is_own = bool(headers) and all(header.get("stack") == stack for header in headers)
    return is_own and not any(is_alive(header, run) for header in headers)


def is_alive(header: Mapping[str, Any], run: Path) -> bool:
    """Return whether the process that wrote a header still records."""
    if header.get("host") != socket.gethostname():
        return time.time() - get_last_write(run) < _FRESH_SECONDS
    pid, start = header.get("pid"), header.get("start")
    if not isinstance(pid, int) or not isinstance(start, int) or pid <= 0:
        return False
    return processes.ProcessId(pid, start).alive


def remove_run(run: Path) -> None:
    """Remove the files of a run, and its directory if nothing else is in it."""
    with contextlib.suppress(OSError):
        if run.is_symlink() or run.lstat().st_uid != os.getuid():
            return
        for path in run.glob("*.jsonl*"):
            path.unlink(missing_ok=True)
        run.rmdir()
