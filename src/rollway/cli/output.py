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

from rollway.errors import UsageError


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


def print_table(
    columns: Iterable[str], rows: Iterable[Iterable[str]], *, text_columns: int | None = None
) -> None:
    """Print rows below a header; long cells are folded. Columns after the first `text_columns`
    hold numbers and are aligned to the right."""
    table = Table(box=None, pad_edge=False)
    for number, column in enumerate(columns):
        is_text = text_columns is None or number < text_columns
        table.add_column(column, overflow="fold", justify="left" if is_text else "right")
    for row in rows:
        # Cells hold text of other programs: square brackets in them are no markup.
        table.add_row(*map(Text, row))
    print_rich(table)


def print_rich(table: Table) -> None:
    # Lines in a file or a pipe are not folded to 80 columns.
    Console(highlight=False, width=None if sys.stdout.isatty() else 200).print(table)


def format_size(count: int) -> str:
    """Format bytes for people: 1.53 GB."""
    amount, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if amount < 1000:
            break
        amount, unit = amount / 1000, larger
    return f"{amount:.3g} {unit}" if amount < 1000 else f"{amount:.0f} {unit}"
