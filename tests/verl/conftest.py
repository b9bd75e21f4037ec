"""These runs need two environments: this one, with the engine, and another with verl."""

from __future__ import annotations

import importlib.util

import pytest

from tests.verl.training import VERL_PYTHON, verl_python


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = ""
    if verl_python() is None:
        missing = f"no environment with verl: `make setup-verl`, or set {VERL_PYTHON}"
    elif importlib.util.find_spec("dynamo") is None:
        missing = "no engine in this environment: `make setup`"
    if missing:
        for item in items:
            if "tests/verl/" in item.nodeid:
                item.add_marker(pytest.mark.skip(reason=missing))
