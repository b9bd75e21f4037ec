"""The scrape config of a stack, and the targets that it reads.

    DIR/prometheus.yml            a whole config: two jobs, and the rules beside it
    DIR/targets/<stack>.json      frontends and workers, each with its labels
    DIR/pages/<stack>.json        Rollway's own page, while `--follow` serves it
    DIR/token                     what that page asks for, if it asks for a token

Prometheus notices by itself when a list of targets changes. A worker that died stays in the list
until it leaves the stack: Prometheus shall see that it does not answer.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from rollway.fleet.discovery import Worker
from rollway.stack.targets import Group, make_group, write_file

JOBS = ("rollway", "rollway-stack")
"""The job of Rollway's own pages, and that of frontends and workers."""
TARGETS, PAGES, TOKEN_FILE = "targets", "pages", "token"


def make_config(scrape_seconds: float, *, has_token: bool = False) -> dict[str, Any]:
    """Return a config whose paths are relative to itself."""
    page, stack = JOBS
    own: dict[str, Any] = {"job_name": page, "file_sd_configs": _read_lists(PAGES)}
    if has_token:  # for Rollway's own page alone: workers must not see it
        own["authorization"] = {"credentials_file": TOKEN_FILE}
    return {
        "global": {
            "scrape_interval": f"{round(scrape_seconds * 1000)}ms",
            "scrape_timeout": f"{round(scrape_seconds * 1000)}ms",
            "evaluation_interval": f"{round(scrape_seconds * 1000)}ms",
        },
        "rule_files": ["*.rules.yml"],
        "scrape_configs": [own, {"job_name": stack, "file_sd_configs": _read_lists(TARGETS)}],
    }


def _read_lists(directory: str) -> list[dict[str, Any]]:
    # Prometheus watches the files; it reads them again this often for disks that tell no changes.
    return [{"files": [f"{directory}/*.json"], "refresh_interval": "30s"}]


def list_attached_groups(stack: str, frontend: str, workers: Iterable[Worker]) -> list[Group]:
    """Return the frontend and the workers of a stack that Rollway did not start."""
    groups = [make_group(frontend, stack=stack, process="frontend")]
    for worker in workers:
        if worker.admin_url:
            labels = {"worker": str(worker.instance_id), "role": worker.role}
            groups.append(make_group(worker.admin_url, stack=stack, **labels))
    return groups


def write_config(directory: Path, config: dict[str, Any]) -> Path:
    return write_file(directory / "prometheus.yml", yaml.safe_dump(config, sort_keys=False))


def write_token(directory: Path, token: str) -> Path:
    """Write the token for this user and its group alone."""
    path = directory / TOKEN_FILE
    directory.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o640)
    with os.fdopen(handle, "w") as file:
        file.write(token)
    return path
