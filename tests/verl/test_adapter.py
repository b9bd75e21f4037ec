"""What verl's calls do to a rank's adapter, in verl's own environment; no engine is started."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.verl.training import environment, verl_python

SCRIPT = """
import asyncio
from rollway.errors import UsageError
from rollway.integrations.verl.adapter import ServerAdapter

beside = ServerAdapter.__new__(ServerAdapter)  # of a worker beside a separate engine
beside._asked, beside._own, beside._hybrid = True, None, False
asyncio.run(beside.update_weights(iter([("a", 1)]), wire_format="rollway"))
for backend in ("named_tensors", "delta_flush"):
    try:
        asyncio.run(beside.update_weights(iter([("a", 1)]), wire_format=backend))
    except UsageError as error:
        assert "backend=rollway" in error.hint, error
    else:
        raise AssertionError(f"weights by {backend} went nowhere, without a word")
"""


def test_weights_that_would_go_nowhere_are_refused(tmp_path: Path) -> None:
    command = [str(verl_python()), "-c", SCRIPT]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment(tmp_path))
    assert ran.returncode == 0, ran.stderr[-3000:]
