"""The top line of the page: is it exact, fresh, cached, busy?

Each answer has a level, a figure, the threshold behind the level, and a sentence that explains it.
Without a figure the level is `unknown`: a page must not show healthy while nothing was measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Level = Literal["good", "warn", "bad", "unknown"]

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


@dataclass(frozen=True, slots=True)
class Verdict:
    """One answer of the top line."""

    name: str
    level: Level
    figure: str
    threshold: str
    sentence: str
    metric: str
    """The metric behind the figure, as docs/metrics.md lists it."""

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "level": self.level,
            "figure": self.figure,
            "threshold": self.threshold,
            "sentence": self.sentence,
            "metric": self.metric,
        }


def judge_exact(
    k3: float | None, version: int | None, foreign_tokens: int, not_believed: int
) -> Verdict:
    """Judge whether the tokens are those of the weights that they are stamped with.

    `foreign_tokens` were accepted with a version that no worker had."""
    threshold = f"k3 below {EXACT_GOOD:g}, red from {EXACT_WARN:g}"
    prevented = (
        f" {_count(not_believed, 'answer')} of uncertain version {_was(not_believed)} discarded."
        if not_believed
        else ""
    )
    if foreign_tokens:
        return Verdict(
            "exact", "bad", _count(foreign_tokens, "token"), "no token of a version unknown here",
            "Answers were accepted with a version that no worker of this run had.",
            "rollway_version_tokens_total",
        )  # fmt: skip
    metric = "rollway_mismatch_k3"
    if k3 is None:
        sentence = "No mismatch between trainer and engine has been recorded yet." + prevented
        return Verdict("exact", "unknown", "–", threshold, sentence, metric)
    level = _grade(k3 < EXACT_GOOD, k3 < EXACT_WARN)
    sentences = {
        "good": f"Trainer and engine agree on the tokens of version {version}.",
        "warn": f"Trainer and engine differ on version {version} by more than rounding explains.",
        "bad": f"The engine did not sample version {version} as the trainer has it: "
        "look at versions, sampling parameters and dtypes.",
    }
    return Verdict("exact", level, f"{k3:.2g}", threshold, sentences[level] + prevented, metric)


def judge_fresh(
    versions: list[int | None],
    paused: int,
    held: int,
    newest: int | None,
    is_refitting: bool,
    behind_seconds: float,
) -> Verdict:
    """Judge whether every serving worker has the newest weights; `versions` has one per worker.
    `paused` workers have to be resumed, and `held` ones, which started after a refit, refitted."""
    threshold = f"spread 0, red after {FRESH_SECONDS:g} s outside a refit"
    metric = "rollway_version_spread"
    if not versions:
        return Verdict(
            "fresh", "unknown", "–", threshold, "No worker has been recorded yet.", metric
        )
    if paused and not is_refitting:
        sentence = (
            f"{_count(paused, 'worker')} {_is(paused)} paused: no request gets an answer of "
            f"{'it' if paused == 1 else 'them'} before `rollway fleet resume`."
        )
        return Verdict("fresh", "warn", "paused", threshold, sentence, metric)
    if held and not is_refitting:
        sentence = (
            f"{_count(held, 'worker')} {_is(held)} out of routing with the base weights: refit "
            "again, or run `rollway fleet watch`."
        )
        figure = f"{len(versions)} of {len(versions) + held}"
        return Verdict("fresh", "warn", figure, threshold, sentence, metric)
    current = [version for version in versions if version is not None and version == newest]
    figure = f"{len(current)} of {len(versions)}"
    if newest is None:
        sentence = "No worker has told its weight version yet."
        return Verdict("fresh", "unknown", figure, threshold, sentence, metric)
    if len(current) == len(versions):
        noun = "The worker serves" if len(versions) == 1 else "All workers serve"
        sentence = f"{noun} version {newest}, the newest."
        return Verdict("fresh", "good", figure, threshold, sentence, metric)
    behind = len(versions) - len(current)
    verb = _is(behind)
    if is_refitting:
        sentence = (
            f"A refit to version {newest} runs; {_count(behind, 'worker')} {verb} not there yet."
        )
        return Verdict("fresh", "warn", figure, threshold, sentence, metric)
    level = _grade(False, behind_seconds < FRESH_SECONDS)
    sentence = (
        f"{_count(behind, 'worker')} {verb} not on version {newest}, for {behind_seconds:.0f} s. "
        "Requests of that version do not reach them."
    )
    return Verdict("fresh", level, figure, threshold, sentence, metric)


def judge_cached(prompt_tokens: float, cached_tokens: float) -> Verdict:
    """Judge the share of prompt tokens that needed no prefill."""
    threshold = f"at least {CACHED_GOOD:.0%}, red below {CACHED_WARN:.0%}"
    metric = "rollway_cached_share"
    if not prompt_tokens:
        sentence = "No prompt has been counted in the last minutes."
        return Verdict("cached", "unknown", "–", threshold, sentence, metric)
    share = min(cached_tokens / prompt_tokens, 1.0)
    level = _grade(share >= CACHED_GOOD, share >= CACHED_WARN or prompt_tokens < CACHED_TOKENS)
    sentences = {
        "good": "Prompts find their prefixes in the workers' caches.",
        "warn": "Few prompt tokens come from a cache: prompts may share little, or be short.",
        "bad": "Almost every prompt is computed anew: check the router's events and affinity.",
    }
    return Verdict("cached", level, f"{share:.0%}", threshold, sentences[level], metric)


def judge_busy(share: float | None, wait: float, paused: float, has_steps: bool) -> Verdict:
    """Judge the share of the wall time that was neither a wait of the trainer nor a pause."""
    threshold = f"at least {BUSY_GOOD:.0%}, red below {BUSY_WARN:.0%}"
    metric = "rollway_step_part_seconds"
    if share is None:
        sentence = "Neither a training step nor a refit has been recorded yet."
        return Verdict("busy", "unknown", "–", threshold, sentence, metric)
    level = _grade(share >= BUSY_GOOD, share >= BUSY_WARN)
    if has_steps:
        sentence = (
            f"Of the last steps, {wait:.0%} went to waiting and {paused:.0%} to paused generation."
        )
    else:
        sentence = (
            f"Refits paused generation for {paused:.1%} of the time; no trainer reports steps."
        )
    return Verdict("busy", level, f"{share:.0%}", threshold, sentence, metric)


def _grade(is_good: bool, is_fair: bool) -> Level:
    return "good" if is_good else "warn" if is_fair else "bad"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _is(number: int) -> str:
    return "is" if number == 1 else "are"


def _was(number: int) -> str:
    return "was" if number == 1 else "were"
