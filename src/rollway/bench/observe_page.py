"""Measure the page in Chromium, and the report, of a day's run with 128 workers."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

from rollway.bench import Say
from rollway.bench.browser import CHROMIUM, MISSING, Browser, Page, open_browser
from rollway.bench.observe_day import DAY_SECONDS, write_day
from rollway.bench.observe_traffic import start_process
from rollway.errors import RollwayError, UsageError

FEW, MANY = 4, 128
HOUR_SECONDS = 3600.0
LIVE_SECONDS = 20.0
_ROUNDS = 3
_SILENCE_SECONDS = 3.0
"""After which a stream of a run that has ended has sent all of it."""
_STREAM = "/api/stream"
_READY = "document.body?.dataset.ready === 'yes'"
_WHOLE = "!document.getElementById('notes').textContent.includes('Reading the record')"
_CLICKS = """(async () => {
  const heads = [...document.querySelectorAll('th button')], times = [];
  for (let number = 0; number < 12; number++) {
    const began = performance.now();
    heads[number % heads.length].click();
    // The second frame begins when the first, which shows the answer, is painted.
    await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
    times.push(performance.now() - began);
  }
  return times.sort((a, b) => a - b)[6];
})()"""


def write_runs(scratch: Path, say: Say) -> dict[str, Path]:
    """Write the runs that are shown: an hour of few workers, a day of many."""
    say(f"writing a day of {MANY} workers")
    runs = {"few": scratch / "hour", "many": scratch / "day"}
    if not runs["few"].exists():
        write_day(runs["few"], FEW, HOUR_SECONDS)
        write_day(runs["many"], MANY, DAY_SECONDS)
    return runs


async def measure_page(scratch: Path, say: Say, figures: dict[str, Any]) -> None:
    """Measure clicks, the bytes of a load, and the bytes of a run that goes on."""
    if CHROMIUM is None:
        raise UsageError(f"T{MISSING[1:]}.", "Install it, or leave this part out with --only.")
    runs = write_runs(scratch, say)
    clicks: dict[str, list[float]] = {name: [] for name in runs}
    shown: dict[str, list[float]] = {name: [] for name in runs}
    whole: dict[str, list[float]] = {name: [] for name in runs}
    loads: dict[str, int] = {}
    async with open_browser() as browser:
        for number in range(_ROUNDS):
            for name in list(runs)[:: 1 if number % 2 else -1]:
                argv = ("rollway.cli", "dash", "--run", str(runs[name]))
                began = time.monotonic()
                async with start_process(*argv, "--json", "--port", "0", "--no-open") as dash:
                    page = await _open(browser, dash.told["url"])
                    shown[name].append(time.monotonic() - began)
                    await page.wait_for(_WHOLE, 240.0)
                    whole[name].append(time.monotonic() - began)
                    loads[name] = await count_bytes(page.requests, _SILENCE_SECONDS)
                    clicks[name].append(await page.run(_CLICKS))
                    await page.close()
        live = await _measure_live(browser, scratch / "live")
    medians = {name: median(times) for name, times in clicks.items()}
    figures.update(
        click_ms=medians,
        click_ratio=medians["many"] / medians["few"],
        shown_seconds={name: median(times) for name, times in shown.items()},
        whole_seconds={name: median(times) for name, times in whole.items()},
        load_kb=loads["many"] / 1e3,
        live_kb_per_second=live / 1e3,
    )
    say(
        f"page: a day is shown after {median(shown['many']):.1f} s, all of it after "
        f"{median(whole['many']):.1f} s"
    )
    say(f"page: {medians['many']:.0f} ms to answer a click, {medians['few']:.0f} with few workers")


async def _measure_live(browser: Browser, directory: Path) -> float:
    """Return the bytes per second of the page of a run that is written meanwhile."""
    writer = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rollway.bench.made_run", str(directory)),
        *("--workers", str(MANY), "--seconds", "60", "--live"),
    )
    try:
        while not any(directory.glob("driver*")):  # noqa: ASYNC110 (another process)
            await asyncio.sleep(0.1)
        argv = ("rollway.cli", "dash", "--run", str(directory))
        async with start_process(*argv, "--json", "--port", "0", "--no-open") as dash:
            page = await _open(browser, dash.told["url"])
            stream = [url for url in page.requests if url.endswith(_STREAM)]
            first = await count_bytes(stream, _SILENCE_SECONDS)
            return (await count_bytes(stream, LIVE_SECONDS) - first) / LIVE_SECONDS
    finally:
        writer.kill()
        await writer.wait()


async def count_bytes(urls: Sequence[str], seconds: float) -> int:
    """Return how many bytes cross the wire for these addresses, as a browser asks for them; of a
    stream, in so many seconds. Chromium itself tells only how many they are when unpacked."""
    count = 0
    headers = {"Accept-Encoding": "gzip"}
    async with aiohttp.ClientSession(auto_decompress=False, headers=headers) as session:
        for url in dict.fromkeys(urls):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds), session.get(url) as answer:
                    async for chunk in answer.content.iter_any():
                        count += len(chunk)
    return count


async def _open(browser: Browser, url: str) -> Page:
    page = await browser.open(url)
    await page.wait_for(_READY, 120.0)
    return page


# The kernel's `ru_maxrss` of a process counts what its parent had before it ran a program of its
# own, so the process reads its peak itself.
_REPORT = """
import pathlib, re, sys
from rollway.cli import main
status = main(sys.argv[2:])
peak = re.search(r"VmHWM:\\s*(\\d+)", pathlib.Path("/proc/self/status").read_text())
pathlib.Path(sys.argv[1]).write_text(peak[1])
sys.exit(status)
"""


def measure_report(scratch: Path, say: Say, figures: dict[str, Any]) -> None:
    """Measure the time and the memory of `rollway report` of a day's run."""
    if importlib.util.find_spec("rollway.observe.report") is None:
        raise RollwayError("This Rollway has no command `report`.", "")
    run, out = write_runs(scratch, say)["many"], scratch / "report.html"
    peak = scratch / "peak"
    argv = [sys.executable, "-c", _REPORT, str(peak), "report", str(run), "--out", str(out)]
    began = time.monotonic()
    if subprocess.run(argv, check=False, stdout=subprocess.DEVNULL).returncode:
        raise RollwayError("`rollway report` failed.", "Its error is above.")
    figures.update(
        seconds=time.monotonic() - began,
        mb=int(peak.read_text()) * 1024 / 1e6,
        file_kb=out.stat().st_size / 1e3,
    )
    say(f"report: {figures['seconds']:.1f} s, {figures['mb']:.0f} MB")
