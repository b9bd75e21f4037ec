"""`rollway bench router` over light workers and in the replay: ratios and rates, not times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Cli

pytestmark = pytest.mark.stack

LIGHT = Path(__file__).parents[1] / "light" / "router.yaml"
ROOT = LIGHT.parents[2]
ROUTINGS = ["round_robin", "kv", "rollway"]
KEYS = ["workers", "routing", "hit_rate", "ttft_mean_seconds", "makespan_seconds", "requests"]


def bench(cli: Cli, *arguments: str) -> dict[str, Any]:
    done = cli("bench", "router", *arguments, "--json", timeout=200.0)
    assert done.returncode == 0, done.stderr[-2000:]
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def hits(part: list[dict[str, Any]], workers: int) -> dict[str, float]:
    return {row["routing"]: row["hit_rate"] for row in part if row["workers"] == workers}


def test_the_preset_hits_more_than_round_robin_live_and_in_the_replay(cli: Cli) -> None:
    # Fast prompts: this test checks where requests go.
    faster = "models.0.env.LIGHT_PREFILL_SECONDS_PER_TOKEN=0.0005"
    report = bench(
        cli, str(LIGHT), "--workers", "4", "--groups", "4",
        "--set", f"models.0.env.PYTHONPATH={ROOT}", "--set", faster,
    )  # fmt: skip
    for part in ("live", "replay"):
        assert [row["routing"] for row in report[part]] == ROUTINGS
        assert all(list(row) == KEYS and row["workers"] == 4 for row in report[part])
        assert all(row["ttft_mean_seconds"] < row["makespan_seconds"] for row in report[part])
        rates = hits(report[part], 4)
        assert 0 < rates["round_robin"] < rates["rollway"] < 1
    assert {row["requests"] for row in report["live"]} == {4 * 8 * 3}
    assert report["preset_hit_rate_at_32"] == {"live": None, "replay": None}
    assert isinstance(report["preset_never_slower"], bool)
    assert report["machine"]["cores"] > 0


def test_the_replay_alone_measures_every_size(cli: Cli) -> None:
    report = bench(cli)
    assert report["live"] == [] and len(report["replay"]) == 4 * len(ROUTINGS)
    # The replay's time is virtual: these figures do not depend on the machine.
    assert report["preset_hit_rate_at_32"]["replay"] >= 0.80
    assert report["preset_worst_ratio"]["ttft"] < 1
    for workers in (4, 8, 16, 32):
        rates = hits(report["replay"], workers)
        assert rates["round_robin"] < rates["rollway"] and rates["kv"] < rates["rollway"]


def test_wrong_input_is_refused_before_anything_starts(cli: Cli) -> None:
    for arguments in (["--workers", "four"], ["--groups", "0"], ["--no-replay"]):
        done = cli("bench", "router", *arguments)
        assert done.returncode == 2 and done.stderr.startswith("rollway: "), arguments
