"""Keep the weight version that each worker serves, as far as this process knows it for certain.

Refits write `FleetVersions`, and rollouts read it. A version names one set of weights for good.
Every request is sent with a ticket: the version that must sample it, the routing taint that only
workers on that version carry, and a salt that separates their KV caches and names the version to
the engine. While the whole fleet changes weights, the gate is closed, and new requests wait instead
of reaching a worker that is about to change.

The engine of a managed worker refuses requests of other versions, and its answers are stamped with
the versions of their tokens: they need nothing from here. `has_served` is the rule for a foreign
worker, which stamps nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rollway.errors import RolloutError, UsageError

BASE_VERSION = 0
"""The version of the checkpoint that a worker starts with. Trainers number updates from 1."""


def taint_of(version: int) -> str:
    """Return the routing taint of workers that serve `version`. A request that requires it reaches
    no other worker, even after a migration."""
    return f"rollway-v{version}"


@dataclass(frozen=True, slots=True)
class Ticket:
    """The version, routing taint and cache salt of one request."""

    version: int | None
    taint: str | None
    salt: str | None
    stamped: bool = False
    """Whether the worker is asked to name the versions of the tokens in its answer."""
    learned: int = 0
    """How much this process had learned about its workers: see `FleetVersions.has_served`."""

    def add_salt(self, salt: str) -> str | None:
        """Return the cache salt of a request that has one of its own. An engine reads the version
        at its beginning, so a caller's salt stands behind it and can never name one."""
        return f"{self.salt or 'own'}:{salt}" if salt else self.salt


class VersionRecord(Protocol):
    """A record, shared with other processes, of the versions and of how to load the current one."""

    def put(self, version: int, path: Path) -> None: ...

    def get(self) -> tuple[int, Path] | None: ...

    def claim(self, version: int, identity: str) -> None:
        """Record which weights a version names."""
        ...

    def claims(self) -> dict[int, str]: ...


