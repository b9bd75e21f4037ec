"""Stores of versions: which versions there are, and how long they stay."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod

from rollway.errors import UsageError, WeightsError

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.01, 0.5


class Versions(ABC):
    """Published versions, as a reader sees them: only complete ones."""

    @abstractmethod
    def versions(self) -> list[int]:
        """List the versions that can be read now, oldest first."""

    def latest(self) -> int | None:
        return max(self.versions(), default=None)

    def wait_for(self, version: int, timeout: float = 600.0) -> None:
        """Wait until `version` can be read; poll less often the longer it takes."""
        deadline = time.monotonic() + timeout
        pause = _SHORTEST_PAUSE
        while version not in (present := self.versions()):
            if present and present[-1] > version:
                raise WeightsError(
                    f"Version {version} is not there, and version {present[-1]} is already.",
                    "Read a newer one, or let the publisher keep more.",
                )
            if time.monotonic() > deadline:
                raise WeightsError(
                    f"Version {version} did not appear within {timeout:g} s.",
                    "See whether the trainer still runs.",
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)


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
