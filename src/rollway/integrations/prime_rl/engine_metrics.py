"""The workers' own `vllm:*` series on one page, each with the worker it comes from.

prime-rl sizes its number of episodes by them; without any, it keeps one episode in flight for the
whole run. Dynamo's frontend has none, the workers' system ports do. prime-rl polls every 5 s from
several processes: one scrape serves all that come within a second.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rollway.errors import RollwayError
from rollway.fleet.fleet import Fleet
from rollway.fleet.workers import Worker
from rollway.http import Http
from rollway.observe.metrics_reader import read_series
from rollway.observe.sample import read_page

SCRAPE_SECONDS = 2.0
"""The limit for one worker: prime-rl gives the whole page 5 s."""
SHARED_SECONDS = 1.0
_ENGINE = re.compile(r'(?:^|,)engine="([^"]*)"')
_SUFFIX = re.compile(r"_(total|created|bucket|sum|count)$")


@dataclass(slots=True)
class EngineMetrics:
    """One bounded, shared scrape of all workers."""

    http: Http
    fleet: Fleet
    shared_seconds: float = SHARED_SECONDS
    _labels: dict[str, int] = field(default_factory=dict)
    _scrape: asyncio.Task[dict[str, str]] | None = None
    _ended: float = 0.0

    async def read(self) -> str:
        """Return the series of all workers that answer in time."""
        is_old = time.monotonic() - self._ended > self.shared_seconds
        if self._scrape is None or (self._scrape.done() and is_old):
            self._scrape = asyncio.create_task(self._read_all())
        return join_pages(await asyncio.shield(self._scrape))  # others may wait for the same scrape

    async def close(self) -> None:
        if self._scrape is not None:
            self._scrape.cancel()
            await asyncio.gather(self._scrape, return_exceptions=True)

    async def _read_all(self) -> dict[str, str]:
        try:
            workers = [w for w in await self.fleet.workers(fresh=False) if w.error is None]
            pages = await asyncio.gather(*map(self._read_worker, workers))
            return {self._get_label(w): page for w, page in zip(workers, pages, strict=True)}
        except RollwayError:
            return {}  # the listing does not answer; the rest of the page is still worth reading
        finally:
            self._ended = time.monotonic()

    async def _read_worker(self, worker: Worker) -> str:
        return await read_page(self.http, f"{worker.admin_url}/metrics", SCRAPE_SECONDS) or ""

    def _get_label(self, worker: Worker) -> str:
        """Return the number of a worker, by its address: prime-rl adds up the cache of every engine
        that it has ever seen, and a restarted worker has a new id at the old address."""
        return str(self._labels.setdefault(worker.admin_url, len(self._labels)))


def join_pages(pages: Mapping[str, str]) -> str:
    """Join the `vllm:*` series of several pages, with the label `engine` set to the page's name.

    A worker with several engines has names such as `0-1`."""
    types: dict[str, str] = {}
    samples: dict[str, list[str]] = {}
    for name, page in pages.items():
        lines = page.splitlines()
        types |= {line.split()[2]: line for line in lines if line.startswith("# TYPE vllm:")}
        series = list(read_series(page, ("vllm:",)))
        engines = {_find_engine(labels) for _, labels, _ in series}
        for metric, labels, value in series:
            engine = f"{name}-{_find_engine(labels)}" if len(engines) > 1 else name
            rest = _ENGINE.sub("", labels).strip(",")
            text = f'{metric}{{engine="{engine}"{"," if rest else ""}{rest}}} {value!r}'
            samples.setdefault(_find_family(metric, types), []).append(text)
    # All samples of a family stand together, as the format requires.
    out: list[str] = []
    for family, texts in samples.items():
        out += [types[family], *texts] if family in types else texts
    return "\n".join([*out, ""]) if out else ""


def format_gauges(gauges: Sequence[tuple[str, str, float]]) -> str:
    """Return Rollway's own gauges: name, meaning and value of each."""
    return "".join(
        f"# HELP {name} {meaning}\n# TYPE {name} gauge\n{name} {value:g}\n"
        for name, meaning, value in gauges
    )


def _find_engine(labels: str) -> str:
    match = _ENGINE.search(labels)
    return match[1] if match else ""


def _find_family(series: str, known: Mapping[str, object]) -> str:
    """Return the family of a series, whose name may have a suffix such as `_total`."""
    if series in known:
        return series
    plain = _SUFFIX.sub("", series)
    return plain if plain in known else series
