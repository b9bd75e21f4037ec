"""Read versions from a trainer's device memory, in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
from torch import Tensor

from rollway.errors import WeightsError
from rollway.weights import leftovers
from rollway.weights.checkpoint import TensorHeader
from rollway.weights.digest.checksums import start_digests
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

    def finish(self, offer: Offer) -> None:
        """Close the trainer's memory, if the trainer wants it back between versions."""
        if not _read_location(offer).keep_open:
            self.close()

    def close(self) -> None:
        """Release the trainer's memory."""
        self._open = {}

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

    def _open_buckets(self, location: IpcLocation, nbytes: int) -> list[Tensor]:
        """Open the publisher's memory, and check its size."""
        if sum(handle.nbytes for handle in location.buckets) != nbytes:
            raise WeightsError(
                "The buckets of an offer are not as long as its list of tensors says."
            )
        device = local_device(location.device)
        if self._publisher != location.directory:
            self.close()  # a publisher that closed frees its memory
            self._publisher = location.directory
        known = self._open.pop(location.slot, {})
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


def _compare(entries: Sequence[Entry], wait: Callable[[], list[str]], offer: Offer) -> None:
    """Wait for digests, and compare them with those published."""
    for entry, value in zip(entries, wait(), strict=True):
        if value != entry.digest:
            raise WeightsError(
                f"{entry.name} of version {offer.version} changed while it was read.",
                "Publish the version again, and change nothing before the refit has ended.",
            )
