"""Read Prometheus pages: the families of the table, and what happened between two pages.

    page of a worker ──parse──► Scrape ──Series.advance──► rates, totals, increments of buckets

A counter that falls, or whose process was replaced, has begun again at 0. A page may be anything: a
line that is none is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rollway.observe.metrics import PERCENTILES, SCRAPED, Metric

Buckets = dict[float, float]
"""Observations up to each upper bound."""


@dataclass(slots=True)
class Scrape:
    """What one page has of the families of the table, summed over labels."""

    values: dict[str, float] = field(default_factory=dict)
    buckets: dict[str, Buckets] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Series:
    metric: Metric
    rank: int
    """The position among the names of its metric; the first that a page has counts."""
    is_bucket: bool


class Families:
    """The families to keep of a page from one source."""

    def __init__(
        self, source: str, include: Sequence[str] = (), exclude: Sequence[str] = ()
    ) -> None:
        self.metrics = {
            metric.name: metric
            for metric in SCRAPED
            if metric.source == source and not metric.name.startswith(tuple(exclude))
        }
        self._include, self._exclude = tuple(include), tuple(exclude)
        self._lookup = {
            f"{name}_bucket" if metric.kind == "histogram" else name: _Series(
                metric, rank, metric.kind == "histogram"
            )
            for metric in self.metrics.values()
            for rank, name in enumerate((metric.name, *metric.aliases))
        }
        self._beginnings = (*self._lookup, *self._include)

    def find(self, name: str) -> Metric:
        """Return the metric of a name; a family that the user added is a gauge or a counter."""
        if (metric := self.metrics.get(name)) is not None:
            return metric
        return Metric(name, "counter" if name.endswith("_total") else "gauge", "", source="worker")

    def parse(self, page: str) -> Scrape:
        """Return what a page has of these families."""
        ranks: dict[str, int] = {}
        scrape = Scrape()
        for line in page.splitlines():
            # Most lines are none of ours; this costs the least for them.
            if not line.startswith(self._beginnings):
                continue
            name, labels, value = _split(line)
            if value is None:
                continue
            series = self._lookup.get(name)
            if series is None:
                self._add_included(scrape, name, value)
                continue
            known = series.metric.name
            if ranks.setdefault(known, series.rank) != series.rank:
                if series.rank > ranks[known]:
                    continue
                ranks[known] = series.rank  # a better name stands further down the page
                scrape.values.pop(known, None)
                scrape.buckets.pop(known, None)
            if series.is_bucket:
                _add_bucket(scrape.buckets.setdefault(known, {}), labels, value)
            else:
                scrape.values[known] = scrape.values.get(known, 0.0) + value
        return scrape

    def _add_included(self, scrape: Scrape, name: str, value: float) -> None:
        if name.startswith(self._include):
            _add_value(scrape.values, name, value, self._exclude)


def sum_series(page: str, include: Sequence[str], exclude: Sequence[str]) -> dict[str, float]:
    """Return the series of a page whose names begin so, under their own names, each summed over its
    labels. Buckets of histograms are left out."""
    values: dict[str, float] = {}
    beginnings, left_out = tuple(include), ("#", *exclude)
    for line in page.splitlines():
        if line.startswith(beginnings):
            name, _, value = _split(line)
            if value is not None:
                _add_value(values, name, value, left_out)
    return values


def _add_value(values: dict[str, float], name: str, value: float, exclude: tuple[str, ...]) -> None:
    if not name.startswith(exclude) and not name.endswith(("_bucket", "_created")):
        values[name] = values.get(name, 0.0) + value


def _split(line: str) -> tuple[str, str, float | None]:
    """Return the name, the labels and the value of a line; the value is None if there is none."""
    if "{" in line:
        head, _, rest = line.rpartition("}")
        name, _, labels = head.partition("{")
    else:
        name, _, rest = line.partition(" ")
        labels = ""
    try:
        value = float(rest.split(maxsplit=1)[0])  # a timestamp may follow
    except (ValueError, IndexError):
        return name, labels, None
    return name, labels, value if math.isfinite(value) else None


def _add_bucket(buckets: Buckets, labels: str, value: float) -> None:
    _, _, rest = labels.partition('le="')
    try:
        bound = float(rest.partition('"')[0])
    except ValueError:
        return
    if not math.isnan(bound):
        buckets[bound] = buckets.get(bound, 0.0) + value


@dataclass(slots=True)
class Change:
    """What happened at one process since the page before; empty after its first page."""

    seconds: float = 0.0
    rates: dict[str, float] = field(default_factory=dict)
    totals: dict[str, float] = field(default_factory=dict)
    buckets: dict[str, Buckets] = field(default_factory=dict)


@dataclass(slots=True)
class History:
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
        change = Change(now - self._at if self._at is not None else 0.0)
        has_rates = change.seconds > 0
        for name in counters:
            if name not in scrape.values:
                continue
            value, last = scrape.values[name], before.values.get(name, 0.0)
            increase = value if value < last else value - last
            self._totals[name] = self._totals.get(name, 0.0) + increase
            change.totals[name] = self._totals[name]
            if has_rates:
                change.rates[name] = increase / change.seconds
        if has_rates:
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
