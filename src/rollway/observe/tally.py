"""Count rollouts as they end, and record the counts every few seconds.

    add_rollout() ──► a list of numbers ── every two seconds ──► sums ──► the record

Counting is on the path of every request, so it keeps the numbers of a rollout and nothing else: no
lock, no entry, no file. To sum them together takes half the time. A timer of the event loop, set by
the first count after a pause, hands an entry to the recorder. All calls are made in one event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from rollway.observe.metrics import PERCENTILES
from rollway.observe.record import Recorder

FLUSH_SECONDS = 2.0

Tokens = tuple[int | None, int]
"""A version, and how many tokens it sampled."""


class RolloutTally:
    """Counts the rollouts of one process since its last entry."""

    def __init__(self, recorder: Recorder, seconds: float = FLUSH_SECONDS) -> None:
        self._recorder = recorder
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None
        self._began = self._busy_until = time.monotonic()
        self.busy_seconds = 0.0
        """For how long a rollout was under way, since this began; a gap between two rollouts
        counts as one, also if a third that ends later covers it. Other threads read it."""
        self._reset()

    def _reset(self) -> None:
        self._rollouts: list[tuple[float, int, int, int, Sequence[Tokens], bool]] = []
        self._first_tokens: list[float] = []
        self._cut = self._not_believed = 0
        self._retries: Counter[str] = Counter()

    def add_rollout(
        self,
        seconds: float,
        prompt_tokens: int,
        cached_tokens: int,
        tokens: int,
        versions: Sequence[Tokens],
        is_continued: bool = False,
    ) -> None:
        """Count a rollout; `versions` has the number of tokens of each of its spans."""
        now = time.monotonic()
        gap = now - self._busy_until
        self._busy_until = now
        self.busy_seconds += seconds if seconds < gap else gap
        self._rollouts.append(
            (seconds, prompt_tokens, cached_tokens, tokens, versions, is_continued)
        )
        self._set_timer()

    def add_first_token(self, seconds: float) -> None:
        self._first_tokens.append(seconds)
        self._set_timer()

    def add_retry(self, cause: str) -> None:
        self._retries[cause] += 1
        self._set_timer()

    def add_cut(self) -> None:
        self._cut += 1
        self._set_timer()

    def add_not_believed(self) -> None:
        self._not_believed += 1
        self._set_timer()

    def flush(self) -> None:
        """Record what was counted since the last entry, if anything was."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._recorder.write("rollouts", **self._take())

    def _set_timer(self) -> None:
        if self._timer is None:
            # The time before the first count of an entry is nobody's: nothing was under way.
            now = time.monotonic()
            self._began = max(self._began, now - self._seconds)
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self.flush)

    def _take(self) -> Mapping[str, Any]:
        now = time.monotonic()
        columns = tuple(zip(*self._rollouts, strict=True)) or ((),) * 6
        seconds, prompts, cached, lengths, versions, continued = columns
        tokens: Counter[int | None] = Counter()
        for version, count in chain.from_iterable(versions):
            tokens[version] += count
        fields = {
            "seconds": now - self._began,
            "count": len(seconds),
            "tokens": sum(lengths),
            "prompt_tokens": sum(prompts),
            "cached_tokens": sum(cached),
            "latency": find_percentiles(seconds),
            "first_token": find_percentiles(self._first_tokens),
            "lengths": find_percentiles(lengths),
            "retries": dict(self._retries),
            "cut": self._cut,
            "continued": sum(continued),
            "not_believed": self._not_believed,
            "versions": {str(version): count for version, count in tokens.items()},
            "histograms": {
                "prompt": Counter(map(int.bit_length, prompts)),
                "sampled": Counter(map(int.bit_length, lengths)),
            },
        }
        self._began = now
        self._reset()
        return fields


def find_percentiles(numbers: Sequence[float]) -> dict[str, float] | None:
    """Return the percentiles of some numbers; None without one."""
    values = sorted(numbers)
    if not values:
        return None
    last = len(values) - 1
    return {name: values[min(last, int(q * len(values)))] for name, q in PERCENTILES.items()}
