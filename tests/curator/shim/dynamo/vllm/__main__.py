"""Stands in for `python -m dynamo.vllm`, where the command line and not the engine is the point.

`dynamo` is a namespace package, so a directory on PYTHONPATH that has `dynamo/vllm` comes before
the installed one. It takes the same options and runs a light worker (tests/light) instead, which
starts in a second.

SHIM_FAIL makes it fail with that text. SHIM_GATE makes every replica but the first wait for that
file.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.light import worker
from tests.waiting import wait_until

if os.environ.get("SHIM_FAIL"):
    sys.exit(os.environ["SHIM_FAIL"])
gate = os.environ.get("SHIM_GATE")
if gate and "--seed" in sys.argv and sys.argv[sys.argv.index("--seed") + 1] != "0":
    Path(f"{gate}.waiting").touch()
    wait_until(Path(gate).exists, 600)
worker.main()
