"""The TOMLs of examples and deploy, read by prime-rl's own config classes, from a checkout."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.prime_rl.environment import ROOT, SOURCE

SCRIPT = Path(__file__).with_name("validate_configs.py")


@pytest.mark.parametrize("folder", ["examples/prime_rl", "deploy/prime-rl/config"])
def test_prime_rl_accepts_the_examples(python: Path, folder: str) -> None:
    """It refuses unknown keys, so a wrong one would end a run at its start."""
    source = os.environ.get(SOURCE)
    if not source:
        pytest.skip(f"{SOURCE} names no checkout of prime-rl, which is not on a package index")
    paths = [f"{source}/src", f"{source}/packages/prime-rl-configs/src"]
    files = [str(ROOT / folder / f"{name}.toml") for name in ("orchestrator", "trainer")]
    ran = subprocess.run(
        [str(python), str(SCRIPT), *files],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.split() == ["orchestrator.toml", "trainer.toml"]
