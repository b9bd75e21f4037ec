"""A pool on two nodes: both serve, both are refitted, and deaths have the right effect."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Footprint
from tests.verl.nodes import run
from tests.verl.training import RAY_DIRECTORY

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(900)]


def run_pool(directory: Path, model: Path, ranks: int) -> dict[str, Any]:
    (directory / "weights").mkdir()
    run(directory, "pool_on_two_nodes.py", model, directory, RAY_DIRECTORY, ranks)
    seen: dict[str, Any] = json.loads((directory / "seen.json").read_text())
    print(json.dumps(seen))
    return seen


def test_a_pool_over_two_nodes_from_start_to_end(
    tmp_path: Path, base_model: Path, footprint: Footprint
) -> None:
    seen = run_pool(tmp_path, base_model, 1)
    assert len(set(seen["addresses"])) == 2
    assert sorted(seen["roles"][0]) == ["frontend", "service", "worker"]
    assert seen["roles"][1] == ["worker"]
    assert seen["before"] == {"versions": [0], "workers": 2}
    assert seen["after"] == {"versions": [1], "workers": 2}
    assert (seen["step_before"], seen["step_after"], seen["step_without_it"]) == (None, 7, 7)
    assert "The actor that ran the engines of node" in seen["cause"]
    assert list((tmp_path / "logs" / "hybrid" / "node-1").glob("*.log"))
    assert footprint.settle(90) == {}


def test_the_ranks_of_a_replica_over_two_nodes_have_the_trainers_weights(
    tmp_path: Path, base_model: Path, footprint: Footprint
) -> None:
    seen = run_pool(tmp_path, base_model, 2)
    assert sorted(seen["roles"][0]) == ["frontend", "service"]
    assert seen["roles"][1:] == [["worker"], ["worker"]]
    assert seen["before"] == {"versions": [0], "workers": 1}
    assert seen["after"] == {"versions": [1], "workers": 1}
    assert (seen["step_before"], seen["step_after"], seen["step_healed"]) == (None, 7, 7)
    assert max(seen["error"], seen["error_healed"]) < 1e-4
    assert footprint.settle(90) == {}
