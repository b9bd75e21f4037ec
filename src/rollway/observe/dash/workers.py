"""The rows of the fleet: what supervisors list, what events say, what the sampler measured."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from rollway.observe.bins import Bins
from rollway.observe.dash.fields import (
    get_amounts,
    get_count,
    get_list,
    get_mapping,
    get_text,
    get_version,
    parse_labels,
)

SERVING = ("ready", "serving")
ENDING = ("stopping", "stopped")
"""What a supervisor says of its workers when it ends the whole stack, in order."""
STALE_SECONDS = 15.0
"""A sampled value that is this much older than the newest sample is a gap."""
_MOST_WORKERS, _MOST_TOLD, _MOST_SAMPLES = 1_024, 10_000, 64
_HIT_BINS = 90
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


class Workers:
    """Every worker by its name, and the versions that any of them had."""

    def __init__(self) -> None:
        self.versions: set[int] = set()
        self.behind_since: float | None = None
        """Since when not every serving worker has the newest version."""
        self._rows: dict[str, dict[str, Any]] = {}
        self._told: dict[str, int] = {}
        self._names: dict[str, str] = {}
        self._early: dict[str, dict[str, Any]] = {}
        """The last events of workers that no list has had yet."""
        self._sampled: dict[str, deque[tuple[float, dict[str, float]]]] = {}
        """The last samples of each metric: when, and the values by their labels."""
        self._last_sample = float("-inf")
        self._hits: dict[str, Bins] = {}
        self._hits_by_labels: dict[str, Bins | None] = {}
        self._began: float | None = None

    def __len__(self) -> int:
        return len(self._rows)

    def add_list(self, entry: Mapping[str, Any], t: float) -> None:
        """Take a list of workers. A supervisor knows the processes of its node, and lists all of
        them; a driver knows versions."""
        listed = [get_mapping(fields) for fields in get_list(entry.get("workers"))]
        is_driver = get_text(entry.get("process"), 40) == "driver"
        for fields in listed:
            version, instance = get_version(fields.get("version")), _get_instance(fields)
            self.add_version(version)
            if version is not None and instance and len(self._told) < _MOST_TOLD:
                self._told[instance] = version
        if is_driver and any(not row["by_driver"] for row in self._rows.values()):
            for row in self._rows.values():
                if row["state"] in SERVING:
                    row["version"] = self._told.get(row["instance"], row["version"])
        else:
            self._put_rows(listed, is_driver)
        self._watch(t)

    def _put_rows(self, listed: list[Mapping[str, Any]], is_driver: bool) -> None:
        names, nodes = set(), set()
        for fields in listed:
            instance = _get_instance(fields)
            name = get_text(fields.get("name"), 100) or instance
            if not name or (name not in self._rows and len(self._rows) >= _MOST_WORKERS):
                continue
            if name not in self._rows:
                nothing = {"last_event": "", "last_event_at": None}
                self._rows[name] = self._early.pop(name, nothing)
            row = self._rows[name]
            row |= {
                "name": name,
                "by_driver": is_driver,
                "instance": instance,
                "node": get_text(fields.get("node"), 100),
                "role": get_text(fields.get("role"), 40),
                "model": get_text(fields.get("model"), 200),
                "state": get_text(fields.get("state"), 60),
                "version": get_version(fields.get("version")),
                "restarts": get_count(fields.get("restarts")),
                "pid": get_count(fields.get("pid")) or None,
            }
            if row["state"] not in (*SERVING, *ENDING):
                row["version"] = None  # what it last had: its next process has to be refitted first
            elif row["version"] is None:
                row["version"] = self._told.get(instance)
            if instance and len(self._names) < _MOST_TOLD:
                self._names[instance] = name
            names.add(name)
            nodes.add(row["node"])
        for row in list(self._rows.values()):
            is_superseded = row["by_driver"] and not is_driver
            if row["name"] not in names and (is_superseded or row["node"] in nodes):
                del self._rows[row["name"]]

    def add_event(self, name: str, worker: str, instance: str, t: float) -> None:
        row = self._find(worker, instance)
        if row is None:
            if worker and len(self._early) < _MOST_WORKERS:
                self._early[worker] = {"last_event": name, "last_event_at": t}
            return
        row["last_event"], row["last_event_at"] = name, t
        row["state"] = _STATES.get(name, row["state"])
        if row["state"] not in (*SERVING, *ENDING):
            row["version"] = None
        self._watch(t)

    def add_report(self, reports: Mapping[str, Mapping[str, Any]], t: float) -> None:
        """Take the workers of a refit's report, by instance."""
        for instance, report in reports.items():
            row, version = self._find("", instance), get_version(report.get("version"))
            if version is None or report.get("state") != "serving":
                continue
            self.add_version(version)
            if row is not None:
                row["version"] = version
        self._watch(t)

    def add_version(self, version: int | None) -> None:
        if version is not None and len(self.versions) < 100_000:
            self.versions.add(version)

    def add_sample(self, values: Mapping[str, Any], t: float) -> dict[str, list[float]]:
        """Take sampled values; return those of all workers by metric."""
        self._last_sample = max(self._last_sample, t)
        columns = {
            metric: amounts
            for metric in (*_COLUMNS, HITS, QUERIES)
            if (amounts := get_amounts(values.get(metric)))
        }
        for metric, amounts in columns.items():
            samples = self._sampled.setdefault(metric, deque(maxlen=_MOST_SAMPLES))
            samples.append((t, amounts))
            while samples[0][0] <= self._last_sample - STALE_SECONDS and len(samples) > 1:
                samples.popleft()
        self._add_hits(columns.get(QUERIES, {}), columns.get(HITS, {}), t)
        return {metric: list(amounts.values()) for metric, amounts in columns.items()}

    def _add_hits(self, queries: Mapping[str, float], hits: Mapping[str, float], t: float) -> None:
        """Keep the share of prompt tokens that each worker found, over time."""
        for labels, count in queries.items():
            if not count:
                continue
            if labels not in self._hits_by_labels:
                self._hits_by_labels[labels] = self._find_bins(labels, t)
            bins = self._hits_by_labels[labels]
            if bins is not None:
                bins.add(t, min(hits.get(labels, 0.0) / count, 1.0), count)

    def _find_bins(self, key: str, t: float) -> Bins | None:
        labels = parse_labels(key)
        # What a decode worker calls hits is KV that came from prefill workers.
        if labels.get("role") == "decode" or len(self._hits_by_labels) >= _MOST_TOLD:
            return None
        name = labels.get("worker", "")
        if name not in self._hits and len(self._hits) < _MOST_WORKERS:
            self._began = t if self._began is None else self._began
            self._hits[name] = Bins(self._began, _HIT_BINS)
        return self._hits.get(name)

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

    @property
    def names(self) -> Mapping[str, str]:
        """The names of workers by instance, also of instances that have died."""
        return self._names

    def as_json(self) -> list[dict[str, Any]]:
        sampled = self._find_newest()
        rows = []
        for row in self._rows.values():
            own = sampled.get(row["name"], {})
            columns = {name: own.get(metric) for metric, name in _COLUMNS.items()}
            queries = own.get(QUERIES)
            hits = min(own.get(HITS, 0.0) / queries, 1.0) if queries else None
            rows.append({**row, **columns, "hits": hits})
        return rows

    def _find_newest(self) -> dict[str, dict[str, float]]:
        """Return the newest values of each worker that are not too old, by metric."""
        oldest = self._last_sample - STALE_SECONDS
        sampled: dict[str, dict[str, float]] = {}
        for metric, samples in self._sampled.items():
            for t, amounts in samples:
                if t > oldest:
                    for key, amount in amounts.items():
                        name = parse_labels(key).get("worker", "")
                        sampled.setdefault(name, {})[metric] = amount
        return sampled

    def _find(self, name: str, instance: str) -> dict[str, Any] | None:
        if name in self._rows:
            return self._rows[name]
        if not instance or name:
            return None
        return next((row for row in self._rows.values() if row["instance"] == instance), None)

    def _watch(self, t: float) -> None:
        newest = self.newest
        if all(version == newest for version in self.list_served_versions()):
            self.behind_since = None
        elif self.behind_since is None:
            self.behind_since = t


def rank_name(name: str) -> tuple[str, int, str]:
    """Return a key that has `tiny-2` before `tiny-10`."""
    stem = name.rstrip("0123456789")
    number = name[len(stem) :][:9]
    return stem, int(number) if number.isascii() and number else 0, name


def _get_instance(fields: Mapping[str, Any]) -> str:
    return get_text(fields.get("instance"), 40)
