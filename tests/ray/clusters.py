"""Ray clusters of several raylets on this machine, and what a stack could leave in one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from rollway.stack.ray import groups
from tests.light.spec import ROOT, light
from tests.waiting import has_become

SIZES: dict[str, Any] = {"num_cpus": 16, "num_gpus": 2}
"""What each raylet counts; there are no such devices."""


@contextmanager
def run_cluster(nodes: int, home: Path) -> Iterator[Cluster]:
    """Run raylets whose actors use this home; connect nobody."""
    patch = pytest.MonkeyPatch()
    patch.setenv("ROLLWAY_HOME", str(home))  # the raylets' processes inherit it
    # A raylet that was killed is dead after 3 s instead of 15; a slow one has 10 s for an answer.
    patch.setenv("RAY_health_check_period_ms", "1000")
    patch.setenv("RAY_health_check_failure_threshold", "3")
    head = Cluster(initialize_head=True, head_node_args={**SIZES, "include_dashboard": False})
    for _ in range(nodes - 1):
        head.add_node(**SIZES)
    patch.undo()
    try:
        yield head
    finally:
        if ray.is_initialized():
            ray.shutdown()
        head.shutdown()


def on_ray(base_model: Path, name: str, replicas: int = 2, **settings: Any) -> dict[str, Any]:
    """Return the spec of a stack of light workers on Ray."""
    return {**light(base_model, name, replicas), "launcher": "ray", "ray": settings}


def list_left() -> dict[str, list[str]]:
    """Return the named actors and groups of Rollway that the cluster has."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    left = {
        "actors": sorted(a["name"] for a in actors if a["name"].startswith("rollway/")),
        "groups": sorted(groups.list_groups()),
    }
    return {what: found for what, found in left.items() if found}


def settle(seconds: float = 60.0) -> dict[str, list[str]]:
    """Return what is left of stacks in the cluster after some time to go."""
    has_become(lambda: not list_left(), seconds)
    return list_left()


def spawn_driver(code: str, *arguments: object) -> subprocess.Popen[str]:
    """Run Python code as another driver; its output is a pipe."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )


DRIVER = """
import json, sys
import rollway
spec = json.loads(sys.argv[1])
with rollway.up(spec, progress=lambda state: print("starting", flush=True)) as stack:
    print("ready", flush=True)
    sys.stdin.read()
"""
"""A driver that owns a stack until its stdin is closed."""
