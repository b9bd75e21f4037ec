"""Everything that a report tells of a run, from one pass over its entries in bounded memory.

    Run.read() ──► Summary.add() ──► figures, series, the worst moments ──► findings, plots, page

A day of 128 workers has gigabytes of entries, so nothing is kept that grows with its samples. Text
and numbers go through `fields`: a run directory comes from anywhere.
"""

from __future__ import annotations

import heapq
import statistics
from array import array
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rollway.observe.bins import Bins
from rollway.observe.dash.fields import get_amount, get_count, get_text, get_time, get_version
from rollway.observe.dash.timeline import STRAGGLER_RATIO, STRAGGLER_SECONDS
from rollway.observe.dash.workers import HITS, KV, LOAD, QUERIES, SERVING, WAITING
from rollway.observe.metrics import PERCENTILES, parse_labels_key
from rollway.observe.read import Run
from rollway.observe.record import Entry
from rollway.observe.report.parts import RefitPoint, StaleTime, Transfers, WorkerSummary
from rollway.versions import BASE_VERSION

KV_FULL = 0.95
PHASES = ("preflight", "pause", "update", "resume")
PARTS = ("generate", "train", "publish", "wait", "paused")
_MOST_WORKERS, _MOST_KEPT, _MOST_TEXTS = 1_024, 50_000, 200
_WORST = 5
_LARGEST = 1e15
_DEATHS = ("exited", "killed")
_BAD_EVENTS = ("exited", "killed", "fault", "failed", "error", "dropped", "gone")
_WORKER_BINS = 60
_UNREAD = frozenset({"step"})
"""A refit's report has the seconds of its steps, and there are a thousand of them per refit."""


