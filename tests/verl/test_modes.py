"""verl, unmodified, trains on Rollway, and its own metrics say that it samples from the policy.

verl computes the log-probs of every sampled token again with the trainer's weights. They agree with
the engine's only if every engine has just these weights, of the last step, when it samples. So no
rollout is begun before the weights of its step are there (`num_warmup_batches=0`), and steps are
so large that old weights could not be taken for new ones; the control shows that.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Footprint
from tests.verl.modes import STEPS, agrees, run, summary

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(1200)]


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
    assert agrees(first), summary(training)  # both began with the same checkpoint
    assert len(later) == STEPS - 1
    assert not any(agrees(step) for step in later), summary(training)
