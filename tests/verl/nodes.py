"""Shared by the tests of verl."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.verl.training import HERE, end, environment, output, verl_python


def run(directory: Path, script: str, *words: object) -> None:
    """A script for verl's interpreter, to its end; Ray's processes are in its session."""
    command = [verl_python(), HERE / script, *words]
    with (directory / "output.log").open("wb") as log:
        process = subprocess.Popen(
            [str(word) for word in command],
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
    assert process.returncode == 0, output(directory)[-6000:]
