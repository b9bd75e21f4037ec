"""Curator's own tests of serving that are about behaviour, with the server replaced by ours.

Neither the wheel nor the sdist has them: $CURATOR_SOURCE names a checkout of Curator 1.4.0. Left
out are tests of Curator's private parts: its backend's methods, its placement and subprocess
modules, and mocks of those (test_backend, test_vllm, test_placement, test_subprocess_mgr,
test_integration).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = os.environ.get("CURATOR_SOURCE", "")
FILES = (
    "test_server",
    "test_config",
    "test_runtime_env",
    "dynamo/test_config",
    "dynamo/test_infra",
)
NOT_OURS = "test_dispatches_to_correct_backend"
"""It asserts that `DynamoServerConfig` gets Curator's `DynamoBackend`: what we replace."""
PLUGIN = """
import nemo_curator.core.serve as serve
from rollway.integrations.curator import InferenceServer
serve.InferenceServer = InferenceServer
"""


@pytest.mark.skipif(not SOURCE, reason="$CURATOR_SOURCE names no checkout of NeMo Curator 1.4.0")
def test_curators_tests_of_behaviour(tmp_path: Path) -> None:
    (tmp_path / "replaced.py").write_text(PLUGIN)
    tests = Path(SOURCE, "tests", "core", "serve")
    # `confcutdir`: Curator's top conftest starts a Ray cluster, which these tests do not use.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "replaced", f"--confcutdir={tests}"]
    command += ["-c", os.devnull, "--rootdir", SOURCE, "-p", "no:cacheprovider"]
    command += ["--deselect", f"tests/core/serve/test_server.py::TestInferenceServer::{NOT_OURS}"]
    command += [str(tests / f"{name}.py") for name in FILES]
    result = subprocess.run(
        command, cwd=SOURCE, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True,
        text=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-3000:]
    assert " passed" in result.stdout and "failed" not in result.stdout
