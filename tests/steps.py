"""The steps of a trainer, in the record of its run and in the run's report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rollway.observe.read import Run
from tests.conftest import Cli

PARTS = {"generate", "train", "publish", "paused"}
"""What is known of a trainer by its refits and rollouts alone: no time is known to be a wait."""


def read_steps(directory: Path, since: float = 0.0) -> list[dict[str, Any]]:
    """Return the steps that a run recorded after a moment."""
    entries = Run(directory).read()
    return [entry for entry in entries if entry["kind"] == "trainer" and entry["t"] >= since]


def check_steps(
    directory: Path,
    numbers: Sequence[int],
    cli: Cli,
    since: float = 0.0,
    *,
    generates: bool = True,
) -> None:
    """Assert that these steps are recorded, each divided without a rest, and that the report of
    the run shows them. `generates` says whether the trainer's process has the rollouts."""
    steps = read_steps(directory, since)
    print(
        "\n".join(
            f"step {step['step']}: {step['seconds']:.2f} s, {step['parts']}" for step in steps
        )
    )
    assert [step["step"] for step in steps] == list(numbers)
    for step in steps:
        assert step["parts"].keys() == PARTS
        assert sum(step["parts"].values()) == pytest.approx(step["seconds"], abs=1e-6)
        empty = {name for name, seconds in step["parts"].items() if seconds <= 0}
        assert empty <= (set() if generates else {"generate"}), step["parts"]
    check_report(directory, cli)


def check_report(directory: Path, cli: Cli) -> None:
    """Assert that `rollway report` has the figures of all steps of a run, and draws them."""
    steps = read_steps(directory)
    ran = cli("report", str(directory), "--json", "--out", "report.html")
    assert ran.returncode == 0, ran.stderr
    result = json.loads(ran.stdout)
    figures = {figure["label"]: figure["value"] for figure in result["runs"][0]["figures"]}
    total = sum(step["seconds"] for step in steps)
    assert figures["trainer's steps"] == len(steps)
    assert figures["step, mean"] == pytest.approx(total / len(steps))
    shares = [value for label, value in figures.items() if label.startswith("of it ")]
    assert len(shares) >= 3 and sum(shares) == pytest.approx(1.0)
    assert "Trainer's steps" in Path(result["file"]).read_text().replace("&#x27;", "'")
