"""Refits as the page draws them: a row per worker, with a bar for each step.

    step entries (live) ──► bars that grow ──► refit entry ──► bars of its report, in their places

While a refit runs, a step lasts until the next one begins. A worker that takes orders tells its
last steps at once, so live bars are a sketch. The report has the measured seconds; with it, the
bars of a worker add up to its preflight, pause, update and resume.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollway.observe.dash.fields import (
    get_amount,
    get_list,
    get_mapping,
    get_text,
    get_time,
    get_version,
)
from rollway.observe.dash.workers import rank_name

STEPS = ("look", "preflight", "leave", "pause", "load", "flush", "verify", "open")
_ALIASES = {"update": "load", "resume": "open", "order": "load"}
"""The names that a fleet's observer hears, and those of the page."""
_PARTS: dict[str, dict[str, tuple[str, ...]]] = {
    "pause": {"leave": ("order.leave", "leave"), "pause": ("order.engine.stop", "pause")},
    "load": {
        "load": ("order.engine.swap", "update", "load"),
        "flush": ("flush",),
        "verify": ("verify",),
    },
}
"""Which steps of a report share the seconds of one phase. A name of a step is that of a call, of
all calls in it (`flush.…`), or of a part of an order."""
KEPT = 50
_MOST_WORKERS = 1_024
_MOST_STEPS = 64  # of one worker; the protocol has eight, in at most three passes
_LONGEST_STEP_SECONDS = 1020.0
"""A pause and an update may take this long by default. After it nobody refits any more."""
STRAGGLER_RATIO = 1.5
STRAGGLER_SECONDS = 0.05

Bar = tuple[str, float, float]
"""A step, and its first and last second since the refit began."""


@dataclass(slots=True)
class RefitView:
    """One refit: what was heard of it, and its report when it has ended."""

    key: str
    version: int
    began: float
    ended: float | None = None
    outcome: str = "running"
    transport: str = ""
    bytes: float | None = None
    error: str = ""
    mode: str = ""
    seconds: float | None = None
    paused_seconds: float | None = None
    steps: dict[str, list[tuple[float, str]]] = field(default_factory=dict)
    workers: dict[str, Mapping[str, Any]] = field(default_factory=dict)

    def add_step(self, worker: str, t: float, step: str) -> None:
        if worker not in self.steps and len(self.steps) >= _MOST_WORKERS:
            return
        steps = self.steps.setdefault(worker, [])
        if len(steps) < _MOST_STEPS:
            steps.append((t, step))

    def summarize(self) -> dict[str, Any]:
        """Return the refit as one line of the list."""
        rows = list(self._make_rows(self.began))
        return {
            "key": self.key,
            "version": self.version,
            "began": self.began,
            "ended": self.ended,
            "outcome": self.outcome,
            "mode": self.mode,
            "transport": self.transport,
            "bytes": self.bytes,
            "seconds": self.seconds,
            "paused_seconds": self.paused_seconds,
            "workers": len(rows),
            "failed": sum(bool(row["error"]) for row in rows),
            "error": self.error,
        }

    def as_json(self, now: float, names: Mapping[str, str]) -> dict[str, Any]:
        """Return the refit with a row per worker; `names` has the workers' names by instance."""
        rows = list(self._make_rows(now))
        usual = statistics.median([row["busy"] for row in rows]) if rows else 0.0
        for row in rows:
            row["name"] = names.get(row["instance"], "")
            late = row["busy"] - usual
            is_late = row["busy"] > usual * STRAGGLER_RATIO and late > STRAGGLER_SECONDS
            row["straggler"] = self.outcome != "running" and is_late
        # What failed or was slow first: with many workers, these are the ones to see.
        rows.sort(key=_rank)
        end = now if self.ended is None else self.ended
        return {**self.summarize(), "span": max(end - self.began, 1e-3), "rows": rows}

    def _make_rows(self, now: float) -> Iterator[dict[str, Any]]:
        for worker in {**self.workers, **self.steps}:
            report = self.workers.get(worker)
            bars = self._draw_live(worker, now) if report is None else self._draw(worker, report)
            pause = next((first for name, first, _ in bars if name in ("leave", "pause")), None)
            paused = None if report is None else get_amount(report.get("paused_seconds"))
            yield {
                "instance": worker,
                "state": "" if report is None else get_text(report.get("state"), 40),
                "version": None if report is None else get_version(report.get("version")),
                "proof": "" if report is None else get_text(report.get("proof"), 60),
                "strategy": "" if report is None else get_text(report.get("strategy"), 200),
                "error": "" if report is None else get_text(report.get("error")),
                "bars": bars,
                "busy": sum(last - first for _, first, last in bars),
                "paused": [pause, pause + paused] if pause is not None and paused else None,
            }

    def _draw_live(self, worker: str, now: float) -> list[Bar]:
        """Draw a worker of which there is no report: each step until the next."""
        steps = sorted(self.steps.get(worker, []))
        end = now if self.ended is None else self.ended
        ends = [t for t, _ in steps[1:]] + [max(end, steps[-1][0])] if steps else []
        return [
            (_rename(name), max(t - self.began, 0.0), max(last - self.began, 0.0))
            for (t, name), last in zip(steps, ends, strict=True)
        ]

    def _draw(self, worker: str, report: Mapping[str, Any]) -> list[Bar]:
        """Draw the seconds of the report, each phase where the worker was heard to begin it."""
        heard: dict[str, float] = {}
        for t, name in sorted(self.steps.get(worker, [])):
            heard.setdefault(_rename(name), max(t - self.began, 0.0))
        bars: list[Bar] = []
        place = 0.0
        for phase, name in (
            ("preflight", "preflight"),
            ("pause", "pause"),
            ("load", "update"),
            ("open", "resume"),
        ):
            seconds = get_amount(report.get(f"{name}_seconds")) or 0.0
            if not seconds:
                continue
            if phase == "pause":  # it may follow a wait for other workers; later steps do not wait
                place = max(place, heard.get("leave", heard.get("pause", 0.0)))
            elif phase == "preflight":
                place = heard.get("preflight", 0.0)
            for step, part in _split(phase, seconds, get_mapping(report.get("steps"))):
                bars.append((step, place, place + part))
                place += part
        return bars


