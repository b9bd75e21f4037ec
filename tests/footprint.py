"""What a run could leave behind on the machine: processes, shared memory, directories, ports."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from rollway import processes
from rollway.stack.locks import FIRST, LAST, get_lock_directory
from tests.waiting import has_become

RUN = "ROLLWAY_TEST_RUN"
"""Every process that this pytest process starts inherits its id. Two run side by side under xdist,
and neither may be blamed for what the other uses."""
_ENTRY = f"{RUN}=".encode()
UNATTRIBUTED = {"shared memory", "scratch"}
"""A file that no process holds open could be anybody's."""
SECONDS_OF_OTHERS = 60.0
"""How long what the other run has may outlive its process: a worker that was killed leaves its
shared memory to its successor, which takes this long to start on a busy machine."""


def mark_own_processes() -> None:
    os.environ[RUN] = str(os.getpid())


class Footprint:
    """What is on the machine now and was not before, except for what another test run has."""

    def __init__(self) -> None:
        self._before = _look(set())
        self._foreign = _foreign_pids()
        """Every process of another run that was ever seen: some die meanwhile."""

    def new(self) -> dict[str, set[str]]:
        left = self._difference()
        if left and left.keys() <= UNATTRIBUTED and "PYTEST_XDIST_WORKER" in os.environ:
            # What the other run had for a moment goes; what this one left stays.
            has_become(lambda: not self._difference(), SECONDS_OF_OTHERS)
            left = self._difference()
        return left

    def settle(self, seconds: float = 30.0) -> dict[str, set[str]]:
        """Return what is still there after some time to go."""
        has_become(lambda: not self._difference(), seconds)
        return self.new()

    def _difference(self) -> dict[str, set[str]]:
        left = self._look_for_new()
        if any(left.values()):
            # A process of the other run that started, or began to listen, after its processes were
            # counted looks like one of this run. The second look knows it.
            again = self._look_for_new()
            left = {what: names & again.get(what, set()) for what, names in left.items()}
        return {what: names for what, names in left.items() if names}

    def _look_for_new(self) -> dict[str, set[str]]:
        self._foreign |= _foreign_pids()
        now = _look(self._foreign)
        return {what: names - self._before[what] for what, names in now.items()}


def _look(foreign: set[int]) -> dict[str, set[str]]:
    sockets = _socket_inodes(foreign)
    return {
        "processes": _marked_processes(foreign),
        "shared memory": _shared_memory(foreign),
        "scratch": _scratch(foreign),
        "ports": _listening_ports(sockets),
        "reservations": _reservations(foreign),
    }


def _foreign_pids() -> set[int]:
    """Return the processes that carry another run's id, and the other processes of pytest."""
    own = str(os.getpid()).encode()
    foreign = _other_test_processes()
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and path.name.encode() != own:
            entries = _read(path / "environ").split(b"\0")
            runs = {entry.partition(b"=")[2] for entry in entries if entry.startswith(_ENTRY)}
            if runs and own not in runs:
                # The id is the pid of that run, whose own environment does not show it.
                foreign |= {int(path.name), *(int(run) for run in runs if run.isdigit())}
    return foreign


def _other_test_processes() -> set[int]:
    """Return the workers of xdist beside this one. Their environment shows no id: the kernel keeps
    that of the start, and each sets its id later."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return set()
    parent = str(os.getppid()).encode()
    numbers = [path.name for path in Path("/proc").iterdir() if path.name.isdigit()]
    stats = {pid: _read(Path("/proc", pid, "stat")).rpartition(b")")[2].split() for pid in numbers}
    siblings = {int(pid) for pid, fields in stats.items() if fields[1:2] == [parent]}
    return siblings - {os.getpid()}


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it has ended, or is another user's
        return b""


def _socket_inodes(pids: set[int]) -> set[str]:
    inodes = set()
    for pid in pids:
        try:
            for handle in os.scandir(f"/proc/{pid}/fd"):
                target = os.readlink(handle.path)  # noqa: PTH115
                if target.startswith("socket:["):
                    inodes.add(target[8:-1])
        except OSError:
            continue
    return inodes


def _listening_ports(foreign: set[str]) -> set[str]:
    """Return those of the range that Rollway chooses from."""
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            port = int(fields[1].rpartition(":")[2], 16)
            if fields[3] == "0A" and FIRST <= port < LAST and fields[9] not in foreign:
                ports.add(str(port))
    return ports


def _reservations(foreign: set[int]) -> set[str]:
    return {path.name for path in get_lock_directory().iterdir() if _is_held(path, foreign)}


def _is_held(lock: Path, foreign: set[int]) -> bool:
    try:
        pid, start = map(int, lock.read_text().split())
    except (OSError, ValueError):
        return False
    return pid not in foreign and processes.ProcessId(pid, start).alive


def _shared_memory(foreign: set[int]) -> set[str]:
    mapped = processes.find_shared_memory(processes.ProcessId(pid, 0) for pid in foreign)
    return {
        path.name
        for path in processes.SHM.iterdir()
        if path.name not in mapped and not _is_marked(path, foreign)
    }


def _is_marked(path: Path, pids: set[int]) -> bool:
    """Return whether one of the processes wrote the path and put its pid into a name: a publisher
    into that of its file, a worker with adapters into that of a file in its directory."""
    names = [path.name]
    if path.is_dir():
        with contextlib.suppress(OSError):  # it is gone, or another user's
            names += [file.name for file in path.iterdir()]
    return any(f"-{pid}-" in name for name in names for pid in pids)


def _scratch(foreign: set[int]) -> set[str]:
    names = {path.name for path in Path("/tmp").glob(f"rollway-{os.getuid()}-*")}
    if names and foreign:
        used = b"".join(_read(Path(f"/proc/{pid}/{file}")) for pid in foreign
                        for file in ("environ", "cmdline"))  # fmt: skip
        names = {name for name in names if name.encode() not in used}
    return names


def _marked_processes(foreign: set[int]) -> set[str]:
    """Return every process that carries any stack's mark, and every supervisor."""
    marked = set()
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and int(path.name) not in foreign:
            mark = processes.MARK.encode() + b"=" in _read(path / "environ")
            if mark or b"rollway.stack.supervisor" in _read(path / "cmdline"):
                marked.add(path.name)
    return marked
