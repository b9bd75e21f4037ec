"""Unmodified verl trains on Rollway, and its own metrics show that it samples from the policy.

verl recomputes the log-probs of every sampled token with the trainer's weights. They agree with the
engine's only if every engine has exactly these weights, of the last step, when it samples. So no
rollout begins before the weights of its step have arrived (`num_warmup_batches=0`), and steps are
so large that old weights would show; the control verifies that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Footprint
from tests.verl.training import Step, Training, prepare, settings, tie_embeddings, train

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(1200)]

CORRELATION = "training/rollout_actor_probs_pearson_corr"
KL = "rollout_corr/k3_kl"
STEPS = 3


def run(
    directory: Path,
    base_model: Path,
    mode: str,
    modules: Sequence[str] = (),
    more: Mapping[str, Any] | None = None,
    *,
    tied: bool = False,
) -> Training:
    prepare(directory, base_model)
    if tied:
        tie_embeddings(directory)
    separate = mode == "separate_async"
    overrides = settings(
        directory,
        trainer_gpus=1 if separate else 2,
        ray_gpus=3 if separate else 2,
        ray_cpus=40 if separate else 24,
    )
    overrides["trainer.v1.trainer_mode"] = mode
    if mode != "sync":
        overrides[f"trainer.v1.{mode}.num_warmup_batches"] = 0
    if separate:
        overrides |= separate_engines()
    return train(directory, {**overrides, **(more or {})}, modules)


def separate_engines() -> dict[str, Any]:
    """Return overrides for two engines on other GPUs, besides the one on the trainer's."""
    rollout = "actor_rollout_ref.rollout"
    return {
        f"{rollout}.nnodes": 1,
        f"{rollout}.n_gpus_per_node": 2,
        f"{rollout}.checkpoint_engine.backend": "rollway",
        f"+{rollout}.checkpoint_engine.engine_kwargs.rollway.weights": "shm",
        "trainer.v1.separate_async.parameter_sync_step": 1,
    }


def agrees(step: Step) -> bool:
    return step[CORRELATION] > 0.99 and step[KL] < 1e-3


def summary(training: Training) -> str:
    rows = [f"{step[CORRELATION]:.6f} {step[KL]:.2e}" for step in training.steps]
    return "\n".join([*rows, training.output[-6000:]])


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
def test_engines_sample_from_the_trainers_policy(
    tmp_path: Path, base_model: Path, footprint: Footprint, mode: str
) -> None:
    training = run(tmp_path, base_model, mode)
    assert training.returncode == 0, training.output[-6000:]
    assert len(training.steps) == STEPS, summary(training)
    assert all(agrees(step) for step in training.steps), summary(training)
    assert footprint.settle() == {}


def test_without_updates_the_same_metrics_fail(tmp_path: Path, base_model: Path) -> None:
    training = run(tmp_path, base_model, "sync", modules=["verl_frozen"])
    assert training.returncode == 0, training.output[-6000:]
    first, *later = training.steps
    assert agrees(first), summary(training)  # both start from the same checkpoint
    assert len(later) == STEPS - 1
    assert not any(agrees(step) for step in later), summary(training)
