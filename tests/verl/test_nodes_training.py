"""verl's own trainer with its ranks, and so its rollout replicas, on two nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Footprint
from tests.verl.test_modes import agrees
from tests.verl.test_nodes import run
from tests.verl.training import RAY_DIRECTORY, prepare, read_steps, settings

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(900)]


def test_verl_trains_on_two_nodes(tmp_path: Path, base_model: Path, footprint: Footprint) -> None:
    prepare(tmp_path, base_model)
    (tmp_path / "weights").mkdir()
    common = settings(tmp_path, trainer_gpus=1, ray_gpus=0, ray_cpus=0)
    overrides = {name: value for name, value in common.items() if "ray_init" not in name}
    overrides["trainer.nnodes"] = 2
    dynamo = "+actor_rollout_ref.rollout.engine_kwargs.dynamo"
    overrides[f"{dynamo}.weights_dir"] = tmp_path / "weights"
    arguments = [f"{name}={value}" for name, value in overrides.items()]
    run(tmp_path, "on_two_nodes.py", RAY_DIRECTORY, *arguments)
    assert len(read_steps(tmp_path)) == 3
    assert all(agrees(step) for step in read_steps(tmp_path)), read_steps(tmp_path)
    assert list((tmp_path / "logs" / "hybrid" / "node-1").glob("*.log"))
    assert footprint.settle(90) == {}
