"""Shared fixtures. Every test has a Rollway home of its own: no test sees a user's stacks."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from rollway.errors import StackNotRunning
from rollway.stack import local
from rollway.stack.preset import cache_dir
from rollway.stack.state import list_stacks
from tests.footprint import Footprint, mark_own_processes
from tests.soak import SOAK

__all__ = ["Cli", "Footprint"]

pytest_plugins = ["tests.stack.stacks"]  # the real stacks that all tests of a session share

settings.register_profile("rollway", deadline=None)  # how long an example takes is no property
settings.load_profile("rollway")
mark_own_processes()
gc.disable()  # until all tests are collected
# A shell that forbids byte code would have every process of every stack compile Rollway again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Models of these tests are tiny: a second thread only waits for the first, all the longer when two
# test processes share the cores. (Read when torch is imported.)
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell starts background jobs with SIGINT ignored, and everything that they start inherits it:
# without this, no Ctrl-C of a test would arrive.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the soaks out unless they are asked for."""
    soaks = {item for item in items if item.get_closest_marker("soak") and not SOAK}
    if soaks:
        config.hook.pytest_deselected(items=list(soaks))
        items[:] = [item for item in items if item not in soaks]


def pytest_collection_finish() -> None:
    """Collect garbage from now on, but not among what exists now: to search torch, vLLM and
    thousands of tests takes most of a second each time."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from tests.groups import StackScheduling

    return StackScheduling(config, log)


@pytest.fixture(scope="session")
def session_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The home of the stack that lives as long as the test session."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, session_home: Path) -> Iterator[Path]:
    home = tmp_path / "rollway-home"
    monkeypatch.setenv("ROLLWAY_HOME", str(home))
    yield home
    # A test that fails half-way must not leave a stack behind for the next one.
    monkeypatch.setenv("ROLLWAY_HOME", str(home))
    for state in list_stacks():
        with contextlib.suppress(StackNotRunning):  # it has just ended by itself
            local.stop(state.name)


@pytest.fixture(scope="session")
def base_model() -> Path:
    """The demo's own checkpoint: tiny, built here, no download."""
    from rollway.demo.model import build_base

    return build_base(cache_dir() / "demo")


Cli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """Run the `rollway` command as a user would."""

    def run(*arguments: str, timeout: float = 300.0) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "rollway.cli", *arguments],
            capture_output=True,
            text=True,
            timeout=timeout,
            cwd=tmp_path,
        )

    return run


@pytest.fixture
def footprint() -> Footprint:
    return Footprint()
