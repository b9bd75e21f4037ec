"""Which weights each worker serves, as far as this process knows it for certain.

Written by the fleet, read by rollouts. A rollout is stamped with the version its worker had when
the request began, provided that no update was issued before the answer came; what cannot be
stamped is not returned as if it could. While weights move the gate is closed, and new requests
wait instead of landing on a worker that is about to change.
"""

from __future__ import annotations

import asyncio

BASE_VERSION = 0
"""The checkpoint a worker starts from. Trainers number their updates from 1."""


def taint_of(version: int) -> str:
    """The routing taint of a worker that serves `version`. A request that requires it reaches no
    other worker, also when it migrates."""
    return f"rollway-v{version}"


class VersionBook:
    """The weight version of the fleet and of each worker."""

    def __init__(self) -> None:
        self.current: int | None = None
        """What the whole fleet is meant to serve; None while nobody declared a version."""
        self.by_worker: dict[int, int] = {}
        self.tainted = False
        """Whether the workers carry their version's taint, so that requests may require it."""
        self.epoch = 0
        """Goes up each time updates are issued: an answer from another epoch proves nothing."""
        self._open = asyncio.Event()
        self._open.set()

    @property
    def moving(self) -> bool:
        return not self._open.is_set()

    @property
    def served(self) -> bool:
        """Whether some worker is known to serve the current version (or none was ever named)."""
        return self.current is None or self.current in self.by_worker.values()

    async def settled(self) -> None:
        """Wait until no weights are moving."""
        await self._open.wait()

    @property
    def required_taint(self) -> str | None:
        return taint_of(self.current) if self.tainted and self.current is not None else None

    def close(self) -> None:
        self._open.clear()

    def updates_begin(self) -> None:
        """From here on no worker is known to serve anything, until `note` says so."""
        self.epoch += 1
        self.by_worker = {}

    def open(self) -> None:
        self._open.set()

    def note(self, by_worker: dict[int, int], current: int | None) -> None:
        """Record what the workers serve now; `current` stays when None is given."""
        self.by_worker = by_worker
        if current is not None:
            self.current = current
