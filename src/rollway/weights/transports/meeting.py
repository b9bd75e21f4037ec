"""Where a publisher and its receivers meet: a small store of the publisher's, for one transfer.

Keys below `room`:  manifest/0…  joined  who/R  go  failed  stop  ended/R  done  left
The store cannot tell a worker from a stranger, so nothing that is read from it is believed unless
it agrees with the offer, which is signed.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import torch.distributed as dist

from rollway.errors import UsageError, WeightsError
from rollway.weights.offer import MOST_MANIFEST_BYTES, Manifest, Offer, read_manifest
from rollway.weights.transports.group import Backend, BrokenOff

_CONNECT_SECONDS = 3.0
_PART = 4 << 20
"""Bytes of a list of tensors per key; the store takes up to 8 MiB."""
_MOST_WORDS = 500
_MOST_PARTS = MOST_MANIFEST_BYTES // _PART
_GRACE_SECONDS = 5.0
"""How long a receiver may take to say how it ended, once it was told to."""
T = TypeVar("T")
Seconds = Annotated[float, msgspec.Meta(gt=0, le=86400)]


class Where(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of an offer: where the store is, and what all ranks must agree on."""

    host: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._:%-]{1,255}\Z")]
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    receivers: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
    backend: Backend
    bucket_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
    init_seconds: Seconds
    """Within which all have joined, and once more for the group to form."""
    step_seconds: Seconds
    """Within which each message has reached everyone."""
    manifest_parts: Annotated[int, msgspec.Meta(ge=1, le=_MOST_PARTS)]
    room: Annotated[str, msgspec.Meta(min_length=8, max_length=64)]


class Who(msgspec.Struct, frozen=True):
    """A receiver, in words for whoever has to find it."""

    host: Annotated[str, msgspec.Meta(max_length=255)]
    pid: int

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class Ended(msgspec.Struct, frozen=True):
    """How it went for a receiver: it has all, others failed, or itself."""

    how: Literal["taken", "stopped", "failed"]
    words: Annotated[str, msgspec.Meta(max_length=_MOST_WORDS)] = ""


class Stopped(WeightsError):
    """The publisher has given up, for a reason that lies elsewhere."""


def read_where(offer: Offer) -> Where:
    try:
        return msgspec.convert(offer.where, Where)
    except (msgspec.ValidationError, RecursionError) as error:
        raise WeightsError(
            f"This offer names no place to meet: {error}.", "Publish the version again."
        ) from error


def serve(host: str, port: int, seconds: float) -> tuple[Any, int]:
    """A store on that address alone, and its port."""
    try:
        # TCPStore itself would listen on every address of the machine.
        listening = socket.create_server((host, port))
    except OSError as error:
        raise UsageError(
            f"Cannot listen on {host}:{port}: {error.strerror}.",
            "Name an address of this machine, and a port that is free (0 takes any).",
        ) from error
    port = listening.getsockname()[1]
    limit = timedelta(seconds=seconds)
    descriptor = listening.detach()  # the store closes it
    store = dist.TCPStore(
        host, port, None, True, limit, wait_for_workers=False, master_listen_fd=descriptor
    )
    return store, port


def connect(where: Where, offer: Offer) -> Any:
    """The publisher's store, if it is still there."""
    try:
        # The store's own client tries again until its time is up, and then once more.
        socket.create_connection((where.host, where.port), _CONNECT_SECONDS).close()
        limit = timedelta(seconds=_CONNECT_SECONDS)
        store = dist.TCPStore(where.host, where.port, None, False, limit, wait_for_workers=False)
        store.set_timeout(timedelta(seconds=where.step_seconds))
    except (OSError, RuntimeError, ValueError) as error:  # ValueError: a name that is none
        raise WeightsError(
            f"Nobody offers version {offer.version} at {where.host}:{where.port} any more.",
            "It is sent once, to as many receivers as were announced: publish it again.",
        ) from error
    return dist.PrefixStore(where.room, store)


def parts_of(raw: bytes) -> list[bytes]:
    return [raw[at : at + _PART] for at in range(0, len(raw), _PART)]


def get_manifest(store: Any, where: Where, offer: Offer) -> Manifest:
    keys = [f"manifest/{number}" for number in range(where.manifest_parts)]
    raw = bytearray()
    try:
        store.wait(keys, timedelta(seconds=_CONNECT_SECONDS))
        for key in keys:
            raw += store.get(key)
            if len(raw) > MOST_MANIFEST_BYTES:
                raise WeightsError(f"The list of tensors of version {offer.version} is too long.")
    except RuntimeError as error:
        raise WeightsError(f"The list of tensors of version {offer.version} is gone.") from error
    return read_manifest(bytes(raw), offer)


