"""`rollway bench gpu-engine` with the tiny model on a CPU: what needs a GPU is skipped."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.conftest import Cli, Footprint
from tests.soak import SOAK

pytestmark = pytest.mark.stack
BY_TURNS = ["by-turns"] if SOAK else []
"""It starts another engine; what it computes is in tests/unit/bench/test_gpu_engine.py."""


def test_every_part_runs_or_says_why_not(cli: Cli, footprint: Footprint) -> None:
    only = ["limits", "throughput", "cuda_ipc", "cuda_ipc_in_place", "shm", "delta", "in-flight"]
    done = cli(
        "bench", "gpu-engine", "--model", "tiny", "--rollouts", "4", "--tokens", "48",
        "--repeat", "1", "--steps", "3", "--filler-gib", "1", "--json",
        "--only", *only, "colocated", "stock", "lost", *BY_TURNS, timeout=300.0,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    figures = json.loads(done.stdout)
    assert figures["failed"] == {}
    assert {"cuda_ipc", "cuda_ipc_in_place"} <= figures["skipped"].keys()
    assert figures["limits"]["device_copy_seconds"] > 0
    for name in ("shm", "delta"):
        part = figures[name]
        assert part["check"]["is_of_version"] and part["later"]["paused_seconds"] > 0
        (refit,) = part["refits"]
        assert refit["report"]["workers"][0]["state"] == "serving"
    parts = figures["delta"]["parts"]
    assert parts["seconds"].keys() == {"publish", "compare", "read", "unpack", "write", "sum"}
    assert parts["delta_bytes"] > 0
    assert figures["shm"]["first"]["is_first_of_process"]
    assert not figures["delta"]["first"]["is_first_of_process"]
    (refit,) = figures["in-flight"]["refits"]
    # Cut, continued, and still what the trainer's weights give.
    assert refit["check_of_new_rollouts"]["is_of_version"]
    assert refit["load"]["tokens"] == 4 * 2 * 48
    assert refit["load"]["first_new_token_seconds"] > 0
    assert figures["stock"]["updates"][0]["check"]["is_of_version"]
    if BY_TURNS:
        turns = figures["by-turns"]
        (row,) = turns["rounds"]
        assert turns["ratio"] == row["ratio"] > 0
        parts = {"client", "frontend", "policy-0", "policy-0, engine"}
        assert row["cpu_us_per_token"].keys() == parts
    assert figures["lost"]["tokens_per_hour"].keys() == {"shm", "delta", "in-flight", "stock"}
    # Each refit was printed when it ended: an interrupted run loses nothing.
    assert "shm: {" in done.stderr and "in-flight: {" in done.stderr
    check_turns(figures["colocated"])
    assert footprint.settle() == {}


def check_turns(part: dict[str, Any]) -> None:
    """A trainer and an engine took turns: sleep, train, wake, refit, at both levels."""
    assert "keeps its memory" in part["notes"][0] and part["filler_gib"] == 0
    levels = ("level_1", "level_2")
    for level in levels:
        assert part[level]["is_of_version"] and part[level]["proofs"] == ["parameters"]
        assert [len(part[level]["steps"]), part[level]["mib_per_step"].keys()] == [
            3, {"before", "asleep", "after"},
        ]  # fmt: skip
    versions = [step["version"] for name in levels for step in part[name]["steps"]]
    assert versions == list(range(versions[0], versions[0] + 6))
