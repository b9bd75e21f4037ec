"""Runs whose processes are killed in the middle of a step."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from rollway.stack.state import list_stacks
from tests.conftest import Footprint
from tests.verl.modes import agrees, mode_settings
from tests.verl.training import end, read_output, read_steps, start
from tests.verl.waiting import wait_for

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.mark.parametrize(
    ("mode", "pool", "role"),
    [
        ("sync", "hybrid", "worker"),
        ("sync", "hybrid", "frontend"),
        ("colocate_async", "hybrid", "worker"),
        ("separate_async", "standalone", "worker"),
        ("separate_async", "hybrid", "worker"),  # the only engine of its pool
    ],
)
def test_a_run_survives_the_death_of_a_worker_or_frontend(
    tmp_path: Path, base_model: Path, footprint: Footprint, mode: str, pool: str, role: str
) -> None:
    overrides = mode_settings(tmp_path, base_model, mode)
    process = start(tmp_path, {**overrides, "trainer.total_training_steps": 6})
    try:
        wait_for(lambda: len(read_steps(tmp_path)) >= 1, 600, tmp_path)
        (stack,) = (stack for stack in list_stacks() if f"verl-{pool}" in stack.name)
        victim = next(process for process in stack.processes if process.role == role)
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
    process = start(
        tmp_path,
        {**mode_settings(tmp_path, base_model, "sync"), "trainer.total_training_steps": 50},
    )
    try:
        wait_for(lambda: len(read_steps(tmp_path)) >= 1, 600, tmp_path)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert footprint.settle(90) == {}
    finally:
        end(process)
