"""From the entries of a run to what the page shows. Pure: no clock, no file, no network.

    view = View()
    for entry in entries: view.add(entry)
    view.get_sections()      # run, top, fleet, refits, rollouts, exactness, trainer
    view.get_events(after)   # those that a page does not have yet
    view.get_series(since)

Entries come from files that anybody may have written, so every field goes through `fields`. Memory
is bounded: series are thinned, and only the last refits, versions, steps and events are kept.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rollway.observe.dash import verdicts
from rollway.observe.dash.fields import (
    get_amount,
    get_count,
    get_mapping,
    get_number,
    get_text,
    get_time,
    get_version,
)
from rollway.observe.dash.series import Series
from rollway.observe.dash.timeline import RefitView, Timeline
from rollway.observe.dash.workers import KV, LOAD, WAITING, Workers
from rollway.versions import BASE_VERSION

SCHEMA = 1
WINDOW_SECONDS = 300.0
"""What `cached` and the rates of the top line look back on."""
_RATE_SECONDS = 15.0
_FOREIGN_SECONDS = 30.0
"""Versions of tokens are compared with those of workers this late: processes write apart."""
_MOST_EVENTS, _MOST_VERSIONS, _MOST_STEPS = 2_000, 200, 200
_MOST_KINDS = 64

_ENDS = ("stop", "stopped", "failed")
_BAD_EVENTS = ("exited", "killed", "fault", "failed", "refused", "error", "dropped", "gone")
_WARN_EVENTS = ("restart", "leave", "stop")


@dataclass(slots=True)
class _Rollouts:
    """What one interval of one process counted."""

    t: float
    seconds: float
    count: float
    tokens: float
    prompt_tokens: float
    cached_tokens: float


class View:
    """The state of the page after some entries."""

    def __init__(self, *, is_partial: bool = False) -> None:
        self.is_partial = is_partial
        """Whether it has only the end of a run."""
        self.first: float | None = None
        self.now = float("-inf")
        self.timeline = Timeline()
        self._stack = self._run = ""
        self._processes: dict[tuple[str, str, str], str] = {}
        self._notes: dict[str, None] = {}
        self._ended: float | None = None
        self.workers = Workers()
        self._events: deque[dict[str, Any]] = deque(maxlen=_MOST_EVENTS)
        self._event_count = 0
        self._recent: deque[_Rollouts] = deque(maxlen=5_000)
        self._totals: Counter[str] = Counter()
        self._retries: Counter[str] = Counter()
        self._forks: Counter[str] = Counter()
        self._tokens_by_version: dict[int, tuple[float, float]] = {}
        self._latest: dict[str, Mapping[str, Any]] = {}
        self._mismatch: dict[int, dict[str, Any]] = {}
        self._gateway = {"sessions": 0, "turns": 0}
        self._steps: deque[dict[str, Any]] = deque(maxlen=_MOST_STEPS)
        self._paused: deque[tuple[float, float]] = deque(maxlen=200)
        self._series: dict[str, Series] = {}
        self._add: dict[str, Callable[[Mapping[str, Any], float], object]] = {
            "header": self._add_header,
            "event": self._add_event,
            "step": self.timeline.add_step,
            "refit": self._add_refit,
            "sample": self._add_sample,
            "rollouts": self._add_rollouts,
            "mismatch": self._add_mismatch,
            "forks": self._add_forks,
            "gateway": self._add_gateway,
            "trainer": self._add_step,
            "workers": self._add_workers,
        }

    def add(self, entry: object) -> None:
        """Take one entry; one that is not understood changes nothing."""
        fields = get_mapping(entry)
        t, add = get_time(fields.get("t")), self._add.get(get_text(fields.get("kind"), 40))
        if t is None or add is None:
            return
        self.first = t if self.first is None else min(t, self.first)
        self.now = max(self.now, t)
        add(fields, t)

    # --- entries ---------------------------------------------------------------------------------

    def _add_header(self, entry: Mapping[str, Any], t: float) -> None:
        self._stack = get_text(entry.get("stack"), 100) or self._stack
        self._run = get_text(entry.get("run"), 100) or self._run
        process = tuple(get_text(entry.get(name), 100) for name in ("process", "host", "pid"))
        if len(self._processes) < 1_000:
            self._processes[process] = get_text(entry.get("rollway"), 40)  # type: ignore[index]
        schema = get_number(entry.get("schema"))
        if schema is not None and schema > SCHEMA:
            self._note(
                f"A part of this run has schema {schema:g}, and this Rollway knows {SCHEMA}. "
                "Newer Rollways show more of it."
            )
        if self._ended is not None and t > self._ended:
            self._ended = None  # somebody writes again

    def _note(self, text: str) -> None:
        if len(self._notes) < 20:
            self._notes[text] = None

    def _add_event(self, entry: Mapping[str, Any], t: float) -> None:
        name, worker = get_text(entry.get("event"), 60), get_text(entry.get("worker"), 100)
        instance = get_text(entry.get("instance"), 40)
        self._put_event(t, name, worker or instance, get_text(entry.get("detail")))
        self.workers.add_event(name, worker, instance, t)
        if name in _ENDS and not worker:
            self._ended = t
        elif name == "start" and not worker:
            self._ended = None

    def _put_event(self, t: float, name: str, worker: str, detail: str) -> None:
        level = "info"
        if any(word in name for word in _BAD_EVENTS):
            level = "bad"
        elif any(word in name for word in _WARN_EVENTS):
            level = "warn"
        self._event_count += 1
        self._events.append(
            {"id": self._event_count, "t": t, "event": name, "worker": worker, "detail": detail,
             "level": level}
        )  # fmt: skip

    def _add_refit(self, entry: Mapping[str, Any], t: float) -> None:
        refit = self.timeline.add_refit(entry, t)
        if refit is None:
            return
        if refit.outcome == "ok":
            self.workers.add_version(refit.version)
        if refit.paused_seconds:
            self._paused.append((t, refit.paused_seconds))
        for name, value in (
            ("refit_seconds", refit.seconds),
            ("refit_pause", refit.paused_seconds),
        ):
            if value is not None:
                self._plot(name, t, value)
        text = f"version {refit.version}"
        if refit.seconds is not None and refit.paused_seconds is not None:
            text += f" in {refit.seconds:.2f} s, paused {refit.paused_seconds:.2f} s"
        outcome = "refit" if refit.outcome == "ok" else f"refit {refit.outcome}"
        self._put_event(t, outcome, "", f"{text}. {refit.error}".rstrip(". ") + ".")
        self.workers.add_report(refit.workers, t)
        self._plot_spread(t)

    def _add_workers(self, entry: Mapping[str, Any], t: float) -> None:
        self.workers.add_list(entry, t)
        self._plot_spread(t)

    def _plot_spread(self, t: float) -> None:
        spread = self.workers.get_spread()
        if spread is not None:
            self._plot("spread", t, spread)

    def _add_sample(self, entry: Mapping[str, Any], t: float) -> None:
        numbers = self.workers.add_sample(get_mapping(entry.get("values")), t)
        for metric, name in ((LOAD, "running"), (WAITING, "waiting")):
            if metric in numbers:
                self._plot(name, t, sum(numbers[metric]))
        if KV in numbers:
            self._plot("kv", t, sum(numbers[KV]) / len(numbers[KV]))

    def _add_rollouts(self, entry: Mapping[str, Any], t: float) -> None:
        amounts = {
            name: get_amount(entry.get(name)) or 0.0
            for name in ("count", "tokens", "prompt_tokens", "cached_tokens", "seconds")
        }
        self._recent.append(_Rollouts(t, **amounts))
        while self._recent and self._recent[0].t < t - WINDOW_SECONDS:
            self._recent.popleft()
        for name in ("count", "tokens", "prompt_tokens", "cached_tokens"):
            self._totals[name] += int(amounts[name])
        for name in ("cut", "continued", "not_believed"):
            self._totals[name] += get_count(entry.get(name))
        _add_counts(self._retries, get_mapping(entry.get("retries")))
        for version, tokens in get_mapping(entry.get("versions")).items():
            number, amount = get_version(version), get_amount(tokens)
            if number is not None and amount and len(self._tokens_by_version) < 10_000:
                before, _ = self._tokens_by_version.get(number, (0.0, t))
                self._tokens_by_version[number] = (before + amount, t)
        if amounts["seconds"]:
            self._plot("tokens_per_second", t, amounts["tokens"] / amounts["seconds"])
            self._plot("rollouts_per_second", t, amounts["count"] / amounts["seconds"])
        if amounts["prompt_tokens"]:
            self._plot("cached", t, amounts["cached_tokens"] / amounts["prompt_tokens"])
        for name in ("latency", "first_token", "lengths"):
            percentiles = get_mapping(entry.get(name))
            if percentiles:
                self._latest[name] = {
                    level: get_amount(percentiles.get(level)) for level in ("p50", "p95", "p99")
                }
            for level, value in self._latest.get(name, {}).items() if percentiles else ():
                if value is not None:
                    self._plot(f"{name}_{level}", t, value)
        retries = sum(get_count(n) for n in get_mapping(entry.get("retries")).values())
        self._plot("retries", t, retries)
        self._plot("cut", t, get_count(entry.get("cut")))

    def _add_mismatch(self, entry: Mapping[str, Any], t: float) -> None:
        version, k3 = get_version(entry.get("version")), get_amount(entry.get("k3"))
        if version is None or k3 is None:
            return
        row = self._mismatch.setdefault(
            version, {"version": version, "k1": None, "k3": 0.0, "max": None, "tokens": 0}
        )
        if k3 >= row["k3"]:
            row |= {"k3": k3, "k1": get_number(entry.get("k1")), "t": t}
        largest = get_amount(entry.get("max"))
        if largest is not None:
            row["max"] = max(largest, row["max"] or 0.0)
        row["tokens"] += get_count(entry.get("tokens"))
        if len(self._mismatch) > _MOST_VERSIONS:
            del self._mismatch[min(self._mismatch)]
        self._plot("k3", t, k3)

    def _add_forks(self, entry: Mapping[str, Any], _: float) -> None:
        _add_counts(self._forks, {get_text(entry.get("reason"), 100): entry.get("count")})

    def _add_gateway(self, entry: Mapping[str, Any], _: float) -> None:
        self._gateway = {name: get_count(entry.get(name)) for name in ("sessions", "turns")}

    def _add_step(self, entry: Mapping[str, Any], t: float) -> None:
        seconds = get_amount(entry.get("seconds"))
        if seconds is None:
            return
        parts = {
            get_text(name, 20): amount
            for name, value in list(get_mapping(entry.get("parts")).items())[:10]
            if (amount := get_amount(value))
        }
        step = {"t": t, "step": get_count(entry.get("step")), "seconds": seconds, "parts": parts}
        self._steps.append(step)

    def _plot(self, name: str, t: float, value: float) -> None:
        self._series.setdefault(name, Series()).add(t, value)

    # --- what the page shows ---------------------------------------------------------------------

    def get_sections(self) -> dict[str, Any]:
        """Return everything but series, events and the bars of refits."""
        return {
            "run": {
                "stack": self._stack,
                "run": self._run,
                "began": self.first,
                "now": self.now if self.first is not None else None,
                "ended": self._ended,
                "notes": list(self._notes),
                "processes": len(self._processes),
                "rollway": max(self._processes.values(), default=""),
            },
            "top": [verdict.as_json() for verdict in self._judge()],
            "fleet": self.workers.as_json(),
            "refits": [refit.summarize() for refit in reversed(self.timeline.refits)],
            "rollouts": self._make_rollouts(),
            "exactness": self._make_exactness(),
            "trainer": list(self._steps)[-60:],
        }

    def get_events(self, after: int = 0) -> list[dict[str, Any]]:
        """Return the events after one, oldest first."""
        return [event for event in self._events if event["id"] > after]

    def get_series(self, since: float = float("-inf")) -> dict[str, dict[str, list[float]]]:
        """Return the points of every series after a time."""
        points = {name: series.as_json(since) for name, series in self._series.items()}
        return {name: point for name, point in points.items() if point["t"]}

    def get_refit(self, key: str) -> dict[str, Any] | None:
        """Return a refit with its bars; the newest without a key."""
        refits = self.timeline.refits
        refit = self.timeline.get(key) if key else (refits[-1] if refits else None)
        return None if refit is None else self._draw(refit)

    def _draw(self, refit: RefitView) -> dict[str, Any]:
        return refit.as_json(self.now, self.workers.names)

    def _judge(self) -> list[verdicts.Verdict]:
        newest = max(self._mismatch, default=None)
        k3 = None if newest is None else self._mismatch[newest]["k3"]
        behind = 0.0 if self.workers.behind_since is None else self.now - self.workers.behind_since
        window = [each for each in self._recent if each.t > self.now - WINDOW_SECONDS]
        self.timeline.end_served(self.workers.list_served_versions(), self.now)
        target = max((refit.version for refit in self.timeline.running), default=None)
        serving = self.workers.list_served_versions() or [None] * len(self.workers)
        return [
            verdicts.judge_exact(
                k3, newest, self._count_foreign_tokens(), self._totals["not_believed"]
            ),
            verdicts.judge_fresh(
                serving,
                self.workers.count("paused"),
                self.workers.count("waiting for a refit"),
                self.workers.newest if target is None else target,
                target is not None,
                behind,
            ),
            verdicts.judge_cached(
                sum(each.prompt_tokens for each in window),
                sum(each.cached_tokens for each in window),
            ),
            self._judge_busy(),
        ]

    def _judge_busy(self) -> verdicts.Verdict:
        steps = list(self._steps)[-20:]
        total = sum(step["seconds"] for step in steps)
        if total:
            wait, paused = (
                min(sum(step["parts"].get(name, 0.0) for step in steps) / total, 1.0)
                for name in ("wait", "paused")
            )
            return verdicts.judge_busy(max(1.0 - wait - paused, 0.0), wait, paused, True)
        if self.first is None or not self._paused:
            return verdicts.judge_busy(None, 0.0, 0.0, False)
        began = max(self.first, self.now - WINDOW_SECONDS)
        pauses = sum(seconds for t, seconds in self._paused if t > began)
        paused = min(pauses / max(self.now - began, 1.0), 1.0)
        return verdicts.judge_busy(1.0 - paused, 0.0, paused, False)

    def _count_foreign_tokens(self) -> int:
        """Count tokens of versions that no worker of this run had. All begin with the base, which
        no list of workers has before the first refit."""
        if self.is_partial or not self.workers.versions:
            return 0
        known = {BASE_VERSION, *self.workers.versions}
        return int(
            sum(
                tokens
                for version, (tokens, t) in self._tokens_by_version.items()
                if version not in known and t < self.now - _FOREIGN_SECONDS
            )
        )

    def _make_rollouts(self) -> dict[str, Any]:
        recent = [each for each in self._recent if each.t > self.now - _RATE_SECONDS]
        span = self.now - min((each.t - each.seconds for each in recent), default=self.now)
        return {
            "tokens_per_second": sum(each.tokens for each in recent) / span if span > 0 else None,
            "rollouts_per_second": sum(each.count for each in recent) / span if span > 0 else None,
            "totals": dict(self._totals),
            "retries": dict(self._retries),
            **{name: self._latest.get(name) for name in ("latency", "first_token", "lengths")},
        }

    def _make_exactness(self) -> dict[str, Any]:
        return {
            "mismatch": [self._mismatch[version] for version in sorted(self._mismatch)[-60:]],
            "bounds": [verdicts.EXACT_GOOD, verdicts.EXACT_WARN],
            "not_believed": self._totals["not_believed"],
            "forks": dict(self._forks),
            "gateway": self._gateway,
            "spread": self.workers.get_spread(),
        }


def _add_counts(counter: Counter[str], counts: Mapping[str, Any]) -> None:
    for name, value in counts.items():
        name = get_text(name, 100)
        if name in counter or len(counter) < _MOST_KINDS:
            counter[name] += get_count(value)
