"""A day of a run in a minute: written for the page and the report, and lived through for memory."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollway.bench.made_run import RUN, STACK, MadeRun
from rollway.http import Http
from rollway.observe.dash.view import View
from rollway.observe.metrics import SCRAPED
from rollway.observe.read import Run
from rollway.observe.record import LARGEST_BYTES, Recorder
from rollway.observe.sample import Sampler, Target

DAY_SECONDS = 86_400.0
STEP_SECONDS = 60.0
INTERVAL_SECONDS = 2.0
TENTHS = 10
_WORKERS = 4
_BOUNDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, "+Inf")
_OTHER_LINES = 300
"""Lines of a worker's page that nobody keeps: a vLLM worker of Dynamo has about so many."""
_FLUSH_ENTRIES = 2_000


def write_day(directory: Path, workers: int, seconds: float = DAY_SECONDS) -> None:
    """Write a run as its processes write it, with a refit a minute; samples are thinned."""
    began = time.time() - seconds
    fields: dict[str, Any] = {"stack": STACK, "run": RUN, "largest_bytes": LARGEST_BYTES}
    recorders: dict[str, Recorder] = {}
    day = MadeRun(workers, step_seconds=STEP_SECONDS)
    for number, (process, entry) in enumerate(_end(day.run(began, seconds), began + seconds)):
        process = "driver" if process == "driver" else "supervisor"
        if process not in recorders:
            recorders[process] = Recorder(directory, process, began=began, **fields)
        if entry["kind"] != "header":
            recorders[process].write(**entry)
        if number % _FLUSH_ENTRIES == 0:
            for recorder in recorders.values():
                recorder.flush(60.0)
    for recorder in recorders.values():
        recorder.close(60.0)


def _end(
    entries: Iterator[tuple[str, dict[str, Any]]], t: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    yield from entries
    yield "supervisor", {"kind": "event", "t": t, "event": "stopped", "detail": ""}


class _Pages(Http):
    """Stands in for the workers: their pages, with counters that grow."""

    def __init__(self) -> None:
        super().__init__()
        self.round = 0
        self._lines = list(_make_lines())

    async def get_bounded(self, url: str, *, timeout: float, limit: int) -> bytes:
        count = str(1000 + 17 * self.round)
        return "\n".join(line + count for line in self._lines).encode()


def _make_lines() -> Iterator[str]:
    """Yield the lines of a worker's page without their values."""
    for metric in SCRAPED:
        if metric.source != "worker":
            continue
        if metric.kind == "histogram":
            for bound in _BOUNDS:
                yield f'{metric.name}_bucket{{le="{bound}",model="tiny"}} '
        else:
            yield f'{metric.name}{{model="tiny"}} '
    for number in range(_OTHER_LINES):
        yield f'dynamo_other_family_{number}{{endpoint="generate"}} '


async def live_through_day(directory: Path) -> None:
    """Sample, record and show a day; print the memory after each tenth as a line of JSON."""
    recorder = Recorder(directory, "supervisor", stack=STACK, run=RUN, largest_bytes=32 << 20)
    targets = [Target(f"tiny-{number}", f"http://{number}") for number in range(_WORKERS)]
    sampler, pages = Sampler(recorder, lambda: targets, interval=INTERVAL_SECONDS), _Pages()
    driver = MadeRun(_WORKERS, step_seconds=STEP_SECONDS)
    others = driver.run(began := time.time() - DAY_SECONDS, DAY_SECONDS)
    follower, view = Run(directory).follower(), View()
    rounds = int(DAY_SECONDS / INTERVAL_SECONDS)
    other = next(others)
    for number in range(rounds):
        pages.round, t = number, began + number * INTERVAL_SECONDS
        recorder.write("sample", t=t, values=await sampler.sample(pages))
        while other is not None and other[1]["t"] <= t:
            if other[1]["kind"] not in ("sample", "header"):
                recorder.write(**other[1])
            other = next(others, None)  # type: ignore[assignment]
        if number % 100 == 99:
            await asyncio.to_thread(recorder.flush, 60.0)
            while entries := follower.poll():
                for entry in entries:
                    view.add(entry)
            view.get_sections()
        if (number + 1) % (rounds // TENTHS) == 0:
            print(json.dumps({"mib": _read_resident() / 2**20}), flush=True)
    recorder.close(60.0)


def _read_resident() -> int:
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmRSS")
    )
    return int(line.split()[1]) << 10
