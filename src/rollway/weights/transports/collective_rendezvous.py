"""The store in which a publisher and its receivers coordinate one transfer.

All keys are below a random prefix; R is the rank of a receiver:

    manifest/0…  the list of tensors      joined  how many receivers joined   who/R  host and pid
    go           all receivers joined     failed  some receiver failed        stop   why to stop
    ended/R      the receiver's outcome   done    all confirmed               left   how many left

The publisher serves the store. The store has no authentication, so a receiver uses data from it
only if it agrees with the offer, which is signed.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import torch.distributed as dist

from rollway.errors import UsageError, WeightsError
from rollway.weights.offer import MAX_MANIFEST_BYTES, Manifest, Offer, read_manifest

_CONNECT_SECONDS = 3.0
_PART_BYTES = 4 << 20
"""Bytes of a list of tensors per key; the store accepts up to 8 MiB."""
_MAX_CHARACTERS = 500
_MAX_PARTS = MAX_MANIFEST_BYTES // _PART_BYTES
_GRACE_SECONDS = 5.0
"""How long a receiver that was stopped may take to report its outcome."""
T = TypeVar("T")
Backend = Literal["gloo", "nccl"]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=86400)]


class Location(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The part of an offer that names the store, and the settings that all ranks share."""

    host: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._:%-]{1,255}\Z")]
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    receivers: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
    backend: Backend
    bucket_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
    init_seconds: Seconds
    """The time limit for all receivers to join, and again for the process group to form."""
    step_seconds: Seconds
    """The time limit for each message to reach all receivers."""
    manifest_parts: Annotated[int, msgspec.Meta(ge=1, le=_MAX_PARTS)]
    prefix: Annotated[str, msgspec.Meta(min_length=8, max_length=64)]
    """The prefix of all keys: random, so that two transfers are never confused."""


class ReceiverId(msgspec.Struct, frozen=True):
    """The process of a receiver, for the person who has to find it."""

    host: Annotated[str, msgspec.Meta(max_length=255)]
    pid: int

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class Outcome(msgspec.Struct, frozen=True):
    """The outcome of a receiver: it has everything, stopped because others failed, or failed."""

    status: Literal["received", "stopped", "failed"]
    message: Annotated[str, msgspec.Meta(max_length=_MAX_CHARACTERS)] = ""


class Stopped(WeightsError):
    """The publisher stopped the transfer because something failed elsewhere."""


class BrokenOff(WeightsError):
    """Other ranks died or are slow; this is seldom this rank's own fault."""


def read_location(offer: Offer) -> Location:
    """Return the store that an offer names; raise if the offer is of another transport."""
    try:
        return msgspec.convert(offer.where, Location)
    except (msgspec.ValidationError, RecursionError) as error:
        raise WeightsError(
            f"This offer names no rendezvous: {error}.", "Publish the version again."
        ) from error


def serve_store(host: str, port: int, seconds: float) -> tuple[Any, int]:
    """Serve a store on this address only; return it and its port."""
    try:
        # TCPStore itself would listen on every address of the machine.
        listener = socket.create_server((host, port))
    except OSError as error:
        raise UsageError(
            f"Cannot listen on {host}:{port}: {error.strerror}.",
            "Name an address of this machine, and a free port (0 uses any).",
        ) from error
    port = listener.getsockname()[1]
    limit = timedelta(seconds=seconds)
    descriptor = listener.detach()  # the store closes it
    store = dist.TCPStore(
        host, port, None, True, limit, wait_for_workers=False, master_listen_fd=descriptor
    )
    return store, port


def find_address_towards(host: str, port: int) -> str:
    """Return the address by which this machine reaches another, and is reached from there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # a datagram socket sends nothing
        return str(probe.getsockname()[0])


def connect_store(location: Location, offer: Offer) -> Any:
    """Connect to the publisher's store."""
    try:
        # Probe first: without a listener, the store's own client retries until its timeout, twice.
        socket.create_connection((location.host, location.port), _CONNECT_SECONDS).close()
        limit = timedelta(seconds=_CONNECT_SECONDS)
        store = dist.TCPStore(
            location.host, location.port, None, False, limit, wait_for_workers=False
        )
        store.set_timeout(timedelta(seconds=location.step_seconds))
    except (OSError, RuntimeError, ValueError) as error:  # ValueError: a malformed host name
        raise WeightsError(
            f"Nobody offers version {offer.version} at {location.host}:{location.port} any more.",
            "It is sent once, to as many receivers as were expected: publish it again.",
        ) from error
    return dist.PrefixStore(location.prefix, store)


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


