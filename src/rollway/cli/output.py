"""Print results on stdout: JSON for scripts, tables for people. Progress goes to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text


def print_json(value: Any) -> None:
    print(json.dumps(value), flush=True)


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
