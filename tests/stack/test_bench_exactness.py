"""`rollway bench exactness` with a real engine on a CPU: both dtypes, and the refusal."""

from __future__ import annotations

import json

import pytest

from tests.conftest import Cli, Footprint

# Soaks: tests/unit/bench/test_exactness.py keeps the promise with a stand-in for the engine.
pytestmark = [pytest.mark.stack, pytest.mark.soak]


@pytest.mark.parametrize(("dtype", "largest"), [("bfloat16", 0.02), ("float32", 1e-8)])
def test_causes_are_told_apart(cli: Cli, footprint: Footprint, dtype: str, largest: float) -> None:
    done = cli(
        "bench", "exactness", "--dtype", dtype, "--rollouts", "8", "--tokens", "32", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    figures = json.loads(done.stdout)
    rows = figures["rows"]
    assert figures["cause"] == "rounding"
    for name in ("batching", "engine", "trainer", "total"):
        assert rows[name]["k3"] < largest
    # vLLM on a CPU scores its own tokens in equal bits: even a small step shows.
    assert figures["is_bit_equal"]
    assert figures["told_apart_by_engine"] == dict.fromkeys(figures["told_apart_by_engine"], True)
    assert figures["told_apart_by_trainer"]["stale, other weights"]
    assert rows["stale, other weights"]["k3"] > 20 * rows["total"]["k3"]
    assert rows["trainer: temperature 0.7, divided by it"]["k3"] < largest
    assert rows["trainer: temperature 0.7, ignored"]["k3"] > largest
    assert rows["trainer: top-k and top-p ignored"]["k3"] > largest
    assert footprint.settle() == {}
