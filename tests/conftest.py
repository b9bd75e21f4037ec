"""Shared fixtures. Every test has a Rollway home of its own: no test sees a user's stacks."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from rollway import processes
from rollway.stack import local
from rollway.stack.lease import FIRST, LAST
from rollway.stack.locks import lock_directory
from rollway.stack.preset import cache_dir
from rollway.stack.state import known_stacks

pytest_plugins = ["tests.stack.stacks"]  # the real stacks that all tests of a session share

settings.register_profile("rollway", deadline=None)  # how long an example takes is no property
settings.load_profile("rollway")


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
    for state in known_stacks():
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


class Footprint:
    """What a run could leave behind: processes, shared memory, scratch directories, ports."""

    def __init__(self) -> None:
        self._before = self._look()

    def new(self) -> dict[str, set[str]]:
        now = self._look()
        left = {what: names - self._before[what] for what, names in now.items()}
        return {what: names for what, names in left.items() if names}

    @staticmethod
    def _look() -> dict[str, set[str]]:
        return {
            "processes": _marked_processes(),
            "shared memory": {path.name for path in processes.SHM.iterdir()},
            "scratch": {path.name for path in Path("/tmp").glob(f"rollway-{os.getuid()}-*")},
            "ports": _listening_ports(),
            "reservations": _reservations(),
        }

    def settle(self, seconds: float = 30.0) -> dict[str, set[str]]:
        """What is still there after some time to go."""
        deadline = time.monotonic() + seconds
        while (left := self.new()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return left


@pytest.fixture
def footprint() -> Footprint:
    return Footprint()


def _listening_ports() -> set[str]:
    """Of the range that Rollway chooses from."""
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            port = int(local.rpartition(":")[2], 16)
            if state == "0A" and FIRST <= port < LAST:
                ports.add(str(port))
    return ports


def _reservations() -> set[str]:
    lines = Path("/proc/net/unix").read_text(errors="replace").splitlines()
    claims = {line.split()[-1] for line in lines if "@rollway/" in line}
    return claims | {path.name for path in lock_directory().iterdir() if _is_held(path)}


def _is_held(lock: Path) -> bool:
    try:
        pid, start = map(int, lock.read_text().split())
    except (OSError, ValueError):
        return False
    return processes.ProcessId(pid, start).alive


def _marked_processes() -> set[str]:
    """Every process that carries any run's mark, and every supervisor, whoever started it."""
    found = set()
    for path in Path("/proc").iterdir():
        if not path.name.isdigit():
            continue
        try:
            marked = processes.MARK.encode() + b"=" in (path / "environ").read_bytes()
            command = (path / "cmdline").read_bytes()
        except OSError:
            continue
        if marked or b"rollway.stack.supervisor" in command:
            found.add(path.name)
    return found
