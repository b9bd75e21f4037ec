"""What a person should know of a run: four answers about now, and findings about all of it.

An answer has a level, a figure, the threshold behind the level, and a sentence. Without a figure
its level is `unknown`: nobody must see healthy while nothing was measured. A finding is a sentence
with its metric; a run without any is a good one.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rollway.observe.figures import (
    NONE,
    count,
    format_number,
    format_seconds,
    format_share,
    format_utc,
)
from rollway.observe.run_state import WINDOW_SECONDS, RunState

Grade = Literal["good", "warn", "bad", "unknown"]

EXACT_GOOD, EXACT_WARN = 1e-3, 1e-2
"""Mismatch k3 between trainer and engine. Rounding in bfloat16 stays below the first; tokens of
other weights are far above the second."""
FRESH_SECONDS = 30.0
"""How long workers may differ in version outside a refit: a restarted one catches up meanwhile."""
CACHED_GOOD, CACHED_WARN = 0.30, 0.05
"""Share of prompt tokens that came from a cache. Groups of eight rollouts can reach 0.87."""
CACHED_TOKENS = 10_000
"""Below so many prompt tokens, a low share is no finding: the first of each prefix misses."""
BUSY_GOOD, BUSY_WARN = 0.80, 0.50
"""Share of the time in which the trainer did not wait and generation was not paused."""


# --- the four answers ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Verdict:
    """One answer."""

    name: str
    level: Grade
    figure: str
    threshold: str
    sentence: str
    metric: str
    """The metric behind the figure, as docs/metrics.md lists it."""


def judge(state: RunState) -> list[Verdict]:
    """Return whether a run is exact, fresh, cached, busy."""
    return [judge_exact(state), judge_fresh(state), judge_cached(state), judge_busy(state)]


def judge_exact(state: RunState) -> Verdict:
    """Judge whether the tokens are those of the weights that they are stamped with."""
    threshold, metric = f"k3 below {EXACT_GOOD:g}, red from {EXACT_WARN:g}", "rollway_mismatch_k3"
    if foreign := state.count_foreign_tokens():
        return Verdict(
            "exact", "bad", count(foreign, "token"), "no token of a version unknown here",
            "Answers were accepted with a version that no worker of this run had.",
            "rollway_version_tokens_total",
        )  # fmt: skip
    discarded = int(state.get("answers_not_believed_total"))
    verb = "was" if discarded == 1 else "were"
    prevented = f" {count(discarded, 'answer')} of uncertain version {verb} discarded."
    prevented = prevented if discarded else ""
    if not state.mismatch:
        sentence = "No mismatch between trainer and engine has been recorded yet." + prevented
        return Verdict("exact", "unknown", NONE, threshold, sentence, metric)
    version = max(state.mismatch)
    k3 = state.mismatch[version]["k3"]
    level = _grade(k3 < EXACT_GOOD, k3 < EXACT_WARN)
    sentences = {
        "good": f"Trainer and engine agree on the tokens of version {version}.",
        "warn": f"Trainer and engine differ on version {version} by more than rounding explains.",
        "bad": f"The engine did not sample version {version} as the trainer has it: "
        "look at versions, sampling parameters and dtypes.",
    }
    return Verdict("exact", level, f"{k3:.2g}", threshold, sentences[level] + prevented, metric)


def judge_fresh(state: RunState) -> Verdict:
    """Judge whether every serving worker has the newest weights."""
    workers, timeline = state.workers, state.timeline
    timeline.end_served(workers.list_served_versions(), state.now)
    target = max((refit.version for refit in timeline.running), default=None)
    newest = workers.newest if target is None else target
    versions = workers.list_served_versions() or [None] * len(workers)
    current = sum(version is not None and version == newest for version in versions)
    figure, level, sentence = f"{current} of {len(versions)}", "warn", ""
    behind = len(versions) - current
    paused, held = workers.count("paused"), workers.count("waiting for a refit")
    if not versions:
        figure, level, sentence = NONE, "unknown", "No worker has been recorded yet."
    elif paused and target is None:
        figure = "paused"
        sentence = f"{_are(paused)} paused: no answer comes before `rollway fleet resume`."
    elif held and target is None:
        figure = f"{len(versions)} of {len(versions) + held}"
        sentence = (
            f"{_are(held)} out of routing with the base weights: refit again, or run "
            "`rollway fleet watch`."
        )
    elif newest is None:
        level, sentence = "unknown", "No worker has told its weight version yet."
    elif not behind:
        level = "good"
        noun = "The worker serves" if len(versions) == 1 else "All workers serve"
        sentence = f"{noun} version {newest}, the newest."
    elif target is not None:
        sentence = f"A refit to version {newest} runs; {_are(behind)} not there yet."
    else:
        seconds = 0.0 if workers.stale is None else workers.stale.seconds
        level = "warn" if seconds < FRESH_SECONDS else "bad"
        sentence = (
            f"{_are(behind)} not on version {newest}, for {seconds:.0f} s. Requests of that "
            "version do not reach them."
        )
    threshold = f"spread 0, red after {FRESH_SECONDS:g} s outside a refit"
    return Verdict("fresh", level, figure, threshold, sentence, "rollway_version_spread")  # type: ignore[arg-type]


def judge_cached(state: RunState) -> Verdict:
    """Judge the share of prompt tokens that needed no prefill."""
    window = [each for each in state.recent if each["t"] > state.now - WINDOW_SECONDS]
    prompts = sum(each.get("prompt_tokens", 0) for each in window)
    figure, level = NONE, "unknown"
    if prompts:
        share = min(sum(each.get("cached_tokens", 0) for each in window) / prompts, 1.0)
        figure = f"{share:.0%}"
        level = _grade(share >= CACHED_GOOD, share >= CACHED_WARN or prompts < CACHED_TOKENS)
    sentences = {
        "unknown": "No prompt has been counted in the last minutes.",
        "good": "Prompts find their prefixes in the workers' caches.",
        "warn": "Few prompt tokens come from a cache: prompts may share little, or be short.",
        "bad": "Almost every prompt is computed anew: check the router's events and affinity.",
    }
    threshold = f"at least {CACHED_GOOD:.0%}, red below {CACHED_WARN:.0%}"
    return Verdict("cached", level, figure, threshold, sentences[level], "rollway_cached_share")  # type: ignore[arg-type]


def judge_busy(state: RunState) -> Verdict:
    """Judge the share of the wall time that was neither a wait of the trainer nor a pause."""
    threshold = f"at least {BUSY_GOOD:.0%}, red below {BUSY_WARN:.0%}"
    metric = "rollway_step_part_seconds"
    steps = list(state.steps)[-20:]
    total = sum(step["seconds"] for step in steps)
    if total:
        wait, paused = (
            min(sum(step["parts"].get(name, 0.0) for step in steps) / total, 1.0)
            for name in ("wait", "paused")
        )
        sentence = (
            f"Of the last steps, {wait:.0%} went to waiting and {paused:.0%} to paused generation."
        )
    elif any(refit.paused for refit in state.refits) and state.first is not None:
        began = max(state.first, state.now - WINDOW_SECONDS)
        pauses = sum(refit.paused for refit in state.refits if refit.t > began)
        wait, paused = 0.0, min(pauses / max(state.now - began, 1.0), 1.0)
        sentence = (
            f"Refits paused generation for {paused:.1%} of the time; no trainer reports steps."
        )
    else:
        sentence = "Neither a training step nor a refit has been recorded yet."
        return Verdict("busy", "unknown", NONE, threshold, sentence, metric)
    share = max(1.0 - wait - paused, 0.0)
    level = _grade(share >= BUSY_GOOD, share >= BUSY_WARN)
    return Verdict("busy", level, f"{share:.0%}", threshold, sentence, metric)


def _grade(is_good: bool, is_fair: bool) -> Grade:
    return "good" if is_good else "warn" if is_fair else "bad"


def _are(number: int) -> str:
    return f"{count(number, 'worker')} {'is' if number == 1 else 'are'}"


# --- findings ------------------------------------------------------------------------------------

SLOW_RATIO = 2.0
"""A refit or step this many times the usual is an outlier."""
SLOW_WORKER_SHARE = 0.3
"""A worker that is slow in this share of the refits is a slow worker, and not chance."""
MIN_REFITS = 3
RESTART_LOOP = 3
PAUSE_SHARE, FULL_SHARE = 0.1, 0.05
STALE_SECONDS = 1.0
"""Shorter differences are those between the entries of two processes."""
FALL_RATIO = 0.7
"""A figure of the second half of a run below this share of the first half has fallen."""
MIN_POINTS = 8
"""A shorter run has no halves."""
_MOST_DETAILS = 8
KINDS = ("failed", "slow", "stale", "prevented")
_LEVELS = ("bad", "warn", "info")


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence, with what it rests on."""

    kind: str
    level: str
    text: str
    metric: str
    t: float | None = None
    details: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "details": self.details[:_MOST_DETAILS]}


