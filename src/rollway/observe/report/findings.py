"""What a person should know of a run: what failed, what was slow, stale, and prevented.

Each rule looks at one thing and returns a sentence with its figure and its metric, or nothing. A
run with nothing to say about is said to be one.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rollway.observe.bins import Bins
from rollway.observe.dash import verdicts
from rollway.observe.figures import (
    count,
    format_number,
    format_seconds,
    format_share,
    format_utc,
)
from rollway.observe.report.summary import PHASES, Summary

Kind = Literal["failed", "slow", "stale", "prevented"]
KINDS: tuple[Kind, ...] = ("failed", "slow", "stale", "prevented")
Level = Literal["bad", "warn", "info"]

SLOW_RATIO = 2.0
"""A refit or step this many times the median is an outlier."""
STRAGGLER_SHARE = 0.3
"""A worker that is slow in this share of the refits is a slow worker, and not chance."""
MIN_REFITS = 3
RESTART_LOOP = 3
PAUSE_SHARE = 0.1
KV_SHARE, WAIT_RATIO = 0.05, 1.0
STALE_SECONDS = 1.0
"""Shorter differences are those between the entries of two processes."""
FALL_RATIO = 0.7
"""A figure of the second half of a run below this share of the first half has fallen."""
_MOST_DETAILS = 8


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence, with what it rests on."""

    kind: Kind
    level: Level
    text: str
    metric: str
    t: float | None = None
    details: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def find_all(summary: Summary) -> list[Finding]:
    """Return every finding of a run, the worst of each kind first."""
    findings = [finding for rule in _RULES for finding in rule(summary)]
    order = {"bad": 0, "warn": 1, "info": 2}
    return sorted(findings, key=lambda each: (KINDS.index(each.kind), order[each.level]))


# --- what failed ---------------------------------------------------------------------------------


def _find_failed_refits(summary: Summary) -> Iterator[Finding]:
    failed = [refit for refit in summary.refits if refit.outcome != "ok"]
    if not failed:
        return
    causes = Counter((refit.outcome, refit.error or "no text") for refit in failed)
    details = [
        f"{outcome}, {_times(number)}: {error}"
        for (outcome, error), number in causes.most_common(_MOST_DETAILS)
    ]
    text = f"{len(failed):,} of {count(len(summary.refits), 'refit')} did not end well."
    yield Finding("failed", "bad", text, "rollway_refits_total", failed[0].t, details)


def _find_deaths(summary: Summary) -> Iterator[Finding]:
    died = {w.name: max(w.deaths, w.restarts) for w in summary.workers.values()}
    died = {name: number for name, number in died.items() if number}
    if not died:
        return
    worst = sorted(died.items(), key=lambda item: -item[1])
    looping = [name for name, number in worst if number >= RESTART_LOOP]
    details = [f"{name}: {_times(number)}" for name, number in worst[:_MOST_DETAILS]]
    text = f"{count(len(died), 'worker')} died or restarted, {_times(sum(died.values()))} in all."
    if looping:
        text += f" {count(len(looping), 'worker')} did so again and again: read the log of each."
    level: Level = "bad" if looping else "warn"
    yield Finding("failed", level, text, "rollway_restarts_total", None, details)


def _find_mismatch(summary: Summary) -> Iterator[Finding]:
    high = {v: k3 for v, k3 in summary.mismatch.items() if k3 >= verdicts.EXACT_GOOD}
    if summary.foreign_tokens:
        text = (
            f"{count(summary.foreign_tokens, 'token')} came with a version that no worker of this "
            "run had."
        )
        yield Finding("failed", "bad", text, "rollway_version_tokens_total")
    if not high:
        return
    worst = sorted(high.items(), key=lambda item: -item[1])
    wrong = sum(k3 >= verdicts.EXACT_WARN for k3 in high.values())
    text = (
        f"Trainer and engine differed by more than rounding on {len(high):,} of "
        f"{count(len(summary.mismatch), 'version')} (k3 from {verdicts.EXACT_GOOD:g}); "
        f"the worst is version {worst[0][0]} with {format_number(worst[0][1])}."
    )
    details = [f"version {version}: {format_number(k3)}" for version, k3 in worst[:_MOST_DETAILS]]
    yield Finding("failed", "bad" if wrong else "warn", text, "rollway_mismatch_k3", None, details)


def _find_lost_record(summary: Summary) -> Iterator[Finding]:
    unread = {w.name: w.unread for w in summary.workers.values() if w.unread}
    if unread:
        worst = sorted(unread.items(), key=lambda item: -item[1])[:_MOST_DETAILS]
        text = f"The metrics of {count(len(unread), 'worker')} could not always be read."
        details = [f"{name}: {count(number, 'sample')}" for name, number in worst]
        yield Finding("failed", "info", text, "rollway_scrape_failed", None, details)
    if summary.dropped:
        text = f"{count(int(summary.dropped), 'line')} could not be recorded: the disk was slow."
        yield Finding("failed", "warn", text, "rollway_record_dropped_total")


