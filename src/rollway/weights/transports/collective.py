"""Weights by broadcast: from a trainer's process into running engines, over gloo or NCCL.

    publisher                       its store                      receivers (one per rank)
    publish: digests, list ───────► manifest ────────────────────► read, compared with the offer
    wait for N of them ◄─────────── joined ◄────────────────────── get a rank
    go ───────────────────────────► go ──────────────────────────► wait
    ══════ a separate process group: each message is sent while the last one is used ══════
    wait for all ◄───────────────── ended ◄─────────────────────── digests compared, or the error
    done ─────────────────────────► done ────────────────────────► leave the group
    after any error: stop ────────► stop ────────────────────────► end, within a moment

Store and group exist only while one version is sent. A stranger who reaches the store can make a
transfer fail, with an error on both sides. Digests detect accidents; they do not stop an attacker
who joins and forges bytes with the same digest, so the network must keep strangers out.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from rollway.errors import UsageError, WeightsError
from rollway.weights.checkpoint import TensorHeader
from rollway.weights.digest.checksums import digest, digests, raw_bytes
from rollway.weights.offer import Entry, Manifest, Offer
from rollway.weights.transports.base import Publisher, Reader, Source, inspect_source, never
from rollway.weights.transports.collective_group import Group, make_buffers, split_into_messages
from rollway.weights.transports.collective_rendezvous import (
    Backend,
    Location,
    PublisherSide,
    ReceiverSide,
    connect_store,
    fetch_manifest,
    find_address_towards,
    read_location,
    serve_store,
    split_manifest,
)
from rollway.weights.transports.entries import lay_out, set_digests, view_entry

log = logging.getLogger(__name__)

BUCKET_BYTES = 64 << 20
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
        self._transfer = _Transfer(version, location, entries, sources, store)
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
        entries: Sequence[Entry],
        tensors: dict[str, Tensor],
        store: Any,
    ) -> None:
        super().__init__(name=f"rollway-collective-{version}", daemon=True)
        self.version = version
        self.cancelled = threading.Event()
        self.error: WeightsError | None = None
        self._location, self._entries, self._tensors = location, entries, tensors
        self._side = PublisherSide(store, location, self.cancelled)

    def run(self) -> None:
        side, location = self._side, self._location
        try:
            side.wait_for_all()
            # After an error, the group closes at once, so that receivers notice.
            with closing(Group(side.store, 0, location, location.host, side.check)) as group:
                self._broadcast(group)
                # Until all have confirmed, bytes may still be on their way.
                side.wait_for_success()
        except (WeightsError, RuntimeError) as error:
            self.error = self._describe_error(error)
            log.warning("%s", self.error)
        finally:
            # `error` refers to this frame: without this, it would keep the store and the tensors.
            side.store, self._tensors = None, {}

    def _broadcast(self, group: Group) -> None:
        messages = split_into_messages(self._entries, self._location.bucket_bytes)
        # A tensor that is a message alone is sent in place.
        sizes = [m[-1].offset + m[-1].nbytes if len(m) > 1 else 0 for m in messages]
        buffers = make_buffers(sizes, next(iter(self._tensors.values())).device)
        for number, message in enumerate(messages):
            flat = buffers[number]
            if len(message) == 1:
                flat = raw_bytes(self._tensors[message[0].name])
            else:
                for entry in message:
                    view_entry(flat, entry).copy_(self._tensors[entry.name].detach())
            group.post(flat)
            # One message stays under way: its buffer is the one that is not filled next.
            if number:
                group.finish()
        group.finish()

    def _describe_error(self, error: Exception) -> WeightsError:
        cause = f"Version {self.version} did not reach all receivers: {error}"
        hint = getattr(error, "hint", "") or _RETRY
        try:
            blamed = self._side.stop(cause)
        except RuntimeError as store_error:
            blamed = f"the store failed: {store_error}"
        return WeightsError(f"{cause} ({blamed})" if blamed else cause, hint)


def _find_backend(tensors: dict[str, Tensor]) -> Backend:
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
        return fetch_manifest(connect_store(location, offer), location, offer)

    def tensors(
        self, offer: Offer, summed: Callable[[str], bool] = never
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor as it arrives, and compare its digest when the next is requested.

        So what the caller has copied by then is what was published, or this raises."""
        location = read_location(offer)
        device = self._find_device(location)
        store = connect_store(location, offer)
        manifest = fetch_manifest(store, location, offer)
        messages = split_into_messages(manifest.entries, location.bucket_bytes)
        side = ReceiverSide(store, location, offer)
        group: Group | None = None
        try:
            side.wait_for_go()
            group = Group(
                store,
                side.rank,
                location,
                find_address_towards(location.host, location.port),
                side.check,
            )
            for entry, tensor in _receive(group, messages, device):
                yield entry.name, tensor
                if digest(tensor) != entry.digest:
                    raise WeightsError(
                        f"{entry.name} of version {offer.version} is not what was published.",
                        "Publish it again, and change nothing before the refit has ended.",
                    )
            side.confirm()
        except BaseException as error:
            side.report_failure(error)
            raise
        finally:
            if group is not None:
                group.close()

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
    group: Group, messages: Sequence[Sequence[Entry]], device: torch.device
) -> Iterator[tuple[Entry, Tensor]]:
    """Yield views into received messages; the next message arrives while one is in use."""
    buffers = make_buffers([m[-1].offset + m[-1].nbytes for m in messages], device)
    group.post(buffers[0])
    for number, message in enumerate(messages):
        if number + 1 < len(messages):
            group.post(buffers[number + 1])
        group.finish()
        for entry in message:
            yield entry, view_entry(buffers[number], entry)
