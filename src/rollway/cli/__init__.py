"""The `rollway` command."""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status."""
    from rollway.cli.root import main as run

    return run(arguments)
