"""`rollway top` as a command, where nobody sits at a terminal."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from rollway.cli import main
from tests.observe.make_run import write_run


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    write_run(tmp_path / "run", workers=2, seconds=30)
    return tmp_path / "run"


def test_json_has_the_sections_of_the_page(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", "--run", str(run_dir), "--json"]) == 0
    model = json.loads(capsys.readouterr().out)
    assert {row["name"] for row in model["sections"]["fleet"]} == {"tiny-0", "tiny-1"}
    assert [answer["name"] for answer in model["sections"]["top"]] == [
        "exact", "fresh", "cached", "busy",
    ]  # fmt: skip
    assert model["refit"]["rows"] and model["events"]


@pytest.mark.parametrize("arguments", [["--once"], []])
def test_it_prints_once_into_a_pipe(
    run_dir: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", "--run", str(run_dir), *arguments]) == 0
    text = capsys.readouterr().out
    for word in ("exact", "Fleet: 2 of 2 workers serve", "Refits", "Rollouts", "Events"):
        assert word in text


def test_without_textual_it_names_the_extra(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["top", "--run", str(run_dir)]) == 2
    assert "rollway[observe]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--run", "RUN", "policy"], "A stack and a run directory are given"),
        (["--run", "RUN/nothing"], "is not a directory"),
        (["--run", "RUN", "--interval", "0"], "--interval is 0"),
    ],
)
def test_wrong_input_is_refused_with_the_fix(
    run_dir: Path, arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [argument.replace("RUN", str(run_dir)) for argument in arguments]
    assert main(["top", "--once", *given]) == 2
    assert text in capsys.readouterr().err
