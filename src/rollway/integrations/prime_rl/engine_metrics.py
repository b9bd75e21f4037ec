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
from rollway.fleet.discovery import Worker
from rollway.fleet.fleet import Fleet
from rollway.http import Http
from rollway.observe.sample import read_page

SCRAPE_SECONDS = 2.0
"""The limit for one worker: prime-rl gives the whole page 5 s."""
SHARED_SECONDS = 1.0
_SERIES = re.compile(r"(vllm:[A-Za-z0-9_:]+)(?:\{(.*)\})? (.+)")
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
    help_lines: dict[str, dict[str, str]] = {}
    samples: dict[str, list[str]] = {}
    for name, page in pages.items():
        lines = page.splitlines()
        engines = {_find_engine(line) for line in lines if line.startswith("vllm:")}
        for line in lines:
            words = line.split(" ", 3)
            if words[0] == "#" and len(words) == 4 and words[2].startswith("vllm:"):
                help_lines.setdefault(words[2], {})[words[1]] = line
            elif match := _SERIES.fullmatch(line):
                series, labels, value = match.groups()
                engine = f"{name}-{_find_engine(line)}" if len(engines) > 1 else name
                rest = _ENGINE.sub("", labels or "").strip(",")
                text = f'{series}{{engine="{engine}"{"," if rest else ""}{rest}}} {value}'
                samples.setdefault(_find_family(series, help_lines), []).append(text)
    # All samples of a family stand together, as the format requires.
    out: list[str] = []
    for family, lines in samples.items():
        out += [*help_lines.get(family, {}).values(), *lines]
    return "\n".join([*out, ""]) if out else ""


def format_gauges(gauges: Sequence[tuple[str, str, float]]) -> str:
    """Return Rollway's own gauges: name, meaning and value of each."""
    return "".join(
        f"# HELP {name} {meaning}\n# TYPE {name} gauge\n{name} {value:g}\n"
        for name, meaning, value in gauges
    )


def _find_engine(line: str) -> str:
    match = _ENGINE.search(line.partition("{")[2])
    return match[1] if match else ""


def _find_family(series: str, known: Mapping[str, object]) -> str:
    """Return the family of a series, whose name may have a suffix such as `_total`."""
    if series in known:
        return series
    plain = _SUFFIX.sub("", series)
    return plain if plain in known else series