def find_all(state: RunState) -> list[Finding]:
    """Return every finding of a run, the worst of each kind first."""
    rules = (_find_failures, _find_slow_refits, _find_slow_steps, _find_loaded_workers,
             _find_falls, _find_stale_workers, _find_prevented)  # fmt: skip
    findings = [finding for rule in rules for finding in rule(state)]
    return sorted(findings, key=lambda f: (KINDS.index(f.kind), _LEVELS.index(f.level)))


def _find_failures(state: RunState) -> Iterator[Finding]:
    if failed := [refit for refit in state.refits if refit.outcome != "ok"]:
        causes = Counter((refit.outcome, refit.error or "no text") for refit in failed)
        details = [f"{o}, {_times(n)}: {error}" for (o, error), n in causes.most_common()]
        text = f"{len(failed):,} of {count(len(state.refits), 'refit')} did not end well."
        yield Finding("failed", "bad", text, "rollway_refits_total", failed[0].t, details)
    histories = state.workers.histories.values()
    if died := Counter({w.name: n for w in histories if (n := max(w.deaths, w.restarts))}):
        text = f"{count(len(died), 'worker')} died or restarted, {_times(died.total())} in all."
        level = "warn"
        if looping := sum(number >= RESTART_LOOP for number in died.values()):
            text += f" {count(looping, 'worker')} did so again and again: read the log of each."
            level = "bad"
        yield Finding("failed", level, text, "rollway_restarts_total", None,
                      _list(died, lambda number: _times(int(number))))  # fmt: skip
    if foreign := state.count_foreign_tokens():
        text = f"{count(foreign, 'token')} came with a version that no worker of this run had."
        yield Finding("failed", "bad", text, "rollway_version_tokens_total")
    high = {v: row["k3"] for v, row in state.mismatch.items() if row["k3"] >= EXACT_GOOD}
    if high:
        details = _list({f"version {v}": k3 for v, k3 in high.items()}, format_number)
        level = "bad" if max(high.values()) >= EXACT_WARN else "warn"
        text = (
            f"Trainer and engine differed by more than rounding on {len(high):,} of "
            f"{count(len(state.mismatch), 'version')} (k3 from {EXACT_GOOD:g})."
        )
        yield Finding("failed", level, text, "rollway_mismatch_k3", None, details)
    if unread := {w.name: w.unread_samples for w in histories if w.unread_samples}:
        text = f"The metrics of {count(len(unread), 'worker')} could not always be read."
        details = _list(unread, lambda number: count(int(number), "sample"))
        yield Finding("failed", "info", text, "rollway_scrape_failed", None, details)
    if state.dropped:
        text = f"{count(int(state.dropped), 'line')} could not be recorded: the disk was slow."
        yield Finding("failed", "warn", text, "rollway_record_dropped_total")


