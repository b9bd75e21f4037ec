"""Weights by broadcast: from a trainer's process into running engines, over gloo or NCCL.

    publisher                       its store                      receivers (one per rank)
    publish: digests, list ───────► manifest ────────────────────► read, compared with the offer
    wait for N of them ◄─────────── joined ◄─────────────────────► get a rank, wait for N
    ══════ a separate process group: a broadcast for each chunk of tensors ════════════════
    wait for N of them ◄─────────── received ◄───────────────────► digests compared, wait for N
    wait for N of them ◄─────────── left ◄──────────────────────── leave the group
    after any error of any rank ──► failed ◄─────────────────────► end, within a moment

Store and group exist only while one version is sent. All keys are below a random prefix. The store
has no authentication: a receiver uses data from it only if it agrees with the offer, which is
signed, and a stranger who reaches it can make a transfer fail, with an error on both sides. Digests
detect accidents; they do not stop an attacker who joins and forges bytes with the same digest, so
the network must keep strangers out.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from rollway.errors import UsageError, WeightsError
from rollway.weights.checkpoint import TensorHeader
from rollway.weights.digest.checksums import DTYPES, digest, digests
from rollway.weights.offer import MAX_MANIFEST_BYTES, Entry, Manifest, Offer, read_manifest
from rollway.weights.transports.base import Publisher, Reader, Source, inspect_source, never
from rollway.weights.transports.entries import join_chunks, lay_out, set_digests, split_in_chunks
from rollway.weights.transports.group import (
    BrokenOff,
    Group,
    Place,
    connect_store,
    form_group,
    never_give_up,
    send,
    serve_store,
    start_thread,
    wait_for,
)

log = logging.getLogger(__name__)

BUCKET_BYTES = 16 << 20
"""A chunk ends with the tensor by which it exceeds `bucket_bytes`; a tensor that is a chunk alone
is sent from its own memory, others are joined in a copy. Over gloo, 64 MiB took longer."""
_RETRY = "Publish the version again; workers still serve the previous one."
_CONNECT_SECONDS = 3.0
_GRACE_SECONDS = 5.0
"""How long a receiver that was stopped may take to leave."""
_POLL_SECONDS = 2e-3
_PART_BYTES = 4 << 20
"""Bytes of a list of tensors per key; the store accepts up to 8 MiB."""
_MAX_PARTS = MAX_MANIFEST_BYTES // _PART_BYTES
_MAX_CHARACTERS = 500


class Location(Place, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The part of an offer that names the store, and the settings that all ranks share."""

    backend: Literal["gloo", "nccl"]
    bucket_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
    manifest_parts: Annotated[int, msgspec.Meta(ge=1, le=_MAX_PARTS)]
    prefix: Annotated[str, msgspec.Meta(min_length=8, max_length=64)]
    """The prefix of all keys: random, so that two transfers are never confused."""


class Rendezvous:
    """Where the ranks of one transfer wait for each other, and learn of the first error of any."""

    def __init__(
        self, store: Any, location: Location, watch: Callable[[], None] = never_give_up
    ) -> None:
        """`watch` raises to give up."""
        self.store = dist.PrefixStore(location.prefix, store)
        self._location, self._watch = location, watch

    def reach(self, step: str) -> int:
        """Note that this receiver has reached a step; return how many have."""
        return int(self.store.add(step, 1))

    @contextmanager
    def form_group(
        self, rank: int, device: torch.device, line: socket.socket | None = None
    ) -> Iterator[Group]:
        """Form the group once all receivers have joined, and close it once all have everything.

        After any error of any rank, raise it on all."""
        location, grace = self._location, _GRACE_SECONDS if rank else 0.0
        with ExitStack() as stack:
            try:
                if rank > location.receivers:
                    raise WeightsError(
                        f"This version is for {location.receivers} receivers; this is one more.",
                        "Expect every tensor-parallel rank of every worker, and no other process.",
                    )
                # Receivers wait a little longer: the publisher says who is missing.
                self._wait_for_all("joined", location.init_seconds + grace)
                group = form_group(location, rank, self.store, device, self.check, line)
                stack.enter_context(closing(group))
                yield group
                if rank:
                    self.reach("received")
                # The group stays open until then: a receiver may have forwarded bytes that others
                # have not received yet.
                self._wait_for_all("received", location.step_seconds + grace)
            except BaseException as error:
                # Before the group closes: the others' broadcasts break off then.
                with suppress(RuntimeError):  # the store is gone: there is nobody to notify
                    self.store.compare_set("failed", "", _describe_end(error, rank))
                raise
            finally:
                if rank:
                    with suppress(RuntimeError):
                        self.reach("left")

    def wait_until_left(self) -> bool:
        """Wait until those that joined need the store no more; return whether they left in time."""
        joined = min(self._count("joined"), self._location.receivers)
        return wait_for(lambda: self._count("left") >= joined, _GRACE_SECONDS)

    def check(self) -> None:
        """Raise if the caller gives up, or any rank has failed."""
        self._watch()
        if cause := self.get_cause():
            raise BrokenOff(cause)

    def get_cause(self) -> str:
        """Return why the first rank failed, if one has."""
        # Cut it before decoding: anyone who reaches the port may have written megabytes.
        raw: bytes = self.store.get("failed") if self.store.check(["failed"]) else b""
        return raw[: 4 * _MAX_CHARACTERS].decode(errors="replace")[:_MAX_CHARACTERS]

    def _count(self, step: str) -> int:
        return int(self.store.add(step, 0))

    def _wait_for_all(self, step: str, seconds: float) -> None:
        """Wait until all receivers have reached a step."""
        expected = self._location.receivers
        if not wait_for(lambda: self._count(step) >= expected, seconds, self.check, _POLL_SECONDS):
            raise WeightsError(
                f"{self._count(step)} of {expected} receivers {step} within {seconds:g} s.",
                "See whether each worker got the offer, and reaches this address.",
            )
        self.check()


