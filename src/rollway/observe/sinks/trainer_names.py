"""The names that users of trainers know, as NeMo-RL logs them, computed from a record.

    sample ───► values of this stretch ──┐
    rollouts ─► lengths of it ───────────┼── refit: the stretch ends
    trainer ◄── means by worker, and on average, of the stretch before the last refit

`TRAINER_NAMES` (rollway.observe.metrics) are always there: without a sample an average is NaN,
which plots as a gap. Of a counter, the last value counts, of a gauge the mean. Lengths are counts
by powers of two; no whole rollout is ever logged.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from rollway.observe.metrics import (
    LENGTHS,
    TRAINER_NAMES,
    TRAINER_PREFIX,
    find_metric,
    make_labels_key,
    parse_labels_key,
)
from rollway.observe.record import Entry
from rollway.observe.series import Values

_MOST_BITS = 40
Histogram = dict[int, int]
"""Counts by the number of bits of a length: 7 is 64 to 127."""


@dataclass(slots=True)
class _Stretch:
    """What was sampled between two refits: sum, count and last value, by name and worker."""

    samples: dict[str, dict[str, tuple[float, int, float]]] = field(default_factory=dict)
    lengths: dict[str, Counter[int]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.samples or self.lengths)


class TrainerNames:
    """Collects a stretch between two refits at a time."""

    def __init__(self) -> None:
        self._now, self._before = _Stretch(), _Stretch()

    def add(self, entry: Entry) -> None:
        """Take an entry; one that has nothing to do with these names changes nothing."""
        match entry["kind"]:
            case "sample":
                self._add_sample(entry["values"])
            case "rollouts":
                for name, counts in (entry.get("histograms") or {}).items():
                    if name in LENGTHS:
                        lengths = self._now.lengths.setdefault(name, Counter())
                        lengths.update({b: n for b, n in counts.items() if 0 <= b <= _MOST_BITS})
            case "refit" if self._now:
                self._before, self._now = self._now, _Stretch()

    def _add_sample(self, values: Mapping[str, Mapping[str, float]]) -> None:
        for name, source in TRAINER_NAMES.items():
            workers = self._now.samples.setdefault(name, {})
            for key, value in values.get(source, {}).items():
                worker = parse_labels_key(key).get("worker", "")
                total, count, _ = workers.get(worker, (0.0, 0, 0.0))
                workers[worker] = (total + value, count + 1, value)

    def take(self) -> tuple[Values, dict[str, Histogram]]:
        """Return the values and histograms of the step that ends, and forget them."""
        stretch = self._before or self._now
        if stretch is self._now:
            self._now = _Stretch()
        self._before = _Stretch()
        values: Values = {}
        for name, source in TRAINER_NAMES.items():
            metric = find_metric(source)
            is_counter = metric is not None and metric.kind == "counter"
            figures = {
                worker: last if is_counter else total / count
                for worker, (total, count, last) in stretch.samples.get(name, {}).items()
            }
            average = sum(figures.values()) / len(figures) if figures else math.nan
            values[f"{TRAINER_PREFIX}average_{name}"] = {"": average}
            values[f"{TRAINER_PREFIX}per_worker_{name}"] = {
                make_labels_key(worker=worker): value for worker, value in figures.items()
            }
        lengths = {LENGTHS[name]: dict(counts) for name, counts in stretch.lengths.items()}
        return values, lengths


def list_edges(histogram: Histogram) -> tuple[list[int], list[int]]:
    """Return the counts of a histogram, and the lengths between which they are: one more."""
    first, last = min(histogram), max(histogram)
    counts = [histogram.get(bits, 0) for bits in range(first, last + 1)]
    return counts, [2**bits >> 1 for bits in range(first, last + 2)]