class Timeline:
    """The last refits, in the order in which they began."""

    def __init__(self) -> None:
        self.refits: deque[RefitView] = deque(maxlen=KEPT)
        self._running: dict[int, RefitView] = {}
        self._count = 0

    @property
    def running(self) -> list[RefitView]:
        return [refit for refit in self._running.values() if refit.ended is None]

    def end_served(self, versions: Sequence[int | None], t: float) -> None:
        """End the refits whose version all workers serve, or a newer one. A process that was
        killed in a refit records no end of it, but the orders to its workers end by themselves."""
        served = min((-1 if version is None else version for version in versions), default=-1)
        for refit in self.running:
            last = max(at for steps in refit.steps.values() for at, _ in steps)
            if refit.version <= served:
                refit.ended, refit.outcome = t, "ok"
            elif t - last > _LONGEST_STEP_SECONDS:
                refit.ended, refit.outcome = last, "unfinished"

    def get(self, key: str) -> RefitView | None:
        return next((refit for refit in self.refits if refit.key == key), None)

    def add_step(self, entry: Mapping[str, Any], t: float) -> None:
        version = get_version(entry.get("refit"))
        worker, step = get_text(entry.get("worker"), 40), get_text(entry.get("step"), 40)
        if version is None or not worker or not step:
            return
        refit = self._running.get(version)
        if refit is None:
            refit = self._running[version] = self._begin(version, t)
        refit.add_step(worker, t, step)

    def add_refit(self, entry: Mapping[str, Any], t: float) -> RefitView | None:
        """Add the end of a refit, and return it."""
        report = get_mapping(entry.get("report"))
        version = get_version(report.get("version"))
        if version is None:
            return None
        began = get_time(entry.get("began"))
        began = t if began is None or began > t else began
        refit = self._running.pop(version, None)
        if refit is None:
            refit = self._begin(version, began)
        refit.began, refit.ended = min(began, refit.began), t
        refit.outcome = get_text(entry.get("outcome"), 20) or "ok"
        refit.transport = get_text(entry.get("transport"), 40)
        refit.bytes = get_amount(entry.get("bytes"))
        refit.error = get_text(entry.get("error"))
        refit.mode = get_text(report.get("mode"), 20)
        refit.seconds = get_amount(report.get("seconds"))
        refit.paused_seconds = get_amount(report.get("paused_seconds"))
        for worker in map(get_mapping, get_list(report.get("workers"))[:_MOST_WORKERS]):
            if instance := get_text(worker.get("instance_id"), 40):
                refit.workers[instance] = worker
        return refit

    def _begin(self, version: int, t: float) -> RefitView:
        self._count += 1
        refit = RefitView(f"{version}.{self._count}", version, t)
        if len(self.refits) == KEPT:
            self._running.pop(self.refits[0].version, None)
        self.refits.append(refit)
        return refit


def _rank(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return not row["error"], not row["straggler"], rank_name(row["name"]), row["instance"]


def _rename(step: str) -> str:
    return _ALIASES.get(step, step)


def _split(phase: str, seconds: float, steps: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the steps of one phase with their shares of its seconds; all of it as one step if the
    report does not tell them apart."""
    parts = {
        step: max(_sum_calls(name, steps) for name in names)
        for step, names in _PARTS.get(phase, {}).items()
    }
    total = sum(parts.values())
    if not total:
        yield phase, seconds
        return
    for step, part in parts.items():
        if part:
            yield step, seconds * part / total


def _sum_calls(name: str, steps: Mapping[str, Any]) -> float:
    """Return the seconds of a step, or the sum of the calls in it."""
    own = get_amount(steps.get(name))
    if own is not None:
        return own
    return sum(
        get_amount(value) or 0.0
        for key, value in steps.items()
        if key.startswith(f"{name}.") and key.count(".") == 1
    )
