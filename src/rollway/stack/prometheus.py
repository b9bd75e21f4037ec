"""Where Prometheus finds the metrics of a stack, in the format of its `file_sd_configs`."""

from __future__ import annotations

import contextlib
import json
import secrets
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rollway.stack.state import StackState

Group = dict[str, Any]
"""Targets with the same labels, as file_sd has them."""


def list_groups(state: StackState) -> list[Group]:
    """Return the frontend and the workers of a stack of Rollway."""
    groups = []
    if state.frontend:
        groups.append(make_group(state.frontend, stack=state.name, process="frontend"))
    for process in state.processes:
        # Ranks of a replica but the first have no page.
        if process.role == "worker" and process.admin_url and process.node_rank == 0:
            labels = {"worker": process.name, "role": process.worker_role, "node": process.node}
            groups.append(make_group(process.admin_url, stack=state.name, **labels))
    return groups


def make_group(url: str, **labels: str) -> Group:
    """Return one target; empty labels are left out."""
    kept = {name: value for name, value in labels.items() if value}
    return {"targets": [urlsplit(url).netloc], "labels": kept}


def write_groups(path: Path, groups: list[Group]) -> Path:
    return write_file(path, json.dumps(groups, indent=2) + "\n")


def write_file(path: Path, content: str) -> Path:
    """Replace a file as a whole. Others may read it: Prometheus runs as a user of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        scratch.write_text(content)
        scratch.replace(path)
    finally:
        with contextlib.suppress(OSError):
            scratch.unlink(missing_ok=True)
    return path
