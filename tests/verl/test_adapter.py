"""verl's calls of a rank's adapter, in verl's own environment; no engine is started."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.verl.training import environment, verl_python

SCRIPT = """
import asyncio
from rollway.errors import UsageError
from rollway.integrations.verl.adapter import ServerAdapter

# The adapter of a worker beside a separate engine.
adapter = ServerAdapter.__new__(ServerAdapter)
adapter._fallback_known, adapter._verl_adapter, adapter._is_hybrid = True, None, False
asyncio.run(adapter.update_weights(iter([("a", 1)]), wire_format="rollway"))
for backend in ("named_tensors", "delta_flush"):
    try:
        asyncio.run(adapter.update_weights(iter([("a", 1)]), wire_format=backend))
    except UsageError as error:
        assert "backend=rollway" in error.hint, error
    else:
        raise AssertionError(f"weights by {backend} were dropped silently")
"""


def test_weights_of_an_unsupported_backend_are_refused(tmp_path: Path) -> None:
    command = [str(verl_python()), "-c", SCRIPT]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment(tmp_path))
    assert ran.returncode == 0, ran.stderr[-3000:]
