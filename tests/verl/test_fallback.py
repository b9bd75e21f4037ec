"""A stack that cannot start, here without Dynamo: an error, or verl's own rollout with `fallback`.

verl's own vLLM is a stand-in here; verl's trainer, and its way to vLLM, are real.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Footprint
from tests.verl.training import prepare, settings, train, verl_python

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(600)]

CAUSE = "Dynamo is not installed in the Python that runs the workers"


def without_dynamo(directory: Path, base_model: Path) -> dict[str, Any]:
    prepare(directory, base_model)
    overrides = settings(directory, trainer_gpus=2, ray_gpus=2, ray_cpus=24)
    python = "+actor_rollout_ref.rollout.engine_kwargs.dynamo.python"
    return {**overrides, python: verl_python(), "trainer.total_training_steps": 2}


def test_without_a_fallback_the_run_ends_with_the_cause(
    tmp_path: Path, base_model: Path, footprint: Footprint
) -> None:
    overrides = without_dynamo(tmp_path, base_model)
    training = train(tmp_path, overrides, ["verl_stand_in_vllm"], seconds=300)
    assert training.returncode != 0
    assert CAUSE in training.output
    assert "THIS RUN DOES NOT USE DYNAMO" not in training.output
    assert "stand-in for verl's vLLM" not in training.output
    assert footprint.settle() == {}


def test_the_fallback_uses_verls_own_rollout(tmp_path: Path, base_model: Path) -> None:
    overrides = without_dynamo(tmp_path, base_model)
    overrides["+actor_rollout_ref.rollout.engine_kwargs.dynamo.fallback"] = "vllm"
    training = train(tmp_path, overrides, ["verl_stand_in_vllm"], seconds=400)
    output = training.output
    assert training.returncode == 0, output[-6000:]
    assert re.search(rf"THIS RUN DOES NOT USE DYNAMO\..* The cause: .*{CAUSE}", output)
    for rank in range(2):  # every rank sends its weights, as verl's own do
        assert f"stand-in for verl's vLLM: replica {rank} serves" in output
        for step in range(3):
            assert re.search(rf"vLLM: rank {rank} had [1-9]\d* tensors of {step}\b", output)
    assert len(training.steps) == 2
