"""Processes as the kernel knows them: their identity, the members of a run, how to end them.

The kernel reuses pids, so a process is identified by its pid and its start time. The members of a
run carry a random mark in their environment, which children inherit: vLLM's EngineCore and Worker
processes survive a killed parent and change their names, and the mark still finds them. (A change
of the name overwrites the environment unless SPT_NOENV is set, so the mark comes with it.)
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rollway.private_files import is_plain_name

MARK = "ROLLWAY_RUN"
SHM = Path("/dev/shm")
_PROC = Path("/proc")
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


@dataclass(frozen=True, slots=True, order=True)
class ProcessId:
    """The identity of a process: its pid and the clock tick at which it started."""

    pid: int
    start: int

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """Return the identity of the process that has this pid now."""
        entry = _read_entry(pid)
        return entry.id if entry else None

    @property
    def alive(self) -> bool:
        entry = _read_entry(self.pid)
        return entry is not None and entry.id == self and entry.state not in "ZX"

    def send(self, number: signal.Signals) -> None:
        """Send a signal to this process, and never to another that has its pid now."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, number)


def this_process() -> ProcessId:
    process = ProcessId.of(os.getpid())
    assert process is not None
    return process


@dataclass(frozen=True, slots=True)
class _Entry:
    id: ProcessId
    parent: int
    state: str


def boot_id() -> str:
    """Return the id of this boot. Start times count from boot, so a record of another boot
    identifies no process."""
    return (_PROC / "sys/kernel/random/boot_id").read_text().strip()


def read_command(process: ProcessId, length: int = 120) -> str:
    """Return the start of a process's command line; empty if it has ended."""
    try:
        line = (_PROC / str(process.pid) / "cmdline").read_bytes()
    except OSError:
        return ""
    text = " ".join(part.decode(errors="replace") for part in line.split(b"\0") if part)
    return "".join(char if char.isprintable() else " " for char in text)[:length]


def list_own_commands(program: str) -> list[list[str]]:
    """Return the command lines of this user's processes that run a file of this name.

    The kernel says which file that is: a process may call itself anything. It also says who started
    the process: one of a setuid program seems to be root's, with arguments of anybody."""
    owner = f"Uid:\t{os.getuid()}\t{os.getuid()}\t{os.getuid()}\t{os.getuid()}\n"
    commands = []
    for process in (_PROC / str(pid) for pid in _list_own_pids()):
        with contextlib.suppress(OSError):
            is_own = owner in (process / "status").read_text(errors="replace")
            if is_own and (process / "exe").readlink().name == program:
                line = (process / "cmdline").read_bytes()
                commands.append(line.decode(errors="replace").split("\0"))
    return commands


def make_run_environment(run_id: str) -> dict[str, str]:
    """Return the variables that mark a process, and all its children, as members of a run."""
    return {MARK: run_id, "SPT_NOENV": "1"}


