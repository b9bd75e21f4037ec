"""Stands in for `python -m dynamo.vllm`, where the command line and not the engine is the point.

`dynamo` is a namespace package, so a directory on PYTHONPATH that has `dynamo/vllm` comes before
the installed one. It takes the same options and runs a light worker (tests/light) instead, which
starts in a second. Its command line and environment are written to $SHIM_RECORD, if that is set.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

if record := os.environ.get("SHIM_RECORD"):
    with Path(record).open("a") as file:
        file.write(json.dumps({"argv": sys.argv[1:], "env": dict(os.environ)}) + "\n")

from tests.light import worker

worker.main()