def _find_slow_refits(state: RunState) -> Iterator[Finding]:
    ended = [refit for refit in state.refits if refit.outcome == "ok"]
    usual = statistics.median(refit.seconds for refit in ended) if ended else 0.0
    slow = [refit for refit in ended if refit.seconds > SLOW_RATIO * usual]
    if slow and len(ended) >= MIN_REFITS:
        slow.sort(key=lambda refit: -refit.seconds)
        details = [
            f"version {refit.version}: {format_seconds(refit.seconds)}, most of it in "
            f"{refit.slowest_phase}, at {format_utc(refit.t)} UTC"
            for refit in slow
        ]
        text = (
            f"{len(slow):,} of {count(len(ended), 'refit')} took more than {SLOW_RATIO:g} times "
            f"the median of {format_seconds(usual)}."
        )
        yield Finding("slow", "warn", text, "rollway_refit_seconds", slow[0].t, details)
    shares = {
        f"{w.name} on {w.node or 'this node'}": w.slow_refits / w.refits
        for w in state.workers.histories.values()
        if w.refits >= MIN_REFITS and w.slow_refits > SLOW_WORKER_SHARE * w.refits
    }
    if shares:
        text = f"{count(len(shares), 'worker')} held refits up again and again."
        details = _list(shares, lambda share: f"slow in {share:.0%} of the refits")
        yield Finding("slow", "warn", text, "rollway_refit_phase_seconds", None, details)


