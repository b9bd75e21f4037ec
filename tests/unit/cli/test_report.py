"""`rollway report` as a command."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rollway.cli import main
from rollway.observe.record import Recorder
from tests.observe.make_run import write_old_run, write_run


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs in a home, and a place to write to."""
    monkeypatch.setenv("ROLLWAY_HOME", str(tmp_path / "home"))
    for name, workers in (("first", 2), ("second", 3)):
        write_run(tmp_path / "home" / "runs" / name, workers=workers, seconds=200)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "home" / "runs"


def test_a_run_is_named_by_its_directory_or_its_name(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for given in (str(runs / "first"), "first"):
        assert main(["report", given]) == 0
        assert "prevented:" in capsys.readouterr().out
        assert Path("first.html").read_text().startswith("<!doctype html>")
        Path("first.html").unlink()


def test_the_newest_run_needs_no_name(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(runs / "third", workers=1, seconds=100)
    assert main(["report", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["file"].endswith("third.html")


def test_a_run_that_is_still_recorded_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    recorder = Recorder(tmp_path / "run-1", "supervisor", stack="s", run="run-1")
    recorder.write("event", event="start")
    recorder.flush()
    assert main(["report", "run-1"]) == 0
    assert "; it runs; " in capsys.readouterr().out
    recorder.close()


def test_two_runs_are_compared(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "first", "second", "--out", "both.html", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert len(result["runs"]) == 2
    workers = next(each for each in result["differences"] if each["label"] == "workers")
    assert (workers["first"], workers["second"]) == ("2", "3")
    assert "tiny" in Path("both.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nothing"], "is not a directory"),
        (["."], "has no record of a run"),
        (["first", "second", "first"], "3 runs are given"),
        (["first", "--out", "/proc/nothing/report.html"], "cannot be written"),
    ],
)
def test_wrong_input_is_refused_with_the_fix(
    runs: Path, arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", *arguments]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["old"], ["old", "first"], ["first", "old"], ["old", "older"], []]
)
def test_a_run_of_an_earlier_version_is_refused_with_the_reason(
    runs: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    write_old_run(runs / "older")
    write_old_run(runs / "old")
    os.utime(runs / "old" / "driver-1-a.jsonl", (2e9, 2e9))  # the newest
    assert main(["report", *arguments]) == 2
    text = " ".join(capsys.readouterr().err.split())
    assert f"Another version of Rollway recorded {runs / 'old'}: its schema is 1" in text
    assert "Read it with the version that recorded it." in text
    assert list(Path().iterdir()) == []  # no report was written


def test_without_a_run_it_says_where_runs_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ROLLWAY_HOME", str(tmp_path))
    assert main(["report"]) == 2
    assert "No run is recorded" in capsys.readouterr().err
