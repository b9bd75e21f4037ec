"""Runs whose processes are killed in the middle of a step."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from rollway.stack.state import StackState, list_stacks
from tests.conftest import Footprint
from tests.verl.modes import agrees
from tests.verl.training import end, prepare, read_output, read_steps, settings, start
from tests.verl.waiting import wait_for

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(1200)]


def run_settings(directory: Path, base_model: Path, training_steps: int) -> dict[str, object]:
    prepare(directory, base_model)
    overrides = settings(directory, trainer_gpus=2, ray_gpus=2, ray_cpus=24)
    return {**overrides, "trainer.total_training_steps": training_steps}


def read_stack() -> StackState:
    (only,) = list_stacks()
    return only


@pytest.mark.parametrize("role", ["worker", "frontend"])
def test_a_run_survives_the_death_of_a_worker_or_frontend(
    tmp_path: Path, base_model: Path, footprint: Footprint, role: str
) -> None:
    process = start(tmp_path, run_settings(tmp_path, base_model, 6))
    try:
        wait_for(lambda: len(read_steps(tmp_path)) >= 1, 600, tmp_path)
        victim = next(process for process in read_stack().processes if process.role == role)
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)
        process.wait(600)
    finally:
        end(process)
    assert process.returncode == 0, read_output(tmp_path)[-6000:]
    assert len(read_steps(tmp_path)) == 6
    assert all(agrees(step) for step in read_steps(tmp_path))
    assert footprint.settle(90) == {}


def test_nothing_is_left_when_the_driver_is_killed(
    tmp_path: Path, base_model: Path, footprint: Footprint
) -> None:
    process = start(tmp_path, run_settings(tmp_path, base_model, 50))
    try:
        wait_for(lambda: len(read_steps(tmp_path)) >= 1, 600, tmp_path)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert footprint.settle(90) == {}
    finally:
        end(process)
