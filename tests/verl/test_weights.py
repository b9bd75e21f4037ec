"""Every transport from verl's trainer to engines, in runs of verl's own trainer."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest

from tests.conftest import Footprint
from tests.verl.modes import STEPS, agrees, run, summary
from tests.verl.training import Training, environment, verl_python
from tests.verl.waiting import wait_for

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(1200)]

SEPARATE = "actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.rollway"
SHARED = "actor_rollout_ref.rollout.engine_kwargs.dynamo"


def check(training: Training) -> None:
    assert training.returncode == 0, training.output[-6000:]
    assert len(training.steps) == STEPS, summary(training)
    assert all(agrees(step) for step in training.steps), summary(training)


@pytest.mark.parametrize(
    ("weights", "beside"),
    [("files", "auto"), ("delta", "collective"), ("collective", "files"), ("nixl", "nixl")],
)
def test_separate_engines_receive_every_step(
    tmp_path: Path, base_model: Path, footprint: Footprint, weights: str, beside: str
) -> None:
    """The engine beside the trainer uses another transport."""
    if weights == "nixl":
        needs_nixl()
    published = tmp_path / "published"
    more = {
        f"+{SEPARATE}.weights": weights,
        f"+{SEPARATE}.weights_dir": str(published),
        f"+{SHARED}.weights": beside,
        f"+{SHARED}.weights_dir": str(published),
    }
    check(run(tmp_path, base_model, "separate_async", more=more))
    assert footprint.settle() == {}
    # Published versions are removed with the run.
    wait_for(lambda: not published.exists() or not any(published.iterdir()), 30, tmp_path)


def test_engines_on_the_trainers_machine_receive_deltas(
    tmp_path: Path, base_model: Path, footprint: Footprint
) -> None:
    """The model's head is its embedding, which verl sends twice."""
    directory = tmp_path / "published"
    more = {f"+{SHARED}.weights": "delta", f"+{SHARED}.weights_dir": str(directory)}
    check(run(tmp_path, base_model, "sync", more=more, tied=True))
    assert footprint.settle() == {}


def test_every_rank_sends_its_weights_to_the_engine_beside_it(
    tmp_path: Path, base_model: Path, footprint: Footprint
) -> None:
    check(run(tmp_path, base_model, "sync", more={f"+{SHARED}.weights": "verl_buckets"}))
    assert footprint.settle() == {}


def test_a_trainer_without_nixl_is_named_in_the_error(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from rollway.weights.transports.nixl.agent import _PACKAGES\n"
        "sys.modules.update(dict.fromkeys(_PACKAGES))  # as if they were not installed\n"
        "from rollway.integrations.verl.spec import WeightOptions\n"
        "from rollway.integrations.verl.weights import WeightSender\n"
        "WeightSender(WeightOptions(weights='nixl'), 1)"
    )
    command = [str(verl_python()), "-c", program]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment(tmp_path))
    assert f"trainer's environment ({verl_python()}) has no NIXL" in ran.stderr


def has_nixl() -> bool:
    program = "import importlib.util as u, sys; sys.exit(u.find_spec('nixl_cu12') is None)"
    return not subprocess.run([str(verl_python()), "-c", program]).returncode


def needs_nixl() -> None:
    if not has_nixl() or importlib.util.find_spec("nixl_cu12") is None:
        pytest.skip("there is no NIXL for this machine in both environments")
