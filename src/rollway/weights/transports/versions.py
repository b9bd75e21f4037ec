"""What every store of versions has in common: which there are, and how long they stay."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod

from rollway.errors import UsageError, WeightsError

_SOONEST, _LATEST = 0.01, 0.5


class Versions(ABC):
    """Published versions, as a reader sees them: only whole ones."""

    @abstractmethod
    def versions(self) -> list[int]:
        """Those that can be read now, oldest first."""

    def latest(self) -> int | None:
        return max(self.versions(), default=None)

    def wait_for(self, version: int, timeout: float = 600.0) -> None:
        """Return when `version` is there; looks rarely when it takes long."""
        deadline = time.monotonic() + timeout
        pause = _SOONEST
        while version not in (there := self.versions()):
            if there and there[-1] > version:
                raise WeightsError(
                    f"Version {version} is not there, and version {there[-1]} is already.",
                    "Take a newer one, or let the publisher keep more.",
                )
            if time.monotonic() > deadline:
                raise WeightsError(
                    f"Version {version} did not appear within {timeout:g} s.",
                    "See whether the trainer still runs.",
                )
            time.sleep(pause)
            pause = min(2 * pause, _LATEST)


def check_retention(keep_recent: int, max_off_policy_steps: int) -> None:
    """Refuse to keep fewer versions than the trainer may still ask for."""
    if keep_recent < max(1, max_off_policy_steps):
        raise UsageError(
            f"keep_recent is {keep_recent}, and a rollout may be {max_off_policy_steps} steps old.",
            f"Set keep_recent to {max(1, max_off_policy_steps)} or more.",
        )


def check_next(version: int, latest: int | None) -> None:
    """Versions only grow: a reader takes the highest for the newest."""
    if version < 0 or (latest is not None and version <= latest):
        raise UsageError(
            f"Version {version} cannot follow version {latest}.",
            "Count upwards; a run that starts again needs a directory of its own.",
        )
