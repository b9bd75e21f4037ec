"""The figures of a whole run, and those of two runs side by side."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rollway.observe.figures import NONE, format_bytes, format_number, format_seconds, format_share
from rollway.observe.report.findings import STALE_SECONDS
from rollway.observe.report.summary import Summary

DIFFERENCE = 0.1
"""Two runs differ in a figure from here on."""
Way = Literal["less", "more", ""]
_PARTS: dict[str, tuple[str, Way]] = {
    "generate": ("generating", ""),
    "train": ("training", ""),
    "publish": ("publishing", "less"),
    "wait": ("waiting", "less"),
    "paused": ("paused", "less"),
}
"""Parts of a step, what a report calls them, and which way is good."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a whole run. `better` says which way is good, where one is."""

    label: str
    metric: str
    value: float | None
    text: str
    better: Way = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def list_figures(summary: Summary) -> list[Figure]:
    """Return the figures that a report begins with, and by which runs are compared."""
    ended = [refit for refit in summary.refits if refit.outcome == "ok"]
    refit = _take_median([refit.seconds for refit in ended])
    paused = _take_median([refit.paused for refit in ended])
    seconds, totals = summary.seconds, summary.totals
    rate = totals["tokens"] / seconds if seconds and totals["tokens"] else None
    prompts = totals["prompt_tokens"]
    step = summary.step_seconds / summary.steps if summary.steps else None
    k3 = max(summary.mismatch.values(), default=None)
    failed = len(summary.refits) - len(ended)
    restarts = sum(worker.restarts for worker in summary.workers.values())
    stale = sum(
        time.ended - time.began
        for time in summary.stale
        if time.ended - time.began >= STALE_SECONDS
    )
    shares = {
        name: part / summary.step_seconds if summary.step_seconds else None
        for name, part in summary.parts.items()
    }
    figures = [
        _in_seconds("refit, median", "rollway_refit_seconds", refit),
        _in_seconds("generation paused by a refit, median", "rollway_refit_paused_seconds", paused),
        _as_number("refits", "rollway_refits_total", len(summary.refits), ""),
        _as_number("refits that did not end well", "rollway_refits_total", failed, "less"),
        _as_number("tokens per second, over the whole run", "rollway_tokens_per_second", rate,
                   "more"),
        _as_number("rollouts", "rollway_rollouts_total", totals["count"], ""),
        _as_number("tokens", "rollway_tokens_total", totals["tokens"], ""),
        _as_share("prompt tokens from a cache", "rollway_cached_share",
                  totals["cached_tokens"] / prompts if prompts else None, "more"),
    ]  # fmt: skip
    for name, transfers in summary.transports.items():
        size, seconds = transfers.bytes / transfers.refits, transfers.seconds / transfers.refits
        by = f"weights by {name or 'an unknown transport'}"
        figures.append(Figure(f"{by}, mean", "rollway_refit_bytes", size, format_bytes(size)))
        figures.append(_in_seconds(f"{by}, staged in", "rollway_refit_transfer_seconds", seconds))
    for label, name, metric in (
        ("time of a rollout", "latency", "rollway_rollout_seconds"),
        ("first token", "first_token", "rollway_first_token_seconds"),
    ):
        for level in ("p50", "p95"):
            value = _take_median(summary.levels.get(f"{name} {level}", ()))
            text = f"{label}, {level}, median of the intervals"
            figures.append(_in_seconds(text, f"{metric}_{level}", value))
    figures += [
        _as_number("trainer's steps", "rollway_step", summary.steps or None, ""),
        _in_seconds("step, mean", "rollway_step_seconds", step),
        *(_as_share(f"of it {name}", "rollway_step_part_seconds", shares.get(part), way)
          for part, (name, way) in _PARTS.items()),
        _as_number("largest mismatch k3 of a version", "rollway_mismatch_k3", k3, "less"),
        _as_number("largest difference of a log-prob", "rollway_mismatch_max",
                   summary.largest_difference or None, "less"),
        _as_number("answers not believed", "rollway_answers_not_believed_total",
                   totals["not_believed"], ""),
        _as_number("requests sent again", "rollway_retries_total", sum(summary.retries.values()),
                   "less"),
        _as_number("rollouts cut", "rollway_rollouts_cut_total", totals["cut"], "less"),
        _in_seconds("time with workers behind", "rollway_version_spread", stale),
        _as_number("restarts of workers", "rollway_restarts_total", restarts, "less"),
        _as_number("workers", "rollway_workers", len(summary.workers), ""),
        _as_number("sessions of the gateway", "rollway_gateway_sessions",
                   summary.gateway["sessions"] or None, ""),
        _as_number("turns of the gateway", "rollway_gateway_turns_total",
                   summary.gateway["turns"] or None, ""),
    ]  # fmt: skip
    return [figure for figure in figures if figure.value is not None]


def _in_seconds(label: str, metric: str, value: float | None) -> Figure:
    return Figure(label, metric, value, format_seconds(value), "less")


def _as_number(label: str, metric: str, value: float | None, better: Way) -> Figure:
    text = f"{value:,}" if isinstance(value, int) and value < 1e6 else format_number(value)
    return Figure(label, metric, value, text, better)


def _as_share(label: str, metric: str, value: float | None, better: Way) -> Figure:
    return Figure(label, metric, value, format_share(value), better)


def _take_median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


@dataclass(frozen=True, slots=True)
class Difference:
    """One figure of two runs. `ratio` is the second by the first."""

    label: str
    metric: str
    first: str
    second: str
    ratio: float | None
    verdict: Literal["better", "worse", "other", "same"]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def describe(self) -> str:
        """Return a sentence, for a difference that is one."""
        times = "" if self.ratio is None else f", {self.ratio:.2f} times"
        return f"{self.label}: {self.second} instead of {self.first}{times}."


def compare(first: Summary, second: Summary) -> list[Difference]:
    """Return how the figures of a second run differ from those of the first."""
    others = {figure.label: figure for figure in list_figures(second)}
    own = {figure.label: figure for figure in list_figures(first)}
    differences = []
    for label in dict.fromkeys([*own, *others]):
        a, b = own.get(label), others.get(label)
        known = a or b
        assert known is not None
        before, after = (None if x is None else x.value for x in (a, b))
        ratio = after / before if before and after is not None else None
        differences.append(
            Difference(
                label,
                known.metric,
                NONE if a is None else a.text,
                NONE if b is None else b.text,
                ratio,
                _judge(before, after, known.better),
            )
        )
    return differences


def _judge(
    before: float | None, after: float | None, better: Way
) -> Literal["better", "worse", "other", "same"]:
    if before is None or after is None:
        return "same" if before == after else "other"
    if abs(after - before) <= DIFFERENCE * max(abs(before), abs(after)):
        return "same"
    if not better:
        return "other"
    return "better" if (after > before) == (better == "more") else "worse"
