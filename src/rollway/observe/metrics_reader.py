"""Read Prometheus pages: the families of the table, and what happened between two pages.

    page of a worker ──Families.parse──► Scrape ──ProcessMetrics.advance──► rates, totals, buckets

A counter that falls, or whose process was replaced, has begun again at 0. A page may be anything: a
line that is none is left out.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from rollway.observe.metrics import PERCENTILES, SCRAPED, Metric

Buckets = dict[float, float]
"""Observations up to each upper bound."""


@dataclass(slots=True)
class Scrape:
    """What one page has of the families of the table, summed over labels."""

    values: dict[str, float] = field(default_factory=dict)
    buckets: dict[str, Buckets] = field(default_factory=dict)


def read_series(page: str, beginnings: tuple[str, ...]) -> Iterator[tuple[str, str, float]]:
    """Yield the name, the labels and the value of each series whose name begins so."""
    for line in page.splitlines():
        # Most lines are none of ours; this costs the least for them.
        if not line.startswith(beginnings) or line.startswith("#"):
            continue
        if "{" in line:
            head, _, rest = line.rpartition("}")
            name, _, labels = head.partition("{")
        else:
            name, _, rest = line.partition(" ")
            labels = ""
        with suppress(ValueError, IndexError):
            value = float(rest.split(maxsplit=1)[0])  # a timestamp may follow
            if math.isfinite(value):
                yield name, labels, value


def sum_series(
    page: str, include: Sequence[str], exclude: Sequence[str], known: Collection[str] = ()
) -> dict[str, float]:
    """Return the series of a page whose names begin so, under their own names, each summed over its
    labels. Buckets of histograms and those that are `known` are left out."""
    values: dict[str, float] = {}
    left_out = tuple(exclude)
    for name, _, value in read_series(page, tuple(include)):
        is_left_out = name in known or name.startswith(left_out)
        if not is_left_out and not name.endswith(("_bucket", "_created")):
            values[name] = values.get(name, 0.0) + value
    return values


class Families:
    """The families to keep of a page from one source."""

    def __init__(
        self, source: str, include: Sequence[str] = (), exclude: Sequence[str] = ()
    ) -> None:
        self._metrics = {
            metric.name: metric
            for metric in SCRAPED
            if metric.source == source and not metric.name.startswith(tuple(exclude))
        }
        self._names = {
            metric.name: [
                f"{name}_bucket" if metric.kind == "histogram" else name
                for name in (metric.name, *metric.aliases)
            ]
            for metric in self._metrics.values()
        }
        self._known = tuple(name for names in self._names.values() for name in names)
        self._include, self._exclude = include, exclude

    def find(self, name: str) -> Metric:
        """Return the metric of a name; a family that the user added is a gauge or a counter."""
        if (metric := self._metrics.get(name)) is not None:
            return metric
        return Metric(name, "counter" if name.endswith("_total") else "gauge", "", source="worker")

    def parse(self, page: str) -> Scrape:
        """Return what a page has of these families. Of a family's names the first that the page has
        counts."""
        sums: dict[str, float] = {}
        buckets: dict[str, Buckets] = {}
        for name, labels, value in read_series(page, self._known):
            if name.endswith("_bucket"):
                _add_bucket(buckets.setdefault(name, {}), labels, value)
            else:
                sums[name] = sums.get(name, 0.0) + value
        scrape = Scrape()
        for metric, names in self._names.items():
            for name in names:
                if name in sums:
                    scrape.values[metric] = sums[name]
                elif name in buckets:
                    scrape.buckets[metric] = buckets[name]
                else:
                    continue
                break
        if self._include:
            scrape.values |= sum_series(page, self._include, self._exclude, self._known)
        return scrape


def _add_bucket(buckets: Buckets, labels: str, value: float) -> None:
    with suppress(ValueError):
        bound = float(labels.partition('le="')[2].partition('"')[0])
        if not math.isnan(bound):
            buckets[bound] = buckets.get(bound, 0.0) + value


@dataclass(slots=True)
class Change:
    """What happened at one process since the page before; empty after its first page."""

    rates: dict[str, float] = field(default_factory=dict)
    totals: dict[str, float] = field(default_factory=dict)
    buckets: dict[str, Buckets] = field(default_factory=dict)


@dataclass(slots=True)
class ProcessMetrics:
    """The last page of one process name, and the totals over all processes that had it."""

    _at: float | None = None
    _process: object = None
    _last: Scrape = field(default_factory=Scrape)
    _totals: dict[str, float] = field(default_factory=dict)

    def advance(
        self, scrape: Scrape, now: float, process: object, counters: Iterable[str]
    ) -> Change:
        """Take the next page, of a process that is told from others by `process`."""
        is_new = process != self._process
        before = Scrape() if is_new else self._last
        change = Change()
        seconds = now - self._at if self._at is not None else 0.0
        for name in counters:
            if name not in scrape.values:
                continue
            value, last = scrape.values[name], before.values.get(name, 0.0)
            increase = value if value < last else value - last
            self._totals[name] = self._totals.get(name, 0.0) + increase
            change.totals[name] = self._totals[name]
            if seconds > 0:
                change.rates[name] = increase / seconds
        if seconds > 0:
            for name, buckets in scrape.buckets.items():
                change.buckets[name] = _subtract(buckets, before.buckets.get(name, {}))
        self._at, self._process, self._last = now, process, scrape
        return change


def _subtract(buckets: Buckets, before: Buckets) -> Buckets:
    has_restarted = any(buckets.get(bound, 0.0) < count for bound, count in before.items())
    if has_restarted:
        return buckets
    return {bound: count - before.get(bound, 0.0) for bound, count in buckets.items()}


def find_percentiles(parts: Sequence[Mapping[float, float]]) -> dict[str, float] | None:
    """Return the percentiles of observations, given as cumulative buckets of several processes;
    None without an observation.

    Between two bounds the observations count as spread evenly. Those above the last finite bound
    count as that bound."""
    total: Buckets = {}
    for part in parts:
        for bound, count in part.items():
            total[bound] = total.get(bound, 0.0) + count
    bounds = sorted(total)
    observations = total[bounds[-1]] if bounds else 0.0
    if observations <= 0:
        return None
    return {name: _interpolate(total, bounds, q * observations) for name, q in PERCENTILES.items()}


def _interpolate(total: Buckets, bounds: Sequence[float], wanted: float) -> float:
    lower, below = 0.0, 0.0
    for bound in bounds:
        count = total[bound]
        if count >= wanted:
            if math.isinf(bound):
                return lower
            share = (wanted - below) / (count - below) if count > below else 1.0
            return lower + (bound - lower) * share
        lower, below = bound if math.isfinite(bound) else lower, count
    return lower
