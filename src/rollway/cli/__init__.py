"""The `rollway` command: `grammar.py` has the arguments, a module each group of commands."""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status."""
    from rollway.cli.root import run_command

    return run_command(arguments)
