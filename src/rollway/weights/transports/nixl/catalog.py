"""Record which source has which version: trainer ranks announce theirs, receivers look them up.

    trainer ranks ── announce ──►  catalog  ◄── look_up ── receivers     (which come and go)
                  ◄─ acknowledged ─   │     ◄── acknowledge ──
                                      └─────◄── announce ── a receiver that serves peers

A version can be found once all ranks of the trainer have announced it, or a receiver has all of it.
A receiver is sent to the least busy source, and becomes a source if it announces itself. Receivers
that all arrive at once ask for a `fanout`, and then form a tree:

    trainer ──► r0 ──► r1 ──► r3, r4       the trainer serves one receiver at a time,
                 └───► r2 ──► r5, r6       a receiver that has the version serves `fanout`

The catalog does not interpret the `body` of a listing, which says how to read the bytes.
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
MAX_RANKS = 1 << 16
_MAX_VERSIONS = 64
_MAX_BYTES = 2 << 30
_MAX_MEMBERS = 1 << 16
_ASSIGNED_SECONDS = 600.0
"""How long a receiver counts as load of its source if it never acknowledges."""


class Listing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one source has of one version."""

    version: Count
    source: Name
    """A unique name; a receiver that serves peers uses the name that it looks up with."""
    rank: Annotated[int, msgspec.Meta(ge=0, lt=MAX_RANKS)]
    world: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
    role: Literal["trainer", "receiver"]
    body: bytes


class NotYet(WeightsError):
    """The version may still come: not all ranks have announced it, or all sources are busy."""


class Catalog(Protocol):
    """A directory of versions. All calls return within a bounded time."""

    def announce(self, listing: Listing) -> None: ...

    def withdraw(self, version: int, source: str) -> None:
        """Remove a listing before its bytes are overwritten; a missing listing is no error."""
        ...

    def look_up(
        self, version: int, member: str, without: Sequence[str] = (), *, fanout: int = 0
    ) -> list[Listing]:
        """Return sources, by rank, that together have all of a version, and none of `without`.

        Raise `NotYet` while some are missing, and `WeightsError` if the version is gone. With a
        `fanout`, also raise `NotYet` until a source is free for `member`."""
        ...

    def acknowledge(self, version: int, member: str) -> None:
        """Record that `member` has received the version."""
        ...

    def acknowledged(self, version: int) -> list[str]:
        """Return the receivers that have the version."""
        ...

    def leave(self, member: str) -> None:
        """Forget a source or a receiver, with all its listings."""
        ...

    def where(self) -> dict[str, Any]:
        """Return the fields of an offer that say how to reach this catalog."""
        ...


