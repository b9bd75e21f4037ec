"""The workers of a run: what supervisors list, what events say, what the sampler measured."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rollway.observe.metrics import parse_labels_key
from rollway.observe.refits import RefitBars

SERVING = ("ready", "serving")
ENDING = ("stopping", "stopped")
"""What a supervisor says of its workers when it ends the whole stack, in order."""
GAP_SECONDS = 15.0
"""A sampled value that is this much older than the newest sample is a gap."""
KV_FULL = 0.95
_MOST_TIMES = 10_000
_MOST_SAMPLES, _MOST_BINS, _LEAST_BINS = 64, 90, 8
_DEATHS = ("exited", "killed")
_STATES = {
    "exited": "exited",
    "leave": "gone",
    "killed": "exited",
    "restart": "restarting",
    "restarting": "restarting",
    "starting": "starting",
    "ready": "ready",
    "join": "ready",
}
"""What an event says about its worker until the next list of workers."""

LOAD = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
KV = "vllm:kv_cache_usage_perc"
HITS = "vllm:prefix_cache_hits_total_per_second"
QUERIES = "vllm:prefix_cache_queries_total_per_second"
_COLUMNS = {LOAD: "load", WAITING: "waiting", KV: "kv"}

_parse_key = lru_cache(maxsize=8192)(parse_labels_key)


class Bins:
    """Means over each stretch of time. When a run outgrows its bins, two become one."""

    def __init__(self, start: float) -> None:
        self.start = start
        self.width = 1.0
        self._bins: list[tuple[float, float]] = []
        """The weighted sum and the weight of each."""

    def add(self, t: float, value: float, weight: float) -> None:
        while (place := max(0, int((t - self.start) / self.width))) >= _MOST_BINS:
            self.width *= 2
            odd = self._bins[1::2] + [(0.0, 0.0)] * (len(self._bins) % 2)
            self._bins = [
                (a + c, b + d) for (a, b), (c, d) in zip(self._bins[::2], odd, strict=True)
            ]
        self._bins += [(0.0, 0.0)] * (place + 1 - len(self._bins))
        total, known = self._bins[place]
        self._bins[place] = (total + value * weight, known + weight)

    def halve(self) -> tuple[float, float]:
        """Return the sums of the first and of the second half; 0 if few bins have a value."""
        totals, half = [total for total, _ in self._bins], len(self._bins) // 2
        if sum(weight > 0 for _, weight in self._bins) < _LEAST_BINS:
            return 0.0, 0.0
        return sum(totals[:half]), sum(totals[-half:])

    def list_means(self) -> list[tuple[float, float]]:
        """Return the middle of every bin that has a value, and the mean of its values."""
        return [
            (self.start + (place + 0.5) * self.width, total / weight)
            for place, (total, weight) in enumerate(self._bins)
            if weight
        ]


@dataclass(slots=True)
class WorkerHistory:
    """One worker over the whole run, all its processes together."""

    name: str
    node: str = ""
    restarts: int = 0
    deaths: int = 0
    refits: int = 0
    slow_refits: int = 0
    samples: int = 0
    full_samples: int = 0
    """Those in which its KV cache was full."""
    unread_samples: int = 0
    """Those in which its page could not be read."""


@dataclass(slots=True)
class StaleTime:
    """A time in which not every serving worker had the newest version."""

    began: float
    workers: int
    seconds: float = 0.0


class Workers:
    """Every worker by its name, and the versions that any of them had."""

    def __init__(self) -> None:
        self.versions: set[int] = set()
        self.names: dict[str, str] = {}
        """The names of workers by instance, also of instances that have died."""
        self.histories: dict[str, WorkerHistory] = {}
        self.stale_times: deque[StaleTime] = deque(maxlen=_MOST_TIMES)
        self.stale: StaleTime | None = None
        """The one that has not ended."""
        self._rows: dict[str, dict[str, Any]] = {}
        self._told: dict[str, int] = {}
        """The last version of every instance."""
        self._last_events: dict[str, tuple[str, float]] = {}
        self._sampled: dict[str, deque[tuple[float, Mapping[str, float]]]] = {}
        """The last samples of each metric: when, and the values by their labels."""
        self._last_sample = float("-inf")
        self._hits: dict[str, Bins] = {}
        self._began: float | None = None

    def __len__(self) -> int:
        return len(self._rows)

    def add_list(self, listed: Iterable[Mapping[str, Any]], t: float) -> None:
        """Take a list of all workers of the stack."""
        rows = {}
        for fields in listed:
            instance = fields["instance"] or ""
            name, version = fields["name"] or instance, self.see_version(fields.get("version"))
            if version is not None and instance:
                self._told[instance] = version
            row = rows[name] = {
                "name": name,
                "instance": instance,
                "node": fields.get("node", ""),
                "role": fields.get("role", ""),
                "model": fields.get("model") or "",
                "state": fields["state"],
                "version": self._told.get(instance, version),
                "restarts": fields.get("restarts", 0),
                "pid": fields.get("pid"),
            }
            _forget_version(row)
            if instance:  # a worker that starts has none yet, and events of the stack have none
                self.names[instance] = name
            history = self.histories.setdefault(name, WorkerHistory(name))
            history.node, history.restarts = row["node"], max(history.restarts, row["restarts"])
        self._rows = rows
        self._watch(t)

    def add_event(self, event: str, worker: str, t: float) -> None:
        self._last_events[worker] = event, t
        if event in _DEATHS and worker in self.histories:
            self.histories[worker].deaths += 1
        row = self._rows.get(worker)
        if row is not None:
            row["state"] = _STATES.get(event, row["state"])
            _forget_version(row)
            self._watch(t)

    def add_refit(self, refit: RefitBars, t: float) -> None:
        """Take the workers of a refit's report."""
        for instance, report in refit.workers.items():
            name = self.names.get(instance, instance)
            history, row = self.histories.get(name), self._rows.get(name)
            version = self.see_version(report.get("version"))
            if history is not None:
                history.refits += 1
                history.slow_refits += instance in refit.slow
            if row is not None and version is not None and report["state"] == "serving":
                row["version"] = version
        self._watch(t)

    def see_version(self, version: int | None) -> int | None:
        """Remember that somebody had a version, if it is one: marks of workers are negative."""
        if version is None or version < 0:
            return None
        self.versions.add(version)
        return version

    def add_sample(self, values: Mapping[str, Mapping[str, float]], t: float) -> None:
        self._last_sample = max(self._last_sample, t)
        for metric in (*_COLUMNS, HITS, QUERIES):
            if metric not in values:
                continue
            samples = self._sampled.setdefault(metric, deque(maxlen=_MOST_SAMPLES))
            samples.append((t, values[metric]))
            while samples[0][0] <= self._last_sample - GAP_SECONDS and len(samples) > 1:
                samples.popleft()
        for key, share in values.get(KV, {}).items():
            if history := self.histories.get(get_worker(key)):
                history.samples += 1
                history.full_samples += share >= KV_FULL
        for key in values.get("rollway_scrape_failed", {}):
            if history := self.histories.get(get_worker(key)):
                history.unread_samples += 1
        hits = values.get(HITS, {})
        for key, queries in values.get(QUERIES, {}).items():
            # What a decode worker calls hits is KV that came from prefill workers.
            if queries > 0 and _parse_key(key).get("role") != "decode":
                self._began = t if self._began is None else self._began
                bins = self._hits.setdefault(get_worker(key), Bins(self._began))
                bins.add(t, _share(hits.get(key, 0.0), queries), queries)

    def list_hits(self) -> list[dict[str, Any]]:
        """List the prefix hits of every worker over time."""
        return [
            {
                "name": name,
                "width": bins.width,
                "points": [(round(t, 1), round(share, 3)) for t, share in bins.list_means()],
            }
            for name, bins in sorted(self._hits.items(), key=lambda item: rank_name(item[0]))
        ]

    @property
    def newest(self) -> int | None:
        return max(self.versions, default=None)

    def list_served_versions(self) -> list[int | None]:
        """List the version of every worker that serves; of a stack that has ended, those that its
        workers served."""
        rows = self._rows.values()
        served = [row["version"] for row in rows if row["state"] in SERVING]
        return served or [row["version"] for row in rows if row["state"] in ENDING]

    def count(self, state: str) -> int:
        """Return how many workers are in a state."""
        return sum(row["state"] == state for row in self._rows.values())

    def get_spread(self) -> int | None:
        known = [version for version in self.list_served_versions() if version is not None]
        return max(known) - min(known) if known else None

    def as_json(self) -> list[dict[str, Any]]:
        sampled = self._find_newest()
        rows = []
        for name, row in self._rows.items():
            own = sampled.get(name, {})
            columns = {column: own.get(metric) for metric, column in _COLUMNS.items()}
            queries = own.get(QUERIES)
            hits = _share(own.get(HITS, 0.0), queries) if queries else None
            event, at = self._last_events.get(name, ("", None))
            rows.append({**row, **columns, "hits": hits, "last_event": event, "last_event_at": at})
        return rows

    def _find_newest(self) -> dict[str, dict[str, float]]:
        """Return the newest values of each worker that are not too old, by metric."""
        oldest = self._last_sample - GAP_SECONDS
        sampled: dict[str, dict[str, float]] = {}
        for metric, samples in self._sampled.items():
            for t, amounts in samples:
                if t > oldest:
                    for key, amount in amounts.items():
                        sampled.setdefault(get_worker(key), {})[metric] = amount
        return sampled

    def _watch(self, t: float) -> None:
        """Note since when, and until when, not every serving worker has the newest version."""
        self.watch_time(t)
        newest = self.newest
        behind = sum(version != newest for version in self.list_served_versions())
        if not behind:
            self.stale = None
            return
        if self.stale is None:
            self.stale = StaleTime(t, behind)
            self.stale_times.append(self.stale)
        self.stale.workers = max(self.stale.workers, behind)

    def watch_time(self, t: float) -> None:
        """Let a time with workers behind last until now."""
        if self.stale is not None:
            self.stale.seconds = max(t - self.stale.began, 0.0)


def _forget_version(row: dict[str, Any]) -> None:
    """A worker that does not serve has to be refitted before its next answer."""
    if row["state"] not in (*SERVING, *ENDING):
        row["version"] = None


def _share(hits: float, queries: float) -> float:
    return min(max(hits / queries, 0.0), 1.0)


def get_worker(key: str) -> str:
    """Return the worker that the key of a sample's value names; an empty text if none."""
    return _parse_key(key).get("worker", "")


def rank_name(name: str) -> tuple[str, int, str]:
    """Return a key that has `tiny-2` before `tiny-10`."""
    stem = name.rstrip("0123456789")
    number = name[len(stem) :][:9]
    return stem, int(number) if number.isascii() and number else 0, name
