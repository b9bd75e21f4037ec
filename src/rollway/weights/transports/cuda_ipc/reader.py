"""Read versions from a trainer's device memory, in place or by prepared copies."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from rollway.errors import WeightsError
from rollway.weights import leftovers
from rollway.weights.checkpoint import TensorHeader
from rollway.weights.copies import SummedCopies
from rollway.weights.digest.checksums import describe, start_digests
from rollway.weights.offer import Entry, Manifest, Offer, read_manifest
from rollway.weights.transports.base import Reader, never
from rollway.weights.transports.cuda_ipc.device_memory import Handle, local_device, open_handle
from rollway.weights.transports.cuda_ipc.publisher import PREFIX, IpcLocation
from rollway.weights.transports.entries import SHM, VersionGone, read_tensor_list, view_entries
from rollway.weights.untrusted import is_file_name

_COMPARED_BYTES = 2 << 30
"""Bytes whose digests are compared together; a GPU that is asked more often idles."""


class CudaIpcReader(Reader):
    """Reads offers in place; opened memory stays open for later versions."""

    def __init__(self, directory: Path = SHM) -> None:
        self._directory = directory
        self._publisher = ""
        """The directory of the publisher whose memory is open."""
        self._open: dict[int, dict[Handle, Tensor]] = {}
        """By slot, so that a slot with new buckets releases the old ones."""
        self._prepared: dict[int, PreparedCopies] = {}
        """By slot: the copies of the previous version."""
        self._stream: Any = None
        self.seconds: dict[str, float] = {}
        """The parts of the last `copy_into`."""

    def headers(self, offer: Offer) -> dict[str, TensorHeader]:
        return self.manifest(offer).headers()

    def manifest(self, offer: Offer) -> Manifest:
        return read_manifest(self._read_list(offer, _read_location(offer)), offer)

    def sums(self, offer: Offer) -> Mapping[str, int]:
        sums = {entry.name: entry.word_sum for entry in self.manifest(offer).entries}
        return {name: total for name, total in sums.items() if total is not None}

    def shares_device(self, offer: Offer) -> bool:
        """Return True if this process sees the device; without a GPU, that is CPU memory."""
        try:
            local_device(_read_location(offer).device)
        except WeightsError:
            return False
        return True

    def tensors(
        self, offer: Offer, summed: Callable[[str], bool] = never
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor as a view of the trainer's memory, valid until the next offer.

        Digests are compared after every few gigabytes and at the end, when the caller's copies are
        complete: what was copied is what was published, or this raises. The caller must copy on the
        current stream."""
        location = _read_location(offer)
        raw = self._read_list(offer, location)
        manifest = read_manifest(raw, offer)
        buckets = self._open_buckets(location, manifest.nbytes)
        on_gpu = buckets[0].device.type == "cuda"
        unchecked: list[tuple[Entry, Tensor]] = []
        unchecked_bytes = 0
        running: list[tuple[list[Entry], Callable[[], list[str]]]] = []

        def start_batch() -> None:
            entries, tensors = zip(*unchecked, strict=True)
            running.append((list(entries), start_digests(list(tensors))))

        views = view_entries(manifest.entries, buckets)
        for entry, view in zip(manifest.entries, views, strict=True):
            yield entry.name, view
            if summed(entry.name):  # the caller compares the sum itself
                continue
            unchecked.append((entry, view))
            unchecked_bytes += entry.nbytes
            if unchecked_bytes >= (_COMPARED_BYTES if on_gpu else 0):
                start_batch()
                unchecked, unchecked_bytes = [], 0
                # A GPU computes these digests while the caller copies the next tensors.
                while len(running) > (1 if on_gpu else 0):
                    _compare(*running.pop(0), offer)
        if unchecked:
            start_batch()
        for entries, wait in running:
            _compare(entries, wait, offer)
        self._check_unreplaced(offer, location, raw)

    def copy_into(self, offer: Offer, targets: Mapping[str, Tensor]) -> None:
        """Copy every tensor into the target of its name, which has its dtype, shape and device.

        One kernel copies and sums. This returns when all bytes have arrived and are verified; if it
        raises, the targets must not be served. It uses its own stream, so that other work on the
        device continues."""
        self.seconds = {}
        location = _read_location(offer)
        with self._measure("look"):
            raw = self._read_list(offer, location)
            buckets = self._open_buckets(location, None)
        with self._on_stream(buckets[0].device):
            with self._measure("launch"):
                copies = self._prepared.get(location.slot)
                if copies is not None and not copies.fits(location.buckets, targets):
                    copies = None
                # Started before the list is parsed: mostly, tensors are where they were before.
                running = copies.start() if copies else []
            with self._measure("list"):
                manifest = read_manifest(raw, offer)
                _check_size(location, manifest.nbytes)
            if copies is None or not copies.matches(manifest.entries):
                with self._measure("prepare"):
                    for wait in running:
                        wait()  # they wrote to the targets
                    self._prepared.pop(location.slot, None)
                    copies = PreparedCopies(location.buckets, buckets, manifest.entries, targets)
                    running = copies.start()
            with self._measure("wait"):
                entries = iter(manifest.entries)
                for size, wait in zip(copies.sizes, running, strict=True):
                    _compare(list(islice(entries, size)), wait, offer)
            if not copies.keeps_tensors:
                self._prepared[location.slot] = copies
        with self._measure("look again"):
            self._check_unreplaced(offer, location, raw)

    def finish(self, offer: Offer) -> None:
        """Close the trainer's memory, if the trainer wants it back between versions."""
        if not _read_location(offer).keep_open:
            self.close()

    def close(self) -> None:
        """Release the trainer's memory."""
        self._open, self._prepared = {}, {}

    @contextlib.contextmanager
    def _on_stream(self, device: torch.device) -> Iterator[None]:
        """Work on the own stream, after all work queued so far; leave when it is idle."""
        if device.type != "cuda":
            yield
            return
        if self._stream is None or self._stream.device != device:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            # After an error too: nothing may write to the targets any more.
            self._stream.synchronize()

    @contextlib.contextmanager
    def _measure(self, part: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[part] = time.perf_counter() - began

    def _check_unreplaced(self, offer: Offer, location: IpcLocation, raw: bytes) -> None:
        """Raise if the version's list is not the one with which reading began."""
        now = self._read_list(offer, location)
        if now != raw:
            read_manifest(now, offer)
            raise WeightsError(f"Version {offer.version} was overwritten while it was read.")

    def _read_list(self, offer: Offer, location: IpcLocation) -> bytes:
        try:
            if leftovers.is_abandoned(location.directory, 0.0):
                # Its publisher died: the device memory may belong to another process by now.
                raise VersionGone(offer.version)
            path = self._directory / location.directory / f"{location.slot}.json"
            return read_tensor_list(path, offer)
        except VersionGone:
            self.close()
            raise

    def _open_buckets(self, location: IpcLocation, nbytes: int | None) -> list[Tensor]:
        """Open the publisher's memory, and check its size where that is known."""
        if nbytes is not None:
            _check_size(location, nbytes)
        device = local_device(location.device)
        if self._publisher != location.directory:
            self.close()  # a publisher that closed frees its memory
            self._publisher = location.directory
        known = self._open.pop(location.slot, {})
        if known.keys() != set(location.buckets):
            # Prepared copies hold addresses of buckets that are released here.
            self._prepared.pop(location.slot, None)
        directory = self._directory / self._publisher
        buckets = {
            handle: known[handle] if handle in known else open_handle(handle, device, directory)
            for handle in location.buckets
        }
        self._open[location.slot] = buckets
        return [buckets[handle] for handle in location.buckets]


def _read_location(offer: Offer) -> IpcLocation:
    try:
        location = msgspec.convert(offer.where, IpcLocation)
    except msgspec.ValidationError as error:
        raise WeightsError(f"This is no offer by CUDA IPC: {error}.") from error
    if not location.buckets:
        raise WeightsError("An offer by CUDA IPC names no memory.")
    if not is_file_name(location.directory, PREFIX):
        raise WeightsError(f"{location.directory!a} is no directory of a publisher.")
    return location


def _check_size(location: IpcLocation, nbytes: int) -> None:
    if sum(handle.nbytes for handle in location.buckets) != nbytes:
        raise WeightsError("The buckets of an offer are not as long as its list of tensors says.")


def _compare(entries: Sequence[Entry], wait: Callable[[], list[str]], offer: Offer) -> None:
    """Wait for digests, and compare them with those published."""
    for entry, value in zip(entries, wait(), strict=True):
        if value != entry.digest:
            raise WeightsError(
                f"{entry.name} of version {offer.version} changed while it was read.",
                "Publish the version again, and change nothing before the refit has ended.",
            )


_BATCH_BYTES = 512 << 20
"""Bytes per kernel; the CPU hashes the sums of one batch while the GPU copies the next."""


class PreparedCopies:
    """The copies of all tensors of a version, in batches of some hundred megabytes."""

    def __init__(
        self,
        handles: Sequence[Handle],
        buckets: Sequence[Tensor],
        entries: Sequence[Entry],
        targets: Mapping[str, Tensor],
    ) -> None:
        missing = [entry.name for entry in entries if entry.name not in targets]
        if missing:
            raise WeightsError(f"There is no tensor to copy {', '.join(missing[:5])} into.")
        self._handles = handles
        self._layout = _describe_layout(entries)
        self._names = [entry.name for entry in entries]
        batches: list[list[tuple[Tensor, Tensor]]] = []
        batch_bytes = _BATCH_BYTES
        for entry, source in zip(entries, view_entries(entries, buckets), strict=True):
            target = targets[entry.name].detach()
            if (target.dtype, target.shape, target.device) != (
                source.dtype,
                source.shape,
                source.device,
            ):
                raise WeightsError(
                    f"{entry.name} is {describe(source)}, but its target is {describe(target)}."
                )
            if batch_bytes >= _BATCH_BYTES:
                batches.append([])
                batch_bytes = 0
            batches[-1].append((target, source))
            batch_bytes += target.nbytes
        self._copies = [SummedCopies(batch) for batch in batches]
        self._addresses = _list_addresses(targets[name] for name in self._names)

    @property
    def sizes(self) -> list[int]:
        """The number of tensors in each batch."""
        return [batch.size for batch in self._copies]

    @property
    def keeps_tensors(self) -> bool:
        """Whether the publisher's tensors stay open as long as this object exists."""
        return any(batch.keeps_tensors for batch in self._copies)

    def fits(self, handles: Sequence[Handle], targets: Mapping[str, Tensor]) -> bool:
        """Return whether these copies are from these buckets to these tensors."""
        if self._handles != handles or not targets.keys() >= set(self._names):
            return False
        return self._addresses == _list_addresses(targets[name] for name in self._names)

    def matches(self, entries: Sequence[Entry]) -> bool:
        """Return whether the tensors are at the same places in the buckets."""
        return self._layout == _describe_layout(entries)

    def start(self) -> list[Callable[[], list[str]]]:
        """Start all batches; each returned function waits for one and returns its digests."""
        return [batch.start() for batch in self._copies]


def _describe_layout(entries: Sequence[Entry]) -> list[tuple[str, str, tuple[int, ...], int]]:
    return [(entry.name, entry.dtype, entry.shape, entry.offset) for entry in entries]


def _list_addresses(tensors: Iterable[Tensor]) -> list[tuple[int, int, bool]]:
    return [(tensor.data_ptr(), tensor.nbytes, tensor.is_contiguous()) for tensor in tensors]
