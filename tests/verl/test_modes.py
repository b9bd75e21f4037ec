"""Unmodified verl trains on Rollway, and its own metrics show that it samples from the policy.

verl recomputes the log-probs of every sampled token with the trainer's weights. They agree with the
engine's only if every engine has exactly these weights, of the last step, when it samples. So no
rollout begins before the weights of its step have arrived (`num_warmup_batches=0`), and steps are
so large that old weights would show; the control verifies that.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rollway.observe.read import list_runs
from tests.conftest import Cli, Footprint
from tests.steps import check_steps
from tests.verl.modes import STEPS, agrees, run, summary

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
def test_engines_sample_from_the_trainers_policy(
    tmp_path: Path, base_model: Path, footprint: Footprint, own_home: Path, cli: Cli, mode: str
) -> None:
    training = run(tmp_path, base_model, mode)
    assert training.returncode == 0, training.output[-6000:]
    assert len(training.steps) == STEPS, summary(training)
    assert all(agrees(step) for step in training.steps), summary(training)
    assert footprint.settle() == {}
    if mode == "sync":  # the others generate and train at once
        (record,) = list_runs(own_home / "runs")
        check_steps(record, range(1, STEPS + 1), cli)


def test_without_updates_the_same_metrics_fail(tmp_path: Path, base_model: Path) -> None:
    training = run(tmp_path, base_model, "sync", modules=["verl_frozen"])
    assert training.returncode == 0, training.output[-6000:]
    first, *later = training.steps
    assert agrees(first), summary(training)  # both start from the same checkpoint
    assert len(later) == STEPS - 1
    assert not any(agrees(step) for step in later), summary(training)
