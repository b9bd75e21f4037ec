"""Count rollouts as they end, and record the counts every few seconds.

    add_rollout() ──► a list of numbers ── each 1,024, and every two seconds ──► sums ──► the record

Counting is on the path of every request, so it keeps the numbers of a rollout and nothing else: no
lock, no entry, no file. To sum them together takes half the time. A timer of the event loop, set by
the first count after a pause, hands an entry to the recorder. All calls are made in one event loop.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from rollway.observe.metrics import PERCENTILES
from rollway.observe.record import Recorder

FLUSH_SECONDS = 2.0
LARGEST_SAMPLE = 16_384
"""From how many rollouts percentiles are computed; of more, a random sample. One process has fewer
in two seconds: to sort them costs less than to choose."""
_MOST_WAITING = 1024


class Figures:
    """Numbers of which percentiles are wanted, a random sample of them if they are many."""

    def __init__(self) -> None:
        self._values: list[float] = []
        self._count = 0

    def add(self, *values: float) -> None:
        room = max(0, LARGEST_SAMPLE - len(self._values))
        self._values += values[:room]
        for count, value in enumerate(values[room:], self._count + room + 1):
            if (place := int(random.random() * count)) < LARGEST_SAMPLE:
                self._values[place] = value
        self._count += len(values)

    def find_percentiles(self) -> dict[str, float] | None:
        """Return the percentiles; None without a value."""
        values = sorted(self._values)
        if not values:
            return None
        last = len(values) - 1
        return {name: values[min(last, int(q * len(values)))] for name, q in PERCENTILES.items()}


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
        self._waiting: list[tuple[float, int, int, int, Sequence[Tokens], bool]] = []
        """The numbers of the rollouts that are not in the sums yet."""
        self._reset()

    def _reset(self) -> None:
        self._count = self._tokens = self._prompt_tokens = self._cached_tokens = 0
        self._cut = self._continued = self._not_believed = 0
        self._latency, self._first_token, self._lengths = Figures(), Figures(), Figures()
        self._retries: Counter[str] = Counter()
        self._versions: Counter[int | None] = Counter()
        self._prompt_bits: Counter[int] = Counter()
        self._sampled_bits: Counter[int] = Counter()

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
        self._waiting.append(
            (seconds, prompt_tokens, cached_tokens, tokens, versions, is_continued)
        )
        if self._timer is None:
            self._set_timer()
        elif len(self._waiting) >= _MOST_WAITING:
            self._sum_up()

    def _sum_up(self) -> None:
        """Add the rollouts that wait to the sums; without a step of Python for each."""
        if not self._waiting:
            return
        seconds, prompts, cached, lengths, versions, continued = zip(*self._waiting, strict=True)
        self._waiting.clear()
        self._count += len(seconds)
        self._tokens += sum(lengths)
        self._prompt_tokens += sum(prompts)
        self._cached_tokens += sum(cached)
        self._continued += sum(continued)
        for (version, count), times in Counter(chain.from_iterable(versions)).items():
            self._versions[version] += count * times
        self._latency.add(*seconds)
        self._lengths.add(*lengths)
        self._prompt_bits.update(map(int.bit_length, prompts))
        self._sampled_bits.update(map(int.bit_length, lengths))

    def add_first_token(self, seconds: float) -> None:
        self._first_token.add(seconds)
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
        self._sum_up()
        now = time.monotonic()
        fields = {
            "seconds": now - self._began,
            "count": self._count,
            "tokens": self._tokens,
            "prompt_tokens": self._prompt_tokens,
            "cached_tokens": self._cached_tokens,
            "latency": self._latency.find_percentiles(),
            "first_token": self._first_token.find_percentiles(),
            "lengths": self._lengths.find_percentiles(),
            "retries": dict(self._retries),
            "cut": self._cut,
            "continued": self._continued,
            "not_believed": self._not_believed,
            "versions": {str(version): count for version, count in self._versions.items()},
            "histograms": {"prompt": self._prompt_bits, "sampled": self._sampled_bits},
        }
        self._began = now
        self._reset()
        return fields
