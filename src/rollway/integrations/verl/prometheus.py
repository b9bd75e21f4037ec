"""The addresses of a pool's metrics, in a file that Prometheus rereads when it changes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from urllib.parse import urlsplit

from rollway.stack.state import StackState


def write_targets(path: Path, state: StackState) -> None:
    """Write the frontend and every worker in the format of Prometheus' `file_sd_configs`."""
    urls = [("frontend", state.frontend)]
    urls += [(process.name, process.admin_url) for process in state.processes if process.admin_url]
    targets = [
        {"targets": [urlsplit(url).netloc], "labels": {"stack": state.name, "process": process}}
        for process, url in urls
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    # Written elsewhere and renamed, so that Prometheus never reads half a file.
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(targets, indent=1) + "\n")
    partial.replace(path)