# --- what was slow -------------------------------------------------------------------------------


def _find_slow_refits(summary: Summary) -> Iterator[Finding]:
    ended = [refit for refit in summary.refits if refit.outcome == "ok"]
    if len(ended) < MIN_REFITS:
        return
    usual = statistics.median(refit.seconds for refit in ended)
    slow = [refit for refit in ended if usual and refit.seconds > SLOW_RATIO * usual]
    if slow:
        worst = sorted(slow, key=lambda refit: -refit.seconds)
        details = [
            f"version {refit.version}: {format_seconds(refit.seconds)}, most of it in "
            f"{PHASES[refit.phases.index(max(refit.phases))]}, at {format_utc(refit.t)} UTC"
            for refit in worst[:_MOST_DETAILS]
        ]
        text = (
            f"{len(slow):,} of {count(len(ended), 'refit')} took more than {SLOW_RATIO:g} times "
            f"the median of {format_seconds(usual)}; the longest took "
            f"{format_seconds(worst[0].seconds)}."
        )
        yield Finding("slow", "warn", text, "rollway_refit_seconds", worst[0].t, details)


def _find_slow_workers(summary: Summary) -> Iterator[Finding]:
    slow = [
        worker
        for worker in summary.workers.values()
        if worker.refits >= MIN_REFITS and worker.slow_refits > STRAGGLER_SHARE * worker.refits
    ]
    if not slow:
        return
    slow.sort(key=lambda worker: -worker.slow_refits / worker.refits)
    details = [
        f"{w.name} on {w.node or 'this node'}: slow in {w.slow_refits} of {w.refits} refits"
        for w in slow[:_MOST_DETAILS]
    ]
    text = f"{count(len(slow), 'worker')} held refits up: slower than the others again and again."
    yield Finding("slow", "warn", text, "rollway_refit_phase_seconds", None, details)


def _find_slow_steps(summary: Summary) -> Iterator[Finding]:
    if not summary.steps or not summary.step_seconds:
        return
    shares = {name: part / summary.step_seconds for name, part in summary.parts.items()}
    paused, wait = shares.get("paused", 0.0), shares.get("wait", 0.0)
    if paused > PAUSE_SHARE:
        text = (
            f"Refits paused generation for {format_share(paused)} of the trainer's time: see which "
            "phase of a refit is long, and whether weights could be staged before the pause."
        )
        yield Finding("slow", "warn", text, "rollway_step_part_seconds")
    if wait > 1 - verdicts.BUSY_GOOD:
        text = f"The trainer waited for {format_share(wait)} of its time, in no named part."
        level: Level = "bad" if wait > 1 - verdicts.BUSY_WARN else "warn"
        yield Finding("slow", level, text, "rollway_step_part_seconds")
    usual = summary.step_seconds / summary.steps
    seconds, number, t = max(summary.slowest_steps)
    if summary.steps >= MIN_REFITS and seconds > SLOW_RATIO * usual:
        text = (
            f"Step {number} took {format_seconds(seconds)}, "
            f"{seconds / usual:.1f} times the mean of {format_seconds(usual)}."
        )
        details = [
            f"step {number}: {format_seconds(seconds)}, at {format_utc(t)} UTC"
            for seconds, number, t in sorted(summary.slowest_steps, reverse=True)
        ]
        yield Finding("slow", "info", text, "rollway_step_seconds", t, details)


def _find_full_workers(summary: Summary) -> Iterator[Finding]:
    full = [
        worker
        for worker in summary.workers.values()
        if worker.samples and worker.kv_full > KV_SHARE * worker.samples
    ]
    if full:
        full.sort(key=lambda worker: -worker.kv_full / worker.samples)
        details = [
            f"{w.name}: full in {format_share(w.kv_full / w.samples)} of the samples"
            for w in full[:_MOST_DETAILS]
        ]
        text = (
            f"The KV cache of {count(len(full), 'worker')} was full: requests waited or lost "
            "their blocks."
        )
        yield Finding("slow", "warn", text, "vllm:kv_cache_usage_perc", None, details)
    waiting, running = _get_mean(summary, "waiting"), _get_mean(summary, "running")
    if waiting is not None and running is not None and waiting > WAIT_RATIO * max(running, 1.0):
        text = (
            f"More requests waited in the workers ({format_number(waiting)} in the mean) than ran "
            f"({format_number(running)})."
        )
        yield Finding("slow", "warn", text, "vllm:num_requests_waiting")


def _find_cold_caches(summary: Summary) -> Iterator[Finding]:
    prompts, cached = summary.totals["prompt_tokens"], summary.totals["cached_tokens"]
    if prompts < verdicts.CACHED_TOKENS:
        return
    share = cached / prompts
    if share < verdicts.CACHED_GOOD:
        text = (
            f"{format_share(share)} of the prompt tokens came from a cache "
            f"(at least {format_share(verdicts.CACHED_GOOD)} is usual with groups)."
        )
        level: Level = "bad" if share < verdicts.CACHED_WARN else "warn"
        yield Finding("slow", level, text, "rollway_cached_share")
        return
    before, after = _halve(summary, "cached")
    if before and after is not None and after < FALL_RATIO * before:
        text = (
            f"Prefix hits fell from {format_share(before)} in the first half to "
            f"{format_share(after)} in the second."
        )
        yield Finding("slow", "warn", text, "rollway_cached_share")


