"""Who has which version of the weights: trainer ranks announce theirs, receivers look them up.

    trainer ranks ── announce ──►  catalog  ◄── look_up ── receivers     (which come and go)
                  ◄─ acknowledged ─   │     ◄── acknowledge ──
                                      └─────◄── announce ── a receiver that has it serves others

A version can be found when all ranks of the trainer have announced it, or when a receiver has all
of it. Whoever looks it up is sent to the least busy: with every receiver that announces itself
there is one more source. Those who all come at once are sent in turns, when they ask for a
`fanout`: the trainer gives to one, whoever has it to some others, so that they form a tree. The
catalog knows nothing of bytes or transports: what a reader must know is the `body` of a listing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Protocol

import msgspec

from rollway.errors import UsageError, WeightsError
from rollway.weights.offer import Count

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
MOST_RANKS = 1 << 16
_MOST_VERSIONS = 64
_MOST_BYTES = 2 << 30
_MOST_MEMBERS = 1 << 16
_ASSIGNED_SECONDS = 600.0
"""After this time a receiver that never said it is done counts for nobody's load."""


class Listing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one source has of one version."""

    version: Count
    source: Name
    """Unlike any other's; a receiver that serves has the name that it looks up with."""
    rank: Annotated[int, msgspec.Meta(ge=0, lt=MOST_RANKS)]
    world: Annotated[int, msgspec.Meta(ge=1, le=MOST_RANKS)]
    role: Literal["trainer", "receiver"]
    body: bytes


class NotYet(WeightsError):
    """A version that may still come: not all ranks have announced it."""


class Catalog(Protocol):
    """A directory of versions. All calls return within a bounded time."""

    def announce(self, listing: Listing) -> None: ...

    def withdraw(self, version: int, source: str) -> None:
        """Before the bytes are written over; what was withdrawn before is no error."""
        ...

    def look_up(
        self, version: int, member: str, without: Sequence[str] = (), *, fanout: int = 0
    ) -> list[Listing]:
        """Sources that have all of a version together, by rank, and none of `without`. Raises
        `NotYet` while some are missing, `WeightsError` when it is gone. With a `fanout`, also
        `NotYet` while it is not `member`'s turn: see `_in_turn`."""
        ...

    def acknowledge(self, version: int, member: str) -> None:
        """`member` has the version."""
        ...

    def acknowledged(self, version: int) -> list[str]: ...

    def leave(self, member: str) -> None:
        """Forget a source or a receiver, with all that it announced."""
        ...

    def where(self) -> dict[str, Any]:
        """For an offer: how a receiver gets at this catalog."""
        ...


