"""The store on which a publisher and its receivers agree about one transfer by `collective`.

All keys are below a random prefix; R is the rank of a receiver:

    manifest/0…  the list of tensors    joined   how many receivers joined   who/R  host and pid
    go           all have joined        failed   the first cause of any      ended/R  it has ended
    done         all have everything    left     how many asked no more

The publisher serves the store. The store has no authentication, so a receiver uses data from it
only if it agrees with the offer, which is signed.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Annotated, Any, Literal

import msgspec
import torch.distributed as dist

from rollway.errors import WeightsError
from rollway.weights.offer import MAX_MANIFEST_BYTES, Manifest, Offer, read_manifest
from rollway.weights.transports.group import BrokenOff, Place, connect_store, wait_for

_CONNECT_SECONDS = 3.0
_PART_BYTES = 4 << 20
"""Bytes of a list of tensors per key; the store accepts up to 8 MiB."""
_MAX_PARTS = MAX_MANIFEST_BYTES // _PART_BYTES
_MAX_CHARACTERS = 500
_GRACE_SECONDS = 5.0
"""How long a receiver that was stopped may take to report that it has ended."""
_POLL_SECONDS = 2e-3


class Location(Place, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The part of an offer that names the store, and the settings that all ranks share."""

    backend: Literal["gloo", "nccl"]
    bucket_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
    manifest_parts: Annotated[int, msgspec.Meta(ge=1, le=_MAX_PARTS)]
    prefix: Annotated[str, msgspec.Meta(min_length=8, max_length=64)]
    """The prefix of all keys: random, so that two transfers are never confused."""


def read_location(offer: Offer) -> Location:
    """Return the store that an offer names; raise if the offer is of another transport."""
    try:
        return msgspec.convert(offer.where, Location)
    except (msgspec.ValidationError, RecursionError) as error:
        raise WeightsError(
            f"This offer names no rendezvous: {error}.", "Publish the version again."
        ) from error


def connect(location: Location, offer: Offer) -> tuple[Any, socket.socket]:
    """Connect to the publisher's store, and keep an idle connection to it."""
    try:
        store, line = connect_store(location)
    except BrokenOff as error:
        raise WeightsError(
            f"Nobody offers version {offer.version} at {location.host}:{location.port} any more.",
            "It is sent once, to as many receivers as were expected: publish it again.",
        ) from error
    return dist.PrefixStore(location.prefix, store), line


def split_manifest(raw: bytes) -> list[bytes]:
    """Return an encoded list of tensors in parts that the store accepts."""
    return [raw[at : at + _PART_BYTES] for at in range(0, len(raw), _PART_BYTES)]


def fetch_manifest(store: Any, location: Location, offer: Offer) -> Manifest:
    """Read the list of tensors from the store, and compare it with the offer."""
    keys = [f"manifest/{number}" for number in range(location.manifest_parts)]
    raw = bytearray()
    try:
        store.wait(keys, timedelta(seconds=_CONNECT_SECONDS))
        for key in keys:
            raw += store.get(key)
            if len(raw) > MAX_MANIFEST_BYTES:
                raise WeightsError(f"The list of tensors of version {offer.version} is too long.")
    except RuntimeError as error:
        raise WeightsError(f"The list of tensors of version {offer.version} is gone.") from error
    return read_manifest(bytes(raw), offer)


def check_failed(store: Any) -> None:
    """Raise if any rank has failed."""
    if store.check(["failed"]):
        raise BrokenOff(_cut(store.get("failed")))


def _cut(raw: bytes) -> str:
    # Cut it before decoding: anyone who reaches the port may have written megabytes.
    return raw[: 4 * _MAX_CHARACTERS].decode(errors="replace")[:_MAX_CHARACTERS]


