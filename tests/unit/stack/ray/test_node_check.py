"""What a node lacks is named with what to install there."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from rollway.spec import load_spec
from rollway.stack.ray import node_check

SPEC: dict[str, Any] = {"launcher": "ray", "discovery": "etcd", "event_plane": "nats"}


@pytest.fixture
def needs(tmp_path: Path) -> dict[str, Any]:
    spec = load_spec({**SPEC, "models": [{"path": str(tmp_path), "name": "m"}]})
    return node_check.list_needs(spec)


def test_a_node_that_has_everything_has_no_problem(needs: dict[str, Any]) -> None:
    assert node_check.find_problem(needs) is None


@pytest.mark.parametrize(
    ("change", "cause", "fix"),
    [
        ({"version": "9.9"}, "the node of the services 9.9", "the same version on all nodes"),
        ({"python": "/no/python"}, "there is no interpreter /no/python", "Set `python`"),
        ({"models": ["/no/model"]}, "there is no model directory /no/model", "Copy it there"),
    ],
)
def test_what_a_node_lacks_is_named(
    needs: dict[str, Any], change: dict[str, Any], cause: str, fix: str
) -> None:
    problem = node_check.find_problem({**needs, **change})
    assert problem is not None
    assert cause in problem[0] and fix in problem[1]


def test_packages_of_a_runtime_env_must_be_there(tmp_path: Path) -> None:
    """Rollway installs nothing; Curator's server for PDFs names a package in its own code."""

    def find_problem(packages: Any) -> tuple[str, str] | None:
        model = {"path": str(tmp_path), "runtime_env": {"uv": packages}}
        spec = load_spec({"launcher": "ray", "models": [model], "python": sys.executable})
        needs = node_check.list_needs(spec)
        return node_check.find_problem(needs)

    assert find_problem(["pytest", "Hypothesis>=1", "none; sys_platform == 'win32'"]) is None
    assert find_problem({"packages": ["pytest>=1"], "uv_pip_install_options": ["--x"]}) is None
    problem = find_problem(["pytest", "pytest==0.1", "no-such-package"])
    assert problem is not None
    assert "has no pytest==0.1 and no no-such-package" in problem[0]
    assert problem[1].endswith("-m pip install pytest==0.1 no-such-package`.")


def test_an_interpreter_without_dynamo_is_named(needs: dict[str, Any], tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    problem = node_check.find_problem({**needs, "python": str(python)})
    assert problem is not None
    assert "Dynamo is not installed" in problem[0] and "rollway[vllm]" in problem[1]
