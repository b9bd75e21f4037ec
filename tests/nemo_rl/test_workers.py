"""NeMo-RL's own `Policy` and worker group on Ray, with workers that publish their shards.

Its policy workers bind themselves to GPUs, so the workers here have their classes and another
`__init__` (`cpu_worker.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.nemo_rl.environment import run_script

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def seen(base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    home = tmp_path_factory.mktemp("home")
    return run_script("drive_workers.py", {"model": str(base_model)}, home)


def test_shards_of_its_workers_are_the_checkpoint(seen: Any) -> None:
    impl = "nemo_rl.models.policy.workers.dtensor_policy_worker.DTensorPolicyWorkerImpl"
    assert impl in seen["bases"]
    assert "rollway.integrations.nemo_rl.publish.ShardPublishing" in seen["bases"]
    # Each rank published what it holds, and nothing of the others.
    assert len(seen["held"]) == 2
    for version in seen["versions"]:
        assert version == {"is_same": True, "bytes": seen["held"]}


@pytest.mark.parametrize(
    ("kind", "name", "base"),
    [
        ("dtensor", "DTensorPolicyWorker", "ShardPublishing"),
        ("dtensor-v2", "DTensorPolicyWorkerV2", "ShardPublishing"),
        ("megatron", "MegatronPolicyWorker", "MegatronShardPublishing"),
    ],
)
def test_classes_run_in_the_environment_of_nemo_rls(
    seen: Any, kind: str, name: str, base: str
) -> None:
    described = seen["classes"][kind]
    assert described["name"] == f"rollway.integrations.nemo_rl.workers.{name}"
    assert described["same_environment"]
    if described["bases"] == ["No module named 'nemo_automodel'"]:
        pytest.skip("nemo_automodel, which the second DTensor worker imports, is not installed")
    order = described["bases"]
    assert order.index(base) < order.index(f"{name}Impl")
