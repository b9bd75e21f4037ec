"""These tests run in the environment of pipelines (.venv-curator); engines run in `.venv`."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHIM = Path(__file__).with_name("shim")
ENGINE_PYTHON = Path(os.environ.get("ROLLWAY_TEST_ENGINE_PYTHON", ROOT / ".venv/bin/python"))

if importlib.util.find_spec("nemo_curator") is None:
    collect_ignore_glob = ["test_*.py"]  # `make test-curator` runs them


@pytest.fixture(autouse=True)
def engine_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLWAY_ENGINE_PYTHON", str(ENGINE_PYTHON))


@pytest.fixture
def light_env() -> dict[str, str]:
    """`subprocess_env` with which `dynamo.vllm` is a light worker."""
    return {"PYTHONPATH": f"{SHIM}:{ROOT}"}


@pytest.fixture(autouse=True)
def nothing_stays_installed() -> Iterator[None]:
    yield
    from rollway.integrations.curator import uninstall

    uninstall()
