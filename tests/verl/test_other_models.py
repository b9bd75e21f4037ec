"""Teachers and reward models that Rollway serves to verl, in other pools than the policy's.

The teacher is the model that the policy starts from. So at the first step both give every sampled
token the same probability; later, after large steps, they do not.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.conftest import Footprint
from tests.verl.test_modes import STEPS, agrees, summary
from tests.verl.training import HERE, prepare, settings, train

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(1200)]

APART = "actor/distillation/abs_loss"


def test_a_teacher_scores_what_the_policy_samples(
    tmp_path: Path, base_model: Path, footprint: Footprint
) -> None:
    prepare(tmp_path, base_model)
    teacher = "distillation.teacher_models.teacher_model"
    overrides = {
        **settings(tmp_path, trainer_gpus=1, ray_gpus=2, ray_cpus=32),
        "distillation.enabled": True,
        "distillation.nnodes": 1,
        "distillation.n_gpus_per_node": 1,
        "distillation.distillation_loss.loss_mode": "k3",
        f"{teacher}.model_path": tmp_path / "model",
        f"{teacher}.inference.tensor_model_parallel_size": 1,
        f"{teacher}.inference.max_num_seqs": 32,
        f"{teacher}.inference.free_cache_engine": False,
        f"+{teacher}.inference.engine_kwargs.dynamo.python": sys.executable,
        f"+{teacher}.inference.engine_kwargs.dynamo.log_dir": tmp_path / "logs",
    }
    training = train(tmp_path, overrides)
    assert training.returncode == 0, training.output[-6000:]
    assert len(training.steps) == STEPS, summary(training)
    assert all(agrees(step) for step in training.steps), summary(training)
    first, *later = [step[APART] for step in training.steps]
    assert first < 1e-6 < 1e-3 < min(later), [first, *later]
    assert footprint.settle() == {}


def test_a_reward_model_answers_the_reward_function(
    tmp_path: Path, base_model: Path, footprint: Footprint
) -> None:
    prepare(tmp_path, base_model)
    judge = "reward.reward_model"
    overrides = {
        **settings(tmp_path, trainer_gpus=1, ray_gpus=2, ray_cpus=32),
        "trainer.total_training_steps": 1,
        "reward.custom_reward_function.path": HERE / "plugin" / "verl_judge.py",
        f"{judge}.enable": True,
        f"{judge}.enable_resource_pool": True,
        f"{judge}.nnodes": 1,
        f"{judge}.n_gpus_per_node": 1,
        f"{judge}.model_path": tmp_path / "model",
        f"{judge}.rollout.name": "dynamo",
        f"{judge}.rollout.dtype": "float32",
        f"{judge}.rollout.tensor_model_parallel_size": 1,
        f"{judge}.rollout.prompt_length": 192,
        f"{judge}.rollout.response_length": 16,
        f"{judge}.rollout.max_num_seqs": 32,
        f"{judge}.rollout.free_cache_engine": False,
        f"+{judge}.rollout.engine_kwargs.dynamo.python": sys.executable,
        f"+{judge}.rollout.engine_kwargs.dynamo.served_model_name": "judge",
    }
    training = train(tmp_path, overrides)
    assert training.returncode == 0, training.output[-6000:]
    assert len(training.steps) == 1 and agrees(training.steps[0]), summary(training)
    # One answer for each of four rollouts of four prompts, sixteen digits each.
    assert len(re.findall(r"the judge says: '\d{16}'", training.output)) == 16
    assert footprint.settle() == {}