class MemoryCatalog:
    """The catalog itself, in one process; `catalog_http` lets others reach it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._versions: dict[int, dict[str, Listing]] = {}
        self._newest = -1
        self._assigned: dict[tuple[int, str], dict[str, float]] = {}
        """By version and first source of a set: who was sent there, and when."""
        self._acknowledged: dict[int, set[str]] = {}
        self._members: set[str] = set()

    def announce(self, listing: Listing) -> None:
        if listing.rank >= listing.world:
            raise UsageError(f"There is no rank {listing.rank} among {listing.world}.")
        if listing.role == "receiver" and listing.world != 1:
            raise UsageError("A receiver serves only when it has all of a version.")
        with self._lock:
            self._check_room(listing)
            listed = self._versions.setdefault(listing.version, {})
            if listing.role == "trainer":
                _take_the_place(listed, listing)
            listed[listing.source] = listing
            self._newest = max(self._newest, listing.version)
            self._join(listing.source)

    def withdraw(self, version: int, source: str) -> None:
        with self._lock:
            self._remove(version, source)

    def look_up(
        self, version: int, member: str, without: Sequence[str] = (), *, fanout: int = 0
    ) -> list[Listing]:
        with self._lock:
            self._join(member)
            for (of, _), assigned in self._assigned.items():
                if of == version:
                    assigned.pop(member, None)
            found = self._sets(version, member, without)
            if not found:
                raise self._missing(version, without)
            if fanout and not (found := self._in_turn(found, fanout)):
                raise NotYet(f"All who have version {version} are giving it to others.")
            # A receiver before the trainer, which has other work.
            chosen = min(found, key=lambda one: (self._load(one), one[0].role == "trainer"))
            if all(one.source != member for one in chosen):  # else a rank that asks how far we are
                assigned = self._assigned.setdefault((version, chosen[0].source), {})
                assigned[member] = time.monotonic()
            return chosen

    def acknowledge(self, version: int, member: str) -> None:
        with self._lock:
            if version not in self._versions:
                return  # it has gone meanwhile
            self._join(member)
            self._acknowledged.setdefault(version, set()).add(member)
            for assigned in self._assigned.values():
                assigned.pop(member, None)

    def acknowledged(self, version: int) -> list[str]:
        with self._lock:
            return sorted(self._acknowledged.get(version, ()))

    def leave(self, member: str) -> None:
        with self._lock:
            for version in list(self._versions):
                self._remove(version, member)
            for assigned in self._assigned.values():
                assigned.pop(member, None)
            self._members.discard(member)

    def where(self) -> dict[str, Any]:
        raise UsageError(
            "A catalog in memory cannot be reached by other processes.", "Use CatalogServer."
        )

    def members(self) -> list[str]:
        with self._lock:
            return sorted(self._members)

    def versions(self) -> list[int]:
        with self._lock:
            return sorted(self._versions)

    def _join(self, member: str) -> None:
        if member not in self._members and len(self._members) >= _MOST_MEMBERS:
            raise UsageError(f"The catalog has {_MOST_MEMBERS} members already.")
        self._members.add(member)

    def _check_room(self, listing: Listing) -> None:
        if listing.version not in self._versions and len(self._versions) >= _MOST_VERSIONS:
            raise UsageError(
                f"The catalog holds {_MOST_VERSIONS} versions already.", "Withdraw old ones."
            )
        held = sum(len(one.body) for some in self._versions.values() for one in some.values())
        if held + len(listing.body) > _MOST_BYTES:
            raise UsageError(f"The catalog is full: {held} bytes.", "Keep fewer versions.")

    def _sets(self, version: int, member: str, without: Sequence[str]) -> list[list[Listing]]:
        """Listings that make up the version, each without help from another set."""
        listed = self._versions.get(version, {}).values()
        sets = [[one] for one in listed if one.role == "receiver" and one.source != member]
        ranks = sorted((one for one in listed if one.role == "trainer"), key=lambda o: o.rank)
        if ranks and len(ranks) == ranks[0].world:
            sets.append(ranks)
        return [some for some in sets if not any(one.source in without for one in some)]

    def _in_turn(self, found: list[list[Listing]], fanout: int) -> list[list[Listing]]:
        """Those who are free: receivers for `fanout` others each, and the trainer for one, as
        long as it is the only one to have the version."""
        receivers = [some for some in found if some[0].role == "receiver"]
        most = fanout if receivers else 1
        return [some for some in receivers or found if self._load(some) < most]

    def _load(self, some: list[Listing]) -> int:
        since = time.monotonic() - _ASSIGNED_SECONDS
        assigned = self._assigned.get((some[0].version, some[0].source), {})
        return sum(when > since for when in assigned.values())

    def _missing(self, version: int, without: Sequence[str]) -> WeightsError:
        listed = self._versions.get(version)
        if listed and without:
            return WeightsError(
                f"Nobody else has version {version}: {len(without)} sources failed.",
                "Publish it again.",
            )
        if listed:
            ranks = [one for one in listed.values() if one.role == "trainer"]
            world = ranks[0].world if ranks else 1
            return NotYet(f"{len(ranks)} of {world} ranks have announced version {version}.")
        if version > self._newest:
            return NotYet(f"Nobody has announced version {version}.")
        kept = ", ".join(map(str, sorted(self._versions))) or "none"
        return WeightsError(
            f"Version {version} is not kept any more (kept: {kept}).",
            "Take a newer one, or let the publisher keep more.",
        )

    def _remove(self, version: int, source: str) -> None:
        listed = self._versions.get(version, {})
        listed.pop(source, None)
        self._assigned.pop((version, source), None)
        if version in self._versions and not listed:
            del self._versions[version]
            self._acknowledged.pop(version, None)
            self._assigned = {key: who for key, who in self._assigned.items() if key[0] != version}


def _take_the_place(listed: dict[str, Listing], listing: Listing) -> None:
    """A rank that was started anew replaces what it was; another world replaces all of it."""
    gone = [
        one.source
        for one in listed.values()
        if one.role == "trainer" and (one.rank == listing.rank or one.world != listing.world)
    ]
    for source in gone:
        del listed[source]


def wait_for(
    catalog: Catalog,
    version: int,
    member: str,
    timeout: float,
    without: Sequence[str] = (),
    *,
    fanout: int = 0,
) -> list[Listing]:
    """Look up a version that other ranks may still be announcing, or others taking."""
    deadline = time.monotonic() + timeout
    pause = 0.005
    while True:
        try:
            return catalog.look_up(version, member, without, fanout=fanout)
        except NotYet as error:
            if time.monotonic() + pause > deadline:
                raise WeightsError(
                    f"{error.message} It was waited for {timeout:g} s.",
                    "See whether all ranks of the trainer still run.",
                ) from error
        time.sleep(pause)
        pause = min(2 * pause, 0.5)
