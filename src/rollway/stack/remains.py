"""What dead runs of this user have left on this machine, besides stacks that `rollway down` clears.

    a process with a run's mark       no supervisor is above any process of the run
    /tmp/rollway-<uid>-<run>          no process has the run's mark, and nobody wrote for a while
    /dev/shm/rollway-weights-<mark>   the process of the mark is dead (weights/leftovers.py)

A user may have stacks in several homes (ROLLWAY_HOME), and a start takes a moment. So a run that
this home does not know counts as dead only by what the kernel says. Ports and names are locked by
the kernel, which releases those of a dead process: there is nothing to leave.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from rollway import processes
from rollway.processes import SHM, ProcessId
from rollway.stack.run_dir import make_run_dir_name
from rollway.stack.state import list_stacks
from rollway.weights.adapter import list_abandoned
from rollway.weights.leftovers import IN_MEMORY, is_abandoned

IDLE_SECONDS = 600.0
"""A start takes less until its first process has the run's mark."""
_MOST_PARENTS = 64


def find_orphans() -> dict[str, list[ProcessId]]:
    """Return the living processes of runs that this home does not know and nobody supervises."""
    known = {state.run_id for state in list_stacks()}
    orphans = {}
    for run_id, members in processes.find_runs().items():
        if run_id not in known and not any(map(_is_supervised, members)):
            orphans[run_id] = sorted(members)
    return orphans


def _is_supervised(process: ProcessId) -> bool:
    """Return whether a supervisor is above a process."""
    above = processes.find_parent(process.pid)
    for _ in range(_MOST_PARENTS):
        if above is None:
            return False
        if processes.is_supervisor(above):
            return True
        above = processes.find_parent(above.pid)
    return False


def list_run_dirs() -> list[Path]:
    """List the directories of runs that are dead."""
    runs = {state.run_id for state in list_stacks()} | processes.find_runs().keys()
    alive = {make_run_dir_name(run_id, os.getuid()) for run_id in runs}
    name = re.compile(re.escape(make_run_dir_name("", os.getuid())) + r"[0-9a-f]{8}")
    dead = []
    for base in list_bases():
        for path in base.glob("rollway-*"):
            if name.fullmatch(path.name) and path.name not in alive and _is_idle(path):
                dead.append(path)
    return sorted(dead)


def list_bases() -> set[Path]:
    """Return where directories of runs are."""
    return {Path(tempfile.gettempdir()), Path("/tmp")}


def _is_idle(path: Path) -> bool:
    """Return whether a directory of this user has not changed for a while."""
    with contextlib.suppress(OSError):
        status = path.lstat()
        is_own = status.st_uid == os.getuid() and not path.is_symlink()
        return is_own and time.time() - status.st_mtime > IDLE_SECONDS
    return False


def list_shared_memory() -> list[Path]:
    """List weights and adapters in shared memory whose writer is dead."""
    weights = (path for prefix in IN_MEMORY for path in SHM.glob(f"{prefix}*"))
    # A mark of another pid namespace tells nothing: its writer may be a container's.
    return sorted({*_own(p for p in weights if is_abandoned(p.name, 0.0)), *_own(list_abandoned())})


def _own(paths: Iterator[Path]) -> Iterator[Path]:
    for path in paths:
        with contextlib.suppress(OSError):
            if path.lstat().st_uid == os.getuid():
                yield path


def count_bytes(paths: list[Path]) -> int:
    """Return the size of files, and of those in directories."""
    size = 0
    for path in paths:
        for file in (path, *path.rglob("*")) if path.is_dir() else (path,):
            with contextlib.suppress(OSError):
                size += file.lstat().st_size if file.is_file() else 0
    return size
