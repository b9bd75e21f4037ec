"""Check that nodes have what a stack needs. A Keeper checks its node before any engine is started.

A task of Ray could check it before the Keeper is created, but Ray starts processes for it, of a
second of CPU time each, and gives none of them to the Keeper. What a node's own supervisor finds
before it starts anything (programs, working directories) is left to it."""

from __future__ import annotations

import importlib.metadata
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollway.errors import SpecError, StartError
from rollway.model_spec import merge_runtime_envs
from rollway.spec import StackSpec

if TYPE_CHECKING:
    from packaging.requirements import Requirement

_READ_FACTS = """
import importlib.metadata as m, importlib.util as u, json, sys
def read(name):
    try: return m.version(name)
    except m.PackageNotFoundError: return None
print(json.dumps([u.find_spec("dynamo") is not None, {name: read(name) for name in sys.argv[1:]}]))
"""
_INSTALLERS = ("pip", "uv")
_KEYS = {"env_vars", "py_executable", "working_dir", "config", *_INSTALLERS}
_IMPORT_ERROR = re.compile(r"(?:ImportError|ModuleNotFoundError): .*")
"""In the error of an actor whose class, or one of whose arguments, a node cannot import."""


def _merge_envs(spec: StackSpec) -> dict[str, dict[str, Any]]:
    """Return the runtime environment of each model, by its name."""
    return {m.name: merge_runtime_envs(spec.runtime_env, m.runtime_env) for m in spec.models}


def check_runtime_envs(spec: StackSpec) -> None:
    """Refuse what Rollway would not carry out: engines are processes of supervisors, not Ray's."""
    for model, merged in _merge_envs(spec).items():
        if unused := sorted(merged.keys() - _KEYS):
            raise SpecError(
                f"The runtime_env of `{model}` has `{unused[0]}`, which Rollway does not provide.",
                "Put it on the nodes yourself, and name the interpreter with `py_executable` or "
                "`python`.",
            )
        if "://" in merged.get("working_dir", ""):
            raise SpecError(
                f"The `working_dir` of `{model}` is an address, which Rollway does not download.",
                "Name a directory that all nodes have.",
            )
    list_packages(spec)


def list_packages(spec: StackSpec) -> list[str]:
    """Return the packages that the models' runtime environments name; raise SpecError for what is
    not a requirement with a name."""
    from packaging.requirements import InvalidRequirement, Requirement

    packages: list[str] = []
    for model, merged in _merge_envs(spec).items():
        for installer in _INSTALLERS:
            named = merged.get(installer) or []
            named = named.get("packages", []) if isinstance(named, dict) else named
            for text in named if isinstance(named, list) else [f"-r {named}"]:
                try:
                    Requirement(text)
                except (InvalidRequirement, TypeError):
                    raise SpecError(
                        f"`{installer}` in the runtime_env of `{model}` has `{text}`, which is not "
                        "a package with a name.",
                        "Rollway only checks that the nodes have the packages: list them as "
                        "`name==version`.",
                    ) from None
                packages.append(text)
    return list(dict.fromkeys(packages))


def get_python(spec: StackSpec) -> str | None:
    """Return the interpreter of the engines: `python`, or the runtime_env's `py_executable`."""
    named = {merged.get("py_executable") for merged in _merge_envs(spec).values()}
    pythons = sorted(str(python) for python in {spec.python, *named} if python)
    if len(pythons) > 1:
        raise SpecError(
            f"The stack names several interpreters: {', '.join(pythons)}.",
            "All processes of a stack run in one; keep one of `python` and `py_executable`.",
        )
    return pythons[0] if pythons else None


def list_needs(spec: StackSpec) -> dict[str, Any]:
    """Return what each node must have."""
    return {
        "version": importlib.metadata.version("rollway"),
        "python": get_python(spec),
        "packages": list_packages(spec),
        "models": [model.path for model in spec.models],
    }


def find_problem(needs: dict[str, Any]) -> tuple[str, str] | None:
    """Return the first thing that this node does not have, and what to do about it."""
    from packaging.requirements import Requirement

    installed = importlib.metadata.version("rollway")
    if installed != needs["version"]:
        return (
            f"it has Rollway {installed}, the node of the services {needs['version']}.",
            "Install the same version on all nodes.",
        )
    python = needs["python"] or sys.executable
    wanted = {text: Requirement(text) for text in needs["packages"]}
    command = [python, "-c", _READ_FACTS, *(each.name for each in wanted.values())]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return f"there is no interpreter {python}.", "Set `python` to one that all nodes have."
    has_dynamo, versions = json.loads(answer.stdout or "[false, {}]")
    if not has_dynamo:
        return (
            f"Dynamo is not installed in the Python that runs the workers, {python}.",
            "Install it there with `pip install 'rollway[vllm]'`, or set `python`.",
        )
    missing = [text for text, each in wanted.items() if not _is_met(each, versions[each.name])]
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
    return None


def _is_met(requirement: Requirement, version: str | None) -> bool:
    if requirement.marker is not None and not requirement.marker.evaluate():
        return True
    return version is not None and requirement.specifier.contains(version, prereleases=True)


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