def read_run_id(pid: int) -> str | None:
    """Return the run that a process is marked as a member of; None without a mark."""
    try:
        entries = (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return None
    prefix = f"{MARK}=".encode()
    marks = [entry.removeprefix(prefix).decode() for entry in entries if entry.startswith(prefix)]
    return marks[0] if marks else None


def find_parent(pid: int) -> ProcessId | None:
    entry = _read_entry(pid)
    return ProcessId.of(entry.parent) if entry is not None else None


def find_members(run_id: str) -> set[ProcessId]:
    """Find the living processes of this user that carry the run's mark."""
    mark = f"{MARK}={run_id}".encode()
    marked = set()
    for pid in _list_own_pids():
        try:
            environment = (_PROC / str(pid) / "environ").read_bytes()
        except OSError:
            continue
        if mark in environment.split(b"\0"):
            entry = _read_entry(pid)
            if entry is not None and entry.state not in "ZX":
                marked.add(entry.id)
    return marked


def find_runs() -> dict[str, set[ProcessId]]:
    """Return the living processes of this user that carry a mark, by their run."""
    runs: dict[str, set[ProcessId]] = {}
    for pid in _list_own_pids():
        run_id, entry = read_run_id(pid), _read_entry(pid)
        if run_id is not None and entry is not None and entry.state not in "ZX":
            runs.setdefault(run_id, set()).add(entry.id)
    return runs


def is_supervisor(process: ProcessId) -> bool:
    """Return whether this is a living supervisor of a stack."""
    return process.alive and "rollway.stack.supervisor" in read_command(process, 2000)


def find_shared_memory(processes: Iterable[ProcessId]) -> set[str]:
    """Find the names under /dev/shm that these processes have mapped or open.

    They are compared by inode: glibc maps a semaphore under a scratch name and links it to its real
    name later."""
    held = {inode for p in processes for inode in (*_list_mapped(p.pid), *_list_open(p.pid))}
    names = set()
    with contextlib.suppress(OSError), os.scandir(SHM) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if entry.is_file(follow_symlinks=False) and entry.inode() in held:
                    names.add(entry.name)
    return names


def remove_shared_memory(names: Iterable[str]) -> list[str]:
    """Unlink segments that dead members left, unless a living process holds them.

    The names come from a file, so paths, links and files of other users are ignored."""
    left = {name for name in names if is_plain_name(name) and _is_own_file(SHM / name)}
    if left:
        left -= find_shared_memory(ProcessId(pid, 0) for pid in _list_own_pids())
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
    """Wait until `find` returns nobody, then SIGKILL those it still returns.

    Return the names of the shared memory that any of them held, also of those that ended on their
    own: a process that ends in the middle of its start leaves segments behind."""
    deadline = time.monotonic() + grace_seconds
    memory: set[str] = set()
    while (remaining := find()) and time.monotonic() < deadline:
        memory |= find_shared_memory(remaining)
        time.sleep(0.05)
    # SIGSTOP first, until no new process appears: a running one could create a child or a segment
    # between the search and the kill.
    stopped: set[ProcessId] = set()
    while remaining - stopped:
        for process in remaining - stopped:
            process.send(signal.SIGSTOP)
        stopped |= remaining
        remaining = find()
    memory |= find_shared_memory(stopped)
    for process in stopped:
        process.send(signal.SIGKILL)
    wait_gone(stopped, 5.0)
    return memory


def wait_gone(processes: set[ProcessId], seconds: float) -> set[ProcessId]:
    """Wait for the end of these processes; return those still alive after `seconds`."""
    deadline = time.monotonic() + seconds
    while (remaining := {p for p in processes if p.alive}) and time.monotonic() < deadline:
        time.sleep(0.05)
    return remaining


def adopt_orphans() -> None:
    """Become the parent of grandchildren whose own parent dies, instead of pid 1."""
    _call_prctl(_PR_SET_CHILD_SUBREAPER, 1)


def raise_file_limit(most: int = 1 << 30) -> int:
    """Raise the limit of open files of this process, to `most` if it may; return what it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < min(hard, most):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, most), hard))
    return hard


def die_with_parent() -> None:
    """Have the kernel send this process SIGTERM when its parent dies (runs before exec)."""
    _call_prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def reap(known: Mapping[int, object]) -> None:
    """Collect adopted children that have ended, except `known` pids, which others wait for."""
    for pid in _list_own_pids():
        entry = _read_entry(pid)
        if entry and entry.parent == os.getpid() and entry.state == "Z" and pid not in known:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def _list_mapped(pid: int) -> list[int]:
    """List inodes of mapped shared memory; a line is `range mode offset device inode path`."""
    try:
        text = (_PROC / str(pid) / "maps").read_bytes()
    except OSError:
        return []
    mark = f"{SHM}/".encode()
    if mark not in text:  # of most processes; an engine has thousands of lines
        return []
    return [int(line.split(maxsplit=5)[4]) for line in text.splitlines() if mark in line]


def _list_open(pid: int) -> list[int]:
    inodes = []
    with contextlib.suppress(OSError), os.scandir(_PROC / str(pid) / "fd") as handles:
        for handle in handles:
            with contextlib.suppress(OSError):
                if os.readlink(handle.path).startswith(f"{SHM}/"):  # noqa: PTH115  (3 x faster)
                    inodes.append(handle.stat().st_ino)
    return inodes


def _list_own_pids() -> list[int]:
    uid = os.getuid()
    pids = []
    with os.scandir(_PROC) as entries:
        for entry in entries:
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if entry.stat().st_uid == uid:
                        pids.append(int(entry.name))
    return pids


def _read_entry(pid: int) -> _Entry | None:
    try:
        line = (_PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    # The name in brackets may hold any bytes, brackets too; fields count from the last bracket.
    fields = line.rpartition(b")")[2].decode().split()
    return _Entry(ProcessId(pid, int(fields[19])), parent=int(fields[1]), state=fields[0])


_libc = ctypes.CDLL(None, use_errno=True)


def _call_prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")
