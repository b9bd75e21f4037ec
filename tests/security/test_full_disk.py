"""A disk without space: the cause, the place and the fix are named, and no result is lost."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.conftest import Cli, Footprint
from tests.security.small_disk import fill

pytestmark = pytest.mark.stack


def fill_all_but(disk: Path, free_kib: int) -> None:
    filler = fill(disk)
    with filler.open("r+b") as file:
        file.truncate(filler.stat().st_size - free_kib * 1024)


@pytest.mark.parametrize("free_kib", [0, 24])
def test_up_with_a_full_home_says_so(
    base_model: Path, small_disk: Path, cli: Cli, free_kib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the first files still fit: a stack that cannot write its state is never ready."""
    monkeypatch.setenv("ROLLWAY_HOME", str(small_disk / "home"))
    fill_all_but(small_disk, free_kib)
    result = cli("up", "--model", str(base_model), "--set", "models.0.engine=mocker", timeout=60)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr and result.stderr.count("\n") == 1
    for text in (str(small_disk / "home"), "No space is left", "Free some space"):
        assert text in result.stderr


def test_the_result_of_a_demo_survives_a_full_disk(
    base_model: Path, small_disk: Path, cli: Cli, footprint: Footprint
) -> None:
    fill_all_but(small_disk, 24)  # the logs begin there, too
    out = small_disk / "out"
    result = cli("demo", "--engine", "mocker", "--steps", "1", "--out", str(out))
    assert result.returncode == 1
    assert "reward 0." in result.stderr and "in 1 steps" in result.stderr
    assert f"{out / 'report.json'} was not written: No space left on device." in result.stderr
    assert "permissions" not in result.stderr
    assert footprint.new() == {}


def test_a_demo_ends_with_how_to_call_rollway(
    base_model: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After `make demo` the shell knows no `rollway`; in an activated environment it does."""
    activated = f"{Path(sys.executable).parent}:/bin"
    for path, name in (("/bin", "/rollway --help"), (activated, " rollway --help")):
        monkeypatch.setenv("PATH", path)
        result = cli("demo", "--engine", "mocker", "--steps", "1", "--out", "run")
        assert result.returncode == 0
        assert result.stderr.splitlines()[-1].endswith(name)