class Seat:
    """A receiver's side of a meeting."""

    def __init__(self, store: Any, where: Where, offer: Offer) -> None:
        self._store, self._where, self._offer = store, where, offer
        with self._publisher_there():
            self.rank = _take_a_place(store, where, offer)

    def wait_for_go(self) -> None:
        # A moment longer than the publisher waits, so that it is the one that says who is missing.
        self._wait("go", self._where.init_seconds + _GRACE_SECONDS)

    def look(self) -> None:
        """Raise if the publisher has given up, or is gone."""
        with self._publisher_there():
            if self._store.check(["stop"]):
                words = self._store.get("stop")[: 4 * _MOST_WORDS].decode(errors="replace")
                raise Stopped(words[:_MOST_WORDS])

    def taken(self) -> None:
        """Say that all is here and right; returns when everyone has said so. Until then the group
        must stay: this rank may have passed bytes on that are still on their way."""
        with self._publisher_there():
            self._end(Ended("taken"))
        self._wait("done", self._where.step_seconds + _GRACE_SECONDS)
        with self._publisher_there():
            self._store.add("left", 1)

    def failed(self, error: BaseException) -> None:
        with suppress(RuntimeError):  # without a publisher there is nobody to tell
            self._end(_how(error))
            self._store.set("failed", "")

    def _wait(self, key: str, seconds: float) -> None:
        with self._publisher_there():
            try:
                self._store.wait([key], timedelta(seconds=seconds))
            except dist.DistStoreError as error:
                raise WeightsError(f"Version {self._offer.version} was late.") from error
        self.look()

    def _end(self, ended: Ended) -> None:
        self._store.set(f"ended/{self.rank}", msgspec.json.encode(ended))

    @contextmanager
    def _publisher_there(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise WeightsError(
                f"The publisher of version {self._offer.version} went away while it was sent.",
                "See whether the trainer still runs, and publish again.",
            ) from error


def _take_a_place(store: Any, where: Where, offer: Offer) -> int:
    rank: int = store.add("joined", 1)
    if rank > where.receivers:
        store.set("failed", "")
        raise WeightsError(
            f"Version {offer.version} is for {where.receivers} receivers; here is one more.",
            "Announce every tensor-parallel rank of every worker, and let no other process join.",
        )
    store.set(f"who/{rank}", msgspec.json.encode(Who(socket.gethostname(), os.getpid())))
    return rank


def _how(error: BaseException) -> Ended:
    if isinstance(error, GeneratorExit):
        return Ended("failed", "the worker took no more; its own error tells why")
    elsewhere = isinstance(error, Stopped | BrokenOff)
    return Ended("stopped" if elsewhere else "failed", str(error)[:_MOST_WORDS])


class Host:
    """The publisher's side of a meeting."""

    def __init__(self, store: Any, where: Where) -> None:
        self._store = store
        self._where = where

    def wait_for_all(self, look: Callable[[], None]) -> None:
        """Return when all have joined, and tell them to go."""
        deadline = time.monotonic() + self._where.init_seconds
        while (joined := self._store.add("joined", 0)) < self._where.receivers:
            look()
            if time.monotonic() > deadline:
                raise WeightsError(
                    f"{joined} of {self._where.receivers} receivers joined within "
                    f"{self._where.init_seconds:g} s.",
                    "See whether each worker was told of the offer, and reaches this address.",
                )
            time.sleep(0.01)
        self._store.set("go", "")

    def look(self) -> None:
        """Raise as soon as a receiver has failed, or there is one too many."""
        if self._store.check(["failed"]):
            raise WeightsError("A receiver gave up, or one too many joined.")

    def wait_for_success(self) -> None:
        """Return when every receiver has said that it has all of it, and that it is right."""
        everyone = range(1, self._where.receivers + 1)
        ended = self._ends(everyone, self._where.step_seconds, self.look)
        if [one.how for one in ended.values()] != ["taken"] * len(everyone):
            seconds = self._where.step_seconds
            raise WeightsError(f"Not everyone has said within {seconds:g} s that it has all.")
        self._store.set("done", "")
        deadline = time.monotonic() + _GRACE_SECONDS
        while self._store.add("left", 0) < len(everyone) and time.monotonic() < deadline:
            time.sleep(0.002)

    def stop(self, words: str) -> str:
        """Tell everyone that it is over; returns, in words, who did not keep up."""
        self._store.set("stop", words[:_MOST_WORDS])
        for waited_for in ("go", "done"):
            self._store.set(waited_for, "")
        joined = range(1, min(self._store.add("joined", 0), self._where.receivers) + 1)
        ended = self._ends(joined, _GRACE_SECONDS, lambda: None)
        silent = [self._who(rank) for rank in joined if rank not in ended]
        said = {
            how: [f"{self._who(r)} said: {one.words}" for r, one in ended.items() if one.how == how]
            for how in ("failed", "stopped")
        }
        if len(joined) < self._where.receivers:
            return f"joined: {', '.join(map(self._who, joined)) or 'none'}"
        gone = [f"no more was heard of {', '.join(silent)}"] if silent else []
        return "; ".join(gone + said["failed"] or said["stopped"])

    def _ends(
        self, ranks: Sequence[int], seconds: float, look: Callable[[], None]
    ) -> dict[int, Ended]:
        """How it went for each of them that says so in time."""
        deadline = time.monotonic() + seconds
        ended: dict[int, Ended] = {}
        while len(ended) < len(ranks) and time.monotonic() < deadline:
            for rank in ranks:
                if rank not in ended and self._store.check([f"ended/{rank}"]):
                    ended[rank] = self._read(f"ended/{rank}", Ended) or Ended("failed", "garbled")
            look()
            time.sleep(0.002)
        return ended

    def leave(self) -> None:
        """Take the store away, whoever keeps an error and its frames."""
        self._store = None

    def _who(self, rank: int) -> str:
        found = self._read(f"who/{rank}", Who) if self._store.check([f"who/{rank}"]) else None
        return f"receiver {rank} ({found or 'it did not say who it is'})"

    def _read(self, key: str, kind: type[T]) -> T | None:
        try:
            return msgspec.json.decode(self._store.get(key), type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
