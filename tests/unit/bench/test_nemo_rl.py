"""What `rollway bench nemo-rl` computes and prints, without engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollway.bench import nemo_rl
from rollway.bench.nemo_rl import LIMITS, PARTS, NemoRlBench, format_figures, plan_bytes
from rollway.bench.nemo_rl_fanout import measure_fanout
from rollway.bench.nemo_rl_refit import compare_refits
from rollway.bench.nemo_rl_traffic import _run_rounds, compare_rates
from rollway.cli import main
from tests.unit.weights.nixl_pieces import nixl

ROUND = {
    "stock": {"seconds": 3.0, "pause": 2.0},
    "files": {"seconds": 4.0, "pause": 0.2},
    "shm": {"seconds": 1.0, "pause": 0.1},
    "nixl": {"seconds": 1.5, "pause": 0.3},
}


def no_model() -> Path:
    raise AssertionError("no part of this test needs a model")


def test_the_fastest_transport_is_compared_with_files_and_its_pause_with_stock() -> None:
    figures = compare_refits([ROUND], 500)
    assert figures["fastest"] == "shm"
    assert figures["refit_ratio"] == 0.25 and figures["pause_ratio"] == 0.05


def test_ratios_are_taken_within_a_round() -> None:
    """Across rounds, a machine that was faster in one of them would look like a faster arm."""
    rounds = [{"with": 90.0, "without": 100.0}, {"with": 45.0, "without": 50.0}]
    figures = compare_rates(rounds, "with", "without")
    assert figures["ratios"] == [0.9, 0.9] and figures["ratio"] == 0.9


def test_arms_take_turns_and_the_warm_up_does_not_count() -> None:
    order: list[str] = []
    kept: list[int] = []

    def run(arm: str, number: int) -> float:
        order.append(arm)
        return 1.0

    arms = {"a": lambda number: run("a", number), "b": lambda number: run("b", number)}
    _run_rounds(arms, 3, lambda row: None, lambda rounds: kept.append(len(rounds)))
    assert order == ["b", "a", "a", "b", "b", "a", "a", "b"]
    assert kept == [1, 2, 3]  # after every round, so that an interrupted run has them


def test_no_byte_is_moved_that_is_not_needed() -> None:
    figures = plan_bytes()
    assert [row["ratio"] for row in figures["layouts"].values()] == [1.0] * 4
    assert all(row["moved"] == row["needed"] for row in figures["layouts"].values())


@nixl
def test_the_trainer_sends_a_version_once_to_receivers_in_waves() -> None:
    figures: dict[str, Any] = {}
    measure_fanout(lambda _: None, figures, receivers=6)
    assert figures["trainer_versions"]["at_once"] == 6.0
    assert figures["ratio"] <= LIMITS["fanout"][1]


def test_the_table_has_a_row_for_each_figure() -> None:
    rate = {"tokens_per_second": {"frontend": 100.0, "gateway": 95.0}, "ratio": 0.95}
    figures = {
        "limits": NemoRlBench(no_model, print).as_json()["limits"],
        "refit": compare_refits([ROUND], 500),
        "fanout": {
            "receivers": 128,
            "trainer_versions": {"at_once": 128.0, "in_waves": 1.0},
            "ratio": 1.0,
        },
        "gym": rate,
        "sampler": {},  # interrupted in its first round
        "is_interrupted": True,
    }
    text = format_figures(figures)
    assert "| refit of 3 workers, `files` and `shm`, s | 4 | 1 | 0.25 | at most 0.5 |" in text
    assert "| pause, Dynamo's update and `shm`, s | 2 | 0.1 | 0.05 | at most 0.2 |" in text
    assert "for 128 receivers | 128 | 1 | 1 | at most 2 |" in text
    assert "| 100 | 95 | 0.95 | at least 0.9 |" in text
    assert "sampler" not in text and text.endswith("rounds that it finished.")


def test_an_interrupted_run_prints_what_it_has(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt() -> dict[str, Any]:
        raise KeyboardInterrupt

    monkeypatch.setattr(nemo_rl, "plan_bytes", interrupt)
    assert main(["bench", "nemo-rl", "--only", "bytes", "--json"]) == 130
    assert json.loads(capsys.readouterr().out)["is_interrupted"] is True


def test_an_unknown_part_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "nemo-rl", "--only", "everything"]) == 2
    assert ", ".join(PARTS) in capsys.readouterr().err
