"""The `rollway` command.

`root.py` lists the commands. The module of a command is imported only when that command runs, and
imports what it needs inside its functions: `rollway --help` loads neither HTTP nor torch.
"""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status."""
    from rollway.cli.root import run_command

    return run_command(arguments)
