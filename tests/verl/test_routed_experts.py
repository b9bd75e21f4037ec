"""Routed experts through verl's client and its conversion, without an engine."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.verl.training import HERE, environment, verl_python


@pytest.mark.slow
def test_every_row_belongs_to_its_token_even_after_aborts(tmp_path: Path) -> None:
    ran = subprocess.run(
        [str(verl_python()), str(HERE / "plugin" / "verl_experts.py")],
        env=environment(tmp_path),
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr[-6000:]
    assert ran.stdout.endswith("300 answers\n")
