"""Curator's pipelines on our server, each driver in a process of its own, on a Ray cluster.

CI runs `test_one_pipeline`; the others take minutes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.curator.conftest import ROOT, run_cluster
from tests.footprint import Footprint

pytestmark = [pytest.mark.stack, pytest.mark.timeout(900)]
EXECUTORS = ("ray-data", "ray-actor-pool", "xenna")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A cluster with a dashboard: the monitor of Xenna lists actors with it, and fails without."""
    with run_cluster(tmp_path_factory.mktemp("cluster-home"), dashboard=True) as address:
        yield address


def test_one_pipeline(cluster: str, tmp_path: Path, footprint: Footprint) -> None:
    run_pipelines("light", tmp_path, "ray-data")
    assert not footprint.settle(60)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["light", "vllm"])
def test_all_executors(cluster: str, kind: str, tmp_path: Path, footprint: Footprint) -> None:
    run_pipelines(kind, tmp_path, *EXECUTORS)
    assert not footprint.settle(60)


def run_pipelines(kind: str, directory: Path, *executors: str) -> None:
    """Every executor in one driver: start, a pipeline per model, stop, and again."""
    command = [sys.executable, "-m", "tests.curator.driver", kind, str(directory), *executors]
    log = directory / "driver.log"
    with log.open("w") as output:
        driver = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=output, text=True, cwd=ROOT, timeout=800
        )
    assert driver.returncode == 0, log.read_text()[-3000:]
    results = [json.loads(line) for line in driver.stdout.splitlines() if line.startswith("{")]
    assert [result["executor"] for result in results] == list(executors)
    for result in results:
        assert {name: len(rows) for name, rows in result["rows"].items()} == {
            "org-a/tiny": 6,
            "org-b/tiny": 6,
        }
        assert all(row["text"] for rows in result["rows"].values() for row in rows)


@pytest.mark.slow
def test_the_judge_workflow_on_vllm(cluster: str, tmp_path: Path, footprint: Footprint) -> None:
    """It names Curator's own classes, and reaches Rollway by `install`."""
    out = tmp_path / "judged"
    script = (
        "import sys; sys.path.insert(0, 'examples/curator'); import judge; "
        f"judge.judge({str(out)!r})"
    )
    log = tmp_path / "judge.log"
    with log.open("w") as output:
        result = subprocess.run(
            [sys.executable, "-c", script], stdout=output, stderr=output, cwd=ROOT, timeout=800
        )
    assert result.returncode == 0, log.read_text()[-3000:]
    rows = [json.loads(line) for file in out.glob("*.jsonl") for line in file.open()]
    assert len(rows) == 4
    assert {row["clarity"]["clear"]["score"] for row in rows} <= {1, 2}
    assert not footprint.settle(60)


def test_the_examples_cluster_starts_where_a_token_is_saved(tmp_path: Path) -> None:
    """As in the home of anybody who has called `ray.init` with Ray 2.60."""
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("0" * 64)
    script = (
        "import sys; sys.path.insert(0, 'examples/curator'); import qa, ray; "
        "client = qa.start_ray(2); ray.init(); print(ray.cluster_resources()['GPU']); "
        "ray.shutdown(); client.stop()"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_A")}
    binaries = f"{Path(sys.executable).parent}:{env['PATH']}"
    result = subprocess.run(
        [sys.executable, "-c", script],
        env={**env, "HOME": str(tmp_path), "PATH": binaries},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert "2.0" in result.stdout.splitlines(), result.stderr[-3000:]