def _describe_end(error: BaseException, rank: int) -> str:
    """Return why a rank ended, for all others."""
    cause = error.message if isinstance(error, WeightsError) else str(error)
    if isinstance(error, GeneratorExit):
        cause = "the worker stopped receiving; its own error says why"
    if rank and not isinstance(error, BrokenOff):
        cause = f"receiver {rank} (process {os.getpid()} on {socket.gethostname()}): {cause}"
    return cause[:_MAX_CHARACTERS]


class CollectivePublisher(Publisher):
    """Broadcasts versions to engines, one after another.

    The tensors must not change before `wait` returns: receivers notice, and reject the version.

    Example:
        publisher.expect(2)
        offer = publisher.publish(7, model.state_dict().items())
        stack.refit(7, offer)  # every rank of every worker joins and receives the bytes
        publisher.wait(7)  # raises if one of them failed; before the optimizer steps
    """

    transport = "collective"

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        bucket_bytes: int = BUCKET_BYTES,
        init_seconds: float = 30.0,
        step_seconds: float = 60.0,
        receivers: int | Callable[[], int] = 1,
    ) -> None:
        """`host` is an address of this machine that workers reach. All receivers must join within
        `init_seconds`; each message must arrive within `step_seconds`."""
        if host in ("", "0.0.0.0", "::"):
            raise UsageError(
                f"`{host}` is no address that workers can connect to.",
                "Name this machine's address in the network of the workers.",
            )
        self._host, self._port = host, port
        self._bucket_bytes = bucket_bytes
        self._init_seconds, self._step_seconds = init_seconds, step_seconds
        self._receivers = receivers
        self._sent: Future[WeightsError | None] | None = None
        """Why the last version did not reach all receivers."""
        self._cancelled = threading.Event()

    def expect(self, receivers: int) -> None:
        """Set how many receivers will join; every tensor-parallel rank of every worker is one."""
        self._receivers = receivers

    def _publish(self, version: int, tensors: Source | None = None) -> Offer:
        """Announce a version; it is sent once all expected receivers have joined.

        While the previous version is still being sent, wait for it first, and raise its error."""
        receivers = self._receivers() if callable(self._receivers) else self._receivers
        if receivers < 1:
            raise UsageError(f"There must be at least one receiver, not {receivers}.")
        sources = dict(inspect_source(tensors).pairs())
        backend = _find_backend(sources)
        if self._sent is not None and not self._sent.done():
            problem = self._sent.result()
            if problem is not None and not self._cancelled.is_set():
                raise problem
        entries, nbytes = lay_out(sources, alignment=1)
        entries = set_digests(entries, digests(list(sources.values())))
        manifest = Manifest(version, nbytes, entries)
        raw = manifest.encode()
        parts = [raw[at : at + _PART_BYTES] for at in range(0, len(raw), _PART_BYTES)]
        store, port = serve_store(self._host, self._port, self._step_seconds)
        location = Location(
            host=self._host,
            port=port,
            receivers=receivers,
            backend=backend,
            bucket_bytes=self._bucket_bytes,
            init_seconds=self._init_seconds,
            step_seconds=self._step_seconds,
            manifest_parts=len(parts),
            prefix=secrets.token_hex(8),
        )
        self._cancelled = cancelled = threading.Event()

        def check_cancelled() -> None:
            if cancelled.is_set():
                raise WeightsError("The transfer was cancelled.")

        rendezvous = Rendezvous(store, location, check_cancelled)
        for number, part in enumerate(parts):
            rendezvous.store.set(f"manifest/{number}", part)
        self._sent = start_thread(
            f"rollway-collective-{version}",
            partial(_send_version, version, list(sources.values()), location, rendezvous),
        )
        where: dict[str, Any] = msgspec.to_builtins(location)
        return Offer("collective", version, manifest.identity, nbytes, where, repeatable=False)

    def wait(self, version: int, seconds: float | None = None) -> None:
        if self._sent is None or version != self.newest:
            raise UsageError(f"Version {version} is not the one that was published last.")
        try:
            problem = self._sent.result(seconds)
        except TimeoutError as error:
            raise WeightsError(
                f"Version {version} has not reached all receivers within {seconds:g} s.",
                "Wait longer, or cancel it.",
            ) from error
        if problem is not None:
            raise problem

    def cancel(self) -> None:
        super().cancel()
        self._cancelled.set()

    def _close(self) -> None:
        """End the transfer in progress; return when it has ended."""
        self._cancelled.set()
        if self._sent is not None:
            self._sent.result()


