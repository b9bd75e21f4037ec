"""Broadcast versions to the ranks of engines."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch.distributed as dist
from torch import Tensor

from rollway.errors import UsageError, WeightsError
from rollway.weights.digest.checksums import digest, raw_bytes
from rollway.weights.offer import Entry, Manifest, Offer
from rollway.weights.transports.base import Publisher, Source, inspect_source
from rollway.weights.transports.collective import rendezvous
from rollway.weights.transports.collective.group import Backend, Group
from rollway.weights.transports.collective.messages import (
    DoubleBuffer,
    place,
    split_into_messages,
)
from rollway.weights.transports.collective.rendezvous import Location, PublisherSide
from rollway.weights.transports.entries import make_entry

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

    def publish(
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
        self._finish_transfer()
        manifest = _make_manifest(version, sources)
        parts = rendezvous.split_manifest(manifest.encode())
        store, port = rendezvous.serve_store(self._host, self._port, self._step_seconds)
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
        self._transfer = _Transfer(version, location, manifest.entries, sources, store)
        self._transfer.start()
        where: dict[str, Any] = msgspec.to_builtins(location)
        nbytes = manifest.nbytes
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
        if self._transfer is not None:
            self._transfer.cancelled.set()

    def close(self) -> None:
        """End the transfer in progress; return when it has ended."""
        self.cancel()
        if self._transfer is not None:
            self._transfer.join()

    def _finish_transfer(self) -> None:
        """Wait for the transfer in progress, which is bounded in time, and raise its error."""
        transfer = self._transfer
        if transfer is None or not transfer.is_alive():
            return
        transfer.join()
        if transfer.error is not None and not transfer.cancelled.is_set():
            raise transfer.error


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
        self._location = location
        self._entries = entries
        self._tensors = tensors
        self._store = store
        self._group: Group | None = None

    def run(self) -> None:
        side = PublisherSide(self._store, self._location)
        try:
            side.wait_for_all(self._check_cancelled)
            self._broadcast(side)
            side.wait_for_success()
            # Not before all have confirmed: bytes may still be on their way.
            self._close_group()
        except (WeightsError, RuntimeError) as error:
            self._close_group()  # at once, so that receivers notice
            self.error = self._describe_error(side, error)
            log.warning("%s", self.error)
        finally:
            side.leave()
            self._store, self._tensors = None, {}

    def _broadcast(self, side: PublisherSide) -> None:
        location = self._location

        def check() -> None:
            self._check_cancelled()
            side.check()

        store = dist.PrefixStore("group", self._store)
        self._group = Group(
            store, 0, location.receivers + 1, location.backend, location.host, location.init_seconds
        )
        buffer = DoubleBuffer(next(iter(self._tensors.values())).device)
        messages = split_into_messages(self._entries, location.bucket_bytes)
        for number, message in enumerate(messages):
            flat = self._pack(message, number, buffer)
            self._group.post(flat, location.bucket_bytes, location.step_seconds)
            # One message stays under way: its buffer is the one that is not filled next.
            if number:
                self._group.finish(location.step_seconds, check)
        self._group.finish(location.step_seconds, check)

    def _pack(self, message: Sequence[Entry], number: int, buffer: DoubleBuffer) -> Tensor:
        """Return the bytes of a message: one tensor in place, or several side by side."""
        if len(message) == 1:
            return raw_bytes(self._tensors[message[0].name])
        starts, size = place(message)
        flat = buffer.get(number, size)
        for entry, start in zip(message, starts, strict=True):
            flat[start : start + entry.nbytes].copy_(raw_bytes(self._tensors[entry.name]))
        return flat

    def _check_cancelled(self) -> None:
        if self.cancelled.is_set():
            raise WeightsError("It was cancelled.")

    def _close_group(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    def _describe_error(self, side: PublisherSide, error: Exception) -> WeightsError:
        cause = f"Version {self.version} did not reach all receivers: {error}"
        hint = getattr(error, "hint", "") or _RETRY
        try:
            blamed = side.stop(cause)
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


def _make_manifest(version: int, tensors: dict[str, Tensor]) -> Manifest:
    entries: list[Entry] = []
    offset = 0
    for name, tensor in tensors.items():
        entries.append(make_entry(name, tensor, offset, digest(tensor)))
        offset += tensor.nbytes
    return Manifest(version, offset, entries)
