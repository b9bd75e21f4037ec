"""What a stack needs to go on: file limits, disk, memory, tested versions, its record."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path

from rollway.observe.doctor.subject import Subject
from rollway.observe.metrics import parse_labels_key
from rollway.observe.read import decode
from rollway.observe.record import Entry
from rollway.stack import doctor
from rollway.stack.doctor import Finding, Level
from rollway.stack.state import find_record_dir, home

_PROC = Path("/proc")
_FEWEST_FILES, _MOST_USED = 1024, 0.8
_LOW_DISK, _NO_DISK = 2**30, 100 * 2**20
_STALE_SAMPLES = 5
"""A record is alive if its last sample is at most this many intervals old."""
_UNKNOWN_INTERVAL = 60.0
_TAIL = 4 << 20


async def check_file_limits(subject: Subject) -> AsyncIterator[Finding]:
    """No process is close to its limit of open files."""
    if not subject.is_here or subject.state is None:
        return
    is_well = True
    for process in subject.state.processes:
        used, limit = count_files(process.pid)
        if limit is None:
            continue
        text = f"{process.name} has {used:,} of {limit:,} files open"
        advice = "Raise it before the start: ulimit -n 65536, or LimitNOFILE of the service."
        if used > _MOST_USED * limit:
            is_well = False
            yield Finding("file limits", "error", text, advice)
        elif limit < _FEWEST_FILES:
            is_well = False
            yield Finding("file limits", "warning", text, advice)
    if is_well:
        yield Finding("file limits", "ok", f"{len(subject.state.processes)} processes have room")


def count_files(pid: int | None) -> tuple[int, int | None]:
    """Return how many files a process has open and may open; None if that is unknown or endless."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = (_PROC / str(pid) / "limits").read_text().splitlines()
        line = next(line for line in lines if line.startswith("Max open files"))
        return len(list((_PROC / str(pid) / "fd").iterdir())), int(line.split()[3])
    return 0, None


async def check_disk(subject: Subject) -> AsyncIterator[Finding]:
    """There is room for logs and records."""
    if not subject.is_here or subject.state is None:
        return
    record = find_record_dir(subject.state)
    paths = {"state": home(), "logs": Path(subject.state.log_dir)}
    paths |= {} if record is None else {"record": record}
    is_well = True
    for what, path in paths.items():
        existing = next(p for p in (path, *path.parents) if p.exists())
        free = shutil.disk_usage(existing).free
        if free < _LOW_DISK:
            is_well = False
            level: Level = "error" if free < _NO_DISK else "warning"
            text = f"{free / 1e6:,.0f} MB free for the {what} in {path}"
            advice = "Free some, or give another place: ROLLWAY_HOME, `observe.directory`."
            yield Finding("disk", level, text, advice)
    if is_well:
        yield Finding("disk", "ok", f"room in {home()}")


async def check_shared_memory(subject: Subject) -> AsyncIterator[Finding]:
    """There is room for weights and for the engines in /dev/shm, as their processes see it."""
    if not subject.is_here or subject.state is None:
        return
    pids = [process.pid for process in subject.state.processes if process.role == "worker"]
    # Workers in containers have a /dev/shm of their own; whose cannot be seen counts as this one.
    roots = [root for pid in pids if _has_memory(root := _PROC / str(pid) / "root")]
    findings = [doctor.check_shared_memory(root) for root in roots or [Path("/")]]
    yield min(findings, key=lambda finding: finding.level == "ok")


def _has_memory(root: Path) -> bool:
    with contextlib.suppress(OSError):
        return (root / "dev/shm").is_dir()
    return False


async def check_leftovers(subject: Subject) -> AsyncIterator[Finding]:
    """No stack of this user was left behind by a dead supervisor, nor anything else of a dead
    run."""
    if not subject.is_here:
        return
    findings = (*doctor.check_stacks(), *doctor.check_remains())
    problems = [finding for finding in findings if finding.level != "ok"]
    for finding in problems:
        yield Finding("leftovers", finding.level, finding.found, finding.advice)
    if not problems:
        yield Finding("leftovers", "ok", "none")


async def check_packages(subject: Subject) -> AsyncIterator[Finding]:
    """The installed versions are those that were tested together."""
    if not subject.is_here:
        return
    problems = [finding for finding in doctor.check_packages() if finding.level != "ok"]
    for finding in problems:
        text = f"{finding.check} {finding.found}"
        yield Finding("packages", finding.level, text, finding.advice)
    if not problems:
        yield Finding("packages", "ok", "the tested versions")


async def check_record(subject: Subject) -> AsyncIterator[Finding]:
    """The run is recorded, and every process answers the sampler."""
    directory = None if subject.state is None else find_record_dir(subject.state)
    if subject.state is not None and directory is not None and not subject.is_here:
        text = "recorded on the nodes of the stack, not checked from here"
        yield Finding("record", "note", text, f"See it: rollway dash {subject.state.name}")
        return
    if directory is None:
        advice = "Say `observe: on` in its spec, and start it again: docs/observe.md."
        yield Finding("record", "note", "nothing is recorded", advice)
        return
    samples = read_last_samples(directory)
    if not samples:
        advice = "Its directory was removed, or its disk is full: see the supervisor's log."
        yield Finding("record", "error", f"{directory} has no samples", advice)
        return
    last, values = samples[-1]["t"], samples[-1]["values"]
    # The interval is the spec's, which is not on record.
    interval = max(last - samples[0]["t"], 1.0) if len(samples) > 1 else _UNKNOWN_INTERVAL
    age = time.time() - last
    dropped = sum(values.get("rollway_record_dropped_total", {}).values())
    failed = [parse_labels_key(key).get("worker", key)
              for key in values.get("rollway_scrape_failed", {})]  # fmt: skip
    if age > _STALE_SAMPLES * interval + 1.0:
        advice = "The supervisor hangs, or the disk is full: see its log."
        yield Finding("record", "error", f"the last sample is {age:,.0f} s old", advice)
    elif failed:
        advice = "Their pages are not read: they hang, or are busy for longer than the interval."
        yield Finding("record", "warning", f"no metrics of {', '.join(failed[:4])}", advice)
    elif dropped:
        advice = "The disk is too slow or full. Events are recorded first: docs/observe.md."
        yield Finding("record", "warning", f"{dropped:,.0f} entries were dropped", advice)
    else:
        yield Finding("record", "ok", str(directory))


def read_last_samples(directory: Path) -> list[Entry]:
    """Return the last two samples of a supervisor, from the end of its newest file."""
    files = sorted(directory.glob("supervisor-*.s*.jsonl"), key=_read_time)
    entries = []
    with contextlib.suppress(OSError, IndexError), files[-1].open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
        entries = [decode(line) for line in file.read(_TAIL).splitlines()]
    return [e for e in entries if isinstance(e, dict) and e["kind"] == "sample"][-2:]


def _read_time(path: Path) -> float:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0