class Summary:
    """What one run comes to.

    Example:
        summary = read_summary(directory)
        summary.totals["tokens"]
    """

    def __init__(self) -> None:
        self.stack = self.run = self.rollway = ""
        self.first: float | None = None
        self.last = 0.0
        self.ended = ""
        """The event that ended the stack; empty if its record just stops."""
        self.problems: dict[str, int] = {}
        self.is_newer = False
        self.workers: dict[str, WorkerSummary] = {}
        self.refits: list[RefitPoint] = []
        self.transports: dict[str, Transfers] = {}
        self.steps = 0
        self.step_seconds = 0.0
        self.parts: dict[str, float] = {}
        self.slowest_steps: list[tuple[float, int, float]] = []
        self.totals: Counter[str] = Counter()
        self.retries: Counter[str] = Counter()
        self.forks: Counter[str] = Counter()
        self.gateway = {"sessions": 0, "turns": 0}
        self.mismatch: dict[int, float] = {}
        self.largest_difference = 0.0
        self.tokens_by_version: dict[int, float] = {}
        self.versions: set[int] = set()
        self.stale: list[StaleTime] = []
        self.first_bad: list[tuple[float, str, str, str]] = []
        self.last_bad: deque[tuple[float, str, str, str]] = deque(maxlen=_MOST_TEXTS)
        self.levels: dict[str, array[float]] = {}
        """Percentiles of rollouts as each interval had them, by series."""
        self.dropped = 0.0
        self._series: dict[str, Bins] = {}
        self._names: dict[str, str] = {}
        self._by_key: dict[str, WorkerSummary] = {}
        self._told: dict[str, int] = {}
        """The last version of every process of a worker."""
        self._behind: StaleTime | None = None
        self._add = {
            "header": self._add_header,
            "event": self._add_event,
            "refit": self._add_refit,
            "sample": self._add_sample,
            "rollouts": self._add_rollouts,
            "mismatch": self._add_mismatch,
            "forks": self._add_forks,
            "gateway": self._add_gateway,
            "trainer": self._add_step,
            "workers": self._add_workers,
        }

    # --- entries ---------------------------------------------------------------------------------

    def add(self, entry: Entry) -> None:
        """Take one entry; entries come in the order of time."""
        t, add = get_time(entry.get("t")), self._add.get(entry["kind"])
        if t is None or add is None:
            return
        self.first = t if self.first is None else min(self.first, t)
        self.last = max(self.last, t)
        add(entry, t)

    def close(self) -> None:
        """End what is still open at the end of the record."""
        self._end_stale(self.last)

    def _add_header(self, entry: Entry, _: float) -> None:
        self.stack = get_text(entry.get("stack"), 100) or self.stack
        self.run = get_text(entry.get("run"), 100) or self.run
        self.rollway = get_text(entry.get("rollway"), 40) or self.rollway

    def _add_event(self, entry: Entry, t: float) -> None:
        name, worker = get_text(entry["event"], 60), get_text(entry.get("worker"), 100)
        detail = get_text(entry.get("detail"), 500)
        if any(word in name for word in _BAD_EVENTS):
            self._keep_bad(t, name, worker or get_text(entry.get("instance"), 40), detail)
        if name in _DEATHS and (row := self.workers.get(worker)):
            row.deaths += 1
        if name in ("stop", "stopped", "failed") and not worker:
            self.ended = name
        elif name == "start" and not worker:
            self.ended = ""

    def _keep_bad(self, t: float, name: str, worker: str, detail: str) -> None:
        if len(self.first_bad) < _MOST_TEXTS:
            self.first_bad.append((t, name, worker, detail))
        else:
            self.last_bad.append((t, name, worker, detail))

    def _add_refit(self, entry: Entry, t: float) -> None:
        report = entry["report"]
        version, outcome = get_version(report["version"]), get_text(entry["outcome"], 20) or "ok"
        if version is None:
            return
        seconds = get_amount(report.get("seconds")) or 0.0
        paused = get_amount(report.get("paused_seconds")) or 0.0
        phases, kept_out = self._add_refit_workers(report["workers"][:_MOST_WORKERS])
        error = get_text(entry.get("error"), 500)
        point = RefitPoint(t, version, seconds, paused, outcome, phases, error, kept_out[:20])
        if len(self.refits) < _MOST_KEPT:
            self.refits.append(point)
        if outcome != "ok":
            self._keep_bad(t, f"refit {outcome}", "", f"version {version}: {error}")
        else:
            self._see_version(version)
        self._plot("refit", t, seconds)
        self._plot("refit paused", t, paused)
        size, transport = get_amount(entry.get("bytes")), get_text(entry.get("transport"), 40)
        if size and (transport in self.transports or len(self.transports) < 16):
            transfers = self.transports.setdefault(transport, Transfers())
            transfers.refits += 1
            transfers.bytes += size
            transfers.seconds += phases[0]

    def _add_refit_workers(
        self, reports: list[dict[str, Any]]
    ) -> tuple[tuple[float, ...], list[str]]:
        """Take the workers of a report; return the slowest of each phase, and who serves not."""
        seconds = [
            [get_amount(report.get(f"{phase}_seconds")) or 0.0 for phase in PHASES]
            for report in reports
        ]
        busy = [sum(parts) for parts in seconds]
        usual = statistics.median(busy) if busy else 0.0
        limit = max(usual * STRAGGLER_RATIO, usual + STRAGGLER_SECONDS)
        kept_out = []
        for report, total in zip(reports, busy, strict=True):
            instance = get_text(report["instance_id"], 40)
            name = self._names.get(instance, instance)
            row = self.workers.get(name)
            error = report.get("error")
            if row is not None:
                row.refits += 1
                row.slow_refits += total > limit
                row.failed_refits += bool(error)
            if error:
                state = get_text(report["state"], 40)
                kept_out.append(f"{name} ({state}): {get_text(error, 300)}")
        slowest = (
            tuple(max(column) for column in zip(*seconds, strict=True))
            if seconds
            else (0.0,) * len(PHASES)
        )
        return slowest, kept_out

    def _add_workers(self, entry: Entry, t: float) -> None:
        served: list[int | None] = []
        for fields in entry["workers"][:_MOST_WORKERS]:
            instance = get_text(fields["instance"], 40)
            name = get_text(fields["name"], 100) or instance
            row = self.workers.get(name) or self._make_worker(name)
            if row is None:
                continue
            if instance and instance not in self._names and len(self._names) < _MOST_KEPT:
                self._names[instance] = name
            row.node = get_text(fields.get("node"), 100)
            row.role = get_text(fields.get("role"), 40)
            row.state = get_text(fields["state"], 60)
            row.restarts = max(row.restarts, get_count(fields.get("restarts")))
            version = get_version(fields.get("version"))
            if version is None:
                version = self._told.get(instance)
            else:
                self._tell(instance, version)
                row.version = version
            if row.state in SERVING:
                served.append(version)
        known = [version for version in served if version is not None]
        if not known:
            return
        newest = max(known)
        self._plot("spread", t, newest - min(known))
        behind = sum(version != newest for version in served)
        if not behind:
            self._end_stale(t)
        elif self._behind is None:
            self._behind = StaleTime(t, t, behind)
        else:
            self._behind.workers = max(self._behind.workers, behind)

    def _make_worker(self, name: str) -> WorkerSummary | None:
        if not name or len(self.workers) >= _MOST_WORKERS or self.first is None:
            return None
        self.workers[name] = WorkerSummary(name, Bins(self.first, _WORKER_BINS))
        return self.workers[name]

    def _end_stale(self, t: float) -> None:
        if self._behind is not None:
            self._behind.ended = max(t, self._behind.began)
            if len(self.stale) < _MOST_KEPT:
                self.stale.append(self._behind)
            self._behind = None

    def _tell(self, instance: str, version: int) -> None:
        if instance in self._told or len(self._told) < _MOST_KEPT:
            self._told[instance] = version
        self._see_version(version)

    def _see_version(self, version: int) -> None:
        if len(self.versions) < 100_000:
            self.versions.add(version)

    def _add_sample(self, entry: Entry, t: float) -> None:
        values: Mapping[str, Mapping[str, float]] = entry["values"]
        for metric, name in ((LOAD, "running"), (WAITING, "waiting")):
            if metric in values:
                self._plot(name, t, sum(_list_amounts(values[metric])))
        if amounts := _list_amounts(values.get(KV, {})):
            self._plot("kv", t, sum(amounts) / len(amounts))
        for key, share in values.get(KV, {}).items():
            row = self._find_worker(key)
            if row is not None and 0 <= share < _LARGEST:
                row.samples += 1
                row.kv += share
                row.kv_full += share >= KV_FULL
        self._add_hits(values, t)
        for key in values.get("rollway_scrape_failed", {}):
            row = self._find_worker(key)
            if row is not None:
                row.unread += 1
        for value in values.get("rollway_record_dropped_total", {}).values():
            self.dropped = max(self.dropped, get_amount(value) or 0.0)

    def _add_hits(self, values: Mapping[str, Mapping[str, float]], t: float) -> None:
        hits = values.get(HITS, {})
        for key, queries in values.get(QUERIES, {}).items():
            row = self._find_worker(key)
            if row is None or row.role == "decode":  # what it calls hits is KV that came over
                continue
            if 0 < queries < _LARGEST:
                own = min(max(hits.get(key, 0.0), 0.0), queries)
                row.queries += queries
                row.hits += own
                row.hits_over_time.add(t, own / queries, queries)

    def _find_worker(self, key: str) -> WorkerSummary | None:
        """Return the worker of a labels' key. There are millions of them, and few different."""
        row = self._by_key.get(key)
        if row is None:
            row = self.workers.get(parse_labels_key(key).get("worker", ""))
            if row is not None and len(self._by_key) < _MOST_KEPT:
                self._by_key[key] = row
        return row

    def _add_rollouts(self, entry: Entry, t: float) -> None:
        totals = self.totals
        for name in ("count", "tokens", "prompt_tokens", "cached_tokens", "cut", "continued",
                     "not_believed"):  # fmt: skip
            totals[name] += get_count(entry.get(name))
        seconds = get_amount(entry["seconds"]) or 0.0
        self._get_bins("tokens").spread(t - seconds, t, get_amount(entry["tokens"]) or 0.0)
        prompts = get_amount(entry.get("prompt_tokens"))
        if prompts:
            share = min((get_amount(entry.get("cached_tokens")) or 0.0) / prompts, 1.0)
            self._plot("cached", t, share, prompts)
        _count_each(self.retries, entry.get("retries") or {})
        for version, tokens in (entry.get("versions") or {}).items():
            number, amount = get_version(version), get_amount(tokens)
            if number is not None and amount and len(self.tokens_by_version) < 100_000:
                self.tokens_by_version[number] = self.tokens_by_version.get(number, 0.0) + amount
        weight = max(1, get_count(entry["count"]))
        for name in ("latency", "first_token", "lengths"):
            levels = entry.get(name) or {}
            for level in PERCENTILES:
                value = get_amount(levels.get(level))
                if value is not None:
                    self._plot(f"{name} {level}", t, value, weight)
                    kept = self.levels.setdefault(f"{name} {level}", array("d"))
                    if len(kept) < 1_000_000:
                        kept.append(value)

    def _add_mismatch(self, entry: Entry, _: float) -> None:
        version, k3 = get_version(entry["version"]), get_amount(entry["k3"])
        if version is None or k3 is None:
            return
        if version in self.mismatch or len(self.mismatch) < _MOST_KEPT:
            self.mismatch[version] = max(k3, self.mismatch.get(version, 0.0))
        self.largest_difference = max(self.largest_difference, get_amount(entry.get("max")) or 0.0)

    def _add_forks(self, entry: Entry, _: float) -> None:
        _count_each(self.forks, {entry["reason"]: entry["count"]})

    def _add_gateway(self, entry: Entry, _: float) -> None:
        self.gateway = {name: get_count(entry[name]) for name in ("sessions", "turns")}

    def _add_step(self, entry: Entry, t: float) -> None:
        seconds, number = get_amount(entry["seconds"]), get_count(entry["step"])
        if seconds is None:
            return
        self.steps += 1
        self.step_seconds += seconds
        for name, value in list(entry["parts"].items())[:20]:
            amount = get_amount(value)
            name = get_text(name, 20)
            if amount and (name in PARTS or name in self.parts or len(self.parts) < 20):
                self.parts[name] = self.parts.get(name, 0.0) + amount
                self._plot(f"part {name}", t, amount)
        self._plot("step", t, seconds)
        heapq.heappush(self.slowest_steps, (seconds, number, t))
        if len(self.slowest_steps) > _WORST:
            heapq.heappop(self.slowest_steps)

    def _plot(self, name: str, t: float, value: float, weight: float = 1.0) -> None:
        self._get_bins(name).add(t, value, weight)

    def _get_bins(self, name: str) -> Bins:
        bins = self._series.get(name)
        if bins is None:
            assert self.first is not None
            bins = self._series[name] = Bins(self.first)
        return bins

    # --- what it comes to ------------------------------------------------------------------------

    def get_series(self, name: str) -> Bins | None:
        return self._series.get(name)

    @property
    def seconds(self) -> float:
        return self.last - self.first if self.first is not None else 0.0

    @property
    def foreign_tokens(self) -> int:
        """Tokens that were accepted with a version that no worker had."""
        if not self.versions:
            return 0
        known = {BASE_VERSION, *self.versions}  # no list of workers has the base's
        return int(sum(n for version, n in self.tokens_by_version.items() if version not in known))

    def list_bad_events(self) -> list[tuple[float, str, str, str]]:
        return [*self.first_bad, *self.last_bad]


def read_summary(directory: Path) -> Summary:
    """Read a whole run."""
    run, summary = Run(directory), Summary()
    for entry in run.read(without=_UNREAD):
        summary.add(entry)
    summary.close()
    summary.problems, summary.is_newer = dict(run.problems), run.is_newer
    return summary


def _list_amounts(values: Mapping[str, float]) -> list[float]:
    """Return the values that are amounts; the reader has checked that they are numbers."""
    return [value for value in values.values() if 0 <= value < _LARGEST]


def _count_each(counter: Counter[str], counts: Mapping[str, object]) -> None:
    for name, value in _bound(counts.items()):
        name = get_text(name, 100)
        if name in counter or len(counter) < 64:
            counter[name] += get_count(value)


def _bound(items: Iterable[tuple[str, object]]) -> list[tuple[str, object]]:
    return list(items)[:64]
