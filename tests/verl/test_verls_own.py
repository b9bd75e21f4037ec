"""Tests that run in verl's environment: verl's own that need no GPU, and ours that need verl."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.verl.training import ROOT, environment, verl_python

FILES = [
    "checkpoint_engine/test_global_steps_on_cpu.py",
    "experimental/agent_loop/test_agent_loop_extra_fields_schema_on_cpu.py",
    "experimental/agent_loop/test_audio_server_contract_on_cpu.py",
    "experimental/agent_loop/test_tool_call_id_on_cpu.py",
    "plugin/test_platform_abstraction.py",
    "single_controller/test_ray_utils_on_cpu.py",
]


@pytest.mark.slow
def test_verls_own_tests_pass(tmp_path: Path) -> None:
    python = str(verl_python())
    where = "import importlib.util as u; print(u.find_spec('verl').submodule_search_locations[0])"
    located = subprocess.run([python, "-c", where], capture_output=True, text=True, cwd=tmp_path)
    tests = Path(located.stdout.strip()).parent / "tests"  # verl's wheel contains them
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    result = subprocess.run(
        [*command, *(str(tests / name) for name in FILES)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stdout[-6000:]


def test_the_parts_of_retool_that_need_verl(tmp_path: Path) -> None:
    """They are skipped without verl. The conftest needs packages that verl's environment lacks."""
    command = [str(verl_python()), "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    result = subprocess.run(
        [*command, "--noconftest", "-o", "addopts=", "tests/unit/test_retool_verl.py"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(tmp_path),
    )
    assert result.returncode == 0 and "skipped" not in result.stdout, result.stdout[-6000:]
