"""Where a stack runs: ports, RDMA, limits, disk, leftovers, the record.

Checks that take a state are of the machine on which the stack's processes run.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from rollway.errors import Level, Problem
from rollway.fleet.workers import Worker
from rollway.observe.doctor.subject import Findings, ModelWorkers, Subject
from rollway.observe.metrics import parse_labels_key
from rollway.observe.read import Run
from rollway.observe.record import Entry
from rollway.stack import logs, machine_check, preset
from rollway.stack.commands import WILDCARDS
from rollway.stack.machine_check import ListeningSocket, list_listeners
from rollway.stack.state import StackState, find_record_dir, home, is_at

_PROC = Path("/proc")


# --- ports ---------------------------------------------------------------------------------------

_ADMIN = "a worker's admin routes and metrics"
_EVENTS = "the event plane: what workers have cached, and their load"


async def check_admin_ports(subject: Subject) -> Findings:
    """Workers take signed orders only, and not everybody reaches them."""
    workers = [w for pool in subject.pools for w in pool.workers if w.error is None]
    open_to_all = [str(w) for w in workers if subject.doors.get(w.instance_id) == "open"]
    if open_to_all:
        advice = (
            "Whoever reaches these ports can change weights. Start workers by Rollway, or close "
            "the ports with a firewall."
        )
        yield "error", f"unsigned orders: {_join(open_to_all)}", advice
    exposed = _list_exposed(subject.local_state).get(_ADMIN, [])
    anywhere = [entry for entry in exposed if entry.address in WILDCARDS]
    if anywhere:
        yield "warning", f"every interface: {_name(anywhere)}", anywhere[0].advice
    elif exposed:
        advice = "Needed by drivers and supervisors of other machines; orders are signed."
        yield "note", f"the network: {_name(exposed)}", advice
    if workers and not (open_to_all or exposed):
        yield "ok", "signed orders only"


async def check_listeners(subject: Subject) -> Findings:
    """Nothing else of the stack can be reached from the network."""
    for purpose, entries in _list_exposed(subject.local_state).items():
        if purpose != _ADMIN:
            # Dynamo opens those of the event plane, whatever it is told.
            level: Level = "note" if purpose == _EVENTS else "warning"
            yield level, f"{purpose}: {_name(entries)}", entries[0].advice


def _list_exposed(state: StackState | None) -> dict[str, list[ListeningSocket]]:
    """Return the sockets that the network can reach, by their purpose."""
    groups: dict[str, list[ListeningSocket]] = {}
    for entry in [] if state is None else list_listeners(state):
        if entry.reach == "the network":
            groups.setdefault(entry.purpose, []).append(entry)
    return groups


def _name(entries: Iterable[ListeningSocket]) -> str:
    return _join([f"{entry.process} {entry.address}:{entry.port}" for entry in entries])


def _join(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


# --- RDMA, and transfers of KV -------------------------------------------------------------------

RDMA_FILES = Path("/dev/infiniband")
_LEAST_LOCKED = 1 << 30
_LOG_LINES = 20_000
_CHOICE = re.compile(r"UCX\s+INFO\s+\S+\s+(intra|inter)-node cfg#\d+\s+(.*)")
"""What UCX logs about an endpoint: `… intra-node cfg#1 am(tcp/lo cma/memory)  ka(tcp/lo)`."""
_LANE = re.compile(r"(\w+)\(([^)]*)\)")
_KEEP_ALIVE = "ka"


def list_ports() -> tuple[list[str], list[str]]:
    """List the ports of all RDMA devices of this machine that are up, with their rates, and the
    others, with their states."""
    active, others = [], []
    for path in sorted(preset.RDMA_DEVICES.glob("*/ports/*")):
        name, state = f"{path.parent.parent.name}:{path.name}", _read(path / "state")
        if "ACTIVE" in state:
            active.append(f"{name} {_read(path / 'rate')}")
        else:
            others.append(f"{name} {state}")
    return active, others


async def check_rdma(subject: Subject) -> Findings:
    """Where there are RDMA devices, workers can use one: a port is up, its device file is there,
    and they may lock memory. Without a device there is nothing to say."""
    state = subject.local_state
    active, others = list_ports()
    if state is None or not (active or others):
        return
    # A stack whose prefill and decode are together may do without.
    level: Level = "warning" if any(pool.is_split for pool in subject.pools) else "note"
    pids = [process.pid for process in state.processes if process.role == "worker"]
    limits = [read_limit(pid, "Max locked memory") for pid in pids]
    locked = min((limit for limit in limits if limit is not None), default=_LEAST_LOCKED)
    devices = list(RDMA_FILES.glob("uverbs*"))
    if not active:
        advice = "No port is up: look at the cable, and at `ibstat` or `rdma link`."
        yield level, ", ".join(others[:4]), advice
    elif not any(os.access(path, os.R_OK | os.W_OK) for path in devices):
        text = f"{active[0]} is up, and {RDMA_FILES} has no device for this user"
        advice = "Give the container its devices: --device /dev/infiniband, or the device plugin."
        yield level, text, advice
    elif locked < _LEAST_LOCKED:
        text = f"a worker may lock {locked / 1e6:,.1f} MB of memory"
        advice = "RDMA locks what it sends: ulimit -l unlimited, or LimitMEMLOCK of the service."
        yield level, text, advice
    else:
        yield "ok", ", ".join(active[:4])


async def check_transfer(subject: Subject, pool: ModelWorkers) -> Findings:
    """With prefill and decode apart, KV takes the best way that there is, and its speed."""
    decoders = [worker for worker in pool.serving if worker.role == "decode"]
    if not decoders:
        return
    choices = [c for w in decoders for c in find_ucx_choices(_read_log(subject, w))[-1:]]
    names = ("vllm:nixl_xfer_time_seconds_sum", "vllm:nixl_bytes_transferred_sum")
    pages = [await subject.read_metrics(worker.admin_url, *names) for worker in decoders]
    seconds, size = (sum(page[name] for page in pages) for name in names)
    speed = f", {size / seconds / 1e6:,.0f} MB/s of {size / 1e6:,.1f} MB" if seconds else ""
    if not choices:
        advice = "Set `UCX_LOG_LEVEL: info` in the workers' env, and restart them."
        yield "note", f"{pool.model}: the logs do not say what UCX chose{speed}", advice
        return
    slow = [choice for choice in choices if choice.is_slow]
    choice = (slow or choices)[-1]
    text = f"{pool.model}: {' '.join(choice.transports)} ({choice.place}-node){speed}"
    if slow:
        better = "Shared memory" if choice.place == "intra" else "RDMA"
        advice = f"{better} is faster: check UCX_TLS and UCX_NET_DEVICES of the workers."
        yield "warning", text, advice
    else:
        yield "ok", text


@dataclass(frozen=True, slots=True)
class UcxChoice:
    """What UCX chose for one peer."""

    place: str
    """`intra` for a process of the same machine, else `inter`."""
    transports: tuple[str, ...]

    @property
    def is_slow(self) -> bool:
        """Whether it is TCP alone, where there is something faster."""
        is_tcp = all(name.startswith("tcp") for name in self.transports)
        return is_tcp and (self.place == "intra" or bool(list_ports()[0]))


def find_ucx_choices(lines: Iterable[str]) -> list[UcxChoice]:
    """Return what UCX says in a log that it uses to reach other processes."""
    choices = []
    for line in lines:
        if match := _CHOICE.search(line):
            lanes = [names for use, names in _LANE.findall(match[2]) if use != _KEEP_ALIVE]
            names = dict.fromkeys(name for lane in lanes for name in lane.split())
            choices.append(UcxChoice(match[1], tuple(names)))
    return choices


def _read_log(subject: Subject, worker: Worker) -> list[str]:
    state = subject.local_state
    processes = [] if state is None else state.processes
    path = next((Path(p.log) for p in processes if is_at(worker.admin_url, p)), None)
    return logs.tail(path, _LOG_LINES) if path is not None and path.is_file() else []


# --- limits and room -----------------------------------------------------------------------------

_FEWEST_FILES, _MOST_USED = 1024, 0.8
_LOW_DISK, _NO_DISK = 2**30, 100 * 2**20


async def check_file_limits(subject: Subject, state: StackState) -> Findings:
    """No process is close to its limit of open files."""
    is_well = True
    for process in state.processes:
        used, limit = count_files(process.pid), read_limit(process.pid, "Max open files")
        if limit is not None and (used > _MOST_USED * limit or limit < _FEWEST_FILES):
            is_well = False
            text = f"{process.name} has {used:,} of {limit:,} files open"
            advice = "Raise it before the start: ulimit -n 65536, or LimitNOFILE of the service."
            yield "error" if used > _MOST_USED * limit else "warning", text, advice
    if is_well:
        yield "ok", f"{len(state.processes)} processes have room"


def read_limit(pid: int | None, name: str) -> int | None:
    """Return a limit of a process; None if it is unknown or endless."""
    lines = _read(_PROC / str(pid) / "limits").splitlines()
    value = next((line[len(name) :].split()[0] for line in lines if line.startswith(name)), "")
    return int(value) if value.isdecimal() else None


def count_files(pid: int | None) -> int:
    with contextlib.suppress(OSError):
        return len(list((_PROC / str(pid) / "fd").iterdir()))
    return 0


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace").strip()
    return ""


async def check_disk(subject: Subject, state: StackState) -> Findings:
    """There is room for logs and records."""
    paths = {"state": home(), "logs": Path(state.log_dir), "record": find_record_dir(state)}
    is_well = True
    for what, path in paths.items():
        if path is None:
            continue
        free = shutil.disk_usage(next(p for p in (path, *path.parents) if p.exists())).free
        if free < _LOW_DISK:
            is_well = False
            level: Level = "error" if free < _NO_DISK else "warning"
            advice = "Free some, or give another place: ROLLWAY_HOME, `observe.directory`."
            yield level, f"{free / 1e6:,.0f} MB free for the {what} in {path}", advice
    if is_well:
        yield "ok", f"room in {home()}"


def check_shared_memory(subject: Subject, state: StackState) -> Findings:
    """There is room for weights and for the engines in /dev/shm, as their processes see it."""
    pids = [process.pid for process in state.processes if process.role == "worker"]
    # Workers in containers have a /dev/shm of their own; whose cannot be seen counts as this one.
    roots = [root for pid in pids if os.access((root := _PROC / str(pid) / "root") / "dev/shm", 0)]
    problems = [machine_check.check_shared_memory(root) for root in roots or [Path("/")]]
    worst = next((problem for problem in problems if problem.level != "ok"), problems[0])
    return _pass_on([worst], worst.cause)


def check_leftovers(subject: Subject, state: StackState) -> Findings:
    """No stack of this user was left behind by a dead supervisor, nor anything else of a dead
    run."""
    return _pass_on([*machine_check.check_stacks(), *machine_check.check_leftovers()], "none")


def check_packages(subject: Subject, state: StackState) -> Findings:
    """The installed versions are those that were tested together."""
    problems = [replace(p, cause=f"{p.what} {p.cause}") for p in machine_check.check_packages()]
    return _pass_on(problems, "the tested versions")


async def _pass_on(problems: list[Problem], text: str) -> Findings:
    """Yield what the doctor of a machine found wrong, or that it found nothing."""
    wrong = [problem for problem in problems if problem.level != "ok"]
    for problem in wrong or [Problem("", "ok", text)]:
        yield problem.level, problem.cause, problem.fix


# --- the record ----------------------------------------------------------------------------------

_STALE_SAMPLES = 5
"""A record is alive if its last sample is at most this many intervals old."""
_UNKNOWN_INTERVAL = 60.0


async def check_record(subject: Subject) -> Findings:
    """The run is recorded, and every process answers the sampler."""
    directory = None if subject.state is None else find_record_dir(subject.state)
    if subject.state is None or directory is None:
        advice = "Say `observe: on` in its spec, and start it again: docs/observe.md."
        yield "note", "nothing is recorded", advice
        return
    if subject.local_state is None:
        advice = f"See it: rollway dash {subject.state.name}"
        yield "note", "recorded on the nodes of the stack, not checked from here", advice
        return
    samples = read_last_samples(directory)
    if not samples:
        advice = "Its directory was removed, or its disk is full: see the supervisor's log."
        yield "error", f"{directory} has no samples", advice
        return
    last, values = samples[-1]["t"], samples[-1]["values"]
    # The interval is the spec's, which is not on record.
    interval = max(last - samples[0]["t"], 1.0) if len(samples) > 1 else _UNKNOWN_INTERVAL
    age = time.time() - last
    dropped = sum(values.get("rollway_record_dropped_total", {}).values())
    failed = [
        parse_labels_key(key).get("worker", key) for key in values.get("rollway_scrape_failed", {})
    ]
    if age > _STALE_SAMPLES * interval + 1.0:
        advice = "The supervisor hangs, or the disk is full: see its log."
        yield "error", f"the last sample is {age:,.0f} s old", advice
    elif failed:
        advice = "Their pages are not read: they hang, or are busy for longer than the interval."
        yield "warning", f"no metrics of {', '.join(failed[:4])}", advice
    elif dropped:
        advice = "The disk is too slow or full. Events are recorded first: docs/observe.md."
        yield "warning", f"{dropped:,.0f} entries were dropped", advice
    else:
        yield "ok", str(directory)


def read_last_samples(directory: Path) -> list[Entry]:
    """Return the last two samples of a supervisor."""
    run = Run(directory)
    run.check_schema()
    return [e for e in run.read_end() if (e["kind"], e["process"]) == ("sample", "supervisor")][-2:]