class ReceiverSide:
    """A receiver's side of a rendezvous."""

    def __init__(self, store: Any, location: Location, offer: Offer) -> None:
        self._store, self._location, self._offer = store, location, offer
        with self._publisher_present():
            self.rank = int(store.add("joined", 1))
            if self.rank > location.receivers:
                store.set("failed", "")
                raise WeightsError(
                    f"Version {offer.version} is for {location.receivers} receivers; this is one "
                    "more.",
                    "Expect every tensor-parallel rank of every worker, and no other process.",
                )
            name = ReceiverId(socket.gethostname(), os.getpid())
            store.set(f"who/{self.rank}", msgspec.json.encode(name))

    def wait_for_go(self) -> None:
        """Wait until all receivers have joined."""
        # Wait a little longer than the publisher does, because only it can name who is missing.
        self._wait("go", self._location.init_seconds + _GRACE_SECONDS)

    def check(self) -> None:
        """Raise if the publisher has given up, or is gone."""
        with self._publisher_present():
            if self._store.check(["stop"]):
                # Cut it before decoding: anyone who reaches the port may have written megabytes.
                message = self._store.get("stop")[: 4 * _MAX_CHARACTERS].decode(errors="replace")
                raise Stopped(message[:_MAX_CHARACTERS])

    def confirm(self) -> None:
        """Report that all bytes arrived and are verified; return when all receivers have reported.

        Until then the process group must stay open: this rank may have forwarded bytes that others
        have not received yet."""
        with self._publisher_present():
            self._report(Outcome("received"))
            self._wait("done", self._location.step_seconds + _GRACE_SECONDS)
            self._store.add("left", 1)

    def report_failure(self, error: BaseException) -> None:
        """Tell the publisher why this receiver ended, and that the transfer has failed."""
        is_elsewhere = isinstance(error, Stopped | BrokenOff)
        outcome = Outcome("stopped" if is_elsewhere else "failed", str(error)[:_MAX_CHARACTERS])
        if isinstance(error, GeneratorExit):
            outcome = Outcome("failed", "the worker stopped receiving; its own error says why")
        with suppress(RuntimeError):  # the publisher is gone: there is nobody to notify
            self._report(outcome)
            self._store.set("failed", "")

    def _wait(self, key: str, seconds: float) -> None:
        with self._publisher_present():
            try:
                self._store.wait([key], timedelta(seconds=seconds))
            except dist.DistStoreError as error:
                raise WeightsError(
                    f"Version {self._offer.version} did not arrive in time.", "Publish it again."
                ) from error
        self.check()

    def _report(self, outcome: Outcome) -> None:
        self._store.set(f"ended/{self.rank}", msgspec.json.encode(outcome))

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
    """The publisher's side of a rendezvous."""

    def __init__(self, store: Any, location: Location, cancelled: threading.Event) -> None:
        self.store, self._location, self._cancelled = store, location, cancelled

    def wait_for_all(self) -> None:
        """Wait until all receivers have joined, then start them."""
        deadline = time.monotonic() + self._location.init_seconds
        while (joined := self.store.add("joined", 0)) < self._location.receivers:
            self._check_cancelled()
            if time.monotonic() > deadline:
                raise WeightsError(
                    f"{joined} of {self._location.receivers} receivers joined within "
                    f"{self._location.init_seconds:g} s.",
                    "See whether each worker got the offer, and reaches this address.",
                )
            time.sleep(0.01)
        self.store.set("go", "")

    def check(self) -> None:
        """Raise if the transfer was cancelled, a receiver failed, or one too many has joined."""
        self._check_cancelled()
        if self.store.check(["failed"]):
            raise WeightsError("A receiver gave up, or one too many joined.")

    def wait_for_success(self) -> None:
        """Wait until every receiver has confirmed that it has all bytes, verified."""
        ranks = range(1, self._location.receivers + 1)
        outcomes = self._collect_outcomes(ranks, self._location.step_seconds, self.check)
        if [outcome.status for outcome in outcomes.values()] != ["received"] * len(ranks):
            seconds = self._location.step_seconds
            raise WeightsError(f"Not every receiver confirmed within {seconds:g} s.")
        self.store.set("done", "")
        # Keep serving the store until every receiver has made its last call to it.
        deadline = time.monotonic() + _GRACE_SECONDS
        while self.store.add("left", 0) < len(ranks) and time.monotonic() < deadline:
            time.sleep(0.002)

    def stop(self, message: str) -> str:
        """Stop all receivers; return a description of those that failed or are missing."""
        self.store.set("stop", message[:_MAX_CHARACTERS])
        # Set these after `stop`: they wake up waiting receivers, which then check for `stop`.
        for key in ("go", "done"):
            self.store.set(key, "")
        joined = range(1, min(self.store.add("joined", 0), self._location.receivers) + 1)
        outcomes = self._collect_outcomes(joined, _GRACE_SECONDS, lambda: None)
        if len(joined) < self._location.receivers:
            return f"joined: {', '.join(map(self._describe, joined)) or 'none'}"
        silent = [self._describe(rank) for rank in joined if rank not in outcomes]
        reports: dict[str, list[str]] = {"received": [], "stopped": [], "failed": []}
        for rank, outcome in outcomes.items():
            report = f"{self._describe(rank)} reported: {outcome.message}"
            reports[outcome.status].append(report)
        lost = [f"no report from {', '.join(silent)}"] if silent else []
        # Name receivers that only stopped if no other is silent or has failed.
        return "; ".join(lost + reports["failed"] or reports["stopped"])

    def _check_cancelled(self) -> None:
        if self._cancelled.is_set():
            raise WeightsError("It was cancelled.")

    def _collect_outcomes(
        self, ranks: Sequence[int], seconds: float, check: Callable[[], None]
    ) -> dict[int, Outcome]:
        """Return the outcomes of these ranks that arrive in time."""
        deadline = time.monotonic() + seconds
        outcomes: dict[int, Outcome] = {}
        while len(outcomes) < len(ranks) and time.monotonic() < deadline:
            for rank in ranks:
                if rank not in outcomes and self.store.check([f"ended/{rank}"]):
                    outcome = self._read(f"ended/{rank}", Outcome)
                    outcomes[rank] = outcome or Outcome("failed", "an unreadable outcome")
            check()
            time.sleep(0.002)
        return outcomes

    def _describe(self, rank: int) -> str:
        key = f"who/{rank}"
        name = self._read(key, ReceiverId) if self.store.check([key]) else None
        return f"receiver {rank} ({name or 'it did not say who it is'})"

    def _read(self, key: str, kind: type[T]) -> T | None:
        try:
            return msgspec.json.decode(self.store.get(key), type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
