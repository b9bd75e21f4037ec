"""Keep the weight version that each worker serves, as far as this process knows it for certain.

Refits write `FleetVersions`, and rollouts read it. A version names one set of weights for good.
Every request is sent with a ticket: the version that must sample it, the routing taint that only
workers on that version carry, and a salt that separates their KV caches. While the whole fleet
changes weights, the gate is closed, and new requests wait instead of reaching a worker that is
about to change.
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
    epoch: int
    stamped: bool = False
    """Whether the worker is asked to name the versions of the tokens in its answer."""
    learned: int = 0
    """How much this process had learned about its workers: see `FleetVersions.knew`."""

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

    async def newest(self) -> int | None:
        """Return the newest version that was claimed before this call, or since; cheap, because it
        is called for every answer."""
        ...


class FleetVersions:
    """The weight version of the fleet and of each worker."""

    def __init__(self) -> None:
        self.current: int | None = None
        """The version of new requests; None until a worker has declared one."""
        self.by_worker: dict[int, int] = {}
        self.tainted = False
        """Whether workers carry the taint of their version, so that requests can require it."""
        self.epoch = 0
        """The number of updates issued so far. Without taints, an answer whose ticket is from
        another epoch cannot be attributed to a version."""
        self.changing = 0
        """The number of refits under way."""
        self._identities: dict[int, str] = {}
        self._learned = 0
        """How often this process has learned that a worker serves a version."""
        self._since: dict[int, dict[int, int]] = {}
        """For each worker and the last two versions that it served, `_learned` at that time."""
        self._entered: dict[int, int] = {}
        """The version that each worker was last resumed with by this process."""
        self._enforced: set[int] = set()
        """Workers that name the versions of their tokens."""
        self._asleep: set[int] = set()
        self._paused: set[int] = set()
        """Workers that were paused without a refit, by this process or another."""
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
        self._paused.clear()
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
        self.epoch += 1
        self.by_worker.pop(worker, None)

    def mark_entered(self, worker: int, version: int) -> None:
        """Note that a worker is about to generate again. Call this before the resume: from the
        resume on its answers may come from this version."""
        self._entered[worker] = version

    def mark_enforced(self, worker: int) -> None:
        """Note that the worker's engine refuses a request of another version, so that the worker
        can name the versions of the tokens in its answers."""
        self._enforced.add(worker)

    def is_enforced(self, worker: int) -> bool:
        """Return whether the worker's engine is known to refuse requests of other versions."""
        return worker in self._enforced

    def mark_serving(self, worker: int, version: int) -> None:
        """Note that a worker is in service with a version."""
        self.by_worker[worker] = version
        self._asleep.discard(worker)
        self._paused.discard(worker)
        self._note_known(worker, version)

    def mark_asleep(self, worker: int) -> None:
        """Note that a worker sleeps: it serves no version until it is woken or refitted."""
        self.by_worker.pop(worker, None)
        self._asleep.add(worker)

    def forget(self, worker: int) -> None:
        """Note that nothing is known about a worker any more, or that it is gone."""
        self.by_worker.pop(worker, None)
        self._asleep.discard(worker)

    def learn(
        self, declared: Mapping[int, int], asleep: Iterable[int] = (), paused: Iterable[int] = ()
    ) -> None:
        """Replace the versions by worker with what the workers declare. A newer version (from a
        refit by another process) becomes the current one; an older one (all workers restarted)
        does not."""
        self.by_worker, self._asleep, self._paused = dict(declared), set(asleep), set(paused)
        for worker, version in declared.items():
            self._note_known(worker, version)
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
            return Ticket(None, None, None, self.epoch)
        if not self.is_served(wanted):
            raise self._make_unserved_error(wanted)
        if not self.is_served(wanted, without=self._paused):
            raise _make_paused_error()
        taint = taint_of(wanted) if self.tainted else None
        stamped = any(worker in self._enforced for worker in self.by_worker)
        return Ticket(wanted, taint, f"v{wanted}", self.epoch, stamped, self._learned)

    def is_over(self, version: int) -> bool:
        """Return whether no worker serves a version, nor will: newer ones are served."""
        return not self.is_served(version) and (self.newest or BASE_VERSION) > version

    def _make_unserved_error(self, version: int) -> RolloutError:
        if self._asleep:
            return RolloutError(
                f"{len(self._asleep)} workers sleep, and no other serves version {version}.",
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

    def attributes_to(self, ticket: Ticket, worker: int | None) -> bool:
        """Return whether this process attributes an answer to the version of its ticket.

        `worker` is the worker that answered; None means unknown, so the condition must hold for
        all workers."""
        if ticket.version is None:
            return True
        if not all(self.knew(ticket, w) for w in (self.by_worker if worker is None else (worker,))):
            return False
        if ticket.taint is not None:
            # The router sends the request only to workers on the version, and a refit aborts what
            # is still queued. But a stalled router may deliver after that abort: the answer
            # counts only if the worker was not resumed with newer weights meanwhile.
            newest = max(self._entered.values(), default=ticket.version)
            entered = newest if worker is None else self._entered.get(worker, ticket.version)
            return entered <= ticket.version
        # Without taints any worker may have answered at any time: it must have had the version
        # throughout, which holds if no update was issued since the ticket.
        versions = self.by_worker.values() if worker is None else [self.by_worker.get(worker)]
        return self.epoch == ticket.epoch and set(versions) == {ticket.version}

    def knew(self, ticket: Ticket, worker: int) -> bool:
        """Return whether this process knew, when it issued the ticket, that the worker served its
        version.

        A router sends requests to a worker that has just joined before it knows its taints. Such an
        answer is of the weights that the worker started with. By the time of the answer the worker
        may have the version, and then no label shows what it had before."""
        assert ticket.version is not None
        since = self._since.get(worker, {}).get(ticket.version)
        return since is not None and since <= ticket.learned

    def has_met(self, worker: int) -> bool:
        """Return whether a version of this worker was ever known."""
        return worker in self._since

    def _note_known(self, worker: int, version: int) -> None:
        since = self._since.setdefault(worker, {})
        if version not in since:
            self._learned += 1
            since[version] = self._learned
            if len(since) > 2:
                del since[min(since)]


def _make_paused_error() -> RolloutError:
    return RolloutError(
        "The fleet is paused.", "Resume it: `Stack.fleet.resume` or `rollway fleet resume`."
    )
