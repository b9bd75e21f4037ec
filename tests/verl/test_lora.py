"""verl trains a LoRA adapter: the base goes to the engines once, the adapter at every step.

The same metrics as for whole weights: the trainer's log-probs are those of base and adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.conftest import Footprint
from tests.verl.modes import STEPS, agrees, summary
from tests.verl.training import Training, prepare, settings, train

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(1200)]


def run(directory: Path, base_model: Path, modules: Sequence[str] = ()) -> Training:
    prepare(directory, base_model)
    overrides = {
        **settings(directory, trainer_gpus=2, ray_gpus=2, ray_cpus=24),
        "actor_rollout_ref.model.lora_rank": 8,
        "actor_rollout_ref.model.lora_alpha": 16,
    }
    return train(directory, overrides, modules)


def test_engines_sample_with_the_trainers_adapter(
    tmp_path: Path, base_model: Path, footprint: Footprint
) -> None:
    training = run(tmp_path, base_model)
    assert training.returncode == 0, training.output[-6000:]
    assert len(training.steps) == STEPS, summary(training)
    assert all(agrees(step) for step in training.steps), summary(training)
    assert footprint.settle() == {}


def test_without_adapters_the_same_metrics_fail(tmp_path: Path, base_model: Path) -> None:
    training = run(tmp_path, base_model, modules=["verl_frozen"])
    assert training.returncode == 0, training.output[-6000:]
    first, *later = training.steps
    assert agrees(first), summary(training)  # a new adapter changes nothing
    assert len(later) == STEPS - 1
    assert not any(agrees(step) for step in later), summary(training)