class MemoryCatalog:
    """The catalog itself, in one process; `catalog_http` makes it reachable."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._versions: dict[int, dict[str, Listing]] = {}
        self._newest = -1
        self._assigned: dict[tuple[int, str], dict[str, float]] = {}
        """By version and first source of a set: the receivers that read from it, and since when."""
        self._acknowledged: dict[int, set[str]] = {}
        self._members: set[str] = set()

    def announce(self, listing: Listing) -> None:
        if listing.rank >= listing.world:
            raise UsageError(f"There is no rank {listing.rank} among {listing.world}.")
        if listing.role == "receiver" and listing.world != 1:
            raise UsageError("A receiver serves peers only if it has all of a version.")
        with self._lock:
            self._check_limits(listing)
            listed = self._versions.setdefault(listing.version, {})
            if listing.role == "trainer":
                _remove_replaced(listed, listing)
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
            # A receiver that asks again no longer reads from its previous source.
            for (assigned_version, _), assigned in self._assigned.items():
                if assigned_version == version:
                    assigned.pop(member, None)
            sets = self._find_sets(version, member, without)
            if not sets:
                raise self._describe_missing(version, without)
            if fanout and not (sets := self._find_free(sets, fanout)):
                raise NotYet(f"All sources of version {version} are serving others.")
            # Prefer a receiver to the trainer, which has other work.
            chosen = min(sets, key=lambda ranks: (self._load(ranks), ranks[0].role == "trainer"))
            # A trainer rank that looks up its own version reads nothing: it asks whether all ranks
            # have announced it.
            if all(listing.source != member for listing in chosen):
                assigned = self._assigned.setdefault((version, chosen[0].source), {})
                assigned[member] = time.monotonic()
            return chosen

    def acknowledge(self, version: int, member: str) -> None:
        with self._lock:
            if version not in self._versions:
                return  # it was withdrawn meanwhile
            self._join(member)
            self._acknowledged.setdefault(version, set()).add(member)
            self._unassign(member)

    def acknowledged(self, version: int) -> list[str]:
        with self._lock:
            return sorted(self._acknowledged.get(version, ()))

    def leave(self, member: str) -> None:
        with self._lock:
            for version in list(self._versions):
                self._remove(version, member)
            self._unassign(member)
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
        if member not in self._members and len(self._members) >= _MAX_MEMBERS:
            raise UsageError(f"The catalog has {_MAX_MEMBERS} members already.")
        self._members.add(member)

    def _unassign(self, member: str) -> None:
        for assigned in self._assigned.values():
            assigned.pop(member, None)

    def _check_limits(self, listing: Listing) -> None:
        if listing.version not in self._versions and len(self._versions) >= _MAX_VERSIONS:
            raise UsageError(
                f"The catalog holds {_MAX_VERSIONS} versions already.", "Withdraw old ones."
            )
        versions = self._versions.values()
        nbytes = sum(len(item.body) for listed in versions for item in listed.values())
        if nbytes + len(listing.body) > _MAX_BYTES:
            raise UsageError(f"The catalog is full: {nbytes} bytes.", "Keep fewer versions.")

    def _find_sets(self, version: int, member: str, without: Sequence[str]) -> list[list[Listing]]:
        """Return sets of listings that each make up the whole version."""
        listed = self._versions.get(version, {}).values()
        sets = [
            [listing]
            for listing in listed
            if listing.role == "receiver" and listing.source != member
        ]
        ranks = sorted(
            (listing for listing in listed if listing.role == "trainer"),
            key=lambda listing: listing.rank,
        )
        if ranks and len(ranks) == ranks[0].world:
            sets.append(ranks)
        return [group for group in sets if all(item.source not in without for item in group)]

    def _find_free(self, sets: list[list[Listing]], fanout: int) -> list[list[Listing]]:
        """Return the sets that can serve one more: receivers up to `fanout`, the trainer one.

        The trainer serves only while no receiver has the version, because its network would limit
        all of them."""
        receivers = [group for group in sets if group[0].role == "receiver"]
        limit = fanout if receivers else 1
        return [group for group in receivers or sets if self._load(group) < limit]

    def _load(self, listings: list[Listing]) -> int:
        """Return how many receivers read from these sources now."""
        since = time.monotonic() - _ASSIGNED_SECONDS
        assigned = self._assigned.get((listings[0].version, listings[0].source), {})
        return sum(when > since for when in assigned.values())

    def _describe_missing(self, version: int, without: Sequence[str]) -> WeightsError:
        listed = self._versions.get(version)
        if listed and without:
            return WeightsError(
                f"Nobody else has version {version}: {len(without)} sources failed.",
                "Publish it again.",
            )
        if listed:
            ranks = [listing for listing in listed.values() if listing.role == "trainer"]
            world = ranks[0].world if ranks else 1
            return NotYet(f"{len(ranks)} of {world} ranks have announced version {version}.")
        if version > self._newest:
            return NotYet(f"Nobody has announced version {version}.")
        versions = ", ".join(map(str, sorted(self._versions))) or "none"
        return WeightsError(
            f"Version {version} is not kept any more (kept: {versions}).",
            "Use a newer one, or let the publisher keep more.",
        )

    def _remove(self, version: int, source: str) -> None:
        listed = self._versions.get(version, {})
        listed.pop(source, None)
        self._assigned.pop((version, source), None)
        if version in self._versions and not listed:
            del self._versions[version]
            self._acknowledged.pop(version, None)
            self._assigned = {
                key: members for key, members in self._assigned.items() if key[0] != version
            }


def _remove_replaced(listed: dict[str, Listing], listing: Listing) -> None:
    """Remove the earlier listing of a restarted rank, and those of a trainer of another size."""
    replaced = [
        old.source
        for old in listed.values()
        if old.role == "trainer" and (old.rank == listing.rank or old.world != listing.world)
    ]
    for source in replaced:
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
    """Look up a version that ranks may still be announcing, or whose sources may be busy."""
    deadline = time.monotonic() + timeout
    pause = 0.005
    while True:
        try:
            return catalog.look_up(version, member, without, fanout=fanout)
        except NotYet as error:
            if time.monotonic() + pause > deadline:
                raise WeightsError(
                    f"{error.message} Rollway waited for {timeout:g} s.",
                    "Check that all ranks of the trainer still run.",
                ) from error
        time.sleep(pause)
        pause = min(2 * pause, 0.5)
