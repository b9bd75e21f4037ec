"""Runs scripts in verl's environment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.verl.training import HERE, end, environment, read_output, verl_python


def run(directory: Path, script: str, *arguments: object) -> None:
    """Run a script in verl's environment to its end; Ray's processes are in its session."""
    command = [verl_python(), HERE / script, *arguments]
    with (directory / "output.log").open("wb") as log:
        process = subprocess.Popen(
            [str(part) for part in command],
            cwd=directory,
            env={**environment(directory), "ENGINE_PYTHON": sys.executable},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        process.wait(800)
    finally:
        end(process)
    assert process.returncode == 0, read_output(directory)[-6000:]