def _find_slow_steps(state: RunState) -> Iterator[Finding]:
    if not state.step_seconds:
        return
    paused, wait = (state.part_seconds[part] / state.step_seconds for part in ("paused", "wait"))
    if paused > PAUSE_SHARE:
        text = (
            f"Refits paused generation for {format_share(paused)} of the trainer's time: see which "
            "phase of a refit is long, and whether weights could be staged before the pause."
        )
        yield Finding("slow", "warn", text, "rollway_step_part_seconds")
    if wait > 1 - BUSY_GOOD:
        text = f"The trainer waited for {format_share(wait)} of its time, in no named part."
        level = "bad" if wait > 1 - BUSY_WARN else "warn"
        yield Finding("slow", level, text, "rollway_step_part_seconds")
    usual, slowest = state.step_seconds / state.step_count, state.slowest_step
    if state.step_count >= MIN_REFITS and slowest["seconds"] > SLOW_RATIO * usual:
        text = (
            f"Step {slowest['step']} took {format_seconds(slowest['seconds'])}, "
            f"{slowest['seconds'] / usual:.1f} times the mean of {format_seconds(usual)}."
        )
        yield Finding("slow", "info", text, "rollway_step_seconds", slowest["t"])


def _find_loaded_workers(state: RunState) -> Iterator[Finding]:
    full = {
        w.name: w.full_samples / w.samples
        for w in state.workers.histories.values()
        if w.full_samples > FULL_SHARE * w.samples
    }
    if full:
        details = _list(full, lambda share: f"full in {share:.0%} of the samples")
        text = (
            f"The KV cache of {count(len(full), 'worker')} was full: requests waited or lost "
            "their blocks."
        )
        yield Finding("slow", "warn", text, "vllm:kv_cache_usage_perc", None, details)
    waiting, running = (
        state.plots[name].mean if name in state.plots else 0.0 for name in ("waiting", "running")
    )
    if waiting > max(running, 1.0):
        text = (
            f"More requests waited in the workers ({format_number(waiting)} in the mean) than ran "
            f"({format_number(running)})."
        )
        yield Finding("slow", "warn", text, "vllm:num_requests_waiting")