def _find_falling_throughput(summary: Summary) -> Iterator[Finding]:
    before, after = _halve(summary, "tokens", Bins.list_rates)
    if before and after is not None and after < FALL_RATIO * before:
        text = (
            f"Throughput fell: the second half of the run returned {after / before:.0%} of the "
            "tokens of the first."
        )
        yield Finding("slow", "warn", text, "rollway_tokens_per_second")


# --- what was stale, and what was prevented ------------------------------------------------------


def _find_stale_workers(summary: Summary) -> Iterator[Finding]:
    times = [time for time in summary.stale if time.ended - time.began >= STALE_SECONDS]
    if not times:
        return
    longest = max(times, key=lambda time: time.ended - time.began)
    seconds = longest.ended - longest.began
    total = sum(time.ended - time.began for time in times)
    text = (
        f"{_times(len(times)).capitalize()}, workers were not all on the newest version, for "
        f"{format_seconds(total)} in all; the longest {format_seconds(seconds)}, with "
        f"{count(longest.workers, 'worker')} behind. Requests of the newest version did not reach "
        "them."
    )
    worst = sorted(times, key=lambda time: time.began - time.ended)[:_MOST_DETAILS]
    details = [
        f"{format_seconds(time.ended - time.began)} from {format_utc(time.began)} UTC, "
        f"{count(time.workers, 'worker')}"
        for time in worst
    ]
    level: Level = "bad" if seconds > verdicts.FRESH_SECONDS else "warn"
    yield Finding("stale", level, text, "rollway_version_spread", longest.began, details)


def _find_prevented(summary: Summary) -> Iterator[Finding]:
    totals = summary.totals
    if totals["not_believed"]:
        text = (
            f"{count(totals['not_believed'], 'answer')} whose version was not certain "
            f"{'was' if totals['not_believed'] == 1 else 'were'} discarded and sampled again."
        )
        yield Finding("prevented", "info", text, "rollway_answers_not_believed_total")
    kept_out = [(refit, line) for refit in summary.refits for line in refit.kept_out]
    if kept_out:
        text = (
            f"{_times(len(kept_out)).capitalize()}, a worker that could not prove its weights was "
            "kept out of service."
        )
        details = [f"version {refit.version}, {line}" for refit, line in kept_out[:_MOST_DETAILS]]
        first = kept_out[0][0].t
        yield Finding("prevented", "warn", text, "rollway_refits_total", first, details)
    if totals["cut"]:
        text = (
            f"Refits and deaths cut {count(totals['cut'], 'rollout')}; "
            f"{totals['continued']:,} were continued on newer weights, token by token with their "
            "versions."
        )
        yield Finding("prevented", "info", text, "rollway_rollouts_cut_total")
    if summary.retries:
        number = sum(summary.retries.values())
        text = f"{count(number, 'request')} {'was' if number == 1 else 'were'} sent again."
        details = [f"{cause}: {n:,}" for cause, n in summary.retries.most_common(_MOST_DETAILS)]
        yield Finding("prevented", "info", text, "rollway_retries_total", None, details)
    if summary.forks:
        text = f"{count(sum(summary.forks.values()), 'turn')} did not extend the one before."
        details = [f"{reason}: {n:,}" for reason, n in summary.forks.most_common(_MOST_DETAILS)]
        yield Finding("prevented", "info", text, "rollway_forks_total", None, details)


_RULES: tuple[Callable[[Summary], Iterator[Finding]], ...] = (
    _find_failed_refits,
    _find_deaths,
    _find_mismatch,
    _find_lost_record,
    _find_slow_refits,
    _find_slow_workers,
    _find_slow_steps,
    _find_full_workers,
    _find_cold_caches,
    _find_falling_throughput,
    _find_stale_workers,
    _find_prevented,
)


def _times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number:,} times")


def _get_mean(summary: Summary, name: str) -> float | None:
    bins = summary.get_series(name)
    values = [value for _, value in bins.list_means()] if bins is not None else []
    return statistics.fmean(values) if values else None


def _halve(
    summary: Summary,
    name: str,
    read: Callable[[Bins], list[tuple[float, float]]] = Bins.list_means,
) -> tuple[float | None, float | None]:
    """Return the means of a series in the two halves of the run; None if it is short. Stretches
    without any are left out: a stack may stay up when the training has ended."""
    bins = summary.get_series(name)
    points = [point for point in read(bins) if point[1]] if bins is not None else []
    if summary.first is None or len(points) < 8:
        return None, None
    middle = summary.first + summary.seconds / 2
    halves = [value for t, value in points if t < middle], [v for t, v in points if t >= middle]
    if not all(halves):
        return None, None
    return statistics.fmean(halves[0]), statistics.fmean(halves[1])
