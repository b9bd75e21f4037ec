"""A pool on two nodes: both serve, both are refitted, and deaths have the right effect."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Footprint
from tests.verl.training import HERE, RAY_DIRECTORY, end, environment, read_output, verl_python

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(900)]


def run(directory: Path, script: str, *arguments: object) -> None:
    """Run a script in verl's environment to its end; Ray's processes are in its session."""
    command = [verl_python(), HERE / script, *arguments]
    with (directory / "output.log").open("wb") as log:
        process = subprocess.Popen(
            [str(part) for part in command],
            cwd=directory,
            env={**environment(directory), "ENGINE_PYTHON": sys.executable},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        process.wait(800)
    finally:
        end(process)
    assert process.returncode == 0, read_output(directory)[-6000:]


def test_a_pool_over_two_nodes_from_start_to_end(
    tmp_path: Path, base_model: Path, footprint: Footprint
) -> None:
    (tmp_path / "weights").mkdir()
    run(tmp_path, "pool_on_two_nodes.py", base_model, tmp_path, RAY_DIRECTORY)
    seen = json.loads((tmp_path / "seen.json").read_text())
    print(json.dumps(seen))
    assert len(set(seen["addresses"])) == 2
    assert sorted(seen["roles"][0]) == ["frontend", "service", "worker"]
    assert seen["roles"][1] == ["worker"]
    assert seen["before"] == {"versions": [0], "workers": 2}
    assert seen["after"] == {"versions": [1], "workers": 2}
    assert (seen["step_before"], seen["step_after"], seen["step_without_it"]) == (None, 7, 7)
    assert "The actor that ran the engines of node" in seen["cause"]
    assert list((tmp_path / "logs" / "hybrid" / "node-1").glob("*.log"))
    assert footprint.settle(90) == {}
