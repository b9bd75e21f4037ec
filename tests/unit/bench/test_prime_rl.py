"""What `rollway bench prime-rl` computes and prints, without engines."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from rollway.bench.prime_rl import (
    LIMITS,
    LOADS,
    Load,
    bench_prime_rl,
    format_figures,
    list_runs,
    summarize,
)
from rollway.bench.prime_rl_pause import Seen, compare_pauses
from rollway.errors import UsageError


def test_arms_take_turns_at_being_first() -> None:
    runs = [run for run in list_runs() if run["load"] == "64"]
    firsts = [run["arm"] for run in runs[::2]]
    assert set(firsts) == {"rollway", "dynamo"}
    assert all(a != b for a, b in pairwise(firsts))
    assert len({run["name"] for run in list_runs()}) == len(list_runs())  # sessions of their own


def test_the_warm_up_does_not_count() -> None:
    load = Load("64", 8, 4, rounds=3)
    rates = {("64", n): {"rollway": 90.0, "dynamo": 100.0} for n in range(1, 4)}
    rates["64", 0] = {"rollway": 1.0, "dynamo": 100.0}
    assert summarize(load, rates)["ratio"] == pytest.approx(0.9)


def test_a_pause_is_what_exceeds_the_time_of_a_token() -> None:
    row = {"stock": Seen(0.9, 0.1, 0.8), "rollway": Seen(0.18, 0.1, 1.2)}
    figures = compare_pauses([row], 500)
    assert figures["ratio"] == pytest.approx(0.1) and figures["closed_ratio"] == pytest.approx(1.5)


def test_parts_that_were_not_measured_are_left_out_or_explained() -> None:
    rate = {"tokens_per_second": {"dynamo": 100.0, "rollway": 95.0}, "ratio": 0.95}
    figures = {"limits": LIMITS, "throughput": {load.name: rate for load in LOADS}}
    broadcast = {"seconds": {"broadcast": 2.0, "collective": 1.8}, "ratio": 0.9}
    measured = format_figures({"limits": LIMITS, "broadcast": broadcast})
    assert measured.endswith("| 1.8 | 2 | 0.90 | at least 0.8 |")
    text = format_figures({**figures, "controller": {"skipped": "there is no checkout"}})
    assert "| 512 episodes in flight, tokens/s | 100 | 95 | 0.95 | at least 0.9 |" in text
    assert text.endswith("The controller was not measured: there is no checkout.")
    assert "pause" not in text


async def test_a_missing_environment_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="setup-prime-rl"):
        await bench_prime_rl(tmp_path / "python", tmp_path, tmp_path, print)
