"""verl trains a LoRA adapter: the base goes to the engines once, the adapter at every step.

The same metrics as for whole weights: the trainer's log-probs are those of base and adapter.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Footprint
from tests.verl.test_modes import STEPS, agrees, summary
from tests.verl.training import prepare, settings, train

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(1200)]


def test_engines_sample_with_the_trainers_adapter(
    tmp_path: Path, base_model: Path, footprint: Footprint
) -> None:
    prepare(tmp_path, base_model)
    overrides = {
        **settings(tmp_path, trainer_gpus=2, ray_gpus=2, ray_cpus=24),
        "actor_rollout_ref.model.lora_rank": 8,
        "actor_rollout_ref.model.lora_alpha": 16,
    }
    training = train(tmp_path, overrides)
    assert training.returncode == 0, training.output[-6000:]
    assert len(training.steps) == STEPS, summary(training)
    assert all(agrees(step) for step in training.steps), summary(training)
    assert footprint.settle() == {}
