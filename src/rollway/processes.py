"""Processes as the kernel knows them: who they are, which belong to a run, how to end them.

A pid alone names nobody, since numbers are reused; a pid with its start time does. The members of
a run are found by a random mark in their environment, which children inherit: vLLM's EngineCore
and Worker processes outlive a killed parent, change their name, and are still found. (Changing the
name overwrites the environment unless SPT_NOENV is set, so the mark comes with it.)
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rollway.private import is_plain_name

MARK = "ROLLWAY_RUN"
SHM = Path("/dev/shm")
_PROC = Path("/proc")
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


@dataclass(frozen=True, slots=True, order=True)
class ProcessId:
    """One process, now and for ever: its number and the clock tick at which it started."""

    pid: int
    start: int

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        entry = _entry(pid)
        return entry.id if entry else None

    @property
    def alive(self) -> bool:
        entry = _entry(self.pid)
        return entry is not None and entry.id == self and entry.state not in "ZX"

    def send(self, number: signal.Signals) -> None:
        """Signal this process and no other that has its number by now."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, number)


@dataclass(frozen=True, slots=True)
class _Entry:
    id: ProcessId
    parent: int
    state: str


def boot_id() -> str:
    """Start times count from boot, so a record of an earlier boot says nothing."""
    return (_PROC / "sys/kernel/random/boot_id").read_text().strip()


def command_of(process: ProcessId, length: int = 120) -> str:
    """The command line of a process, cut short; empty when it has ended."""
    try:
        line = (_PROC / str(process.pid) / "cmdline").read_bytes()
    except OSError:
        return ""
    text = " ".join(part.decode(errors="replace") for part in line.split(b"\0") if part)
    return "".join(sign if sign.isprintable() else " " for sign in text)[:length]


def run_environment(run_id: str) -> dict[str, str]:
    """What marks a process and all it starts as members of a run."""
    return {MARK: run_id, "SPT_NOENV": "1"}


def members(run_id: str) -> set[ProcessId]:
    """Every living process of this user that carries the run's mark."""
    mark = f"{MARK}={run_id}".encode()
    found = set()
    for pid in _own_pids():
        try:
            environment = (_PROC / str(pid) / "environ").read_bytes()
        except OSError:
            continue
        if mark in environment.split(b"\0"):
            entry = _entry(pid)
            if entry is not None and entry.state not in "ZX":
                found.add(entry.id)
    return found


def descendants(root: int) -> set[ProcessId]:
    """All living children of a process and theirs, to any depth."""
    entries = [entry for pid in _own_pids() if (entry := _entry(pid))]
    family, grown = {root}, True
    while grown:
        more = {e.id.pid for e in entries if e.parent in family} - family
        family |= more
        grown = bool(more)
    return {e.id for e in entries if e.id.pid in family - {root} and e.state not in "ZX"}


def shared_memory(processes: Iterable[ProcessId]) -> set[str]:
    """Names under /dev/shm of what these processes have mapped or open.

    Found by inode: a semaphore is mapped under a scratch name and linked to its real one later."""
    held = {inode for p in processes for inode in (*_mapped(p.pid), *_opened(p.pid))}
    names = set()
    with contextlib.suppress(OSError), os.scandir(SHM) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if entry.is_file(follow_symlinks=False) and entry.inode() in held:
                    names.add(entry.name)
    return names


def remove_shared_memory(names: Iterable[str]) -> list[str]:
    """Unlink segments that dead members left, unless a living process holds one.

    The names come from a file, so a path, a link and a file of another user are left alone."""
    left = {name for name in names if is_plain_name(name) and _is_own_file(SHM / name)}
    if left:
        left -= shared_memory(ProcessId(pid, 0) for pid in _own_pids())
    for name in left:
        with contextlib.suppress(OSError):
            (SHM / name).unlink()
    return sorted(left)


def _is_own_file(path: Path) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid()


def end(find: Callable[[], set[ProcessId]], grace_seconds: float) -> set[str]:
    """Wait until `find` finds nobody, then SIGKILL those it still finds; returns the shared memory
    that any of them held: one that ends by itself in the middle of its start leaves some too.

    They are stopped first, until no new one turns up: one that is just starting would otherwise
    create a child or a segment between the look and the kill."""
    deadline = time.monotonic() + grace_seconds
    memory: set[str] = set()
    while (remaining := find()) and time.monotonic() < deadline:
        memory |= shared_memory(remaining)
        time.sleep(0.05)
    stopped: set[ProcessId] = set()
    while remaining - stopped:
        for process in remaining - stopped:
            process.send(signal.SIGSTOP)
        stopped |= remaining
        remaining = find()
    memory |= shared_memory(stopped)
    for process in stopped:
        process.send(signal.SIGKILL)
    wait_gone(stopped, 5.0)
    return memory


def wait_gone(processes: set[ProcessId], seconds: float) -> set[ProcessId]:
    """Those still alive after at most `seconds`."""
    deadline = time.monotonic() + seconds
    remaining = {process for process in processes if process.alive}
    while remaining and time.monotonic() < deadline:
        time.sleep(0.05)
        remaining = {process for process in remaining if process.alive}
    return remaining


def adopt_orphans() -> None:
    """Become the parent of grandchildren whose own parent dies, instead of pid 1."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Runs in a child before exec: be asked to end when the supervisor is killed."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def reap(known: Mapping[int, object]) -> None:
    """Collect adopted children that have ended; `known` pids have another waiter."""
    for pid in _own_pids():
        entry = _entry(pid)
        if entry and entry.parent == os.getpid() and entry.state == "Z" and pid not in known:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def _mapped(pid: int) -> list[int]:
    """Inodes of mapped shared memory; a line is `range mode offset device inode path`."""
    try:
        lines = (_PROC / str(pid) / "maps").read_text(errors="replace").splitlines()
    except OSError:
        return []
    return [int(line.split(maxsplit=5)[4]) for line in lines if f"{SHM}/" in line]


def _opened(pid: int) -> list[int]:
    inodes = []
    with contextlib.suppress(OSError), os.scandir(_PROC / str(pid) / "fd") as handles:
        for handle in handles:
            with contextlib.suppress(OSError):
                if str(Path(handle.path).readlink()).startswith(f"{SHM}/"):
                    inodes.append(handle.stat().st_ino)
    return inodes


def _own_pids() -> list[int]:
    uid = os.getuid()
    pids = []
    with os.scandir(_PROC) as entries:
        for entry in entries:
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if entry.stat().st_uid == uid:
                        pids.append(int(entry.name))
    return pids


def _entry(pid: int) -> _Entry | None:
    try:
        line = (_PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    # The name in brackets may hold any bytes, also half a character, so fields are counted from
    # the last bracket.
    fields = line.rpartition(b")")[2].decode().split()
    return _Entry(ProcessId(pid, int(fields[19])), parent=int(fields[1]), state=fields[0])


_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")
