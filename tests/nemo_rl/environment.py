"""Where NeMo-RL is on this machine, and how its Python is run."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SOURCE = "ROLLWAY_NEMO_RL_SRC"
"""Environment variable: a checkout of NeMo-RL, which is on no package index."""
RECIPE = "examples/configs/grpo_math_1B_dynamo.yaml"
"""NeMo-RL's own recipe for its Dynamo backend, in a checkout."""
PYTHON = "ROLLWAY_NEMO_RL_PYTHON"
"""Environment variable: the interpreter that has what NeMo-RL imports, if it is not that of
.venv-nemo-rl."""


def find_source() -> Path:
    """Return the checkout; skip the test without one."""
    source = os.environ.get(SOURCE)
    if not source:
        pytest.skip(f"NeMo-RL is on no package index: set {SOURCE} to a checkout")
    return Path(source).resolve()


def find_python() -> Path:
    """Return the interpreter of the trainer; skip the test without one."""
    python = Path(os.environ.get(PYTHON) or ROOT / ".venv-nemo-rl" / "bin" / "python")
    if not python.is_file():
        pytest.skip("there is no .venv-nemo-rl: run `make setup-nemo-rl`")
    return python


def run_script(name: str, question: Any, home: Path, timeout: float = 300.0) -> Any:
    """Run a script of this directory beside NeMo-RL; return what it answers as JSON."""
    source, python = find_source(), find_python()
    paths = [str(ROOT / "src"), str(ROOT), str(source)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "ROLLWAY_HOME": str(home)}
    answer = home / f"{name}.json"
    done = subprocess.run(
        [python, str(HERE / name), str(answer)],
        input=json.dumps(question),
        env=env,
        cwd=home,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return json.loads(answer.read_text())