def _send_version(
    version: int, tensors: Sequence[Tensor], location: Location, rendezvous: Rendezvous
) -> WeightsError | None:
    """Send a version as rank 0 of its group; return why it did not reach all receivers."""
    cause = hint = ""
    try:
        with rendezvous.form_group(0, tensors[0].device) as group:
            send(group, join_chunks(tensors, location.bucket_bytes))
    except (WeightsError, RuntimeError) as error:
        cause, hint = _describe_end(error, 0), getattr(error, "hint", "") or _RETRY
    try:
        # Serve the store until every receiver has made its last call to it.
        have_left = rendezvous.wait_until_left()
        if not cause:
            return None
        first = rendezvous.get_cause()
        if first != cause:
            cause = f"{first}; the trainer's own error: {cause}"
        if not have_left:
            cause += " (some receivers have not reported)"
    except RuntimeError as error:
        cause += f" (the store failed: {error})"
    problem = WeightsError(f"Version {version} did not reach all receivers: {cause}", hint)
    log.warning("%s", problem)
    return problem


def _find_backend(tensors: dict[str, Tensor]) -> Literal["gloo", "nccl"]:
    devices = {tensor.device for tensor in tensors.values()}
    if len(devices) > 1:
        raise UsageError(
            f"The tensors are on {', '.join(sorted(map(str, devices)))}.",
            "Publish tensors that are all on one device.",
        )
    (device,) = devices
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"Tensors on {device} cannot be broadcast.", "Copy them to CPU memory.")
    return "nccl" if device.type == "cuda" else "gloo"


class CollectiveReader(Reader):
    """Joins broadcasts. It must be created on the thread whose GPU the engine uses."""

    def __init__(self) -> None:
        self._gpu = torch.cuda.current_device() if torch.cuda.is_available() else None

    def headers(self, offer: Offer) -> dict[str, TensorHeader]:
        return self.manifest(offer).headers()

    def manifest(self, offer: Offer) -> Manifest:
        location = read_location(offer)
        store, line = connect(location, offer)
        with line:
            return fetch_manifest(store, location, offer)

    def tensors(
        self, offer: Offer, summed: Callable[[str], bool] = never
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor as it arrives, and compare its digest when the next is requested.

        So what the caller has copied by then is what was published, or this raises."""
        location = read_location(offer)
        device = self._find_device(location)
        store, line = connect(location, offer)
        with line:
            manifest = fetch_manifest(store, location, offer)
            rendezvous = Rendezvous(store, location)
            try:
                rank = rendezvous.reach("joined")
                with rendezvous.form_group(rank, device, line) as group:
                    for entry, tensor in _receive(group, manifest.entries, location.bucket_bytes):
                        yield entry.name, tensor
                        if digest(tensor) != entry.digest:
                            raise WeightsError(
                                f"{entry.name} of version {offer.version} is not what was "
                                "published.",
                                "Publish it again, and change nothing before the refit has ended.",
                            )
            except dist.DistError as error:
                raise WeightsError(
                    f"The publisher of version {offer.version} went away while it was sent.",
                    "See whether the trainer still runs, and publish again.",
                ) from error

    def _find_device(self, location: Location) -> torch.device:
        if location.backend == "gloo":
            return torch.device("cpu")
        if self._gpu is None:
            raise WeightsError(
                "These weights are sent by NCCL, and this worker has no GPU.",
                "Publish tensors that are in CPU memory.",
            )
        return torch.device("cuda", self._gpu)


def _receive(
    group: Group, entries: Sequence[Entry], chunk_bytes: int
) -> Iterator[tuple[Entry, Tensor]]:
    """Yield views into received chunks, each valid until the next is requested; copies of tensors
    that begin where no element can."""
    chunks = list(split_in_chunks(entries, lambda entry: entry.nbytes, chunk_bytes))
    sizes = [sum(entry.nbytes for entry in chunk) for chunk in chunks]
    buffer = torch.empty(max(sizes), dtype=torch.uint8, device=group.device)
    for chunk, size in zip(chunks, sizes, strict=True):
        flat = buffer[:size]
        group.broadcast(flat)
        for entry, raw in zip(chunk, flat.split([e.nbytes for e in chunk]), strict=True):
            dtype = DTYPES[entry.dtype]
            aligned = raw.clone() if raw.storage_offset() % dtype.itemsize else raw
            yield entry, aligned.view(dtype).view(entry.shape)


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
        return connect_store(location)
    except BrokenOff as error:
        raise WeightsError(
            f"Nobody offers version {offer.version} at {location.host}:{location.port} any more.",
            "It is sent once, to as many receivers as were expected: publish it again.",
        ) from error


def fetch_manifest(store: Any, location: Location, offer: Offer) -> Manifest:
    """Read the list of tensors from the store, and compare it with the offer."""
    keys = [f"{location.prefix}/manifest/{number}" for number in range(location.manifest_parts)]
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
