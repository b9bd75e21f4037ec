"""Sample the metrics of a stack's processes into its record, in a thread with its own event loop.

    every interval:  list_targets() ─► GET /metrics of all at once ─► one `sample` entry
                     (no worker is        each within the interval,
                      asked for it)       and of bounded size

Who owns the processes says where they are, so nobody lists workers: a listing makes the frontend
probe each of them. A process that does not answer has no value in the entry: a gap, not a zero. It
is named in `rollway_scrape_failed`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollway.errors import RollwayError
from rollway.http import Http
from rollway.observe.metrics import RATE, Values, make_labels_key
from rollway.observe.metrics_reader import Buckets, Families, ProcessMetrics, find_percentiles
from rollway.observe.record import Recorder

log = logging.getLogger(__name__)

LARGEST_PAGE = 8 << 20
SHORTEST_TIMEOUT = 1.0


@dataclass(frozen=True, slots=True)
class MetricsTarget:
    """A process with a page of metrics."""

    name: str
    url: str
    source: str = "worker"
    """`worker` or `frontend`."""
    role: str = ""
    process: object = None
    """What changes when the process is another one: its pid and start."""


class Sampler:
    """Samples until it is closed."""

    def __init__(
        self,
        recorder: Recorder,
        list_targets: Callable[[], Sequence[MetricsTarget]],
        *,
        interval: float = 2.0,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
    ) -> None:
        self._recorder = recorder
        self._list_targets = list_targets
        self._interval = interval
        self._families = {
            source: Families(source, include if source == "worker" else (), exclude)
            for source in ("worker", "frontend")
        }
        self._histories: dict[tuple[str, str], ProcessMetrics] = {}
        self._cpu: tuple[float, float] | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rollway-sampler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, seconds: float = 5.0) -> None:
        """Stop sampling, within a moment."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(seconds)

    def _run(self) -> None:
        try:
            asyncio.run(self._sample_until_stopped())
        except Exception:
            log.exception("the metrics of the stack are not sampled any more")
            self._recorder.event("fault", "the metrics are not sampled any more")

    async def _sample_until_stopped(self) -> None:
        async with Http() as http:
            next_time = time.monotonic()
            while not self._stop.is_set():
                sampling = asyncio.ensure_future(self.sample(http))
                while not sampling.done() and not self._stop.is_set():
                    await asyncio.wait({sampling}, timeout=0.1)
                if not sampling.done():
                    sampling.cancel()
                    return
                self._recorder.write("sample", values=sampling.result())
                # A slow round is followed by the next at once, but none is made up for.
                next_time = max(next_time + self._interval, time.monotonic())
                await asyncio.to_thread(self._stop.wait, next_time - time.monotonic())

    async def sample(self, http: Http) -> Values:
        """Return the values of one round."""
        targets = list(self._list_targets())
        began = time.monotonic()
        pages = await asyncio.gather(*(self._read(http, target) for target in targets))
        values: Values = {}
        buckets: dict[tuple[str, str], list[Buckets]] = {}
        for target, page in zip(targets, pages, strict=True):
            is_worker = target.source == "worker"
            key = make_labels_key(worker=target.name, role=target.role)
            if page is None:
                values.setdefault("rollway_scrape_failed", {})[key] = 1
                continue
            self._add(values, buckets, target, page, key if is_worker else "")
        for (name, role), parts in buckets.items():
            for percentile, value in (find_percentiles(parts) or {}).items():
                _put(values, f"{name}_{percentile}", make_labels_key(role=role), value)
        _put(values, "rollway_scrape_seconds", "", time.monotonic() - began)
        self._add_own(values)
        return values

    async def _read(self, http: Http, target: MetricsTarget) -> str | None:
        return await read_page(http, target.url, max(self._interval, SHORTEST_TIMEOUT))

    def _add(
        self,
        values: Values,
        buckets: dict[tuple[str, str], list[Buckets]],
        target: MetricsTarget,
        page: str,
        key: str,
    ) -> None:
        families = self._families[target.source]
        scrape = families.parse(page)
        history = self._histories.setdefault((target.source, target.name), ProcessMetrics())
        kinds = {name: families.find(name) for name in scrape.values}
        counters = [name for name, metric in kinds.items() if metric.kind == "counter"]
        change = history.advance(scrape, time.monotonic(), target.process, counters)
        for name, metric in kinds.items():
            if metric.kind == "gauge":
                _put(values, name, key, scrape.values[name])
            elif metric.keeps_total:
                _put(values, name, key, change.totals[name])
        for name, rate in change.rates.items():
            _put(values, f"{name}{RATE}", key, rate)
        for name, increments in change.buckets.items():
            buckets.setdefault((name, target.role), []).append(increments)

    def _add_own(self, values: Values) -> None:
        """Add the figures of this process and of the record."""
        key = make_labels_key(process=self._recorder.process)
        _put(values, "rollway_record_dropped_total", key, self._recorder.dropped)
        times, now = os.times(), time.monotonic()
        used = times.user + times.system
        if self._cpu is not None and now > self._cpu[1]:
            share = (used - self._cpu[0]) / (now - self._cpu[1])
            _put(values, "rollway_process_cpu_seconds_per_second", key, share)
        self._cpu = used, now
        with contextlib.suppress(OSError, ValueError, IndexError):
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            size = float(pages * os.sysconf("SC_PAGE_SIZE"))
            _put(values, "rollway_process_resident_bytes", key, size)


async def read_page(http: Http, url: str, timeout: float) -> str | None:
    """Return a page of metrics; None from a process that does not answer, or with too much."""
    try:
        page = await http.get_bounded(url, timeout=timeout, limit=LARGEST_PAGE)
    except RollwayError as error:
        log.debug("no metrics of %s: %s", url, error.message)
        return None
    return page.decode(errors="replace")


def _put(values: Values, name: str, key: str, value: float) -> None:
    # Six digits: a sample of 128 workers has thousands of values.
    values.setdefault(name, {})[key] = float(f"{value:.6g}") if abs(value) < 1e6 else value
