"""Checks for packages that only some commands need."""

from __future__ import annotations

import importlib.util

from rollway.errors import UsageError


def require(*modules: str) -> None:
    """Raise UsageError unless these modules are installed. Call it before a command starts work."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"This command needs packages that are not installed: {', '.join(missing)}.",
            "pip install 'rollway[cpu,demo]', see docs/install.md.",
        )
