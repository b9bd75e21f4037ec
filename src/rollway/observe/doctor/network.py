"""Who reaches a stack, and how its parts reach each other: ports, clocks, transfers of KV."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp

from rollway.fleet.discovery import Worker
from rollway.observe.doctor.subject import Subject, sum_values
from rollway.stack import logs, preset
from rollway.stack.commands import WILDCARDS
from rollway.stack.doctor import Finding, Level, Listener, list_listeners
from rollway.stack.state import ProcessState, is_at

CLOCK_SECONDS, WORST_CLOCK_SECONDS = 3.0, 60.0
"""The Date of an answer has whole seconds. Orders are refused after 120 s."""
_ADMIN = "a worker's admin routes and metrics"
_EVENTS = "the event plane: what workers have cached, and their load"
_LOG_LINES = 20_000
_CHOICE = re.compile(r"UCX\s+INFO\s+\S+\s+(intra|inter)-node cfg#\d+\s+(.*)")
"""What UCX logs about an endpoint: `… intra-node cfg#1 am(tcp/lo cma/memory)  ka(tcp/lo)`."""
_LANE = re.compile(r"(\w+)\(([^)]*)\)")
_KEEP_ALIVE = "ka"
RDMA_FILES = Path("/dev/infiniband")
_LEAST_LOCKED = 1 << 30


# --- ports ---------------------------------------------------------------------------------------


async def check_admin_ports(subject: Subject) -> AsyncIterator[Finding]:
    """Workers take signed orders only, and not everybody reaches them."""
    workers = [w for pool in subject.pools for w in pool.workers if w.error is None]
    open_to_all = [str(w) for w in workers if subject.doors.get(w.instance_id) == "open"]
    if open_to_all:
        advice = (
            "Whoever reaches these ports can change weights. Start workers by Rollway, or close "
            "the ports with a firewall."
        )
        yield Finding("admin ports", "error", _join("unsigned orders", open_to_all), advice)
    exposed = [entry for entry in _list_exposed(subject) if entry.purpose == _ADMIN]
    anywhere = [entry for entry in exposed if entry.address in WILDCARDS]
    if anywhere:
        names = [f"{entry.process} {entry.address}:{entry.port}" for entry in anywhere]
        yield Finding("admin ports", "warning", _join("every interface", names), anywhere[0].advice)
    elif exposed:
        names = [f"{entry.process} {entry.address}:{entry.port}" for entry in exposed]
        advice = "Needed by drivers and supervisors of other machines; orders are signed."
        yield Finding("admin ports", "note", _join("the network", names), advice)
    if workers and not (open_to_all or exposed):
        yield Finding("admin ports", "ok", "signed orders only")


async def check_listeners(subject: Subject) -> AsyncIterator[Finding]:
    """Nothing else of the stack can be reached from the network."""
    for purpose, entries in _group(_list_exposed(subject)).items():
        if purpose != _ADMIN:
            names = [f"{entry.process} {entry.address}:{entry.port}" for entry in entries]
            # Dynamo opens those of the event plane, whatever it is told.
            level: Level = "note" if purpose == _EVENTS else "warning"
            yield Finding("listeners", level, _join(purpose, names), entries[0].advice)


def _list_exposed(subject: Subject) -> list[Listener]:
    if not subject.is_here or subject.state is None:
        return []
    return [e for e in list_listeners(subject.state) if e.reach == "the network"]


def _group(entries: Iterable[Listener]) -> dict[str, list[Listener]]:
    groups: dict[str, list[Listener]] = {}
    for entry in entries:
        groups.setdefault(entry.purpose, []).append(entry)
    return groups


def _join(what: str, names: list[str]) -> str:
    shown = ", ".join(names[:4])
    return f"{what}: {shown}" + (f" and {len(names) - 4} more" if len(names) > 4 else "")


# --- clocks --------------------------------------------------------------------------------------


async def check_clocks(subject: Subject) -> AsyncIterator[Finding]:
    """The clocks of all machines agree with this one's."""
    urls = {urlsplit(subject.stack.frontend_url).hostname: f"{subject.stack.frontend_url}/health"}
    for pool in subject.pools:
        for worker in pool.workers:
            if worker.error is None:
                host = urlsplit(worker.admin_url).hostname
                urls.setdefault(host, f"{worker.admin_url}/health")
    offsets = await asyncio.gather(*map(measure_offset, urls.values()))
    wrong = False
    for host, offset in zip(urls, offsets, strict=True):
        if offset is None or abs(offset) <= CLOCK_SECONDS:
            continue
        wrong = True
        level: Level = "error" if abs(offset) > WORST_CLOCK_SECONDS else "warning"
        text = f"{host} is {abs(offset):.0f} s {'ahead' if offset > 0 else 'behind'}"
        advice = (
            "Run NTP or chrony there. Workers refuse orders that are 120 s old, and records of "
            "several machines are merged by time."
        )
        yield Finding("clocks", level, text, advice)
    if not wrong and any(offset is not None for offset in offsets):
        yield Finding("clocks", "ok", f"{len(urls)} hosts within {CLOCK_SECONDS:g} s")


async def measure_offset(url: str) -> float | None:
    """Return by how many seconds a server's clock is ahead of ours; None if it does not say."""
    began = time.time()
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5.0)) as session,
            session.get(url) as response,
        ):
            text = response.headers.get("Date", "")
        middle = (began + time.time()) / 2
        # The header has whole seconds, so it is half a second behind on average.
        return parsedate_to_datetime(text).timestamp() + 0.5 - middle
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
        return None