class FleetVersions:
    """The weight version of the fleet and of each worker."""

    def __init__(self) -> None:
        self.current: int | None = None
        """The version of new requests; None until a worker has declared one."""
        self.by_worker: dict[int, int] = {}
        self.tainted = False
        """Whether workers carry the taint of their version, so that requests can require it."""
        self.changing = 0
        """The number of refits under way."""
        self.foreign: set[int] = set()
        """Workers that are known to stamp nothing."""
        self.asleep: set[int] = set()
        self.paused: set[int] = set()
        """Workers that were paused without a refit, by this process or another."""
        self.learned = 0
        """How often this process has learned that a worker serves another version than before."""
        self._since: dict[int, int] = {}
        """For each entry of `by_worker`, `learned` when it was made."""
        self._identities: dict[int, str] = {}
        self._roles: dict[int, str] = {}
        """With prefill and decode apart, the role of every worker that was ever listed."""
        self._gate = asyncio.Event()
        self._gate.set()
        self._is_pause = False
        """Whether a pause has closed the gate, and nobody knows for how long."""

    @property
    def is_closed(self) -> bool:
        return not self._gate.is_set()

    async def wait_open(self, patience: float) -> None:
        """Wait until the gate is open. Raise `RolloutError` if a pause lasts longer than
        `patience` seconds; a refit ends by itself."""
        while self.is_closed:
            try:
                async with asyncio.timeout(patience if self._is_pause else None):
                    await self._gate.wait()
            except TimeoutError:
                if self._is_pause:
                    raise _make_paused_error() from None

    def close(self, *, is_pause: bool = False) -> None:
        """Close the gate: new requests wait."""
        self._is_pause = is_pause
        self._gate.clear()

    def open(self) -> None:
        self.paused.clear()
        self._gate.set()

    def claim(self, version: int, identity: str) -> None:
        """Bind a version to one set of weights. Raise `UsageError` if the version is older than
        what is served, or already names other weights."""
        newest = self.newest
        if version < 0 or (newest is not None and version < newest):
            raise UsageError(
                f"Version {version} is older than {newest}, which the fleet serves.",
                "Versions only go up; use the next number.",
            )
        if version == newest and version not in self._identities:
            # Nobody knows which weights it names, so these may be others.
            raise UsageError(
                f"Version {version} is served already.", "Versions only go up; use the next number."
            )
        self.check_identity(version, identity)
        self._identities[version] = identity

    def choose_version(self, identity: str) -> int:
        """Return the version under which weights can be served: the newest that is known if it
        names them already, else the next."""
        newest = max((BASE_VERSION, self.newest or BASE_VERSION, *self._identities))
        return newest if self._identities.get(newest) == identity else newest + 1

    def check_identity(self, version: int, identity: str) -> None:
        """Raise if the version is known to name other weights."""
        if self._identities.get(version, identity) != identity:
            raise UsageError(
                f"Version {version} already names other weights.",
                "A version names one set of weights for good; use the next number.",
            )

    def learn_claims(self, identities: Mapping[int, str]) -> None:
        """Add the claims of other processes; this process's own claims win."""
        self._identities = {**identities, **self._identities}

    def list_serving(self, version: int) -> list[int]:
        """Return the ids of the workers that are known to serve a version."""
        return [worker for worker, served in self.by_worker.items() if served == version]

    def note_roles(self, roles: Mapping[int, str]) -> None:
        """Note which workers do only the prefill or only the decoding."""
        self._roles |= {worker: role for worker, role in roles.items() if role}

    @property
    def needed_roles(self) -> frozenset[str]:
        """The roles of which a version needs a worker each; none if every worker does all."""
        return frozenset({"prefill", "decode"}) if self._roles else frozenset()

    def is_served(self, version: int, without: Collection[int] = ()) -> bool:
        """Return whether workers are known to serve a version, with prefill and decode apart at
        least one of each; `without` are workers that do not count."""
        serving = [worker for worker in self.list_serving(version) if worker not in without]
        roles = {self._roles.get(worker, "") for worker in serving}
        return bool(roles) and roles >= self.needed_roles

    @property
    def newest(self) -> int | None:
        """The newest version that any worker serves, to which the others have to move. It is not
        current before it is served."""
        known = (self.current, *self.by_worker.values())
        return max((version for version in known if version is not None), default=None)

    def mark_issued(self, worker: int) -> None:
        """Note that an update is about to be sent: what the worker serves is unknown from now on,
        until `mark_serving`."""
        self.by_worker.pop(worker, None)

    def mark_serving(self, worker: int, version: int) -> None:
        """Note that a worker is in service with a version."""
        self._note_version(worker, version)
        self.asleep.discard(worker)
        self.paused.discard(worker)

    def note_facts(self, worker: int, *, is_foreign: bool) -> None:
        """Note whether a worker is one that stamps nothing, as it has said itself."""
        (self.foreign.add if is_foreign else self.foreign.discard)(worker)

    def mark_asleep(self, worker: int) -> None:
        """Note that a worker sleeps: it serves no version until it is woken or refitted."""
        self.by_worker.pop(worker, None)
        self.asleep.add(worker)

    def forget(self, worker: int) -> None:
        """Note that nothing is known about a worker any more, or that it is gone."""
        self.by_worker.pop(worker, None)
        self.asleep.discard(worker)

    def learn(
        self, declared: Mapping[int, int], asleep: Iterable[int] = (), paused: Iterable[int] = ()
    ) -> None:
        """Replace the versions by worker with what the workers declare. A newer version (from a
        refit by another process) becomes the current one; an older one (all workers restarted)
        does not."""
        for worker in self.by_worker.keys() - declared.keys():
            del self.by_worker[worker]
        for worker, version in declared.items():
            self._note_version(worker, version)
        self.asleep, self.paused = set(asleep), set(paused)
        newest = max(filter(self.is_served, declared.values()), default=None)
        if newest is not None:
            self.note_served(newest)

    def note_served(self, version: int) -> None:
        """Note that workers serve or have served a version; new requests are for the newest."""
        if self.current is None or version > self.current:
            self.current = version

    def ticket(self, version: int | None = None) -> Ticket:
        """Return a ticket for `version`, or for the current one; raise if no worker serves it."""
        wanted = self.current if version is None else version
        if wanted is None:
            return Ticket(None, None, None)
        if not self.is_served(wanted):
            raise self._make_unserved_error(wanted)
        if not self.is_served(wanted, without=self.paused):
            raise _make_paused_error()
        taint = taint_of(wanted) if self.tainted else None
        stamped = not self.foreign.issuperset(self.by_worker)
        return Ticket(wanted, taint, f"v{wanted}", stamped, self.learned)

    def is_over(self, version: int) -> bool:
        """Return whether no worker serves a version, nor will: newer ones are served."""
        return not self.is_served(version) and (self.newest or BASE_VERSION) > version

    def _make_unserved_error(self, version: int) -> RolloutError:
        if self.asleep:
            return RolloutError(
                f"{len(self.asleep)} workers sleep, and no other serves version {version}.",
                "Wake them with `Stack.wake` or `rollway fleet wake`; after level 2, refit them.",
            )
        if version != self.current:
            return RolloutError(
                f"No worker serves weight version {version}: the fleet's is {self.current}.",
                "Leave `version` out to get the current one.",
            )
        return RolloutError(
            f"No worker is known to serve weight version {version}.",
            "The last refit failed or was interrupted, or all workers restarted: refit.",
        )

    def has_served(self, ticket: Ticket, worker: int | None) -> bool:
        """Return whether a foreign worker has had the ticket's version ever since the ticket was
        issued, as far as this process knows; with `worker` None, whether all workers have.

        What a worker had before it was known does not count: a router sends requests to one that
        has just joined before it knows its taints. By the time of the answer that worker may have
        the version, and then no label shows what it had before."""
        workers = list(self.by_worker) if worker is None else [worker]
        return bool(workers) and all(
            worker in self.foreign
            and self.by_worker.get(worker) == ticket.version
            and self._since[worker] <= ticket.learned
            for worker in workers
        )

    def _note_version(self, worker: int, version: int) -> None:
        if self.by_worker.get(worker) != version:
            self.learned += 1
            self.by_worker[worker], self._since[worker] = version, self.learned


def _make_paused_error() -> RolloutError:
    return RolloutError(
        "The fleet is paused.", "Resume it: `Stack.fleet.resume` or `rollway fleet resume`."
    )
