"""Which weights each worker serves, as far as this process knows it for certain.

Written by refits, read by rollouts. A version names one set of weights for good. A request is sent
with a ticket: the version it must be sampled from, the routing taint that only workers on that
version carry, and the salt that keeps their KV cache apart. While a whole fleet changes, the gate
is closed and new requests wait instead of landing on a worker that is about to change.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from rollway.errors import RolloutError, UsageError

BASE_VERSION = 0
"""The checkpoint a worker starts from. Trainers number their updates from 1."""


def taint_of(version: int) -> str:
    """The routing taint of a worker that serves `version`. A request that requires it reaches no
    other worker, also when it migrates."""
    return f"rollway-v{version}"


@dataclass(frozen=True, slots=True)
class Ticket:
    """What one request is sent with."""

    version: int | None
    taint: str | None
    salt: str | None
    epoch: int


class VersionBook:
    """The weight version of the fleet and of each worker."""

    def __init__(self) -> None:
        self.current: int | None = None
        """What new requests are sampled from; None while nobody declared a version."""
        self.by_worker: dict[int, int] = {}
        self.tainted = False
        """Whether the workers carry their version's taint, so that requests may require it."""
        self.epoch = 0
        """Goes up each time an update is issued. Without taints, an answer from another epoch
        proves nothing."""
        self.changing = 0
        """How many refits are under way."""
        self._weights: dict[int, str] = {}
        self._entered: dict[int, int] = {}
        """What each worker last began to generate from, here."""
        self._open = asyncio.Event()
        self._open.set()

    @property
    def moving(self) -> bool:
        return not self._open.is_set()

    async def settled(self) -> None:
        """Wait until requests may be sent."""
        await self._open.wait()

    def close(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def claim(self, version: int, identity: str) -> None:
        """Bind a version to one set of weights; refuse what would go back or mean two things."""
        newest = max(
            (v for v in (self.current, *self.by_worker.values()) if v is not None), default=None
        )
        if version < 0 or (newest is not None and version < newest):
            raise UsageError(
                f"Version {version} is older than {newest}, which the fleet serves.",
                "Versions only go up; give the next number.",
            )
        known = self._weights.get(version)
        if version == newest and known is None:
            raise UsageError(
                f"Version {version} is served already.",
                "Versions only go up; give the next number.",
            )
        self.refuse_others(version, identity)
        self._weights[version] = identity

    def refuse_others(self, version: int, identity: str) -> None:
        """Raise if a version is known to name other weights than these."""
        if self._weights.get(version, identity) != identity:
            raise UsageError(
                f"Version {version} already names other weights.",
                "A version names one set of weights for good; give these the next number.",
            )

    def claimed(self, weights: Mapping[int, str]) -> None:
        """What versions name according to other processes."""
        self._weights = {**weights, **self._weights}

    def served_by(self, version: int) -> list[int]:
        return [worker for worker, has in self.by_worker.items() if has == version]

    def issued(self, worker: int) -> None:
        """An update goes out: the worker is not known to serve anything until `serves` says so."""
        self.epoch += 1
        self.by_worker.pop(worker, None)

    def enters(self, worker: int, version: int) -> None:
        """It is about to generate again: what it answers from now on may be of this version."""
        self._entered[worker] = version

    def serves(self, worker: int, version: int) -> None:
        self.by_worker[worker] = version

    def gone(self, worker: int) -> None:
        self.by_worker.pop(worker, None)

    def learn(self, declared: Mapping[int, int]) -> None:
        """Take over what the workers say of themselves. A refit elsewhere shows here: its version
        becomes the current one; one that went back (all workers started anew) does not."""
        self.by_worker = dict(declared)
        newest = max(declared.values(), default=None)
        if newest is not None and (self.current is None or newest > self.current):
            self.current = newest

    def ticket(self, version: int | None = None) -> Ticket:
        """For a request from `version`, or from the current one; refuses what nobody serves."""
        wanted = self.current if version is None else version
        if wanted is None:
            return Ticket(None, None, None, self.epoch)
        if not self.served_by(wanted):
            raise RolloutError(
                f"No worker is known to serve weight version {wanted}.",
                "The last refit failed or was interrupted, or all workers started anew: refit.",
            )
        taint = taint_of(wanted) if self.tainted else None
        return Ticket(wanted, taint, f"v{wanted}", self.epoch)

    def vouches(self, ticket: Ticket, worker: int | None) -> bool:
        """Whether an answer to this ticket was sampled from its version.

        With a taint it was, if the worker has not begun with another since: only workers on the
        version are sent such requests, and what one still had queued when it changed was aborted;
        but a stalled router may deliver even later than that. Without a taint, the worker must
        have had that version all along; where nobody knows which one it was, all must have."""
        if ticket.version is None:
            return True
        if ticket.taint is not None:
            newest = max(self._entered.values(), default=ticket.version)
            entered = newest if worker is None else self._entered.get(worker, ticket.version)
            return entered <= ticket.version
        had = self.by_worker.values() if worker is None else [self.by_worker.get(worker)]
        return self.epoch == ticket.epoch and set(had) == {ticket.version}
