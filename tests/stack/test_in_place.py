"""A real engine is refitted by copies into its parameters, as on a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.stack.in_place_engine import STRATEGIES

pytestmark = pytest.mark.stack


def test_every_strategy_serves_the_published_weights(tmp_path: Path) -> None:
    """In a process of its own, because vLLM's settings for the test are of the whole process."""
    command = [sys.executable, "-m", "tests.stack.in_place_engine", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULTS ")]
    assert lines, done.stdout[-2000:] + done.stderr[-4000:]
    results = json.loads(lines[-1].removeprefix("RESULTS "))
    assert results["start"] < 1e-4
    for strategy in (*STRATEGIES, "patch"):
        result = results[strategy]
        assert result["staging"]["state"] == "ready", result
        assert result["swap"]["strategy"] == strategy
        assert ("reload" in result["swap"]["seconds"]) == (strategy == "reload")
        assert result["deviation"] < 1e-4
