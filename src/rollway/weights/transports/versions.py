"""Checks that every publisher makes of the numbers of versions."""

from __future__ import annotations

from rollway.errors import UsageError


def check_retention(keep_recent: int, max_off_policy_steps: int) -> None:
    """Refuse to keep fewer versions than the trainer may still request."""
    if keep_recent < max(1, max_off_policy_steps):
        raise UsageError(
            f"keep_recent is {keep_recent}, and a rollout may be {max_off_policy_steps} steps old.",
            f"Set keep_recent to {max(1, max_off_policy_steps)} or more.",
        )


def check_next(version: int, latest: int | None) -> None:
    """Refuse a version that does not grow: readers regard the highest as the newest."""
    if version < 0 or (latest is not None and version <= latest):
        raise UsageError(
            f"Version {version} cannot follow version {latest}.",
            "Count upwards, and give a run that starts again a new directory.",
        )