class ReceiverSide:
    """A receiver in the store."""

    def __init__(self, store: Any, location: Location, offer: Offer) -> None:
        self._store, self._location, self._offer = store, location, offer
        self._name = f"process {os.getpid()} on {socket.gethostname()}"
        with self._publisher_present():
            self.rank = int(store.add("joined", 1))
            if self.rank > location.receivers:
                error = WeightsError(
                    f"Version {offer.version} is for {location.receivers} receivers; this is one "
                    "more.",
                    "Expect every tensor-parallel rank of every worker, and no other process.",
                )
                self.report_failure(error)
                raise error
            store.set(f"who/{self.rank}", self._name)

    def wait_for_go(self) -> None:
        """Wait until all receivers have joined."""
        # Wait a little longer than the publisher does, because only it can name who is missing.
        self._wait("go", self._location.init_seconds + _GRACE_SECONDS)

    def check(self) -> None:
        """Raise if the transfer has failed, or the publisher is gone."""
        with self._publisher_present():
            check_failed(self._store)

    def confirm(self) -> None:
        """Report that all bytes arrived and are verified; return when all receivers have reported.

        Until then the process group must stay open: this rank may have forwarded bytes that others
        have not received yet."""
        with self._publisher_present():
            self._store.set(f"ended/{self.rank}", "")
            self._wait("done", self._location.step_seconds + _GRACE_SECONDS)
            self._store.add("left", 1)

    def report_failure(self, error: BaseException) -> None:
        """Tell all others why this receiver ended."""
        cause = "the worker stopped receiving; its own error says why"
        if not isinstance(error, GeneratorExit):
            cause = str(error)
        if not isinstance(error, BrokenOff):
            cause = f"receiver {self.rank} ({self._name}) reported: {cause}"
        with suppress(RuntimeError):  # the publisher is gone: there is nobody to notify
            self._store.compare_set("failed", "", cause[:_MAX_CHARACTERS])
            self._store.set(f"ended/{self.rank}", "")

    def _wait(self, key: str, seconds: float) -> None:
        with self._publisher_present():
            try:
                self._store.wait([key], timedelta(seconds=seconds))
            except dist.DistStoreError as error:
                raise WeightsError(
                    f"Version {self._offer.version} did not arrive in time.", "Publish it again."
                ) from error
        self.check()

    @contextmanager
    def _publisher_present(self) -> Iterator[None]:
        """Explain errors of the store, which only occur if the publisher is gone."""
        try:
            yield
        except RuntimeError as error:
            raise WeightsError(
                f"The publisher of version {self._offer.version} went away while it was sent.",
                "See whether the trainer still runs, and publish again.",
            ) from error


class PublisherSide:
    """The publisher in its store. `watch` raises if the transfer is cancelled."""

    def __init__(self, store: Any, location: Location, watch: Callable[[], None]) -> None:
        self.store, self._location, self._watch = store, location, watch

    def wait_for_all(self) -> None:
        """Wait until all receivers have joined, then start them."""
        expected, seconds = self._location.receivers, self._location.init_seconds

        def have_joined() -> bool:
            return int(self.store.add("joined", 0)) >= expected

        if not wait_for(have_joined, seconds, self._watch, _POLL_SECONDS):
            raise WeightsError(
                f"{self.store.add('joined', 0)} of {expected} receivers joined within "
                f"{seconds:g} s.",
                "See whether each worker got the offer, and reaches this address.",
            )
        self.store.set("go", "")

    def check(self) -> None:
        """Raise if the transfer was cancelled, a receiver failed, or one too many has joined."""
        self._watch()
        check_failed(self.store)

    def wait_for_success(self) -> None:
        """Wait until every receiver has confirmed that it has all bytes, verified."""
        ranks, seconds = range(1, self._location.receivers + 1), self._location.step_seconds
        if not self._wait_for_ends(ranks, seconds, self.check):
            raise WeightsError(f"Not every receiver confirmed within {seconds:g} s.")
        self.check()
        self.store.set("done", "")
        # Keep serving the store until every receiver has made its last call to it.
        wait_for(lambda: self.store.add("left", 0) >= len(ranks), _GRACE_SECONDS)

    def report_failure(self, error: Exception) -> None:
        """Tell all receivers why this ended."""
        with suppress(RuntimeError):  # the store failed: `stop` says so
            self.store.compare_set("failed", "", str(error)[:_MAX_CHARACTERS])

    def stop(self, error: Exception) -> str:
        """Stop all receivers; return the first cause, this error if it is another one, and which
        receivers are missing."""
        own = str(error)[:_MAX_CHARACTERS]
        cause = _cut(self.store.compare_set("failed", "", own))
        if cause != own:
            cause += f"; the trainer's own error: {own}"
        # Set these after `failed`: they wake up waiting receivers, which then check for it.
        for key in ("go", "done"):
            self.store.set(key, "")
        joined = range(1, min(self.store.add("joined", 0), self._location.receivers) + 1)
        self._wait_for_ends(joined, _GRACE_SECONDS, lambda: None)
        if len(joined) < self._location.receivers:
            return f"{cause} (joined: {self._describe(joined) or 'none'})"
        silent = [rank for rank in joined if not self.store.check([f"ended/{rank}"])]
        return f"{cause} (no report from {self._describe(silent)})" if silent else cause

    def _wait_for_ends(
        self, ranks: Sequence[int], seconds: float, watch: Callable[[], None]
    ) -> bool:
        keys = [f"ended/{rank}" for rank in ranks]
        return wait_for(lambda: bool(self.store.check(keys)), seconds, watch, _POLL_SECONDS)

    def _describe(self, ranks: Sequence[int]) -> str:
        names = []
        for rank in ranks:
            is_named = self.store.check([f"who/{rank}"])
            name = _cut(self.store.get(f"who/{rank}")) if is_named else "it did not say who it is"
            names.append(f"receiver {rank} ({name})")
        return ", ".join(names)
