"""What a run comes to, after some of its entries: the one state that everybody reads.

    Run.read() ──► RunState.add() ──┬── values      every metric of the table: sinks, exports
                                    ├── workers, timeline, events, plots: dashboard, report
                                    └── sums over the run: figures and findings

Pure: no clock, no file, no network. The reader of the record has checked every entry, so nothing is
checked here. Memory is bounded: plots are thinned, and only the last events, steps, bars of refits
and versions are kept.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rollway.observe.metrics import LENGTHS, PERCENTILES, TRAINER_NAMES, Values, make_labels_key
from rollway.observe.record import Entry
from rollway.observe.refits import Timeline
from rollway.observe.workers import KV, LOAD, WAITING, Bins, Workers, get_worker
from rollway.versions import BASE_VERSION

WINDOW_SECONDS = 300.0
"""What figures of now look back on."""
FOREIGN_SECONDS = 30.0
"""Versions of tokens are compared with those of workers this late: processes write apart."""
MOST_POINTS = 1_200
_MOST_EVENTS, _MOST_STEPS = 2_000, 200
MOST_KEPT = 50_000
"""Of refits, versions and times with workers behind. A week of steps has as many."""
_MOST_TEXTS, _LONGEST_TEXT = 20, 500
_ENDS = ("stop", "stopped", "failed")
_BAD_EVENTS = ("exited", "killed", "fault", "failed", "refused", "error", "dropped", "gone")
_WARN_EVENTS = ("restart", "leave", "stop")
_TOTALS = {
    "count": "rollouts",
    "tokens": "tokens",
    "prompt_tokens": "prompt_tokens",
    "cached_tokens": "cached_tokens",
    "cut": "rollouts_cut",
    "continued": "rollouts_continued",
    "not_believed": "answers_not_believed",
}
"""Counts of rollouts, and what their metrics are called."""
_PERCENTILES = {
    "latency": "rollout_seconds",
    "first_token": "first_token_seconds",
    "lengths": "rollout_tokens",
}


@dataclass(slots=True)
class Plot:
    """Points in the order of their times. A full plot makes one of every two, and from then on one
    of so many that come: all of the run is equally dense, but for the newest point, which is exact.
    A point is the mean of what it stands for, from its time on; of peaks, the largest."""

    is_of_peaks: bool = False
    times: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    count: int = 0
    total: float = 0.0
    """Of all values that were added."""
    _weights: list[int] = field(default_factory=list)
    """For how many values each point stands."""
    _stride: int = 1

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    def add(self, t: float, value: float) -> None:
        """Add a value; processes write their records apart, so one may come late. More digits than
        a plot shows would only be sent. A rate of a torn time may be infinite: it is left out."""
        if not math.isfinite(value):
            return
        self.count, self.total = self.count + 1, self.total + value
        t, value = round(t, 3), float(f"{value:.6g}")
        place = bisect.bisect_left(self.times, t)
        if place < len(self.times) and self.times[place] == t:
            if self.is_of_peaks:
                self.values[place] = max(value, self.values[place])
            elif self._weights[place] == 1:
                self.values[place] = value
            return
        self.times.insert(place, t)
        self.values.insert(place, value)
        self._weights.insert(place, 1)
        place = min(place, len(self.times) - 2)  # the newest stays as it is
        if place > 0 and self._weights[place - 1] < self._stride:
            self._join(place)
        if len(self.times) > MOST_POINTS:
            self._stride *= 2
            for place in range(1, MOST_POINTS // 2 + 1):
                self._join(place)

    def _join(self, place: int) -> None:
        """Make one of a point and the one before."""
        first, second = self.values[place - 1 : place + 1]
        a, b = self._weights[place - 1 : place + 1]
        value = max(first, second) if self.is_of_peaks else (first * a + second * b) / (a + b)
        self.values[place - 1 : place + 1] = [float(f"{value:.6g}")]
        self._weights[place - 1 : place + 1] = [a + b]
        del self.times[place]

    def as_json(self) -> dict[str, list[float]]:
        return {"t": self.times[:], "v": self.values[:]}


@dataclass(frozen=True, slots=True)
class EndedRefit:
    """One refit of the whole run, as far as figures and findings need it."""

    t: float
    version: int
    seconds: float
    paused: float
    outcome: str
    slowest_phase: str
    error: str
    kept_out: list[str]
    """Workers that did not serve after it, with their errors."""


@dataclass(slots=True)
class Transfers:
    """What one transport carried, and how long the slowest worker took to check and stage it."""

    refits: int = 0
    bytes: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Stretch:
    """What was recorded between two refits, for the names that users of trainers know."""

    samples: dict[str, dict[str, tuple[float, int, float]]] = field(default_factory=dict)
    """Sum, count and last value, by metric and worker."""
    lengths: dict[str, Counter[int]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.samples or self.lengths)


class RunState:
    """The state of a run.

    Example:
        state = RunState()
        for entry in Run(directory).read():
            state.add(entry)
        state.values["rollway_version_spread"][""]
    """

    def __init__(self, *, is_partial: bool = False) -> None:
        self.is_partial = is_partial
        """Whether it has only the end of a run."""
        self.values: Values = {}
        self.first: float | None = None
        self.now = -math.inf
        self.stack = self.run = self.rollway = ""
        self.processes: set[tuple[Any, ...]] = set()
        self.ended: float | None = None
        self.ended_by = ""
        self.workers = Workers()
        self.timeline = Timeline()
        self.refits: deque[EndedRefit] = deque(maxlen=MOST_KEPT)
        self.transfers: dict[str, Transfers] = {}
        self.events: deque[dict[str, Any]] = deque(maxlen=_MOST_EVENTS)
        self._event_count = 0
        self.recent: deque[Entry] = deque(maxlen=5_000)
        """The rollouts of the last minutes."""
        self.percentiles: dict[str, Mapping[str, float]] = {}
        self.levels: dict[str, Counter[float]] = {}
        """How often a percentile of an entry had a value, to three digits."""
        self.tokens: Bins | None = None
        """Sums from the first entry of rollouts on, until the last of them or of the steps."""
        self.tokens_by_version: dict[int, tuple[int, float]] = {}
        """How many, and when the last of them were counted."""
        self.mismatch: dict[int, dict[str, Any]] = {}
        self.steps: deque[dict[str, Any]] = deque(maxlen=_MOST_STEPS)
        self.slowest_step: dict[str, Any] = {}
        self.dropped = 0.0
        """The most entries that a process says it did not record."""
        self.step_count = 0
        self.step_seconds = 0.0
        self.part_seconds: Counter[str] = Counter()
        self.plots: dict[str, Plot] = {}
        self._stretch, self._last_stretch = Stretch(), Stretch()

    @property
    def seconds(self) -> float:
        return 0.0 if self.first is None else self.now - self.first

    def get(self, name: str, key: str = "") -> float:
        """Return the value of one of Rollway's metrics, 0 if it has none."""
        return self.values.get(f"rollway_{name}", {}).get(key, 0)

    def list_by_label(self, name: str) -> dict[str, float]:
        """Return the values of a metric with one label."""
        keys = self.values.get(f"rollway_{name}", {})
        return {key.partition("=")[2]: value for key, value in keys.items()}

    def list_totals(self) -> dict[str, float]:
        """Return the counts of rollouts so far, by the names that entries have for them."""
        return {field: self.get(f"{name}_total") for field, name in _TOTALS.items()}

    def take_stretch(self) -> Stretch:
        """Return what was recorded before the last refit, or since it if nothing was, and forget
        it."""
        stretch = self._last_stretch or self._stretch
        if stretch is self._stretch:
            self._stretch = Stretch()
        self._last_stretch = Stretch()
        return stretch

    def count_foreign_tokens(self) -> int:
        """Count tokens of versions that no worker of this run had. All begin with the base, which
        no list of workers has before the first refit."""
        if self.is_partial or not self.workers.versions:
            return 0
        known = {BASE_VERSION, *self.workers.versions}
        until = self.now - FOREIGN_SECONDS if self.ended is None else math.inf
        counts = self.tokens_by_version.items()
        return sum(tokens for v, (tokens, t) in counts if v not in known and t < until)

    # --- entries ---------------------------------------------------------------------------------

    def add(self, entry: Entry) -> None:
        """Take one entry; entries come in the order of time, nearly."""
        t = entry["t"]
        self.first = t if self.first is None else min(t, self.first)
        self.now = max(self.now, t)
        getattr(self, f"_add_{entry['kind']}")(entry, t)
        self.workers.watch_time(self.now)

    def _add_header(self, entry: Entry, t: float) -> None:
        self.stack = entry.get("stack") or self.stack
        self.run = entry.get("run") or self.run
        self.rollway = entry.get("rollway") or self.rollway
        self.processes.add((entry["process"], entry.get("host"), entry.get("pid")))
        if self.ended is not None and t > self.ended:
            self.ended, self.ended_by = None, ""  # somebody writes again

    def _add_event(self, entry: Entry, t: float) -> None:
        event, instance = entry["event"], entry.get("instance") or ""
        worker = entry.get("worker") or self.workers.names.get(instance, "")
        self._put_event(t, event, worker or instance, entry.get("detail", ""))
        if worker:
            self.workers.add_event(event, worker, t)
        elif event in _ENDS:
            self.ended, self.ended_by = t, event
        elif event == "start":
            self.ended, self.ended_by = None, ""

    def _put_event(self, t: float, name: str, worker: str, detail: str) -> None:
        level = "info"
        if any(word in name for word in _BAD_EVENTS):
            level = "bad"
        elif any(word in name for word in _WARN_EVENTS):
            level = "warn"
        self._event_count += 1
        self.events.append(
            {"id": self._event_count, "t": t, "event": name, "worker": worker, "detail": detail,
             "level": level}
        )  # fmt: skip

    def _add_step(self, entry: Entry, _: float) -> None:
        self.timeline.add_step(entry)

    def _add_refit(self, entry: Entry, t: float) -> None:
        if self._stretch:
            self._last_stretch, self._stretch = self._stretch, Stretch()
        refit = self.timeline.add_refit(entry)
        seconds, paused = refit.seconds or 0.0, refit.paused_seconds or 0.0
        slowest, is_ok = refit.find_slowest(), refit.outcome == "ok"
        outcome = make_labels_key(outcome=refit.outcome)
        self._count("refits_total", outcome, 1)
        self.values["rollway_refit_seconds"] = {outcome: seconds}
        self._set("refit_paused_seconds", "", refit.paused_seconds)
        self._set("refit_waited_seconds", "", entry["report"].get("waited_seconds"))
        self._set_each("refit_phase_seconds", "phase", slowest)
        transport = make_labels_key(transport=refit.transport or "unknown")
        self._set("refit_bytes", transport, refit.bytes)
        self._set("refit_transfer_seconds", transport, slowest["preflight"])
        if refit.bytes:
            transfers = self.transfers.setdefault(refit.transport, Transfers())
            transfers.refits += 1
            transfers.bytes += refit.bytes
            transfers.seconds += slowest["preflight"]
        names = self.workers.names
        kept_out = [
            f"{names.get(instance, instance)} ({report['state']}): {report['error']}"
            for instance, report in refit.workers.items()
            if report.get("error")
        ]
        kept_out = [text[:_LONGEST_TEXT] for text in kept_out[:_MOST_TEXTS]]
        error = refit.error[:_LONGEST_TEXT]
        phase = max(slowest, key=lambda name: slowest[name])
        self.refits.append(
            EndedRefit(t, refit.version, seconds, paused, refit.outcome, phase, error,
                       kept_out)
        )  # fmt: skip
        if is_ok:
            self.workers.see_version(refit.version)
        self._plot("refit_seconds", t, seconds)
        self._plot("refit_pause", t, paused)
        text = f"version {refit.version} in {seconds:.2f} s, paused {paused:.2f} s"
        self._put_event(t, "refit" if is_ok else f"refit {refit.outcome}", "",
                        f"{text}. {error}".rstrip(". ") + ".")  # fmt: skip
        self.workers.add_refit(refit, t)
        self._add_spread(t)

    def _add_workers(self, entry: Entry, t: float) -> None:
        self.workers.add_list(entry["workers"], t)
        states: Counter[str] = Counter()
        served, restarts = {}, {}
        for row in entry["workers"]:
            role = row.get("role", "")
            key = make_labels_key(worker=row["name"], role=role)
            states[make_labels_key(state=row["state"], role=role)] += 1
            restarts[key] = float(row.get("restarts", 0))
            if row.get("version") is not None:
                served[key] = float(row["version"])
        self.values["rollway_workers"] = dict(states)
        self.values["rollway_restarts_total"] = restarts
        self.values["rollway_weight_version"] = served
        self._add_spread(t)

    def _add_spread(self, t: float) -> None:
        spread = self.workers.get_spread()
        if spread is not None:
            self._set("version_spread", "", spread)
            self._plot("spread", t, spread)

    def _add_sample(self, entry: Entry, t: float) -> None:
        values = entry["values"]
        # A process that did not answer has no value now, so the last sample counts alone.
        names = [name for name in self.values if not name.startswith("rollway_")]
        for name in [*names, "rollway_scrape_failed"]:
            self.values.pop(name, None)
        self.values |= values
        dropped = values.get("rollway_record_dropped_total", {})
        self.dropped = max(self.dropped, sum(dropped.values()))
        self.workers.add_sample(values, t)
        for metric in TRAINER_NAMES.values():
            workers = self._stretch.samples.setdefault(metric, {})
            for key, value in values.get(metric, {}).items():
                worker = get_worker(key)
                total, count, _ = workers.get(worker, (0.0, 0, 0.0))
                workers[worker] = total + value, count + 1, value
        for metric, name in ((LOAD, "running"), (WAITING, "waiting")):
            if metric in values:
                self._plot(name, t, sum(values[metric].values()))
        if shares := values.get(KV):
            self._plot("kv", t, sum(shares.values()) / len(shares))

    def _add_rollouts(self, entry: Entry, t: float) -> None:
        self.recent.append(entry)
        while self.recent[0]["t"] < t - WINDOW_SECONDS:
            self.recent.popleft()
        for field_name, name in _TOTALS.items():
            self._count(f"{name}_total", "", entry.get(field_name, 0))
        for name, count in (("rollouts", entry["count"]), ("tokens", entry["tokens"])):
            if entry["seconds"]:
                self._set(f"{name}_per_second", "", count / entry["seconds"])
                self._plot(f"{name}_per_second", t, count / entry["seconds"])
        self.tokens = self.tokens or Bins(t)
        self.tokens.add(t, entry["tokens"], 1.0)
        if prompts := entry.get("prompt_tokens"):
            share = entry.get("cached_tokens", 0) / prompts
            self._set("cached_share", "", share)
            self._plot("cached", t, share)
        for field_name, name in _PERCENTILES.items():
            levels = entry.get(field_name) or {}
            if levels:
                self.percentiles[field_name] = {p: levels[p] for p in PERCENTILES if p in levels}
            for percentile in PERCENTILES:
                if percentile in levels:
                    self._set(f"{name}_{percentile}", "", levels[percentile])
                    self._plot(f"{field_name}_{percentile}", t, levels[percentile])
                    known = self.levels.setdefault(f"{field_name}_{percentile}", Counter())
                    known[float(f"{levels[percentile]:.3g}")] += 1
        for name, counts in (entry.get("histograms") or {}).items():
            if name in LENGTHS:
                self._stretch.lengths.setdefault(name, Counter()).update(counts)
        retries, versions = entry.get("retries", {}), entry.get("versions", {})
        self._count_each("retries_total", "cause", retries)
        self._count_each("version_tokens_total", "version", versions)
        for version, tokens in versions.items():
            if tokens and version.isdecimal():
                before, _ = self.tokens_by_version.get(int(version), (0, t))
                self.tokens_by_version[int(version)] = before + tokens, t
        _bound(self.tokens_by_version)
        self._plot("retries", t, sum(retries.values()))
        self._plot("cut", t, entry.get("cut", 0))

    def _add_mismatch(self, entry: Entry, t: float) -> None:
        version, k3 = entry["version"], entry["k3"]
        key = make_labels_key(version=str(version))
        for name in ("k1", "k3", "max"):
            self._set(f"mismatch_{name}", key, entry.get(name))
        if version is None:
            return
        row = self.mismatch.setdefault(
            version, {"version": version, "k1": None, "k3": 0.0, "max": None, "tokens": 0}
        )
        if k3 >= row["k3"]:
            row |= {"k3": k3, "k1": entry.get("k1"), "t": t}
        if entry.get("max") is not None:
            row["max"] = max(entry["max"], row["max"] or 0.0)
        row["tokens"] += entry.get("tokens") or 0
        _bound(self.mismatch)
        self._plot("k3", t, k3)

    def _add_adapters(self, entry: Entry, _: float) -> None:
        self._set_each("adapters", "adapter", entry["versions"])

    def _add_forks(self, entry: Entry, _: float) -> None:
        self._count_each("forks_total", "reason", {entry["reason"]: entry["count"]})

    def _add_gateway(self, entry: Entry, _: float) -> None:
        self._set("gateway_sessions", "", entry["sessions"])
        self._set("gateway_turns_total", "", entry["turns"])

    def _add_trainer(self, entry: Entry, t: float) -> None:
        seconds, parts = entry["seconds"], entry["parts"]
        self._set("step", "", entry["step"])
        self._set("step_seconds", "", seconds)
        self._set_each("step_part_seconds", "part", parts)
        if self.tokens is not None:
            self.tokens.add(t, 0.0, 0.0)
        self.step_count += 1
        self.step_seconds += seconds
        self.part_seconds.update(parts)
        step = {"t": t, "step": entry["step"], "seconds": seconds, "parts": parts}
        self.steps.append(step)
        self.slowest_step = max(step, self.slowest_step or step, key=lambda each: each["seconds"])

    # --- values and plots ------------------------------------------------------------------------

    def _plot(self, name: str, t: float, value: float) -> None:
        self.plots.setdefault(name, Plot(name == "spread")).add(t, value)

    def _set(self, name: str, key: str, value: float | None) -> None:
        if value is not None:
            values = self.values.setdefault(f"rollway_{name}", {})
            values[key] = value
            _bound(values)

    def _set_each(self, name: str, label: str, values: Mapping[str, float]) -> None:
        self.values[f"rollway_{name}"] = {
            make_labels_key(**{label: key}): value for key, value in values.items()
        }

    def _count(self, name: str, key: str, value: float) -> None:
        values = self.values.setdefault(f"rollway_{name}", {})
        values[key] = values.get(key, 0) + value
        _bound(values)

    def _count_each(self, name: str, label: str, counts: Mapping[str, int]) -> None:
        for value, count in counts.items():
            self._count(name, make_labels_key(**{label: value}), count)


def _bound(kept: dict[Any, Any]) -> None:
    """Forget the oldest of too many."""
    while len(kept) > MOST_KEPT:
        del kept[next(iter(kept))]
