"""Where a pool's metrics are, in a file that Prometheus reads again when it changes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rollway.stack.state import StackState


def targets(state: StackState) -> list[dict[str, Any]]:
    """As `file_sd_configs` wants them: the frontend, and every worker at its own port."""
    found = [_target(state.frontend, state.name, "frontend")]
    found += [
        _target(process.admin_url, state.name, process.name)
        for process in state.processes
        if process.admin_url is not None
    ]
    return found


def _target(url: str, stack: str, process: str) -> dict[str, Any]:
    return {"targets": [urlsplit(url).netloc], "labels": {"stack": stack, "process": process}}


def write_targets(path: Path, state: StackState) -> None:
    """Prometheus never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(json.dumps(targets(state), indent=1) + "\n")
    beside.replace(path)