def _find_falls(state: RunState) -> Iterator[Finding]:
    prompts, cached = state.get("prompt_tokens_total"), state.get("cached_tokens_total")
    if prompts >= CACHED_TOKENS and cached < CACHED_GOOD * prompts:
        text = (
            f"{format_share(cached / prompts)} of the prompt tokens came from a cache "
            f"(at least {format_share(CACHED_GOOD)} is usual with groups)."
        )
        level = "bad" if cached < CACHED_WARN * prompts else "warn"
        yield Finding("slow", level, text, "rollway_cached_share")
    elif prompts >= CACHED_TOKENS and len(shares := state.plots["cached"].values) >= MIN_POINTS:
        half = len(shares) // 2
        before, after = statistics.fmean(shares[:half]), statistics.fmean(shares[half:])
        yield from _find_fall("Prefix hits", before, after, "rollway_cached_share")
    # A few steps are not divided evenly between two halves.
    if state.tokens is not None and (state.step_count == 0 or state.step_count >= MIN_POINTS):
        yield from _find_fall("Throughput", *state.tokens.halve(), "rollway_tokens_per_second")


def _find_fall(noun: str, before: float, after: float, metric: str) -> Iterator[Finding]:
    if after < FALL_RATIO * before:
        text = f"{noun} fell in the second half of the run, to {after / before:.0%} of before."
        yield Finding("slow", "warn", text, metric)


def _find_stale_workers(state: RunState) -> Iterator[Finding]:
    times = [time for time in state.workers.stale_times if time.seconds >= STALE_SECONDS]
    if not times:
        return
    times.sort(key=lambda time: -time.seconds)
    longest, total = times[0], sum(time.seconds for time in times)
    text = (
        f"{_times(len(times)).capitalize()}, workers were not all on the newest version, for "
        f"{format_seconds(total)} in all; the longest {format_seconds(longest.seconds)}, with "
        f"{count(longest.workers, 'worker')} behind."
    )
    details = [
        f"{format_seconds(time.seconds)} from {format_utc(time.began)} UTC, "
        f"{count(time.workers, 'worker')}"
        for time in times
    ]
    level = "bad" if longest.seconds > FRESH_SECONDS else "warn"
    yield Finding("stale", level, text, "rollway_version_spread", longest.began, details)


def _find_prevented(state: RunState) -> Iterator[Finding]:
    totals = {name: int(number) for name, number in state.list_totals().items()}
    kept_out = [(refit, line) for refit in state.refits for line in refit.kept_out]
    if kept_out:
        text = (
            f"{_times(len(kept_out)).capitalize()}, a worker that could not prove its weights was "
            "kept out of service."
        )
        details = [f"version {refit.version}, {line}" for refit, line in kept_out]
        first = kept_out[0][0].t
        yield Finding("prevented", "warn", text, "rollway_refits_total", first, details)
    if number := totals["not_believed"]:
        text = f"{count(number, 'answer')} of uncertain version discarded and sampled again."
        yield Finding("prevented", "info", text, "rollway_answers_not_believed_total")
    if number := totals["cut"]:
        text = (
            f"Refits and deaths cut {count(number, 'rollout')}; {totals['continued']:,} were "
            "continued on newer weights, token by token with their versions."
        )
        yield Finding("prevented", "info", text, "rollway_rollouts_cut_total")
    for name, noun, verb in (("retries", "request", "sent again"),
                             ("forks", "turn", "not an extension of the one before")):  # fmt: skip
        if counts := state.list_by_label(f"{name}_total"):
            text = f"{count(int(sum(counts.values())), noun)} {verb}."
            details = _list(counts, lambda number: f"{number:,}")
            yield Finding("prevented", "info", text, f"rollway_{name}_total", None, details)


def _times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number:,} times")


def _list(values: Mapping[str, float], form: Any) -> list[str]:
    """Return names with their figures, the largest first."""
    ranked = sorted(values.items(), key=lambda item: -item[1])
    return [f"{name}: {form(value)}" for name, value in ranked]
