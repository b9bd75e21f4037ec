"""What the docs name must exist."""

from __future__ import annotations

import argparse
import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest

from rollway.cli import make_parser

ROOT = Path(__file__).parents[2]
PAGES = sorted(path.name for path in (ROOT / "docs").glob("*.md"))
SOURCES = {path: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
FILES = {path.name for path in SOURCES}


@pytest.mark.parametrize("page", PAGES)
def test_every_test_that_a_page_names_exists(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    everything = "\n".join(SOURCES.values())
    for name in re.findall(r"`(?:test_\w+\.py::)?(test_\w+)`", text):
        assert f"def {name}(" in everything, name
    for name in re.findall(r"\b(test_\w+\.py)", text):
        assert name in FILES, name


@pytest.mark.parametrize("page", ["architecture.md", "first-change.md"])
def test_every_file_that_a_page_names_exists(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    folders = [ROOT / name for name in ("src", "tests", "scripts", "chaos", "benchmarks")]
    files = {path.name for folder in folders for path in folder.rglob("*.py")}
    assert set(re.findall(r"\b(\w+\.py)\b", text)) <= files


@pytest.mark.parametrize("page", [*PAGES, "../README.md"])
def test_every_measurement_that_a_page_names_has_these_arguments(
    page: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / "docs" / page).read_text().replace("\\\n", " ")
    for program, line in re.findall(r"\brollway (bench|chaos)\b([^`|#>\n]*)", text):
        module = import_module("benchmarks.__main__" if program == "bench" else "chaos.__main__")

        def parse(parser: argparse.ArgumentParser, arguments: list[str]) -> int:
            assert callable(parser.parse_args([*arguments, "--json"]).run_command)
            return 0

        monkeypatch.setattr(module, "run_command", parse)
        if program == "chaos" or line.strip():  # `rollway bench` alone is no command
            assert module.main(shlex.split(line)) == 0, line


@pytest.mark.parametrize("page", [*PAGES, "../README.md"])
def test_every_command_that_a_page_shows_is_accepted(
    page: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "docs" / page).read_text().replace("\\\n", " ")
    shown = re.findall(r"^ *(rollway .*)", text, re.MULTILINE)  # blocks of code
    shown += re.findall(r"`(rollway [^`\n]*)`", text)
    for line in (part for each in shown for part in each.partition(" #")[0].split(";")):
        words = shlex.split(line)[1:]
        is_pattern = re.search(r"[\[|…@{]|\.\.\.", line) or not words
        if is_pattern or words[0] in ("bench", "chaos") or "--help" in words:
            continue
        try:
            make_parser(words).parse_args(words)
        except SystemExit:  # a sentence may name a command without all that it needs
            assert "arguments are required" in capsys.readouterr().err, line


@pytest.mark.parametrize("page", PAGES)
def test_every_link_of_a_page_has_a_target(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", text):
        assert (ROOT / "docs" / target).exists(), target
