"""Weights by broadcast: from a trainer's process into running engines, over gloo or NCCL.

    publisher                       its store                      receivers (one per rank)
    publish: digests, list ───────► manifest ────────────────────► read, compared with the offer
    wait for N of them ◄─────────── joined ◄────────────────────── get a rank
    go ───────────────────────────► go ──────────────────────────► wait
    ══════ a separate process group: each message is sent while the last one is used ══════
    wait for all ◄───────────────── ended ◄─────────────────────── digests compared
    done ─────────────────────────► done ────────────────────────► leave the group
    after any error of any rank ──► failed ──────────────────────► end, within a moment

Store and group exist only while one version is sent. A stranger who reaches the store can make a
transfer fail, with an error on both sides. Digests detect accidents; they do not stop an attacker
who joins and forges bytes with the same digest, so the network must keep strangers out.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from typing import Any, Literal

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from rollway.errors import UsageError, WeightsError
from rollway.weights.checkpoint import TensorHeader
from rollway.weights.digest.checksums import DTYPES, digest, digests
from rollway.weights.offer import Entry, Manifest, Offer
from rollway.weights.transports.base import Publisher, Reader, Source, inspect_source, never
from rollway.weights.transports.collective_store import (
    Location,
    PublisherSide,
    ReceiverSide,
    connect,
    fetch_manifest,
    read_location,
    split_manifest,
)
from rollway.weights.transports.entries import join_chunks, lay_out, set_digests, split_in_chunks
from rollway.weights.transports.group import Group, form_group, receive, send, serve_store

log = logging.getLogger(__name__)

BUCKET_BYTES = 16 << 20
"""A chunk ends with the tensor by which it exceeds `bucket_bytes`; a tensor that is a chunk alone
is sent from its own memory, others are joined in a copy. Over gloo, 64 MiB took a third longer:
there is less to do while a chunk is under way."""
_RETRY = "Publish the version again; workers still serve the previous one."


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
        if bucket_bytes < 1 or init_seconds <= 0 or step_seconds <= 0:
            raise UsageError("Bucket size and time limits must be more than zero.")
        self._host, self._port = host, port
        self._bucket_bytes = bucket_bytes
        self._init_seconds, self._step_seconds = init_seconds, step_seconds
        self._receivers = receivers
        self._transfer: _Transfer | None = None

    def expect(self, receivers: int) -> None:
        """Set how many receivers will join; every tensor-parallel rank of every worker is one."""
        self._receivers = receivers

    def _publish(
        self, version: int, tensors: Source | None = None, receivers: int | None = None
    ) -> Offer:
        """Announce a version; it is sent once all expected receivers have joined.

        While the previous version is still being sent, wait for it first, and raise its error."""
        if receivers is None:
            receivers = self._receivers() if callable(self._receivers) else self._receivers
        if receivers < 1:
            raise UsageError(f"There must be at least one receiver, not {receivers}.")
        sources = dict(inspect_source(tensors).pairs())
        backend = _find_backend(sources)
        transfer = self._transfer
        if transfer is not None and transfer.is_alive():
            transfer.join()
            if transfer.error is not None and not transfer.cancelled.is_set():
                raise transfer.error
        entries, nbytes = lay_out(sources, alignment=1)
        entries = set_digests(entries, digests(list(sources.values())))
        manifest = Manifest(version, nbytes, entries)
        parts = split_manifest(manifest.encode())
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
        store = dist.PrefixStore(location.prefix, store)
        for number, part in enumerate(parts):
            store.set(f"manifest/{number}", part)
        self._transfer = _Transfer(version, location, sources, store)
        self._transfer.start()
        where: dict[str, Any] = msgspec.to_builtins(location)
        return Offer("collective", version, manifest.identity, nbytes, where, repeatable=False)

    def wait(self, version: int, seconds: float | None = None) -> None:
        transfer = self._transfer
        if transfer is None or transfer.version != version:
            raise UsageError(f"Version {version} is not the one that was published last.")
        transfer.join(seconds)
        if transfer.is_alive():
            raise WeightsError(
                f"Version {version} has not reached all receivers within {seconds:g} s.",
                "Wait longer, or cancel it.",
            )
        if transfer.error is not None:
            raise transfer.error

    def cancel(self) -> None:
        super().cancel()
        if self._transfer is not None:
            self._transfer.cancelled.set()

    def _close(self) -> None:
        """End the transfer in progress; return when it has ended."""
        self.cancel()
        if self._transfer is not None:
            self._transfer.join()


class _Transfer(threading.Thread):
    """Sends one version, as rank 0 of its group."""

    def __init__(
        self,
        version: int,
        location: Location,
        tensors: dict[str, Tensor],
        store: Any,
    ) -> None:
        super().__init__(name=f"rollway-collective-{version}", daemon=True)
        self.version = version
        self.cancelled = threading.Event()
        self.error: WeightsError | None = None
        self._location, self._tensors = location, tensors
        self._device = next(iter(tensors.values())).device
        self._side = PublisherSide(store, location, self._check_cancelled)

    def run(self) -> None:
        side, location = self._side, self._location
        try:
            side.wait_for_all()
            # After an error, the group closes at once, so that receivers notice.
            with closing(form_group(location, 0, side.store, self._device, side.check)) as group:
                try:
                    send(group, join_chunks(self._tensors.values(), location.bucket_bytes))
                    # Until all have confirmed, bytes may still be on their way.
                    side.wait_for_success()
                except (WeightsError, RuntimeError) as error:
                    # Before the group closes: the receivers' broadcasts break off then.
                    side.report_failure(error)
                    raise
        except (WeightsError, RuntimeError) as error:
            self.error = self._fail(error)
            log.warning("%s", self.error)
        finally:
            # `error` refers to this frame: without this, it would keep the store and the tensors.
            side.store, self._tensors = None, {}

    def _fail(self, error: Exception) -> WeightsError:
        try:
            cause = self._side.stop(error)
        except RuntimeError as store_error:
            cause = f"{error} (the store failed: {store_error})"
        hint = getattr(error, "hint", "") or _RETRY
        return WeightsError(f"Version {self.version} did not reach all receivers: {cause}", hint)

    def _check_cancelled(self) -> None:
        if self.cancelled.is_set():
            raise WeightsError("The transfer was cancelled.")


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
        with ExitStack() as stack:
            stack.enter_context(line)
            manifest = fetch_manifest(store, location, offer)
            side = ReceiverSide(store, location, offer)
            try:
                side.wait_for_go()
                group = form_group(location, side.rank, store, device, side.check, line)
                stack.enter_context(closing(group))
                for entry, tensor in _receive(group, manifest.entries, location.bucket_bytes):
                    yield entry.name, tensor
                    if digest(tensor) != entry.digest:
                        raise WeightsError(
                            f"{entry.name} of version {offer.version} is not what was published.",
                            "Publish it again, and change nothing before the refit has ended.",
                        )
                side.confirm()
            except BaseException as error:
                # Before the group closes: the others' broadcasts break off then.
                side.report_failure(error)
                raise

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
    """Yield views into received chunks; copies of tensors that begin where no element can."""
    chunks = list(split_in_chunks(entries, lambda entry: entry.nbytes, chunk_bytes))
    sizes = [sum(entry.nbytes for entry in chunk) for chunk in chunks]
    for chunk, flat in zip(chunks, receive(group, sizes), strict=True):
        for entry, raw in zip(chunk, flat.split([e.nbytes for e in chunk]), strict=True):
            dtype = DTYPES[entry.dtype]
            aligned = raw.clone() if raw.storage_offset() % dtype.itemsize else raw
            yield entry, aligned.view(dtype).view(entry.shape)
