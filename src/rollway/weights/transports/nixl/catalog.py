"""Record which source has which version: trainer ranks announce theirs, receivers look them up.

    trainer ranks ── announce ──►  catalog  ◄── look_up ── receivers     (which come and go)
                ◄─ list_receivers ─   │     ◄── acknowledge ──
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
from collections import Counter
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
_READING_SECONDS = 600.0
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

    def look_up(
        self, version: int, member: str, without: Sequence[str] = (), *, fanout: int = 0
    ) -> list[Listing]:
        """Return sources, by rank, that together have all of a version, and none of `without`.

        Raise `NotYet` while some are missing, and `WeightsError` if the version is gone. With a
        `fanout`, also raise `NotYet` until a source is free for `member`."""

    def acknowledge(self, version: int, member: str) -> None:
        """Record that `member` has received the version."""

    def list_receivers(self, version: int) -> list[str]:
        """Return the receivers that have the version."""

    def leave(self, member: str) -> None:
        """Forget a source or a receiver, with all its listings."""

    def where(self) -> dict[str, Any]:
        """Return the fields of an offer that say how to reach this catalog."""


class MemoryCatalog:
    """The catalog itself, in one process; `catalog_http` makes it reachable."""

    def __init__(self) -> None:
        self.versions: dict[int, dict[str, Listing]] = {}
        """Listings by version and source."""
        self.members: set[str] = set()
        self._lock = threading.Lock()
        self._newest = -1
        self._reading: dict[str, tuple[int, str, float]] = {}
        """By receiver: the version that it reads, the first of its sources, and since when."""
        self._acknowledged: dict[int, set[str]] = {}

    def announce(self, listing: Listing) -> None:
        if listing.rank >= listing.world:
            raise UsageError(f"There is no rank {listing.rank} among {listing.world}.")
        if listing.role == "receiver" and listing.world != 1:
            raise UsageError("A receiver serves peers only if it has all of a version.")
        with self._lock:
            self._check_limits(listing)
            listed = self.versions.setdefault(listing.version, {})
            if listing.role == "trainer":
                # A restarted rank replaces its listing, a trainer of another size all of them.
                for old in [old for old in listed.values() if old.role == "trainer"]:
                    if old.rank == listing.rank or old.world != listing.world:
                        del listed[old.source]
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
            self._reading.pop(member, None)
            sets = self._find_sets(version, member, without)
            if not sets:
                raise self._describe_missing(version, without)
            since = time.monotonic() - _READING_SECONDS
            loads = Counter(
                source
                for reads, source, start in self._reading.values()
                if reads == version and start > since
            )
            if fanout:
                # The trainer serves one receiver, and only while no receiver has the version,
                # because its network would limit all of them.
                receivers = [group for group in sets if group[0].role == "receiver"]
                limit = fanout if receivers else 1
                sets = [group for group in receivers or sets if loads[group[0].source] < limit]
                if not sets:
                    raise NotYet(f"All sources of version {version} are serving others.")
            # Prefer a receiver to the trainer, which has other work.
            chosen = min(
                sets, key=lambda group: (loads[group[0].source], group[0].role == "trainer")
            )
            # A trainer rank that looks up its own version reads nothing: it asks whether all ranks
            # have announced it.
            if all(listing.source != member for listing in chosen):
                self._reading[member] = version, chosen[0].source, time.monotonic()
            return chosen

    def acknowledge(self, version: int, member: str) -> None:
        with self._lock:
            if version in self.versions:  # or it was withdrawn meanwhile
                self._join(member)
                self._acknowledged.setdefault(version, set()).add(member)
                self._reading.pop(member, None)

    def list_receivers(self, version: int) -> list[str]:
        with self._lock:
            return sorted(self._acknowledged.get(version, ()))

    def leave(self, member: str) -> None:
        with self._lock:
            for version in list(self.versions):
                self._remove(version, member)
            self._reading.pop(member, None)
            self.members.discard(member)

    def where(self) -> dict[str, Any]:
        raise UsageError(
            "A catalog in memory cannot be reached by other processes.", "Use CatalogServer."
        )

    def _join(self, member: str) -> None:
        if member not in self.members and len(self.members) >= _MAX_MEMBERS:
            raise UsageError(f"The catalog has {_MAX_MEMBERS} members already.")
        self.members.add(member)

    def _check_limits(self, listing: Listing) -> None:
        if listing.version not in self.versions and len(self.versions) >= _MAX_VERSIONS:
            raise UsageError(
                f"The catalog holds {_MAX_VERSIONS} versions already.", "Withdraw old ones."
            )
        versions = self.versions.values()
        nbytes = sum(len(item.body) for listed in versions for item in listed.values())
        if nbytes + len(listing.body) > _MAX_BYTES:
            raise UsageError(f"The catalog is full: {nbytes} bytes.", "Keep fewer versions.")

    def _find_sets(self, version: int, member: str, without: Sequence[str]) -> list[list[Listing]]:
        """Return sets of listings that each make up the whole version."""
        listed = sorted(self.versions.get(version, {}).values(), key=lambda listing: listing.rank)
        ranks = [listing for listing in listed if listing.role == "trainer"]
        receivers = [listing for listing in listed if listing.role == "receiver"]
        sets = [[listing] for listing in receivers if listing.source != member]
        if ranks and len(ranks) == ranks[0].world:
            sets.append(ranks)
        return [group for group in sets if all(item.source not in without for item in group)]

    def _describe_missing(self, version: int, without: Sequence[str]) -> WeightsError:
        listed = self.versions.get(version)
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
        versions = ", ".join(map(str, sorted(self.versions))) or "none"
        return WeightsError(
            f"Version {version} is not kept any more (kept: {versions}).",
            "Use a newer one, or let the publisher keep more.",
        )

    def _remove(self, version: int, source: str) -> None:
        listed = self.versions.get(version, {})
        listed.pop(source, None)
        for member, (reads, read_source, _) in list(self._reading.items()):
            if (reads, read_source) == (version, source):
                del self._reading[member]
        if not listed:
            self.versions.pop(version, None)
            self._acknowledged.pop(version, None)


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