# --- RDMA ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Port:
    """One port of an RDMA device, as the kernel describes it."""

    name: str
    state: str
    rate: str

    @property
    def is_active(self) -> bool:
        return "ACTIVE" in self.state


def list_ports() -> list[Port]:
    """List the ports of all RDMA devices of this machine."""
    ports = []
    for path in sorted(preset.RDMA_DEVICES.glob("*/ports/*")):
        name = f"{path.parent.parent.name}:{path.name}"
        ports.append(Port(name, _read(path / "state"), _read(path / "rate")))
    return ports


async def check_rdma(subject: Subject) -> AsyncIterator[Finding]:
    """Where there are RDMA devices, workers can use one: a port is up, its device file is there,
    and they may lock memory. Without a device there is nothing to say."""
    ports = list_ports() if subject.is_here and subject.state is not None else []
    if not ports or subject.state is None:
        return
    # A stack whose prefill and decode are together may do without.
    level: Level = "warning" if any(pool.is_split for pool in subject.pools) else "note"
    active = [port for port in ports if port.is_active]
    pids = [process.pid for process in subject.state.processes if process.role == "worker"]
    locked = [limit for pid in pids if (limit := read_lock_limit(pid)) is not None]
    devices = list(RDMA_FILES.glob("uverbs*"))
    if not active:
        text = ", ".join(f"{port.name} {port.state}" for port in ports[:4])
        advice = "No port is up: look at the cable, and at `ibstat` or `rdma link`."
        yield Finding("RDMA", level, text, advice)
    elif not any(os.access(path, os.R_OK | os.W_OK) for path in devices):
        text = f"{active[0].name} is up, and {RDMA_FILES} has no device for this user"
        advice = "Give the container its devices: --device /dev/infiniband, or the device plugin."
        yield Finding("RDMA", level, text, advice)
    elif locked and min(locked) < _LEAST_LOCKED:
        text = f"a worker may lock {min(locked) / 1e6:,.1f} MB of memory"
        advice = "RDMA locks what it sends: ulimit -l unlimited, or LimitMEMLOCK of the service."
        yield Finding("RDMA", level, text, advice)
    else:
        text = ", ".join(f"{port.name} {port.rate}" for port in active[:4])
        yield Finding("RDMA", "ok", text)


def read_lock_limit(pid: int | None) -> int | None:
    """Return how many bytes a process may lock; None if that is unknown or endless."""
    lines = _read(Path(f"/proc/{pid}/limits")).splitlines()
    words = next((line.split() for line in lines if line.startswith("Max locked memory")), [])
    return int(words[3]) if len(words) > 3 and words[3].isdecimal() else None


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


# --- transfers of KV -----------------------------------------------------------------------------


async def check_transfer(subject: Subject) -> AsyncIterator[Finding]:
    """With prefill and decode apart, KV takes the best way that there is, and its speed."""
    for pool in subject.pools:
        decoders = [worker for worker in pool.serving if worker.role == "decode"]
        if not decoders:
            continue
        ways = [way for w in decoders for way in find_ways(_read_log(subject, w))[-1:]]
        speed = await _measure_speed(subject, decoders)
        if not ways:
            text = f"{pool.model}: the logs do not say what UCX chose{speed}"
            advice = "Set `UCX_LOG_LEVEL: info` in the workers' env, and restart them."
            yield Finding("KV transfer", "note", text, advice)
            continue
        slow = [way for way in ways if way.is_slow]
        way = (slow or ways)[-1]
        text = f"{pool.model}: {' '.join(way.transports)} ({way.place}-node){speed}"
        if slow:
            better = "Shared memory" if way.place == "intra" else "RDMA"
            advice = f"{better} is faster: check UCX_TLS and UCX_NET_DEVICES of the workers."
            yield Finding("KV transfer", "warning", text, advice)
        else:
            yield Finding("KV transfer", "ok", text)


@dataclass(frozen=True, slots=True)
class Way:
    """What UCX chose for one peer."""

    place: str
    """`intra` for a process of the same machine, else `inter`."""
    transports: tuple[str, ...]

    @property
    def is_slow(self) -> bool:
        """Whether it is TCP alone, where there is something faster."""
        is_tcp = all(name.startswith("tcp") for name in self.transports)
        return is_tcp and (self.place == "intra" or any(port.is_active for port in list_ports()))


def find_ways(lines: Iterable[str]) -> list[Way]:
    """Return what UCX says in a log that it uses to reach other processes."""
    ways = []
    for line in lines:
        if match := _CHOICE.search(line):
            lanes = [names for use, names in _LANE.findall(match[2]) if use != _KEEP_ALIVE]
            names = dict.fromkeys(name for lane in lanes for name in lane.split())
            ways.append(Way(match[1], tuple(names)))
    return ways


def _read_log(subject: Subject, worker: Worker) -> list[str]:
    process = _find_process(subject, worker)
    if process is None or not subject.is_here:
        return []
    path = Path(process.log)
    return logs.tail(path, _LOG_LINES) if path.is_file() else []


def _find_process(subject: Subject, worker: Worker) -> ProcessState | None:
    if subject.state is None:
        return None
    return next((p for p in subject.state.processes if is_at(worker.admin_url, p)), None)


async def _measure_speed(subject: Subject, workers: list[Worker]) -> str:
    """Return the bandwidth of the transfers so far, as vLLM counts them."""
    seconds = size = 0.0
    for worker in workers:
        page = await subject.read_page(worker.admin_url)
        seconds += sum_values(page, "vllm:nixl_xfer_time_seconds_sum")
        size += sum_values(page, "vllm:nixl_bytes_transferred_sum")
    return f", {size / seconds / 1e6:,.0f} MB/s of {size / 1e6:,.1f} MB" if seconds else ""
