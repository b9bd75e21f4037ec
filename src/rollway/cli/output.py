"""Print results on stdout: JSON for scripts, tables for people. Progress goes to stderr."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rollway.errors import Problem, UsageError


def get_spec_file(options: argparse.Namespace) -> Path | None:
    """Return the stack file, given by position or by `-f`."""
    positional: Path | None = options.stack
    if positional is not None and options.file is not None:
        raise UsageError(
            f"Two stack files are given: {positional} and {options.file}.", "Give one of them."
        )
    return positional or options.file


def print_json(value: Any) -> None:
    print(json.dumps(value), flush=True)


def print_result(
    options: argparse.Namespace, result: dict[str, Any], show: Callable[[dict[str, Any]], None]
) -> None:
    """Print a result as JSON with `--json`, otherwise by `show`."""
    if options.json:
        print_json(result)
    else:
        show(result)


def print_progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def print_table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """Print rows below a header; long cells are folded."""
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        # Cells hold text of other programs: square brackets in them are no markup.
        table.add_row(*map(Text, row))
    print_rich(table)


_STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "red"}


def print_problems(problems: Iterable[Problem]) -> None:
    """Print one line per thing that was checked: how it is, the cause and the fix."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for _ in range(4):
        table.add_column(overflow="fold")
    for problem in problems:
        level = Text(problem.level, style=_STYLES[problem.level])
        table.add_row(level, *map(Text, (problem.what, problem.cause, problem.fix)))
    print_rich(table)


def report_problems(options: argparse.Namespace, problems: list[Problem]) -> int:
    """Print what in a trainer's config will not work; return 1 if there is anything."""
    names = ("key", "level", "cause", "fix")
    text = "\n".join(map(str, problems)) or "no problem found"
    result = {"problems": [problem.as_json(*names) for problem in problems]}
    print_result(options, result, lambda _: print(text))
    return 1 if problems else 0


def print_rich(table: Table) -> None:
    # Lines in a file or a pipe are not folded to 80 columns.
    Console(highlight=False, width=None if sys.stdout.isatty() else 200).print(table)
