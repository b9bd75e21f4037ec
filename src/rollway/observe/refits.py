"""Refits as they are drawn: a row per worker, with a bar for each step.

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

from rollway.observe.record import Entry

PHASES = ("preflight", "pause", "update", "resume")
_ALIASES = {"update": "load", "resume": "open", "order": "load"}
"""The names that a fleet's observer hears, and those that are shown."""
_PARTS: dict[str, dict[str, tuple[str, ...]]] = {
    "pause": {"leave": ("order.leave", "leave"), "pause": ("order.engine.stop", "pause")},
    "update": {
        "load": ("order.engine.swap", "update"),
        "flush": ("flush",),
        "verify": ("verify",),
    },
}
"""Which steps of a report share the seconds of one phase: those of a worker, or of its order."""
KEPT = 50
_LONGEST_STEP_SECONDS = 1020.0
"""A pause and an update may take this long by default. After it nobody refits any more."""
SLOW_WORKER_RATIO, SLOW_WORKER_SECONDS = 1.5, 0.05
"""A worker is slow that takes so many times the median of its refit, and so much longer."""

Bar = tuple[str, float, float]
"""A step, and its first and last second since the refit began."""


@dataclass(slots=True)
class RefitBars:
    """One refit: what was heard of it, and its report when it has ended."""

    key: str
    version: int
    began: float
    ended: float | None = None
    outcome: str = "running"
    transport: str = ""
    bytes: int | None = None
    error: str = ""
    mode: str = ""
    seconds: float | None = None
    paused_seconds: float | None = None
    steps: dict[str, list[tuple[float, str]]] = field(default_factory=dict)
    workers: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """The reports of the workers, by instance."""
    slow: set[str] = field(default_factory=set)

    def end(self, entry: Entry) -> None:
        """Take the entry that ends it."""
        report = entry["report"]
        self.began, self.ended = min(entry["began"], self.began, entry["t"]), entry["t"]
        self.outcome, self.error = entry["outcome"], entry.get("error") or ""
        self.transport, self.bytes = entry.get("transport") or "", entry.get("bytes")
        self.mode, self.seconds = report.get("mode", ""), report.get("seconds")
        self.paused_seconds = report.get("paused_seconds")
        self.workers = {worker["instance_id"]: worker for worker in report["workers"]}
        busy = {name: sum(_get_phases(worker)) for name, worker in self.workers.items()}
        usual = statistics.median(busy.values()) if busy else 0.0
        least = max(usual * SLOW_WORKER_RATIO, usual + SLOW_WORKER_SECONDS)
        self.slow = {name for name, seconds in busy.items() if seconds > least}

    def find_slowest(self) -> dict[str, float]:
        """Return the seconds of the slowest worker in each phase."""
        rows = [_get_phases(worker) for worker in self.workers.values()] or [(0.0,) * len(PHASES)]
        return dict(zip(PHASES, map(max, zip(*rows, strict=True)), strict=True))

    def summarize(self) -> dict[str, Any]:
        """Return the refit as one line of the list."""
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
            "workers": len({**self.workers, **self.steps}),
            "failed": sum(bool(report.get("error")) for report in self.workers.values()),
            "error": self.error,
        }

    def as_json(self, now: float, names: Mapping[str, str]) -> dict[str, Any]:
        """Return the refit with a row per worker; `names` has the workers' names by instance."""
        workers = {**self.workers, **self.steps}
        rows = [self._make_row(worker, names.get(worker, ""), now) for worker in workers]
        # What failed or was slow first: with many workers, these are the ones to see.
        rows.sort(key=lambda row: (not row["error"], not row["straggler"], len(row["name"]),
                                   row["name"], row["instance"]))  # fmt: skip
        end = now if self.ended is None else self.ended
        return {**self.summarize(), "span": max(end - self.began, 1e-3), "rows": rows}

    def _make_row(self, worker: str, name: str, now: float) -> dict[str, Any]:
        report = self.workers.get(worker, {})
        bars = self._draw(worker, report) if report else self._draw_live(worker, now)
        pause = next((first for step, first, _ in bars if step in ("leave", "pause")), None)
        paused = report.get("paused_seconds")
        return {
            "instance": worker,
            "name": name,
            "state": report.get("state", ""),
            "version": report.get("version"),
            "proof": report.get("proof", ""),
            "strategy": report.get("strategy", ""),
            "error": report.get("error") or "",
            # Tenths of milliseconds: 128 workers have a thousand bars.
            "bars": [(step, round(first, 4), round(last, 4)) for step, first, last in bars],
            "busy": sum(last - first for _, first, last in bars),
            "paused": [pause, pause + paused] if pause is not None and paused else None,
            "straggler": worker in self.slow,
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
        place = heard.get("preflight", 0.0)
        for phase, seconds in zip(PHASES, _get_phases(report), strict=True):
            if phase == "pause":  # it may follow a wait for other workers; later steps do not wait
                place = max(place, heard.get("leave", heard.get("pause", 0.0)))
            for step, part in _split(phase, seconds, report.get("steps", {})):
                bars.append((step, place, place + part))
                place += part
        return bars


class Timeline:
    """The last refits, in the order in which they began."""

    def __init__(self) -> None:
        self.refits: deque[RefitBars] = deque(maxlen=KEPT)
        self._running: dict[int, RefitBars] = {}
        self._count = 0

    @property
    def running(self) -> list[RefitBars]:
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

    def get(self, key: str) -> RefitBars | None:
        """Return a refit by its key; the newest without one."""
        if not key:
            return self.refits[-1] if self.refits else None
        return next((refit for refit in self.refits if refit.key == key), None)

    def add_step(self, entry: Entry) -> None:
        refit = self._running.get(entry["refit"])
        if refit is None:
            refit = self._running[entry["refit"]] = self._begin(entry["refit"], entry["t"])
        refit.steps.setdefault(entry["worker"], []).append((entry["t"], entry["step"]))

    def add_refit(self, entry: Entry) -> RefitBars:
        """Add the end of a refit, and return it."""
        version = entry["report"]["version"]
        refit = self._running.pop(version, None) or self._begin(version, entry["began"])
        refit.end(entry)
        return refit

    def _begin(self, version: int, t: float) -> RefitBars:
        self._count += 1
        refit = RefitBars(f"{version}.{self._count}", version, t)
        if len(self.refits) == KEPT:
            self._running.pop(self.refits[0].version, None)
        self.refits.append(refit)
        return refit


def _get_phases(report: Mapping[str, Any]) -> tuple[float, ...]:
    return tuple(report.get(f"{phase}_seconds", 0.0) for phase in PHASES)


def _rename(step: str) -> str:
    return _ALIASES.get(step, step)


def _split(phase: str, seconds: float, steps: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    """Yield the steps of one phase with their shares of its seconds; all of it as one step if the
    report does not tell them apart."""
    parts = {
        step: max(steps.get(name, 0.0) for name in names)
        for step, names in _PARTS.get(phase, {}).items()
    }
    total = sum(parts.values())
    if not total:
        parts, total = {_rename(phase): 1.0}, 1.0
    for step, part in parts.items():
        if part and seconds:
            yield step, seconds * part / total
