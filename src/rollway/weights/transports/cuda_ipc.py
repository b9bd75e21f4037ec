"""Weights on one GPU: a reader in another process copies out of the trainer's device memory.

    trainer ── publish: copy into buckets, sum ──► device memory   (`in_place`: its parameters)
                 │ list of tensors: /dev/shm/rollway-ipc-…/<slot>.json      ▲ opened once
    offer ───────┴─ IPC handles of the allocations ────────────────────────┤
    worker  ◄── `tensors`: views of that memory; the engine copies, sums are compared

An offer exists only after its copies are complete, because publishing waits for their sums. A
reader opens handles once, since later versions use the same buckets. CPU tensors use shared memory
instead of handles, so that everything else works the same where there is no GPU.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from torch import Tensor

from rollway.errors import UsageError, WeightsError
from rollway.weights import leftovers
from rollway.weights.checkpoint import TensorHeader
from rollway.weights.device_copies import explain_exhaustion
from rollway.weights.digest.checksums import finish_word_sums, start_word_sum, word_sums
from rollway.weights.offer import Count, Entry, Manifest, Offer, read_manifest
from rollway.weights.transports.base import (
    NamedTensor,
    Publisher,
    Reader,
    Source,
    inspect_source,
    never,
)
from rollway.weights.transports.device_memory import (
    Handle,
    InPlace,
    allocate,
    device_name,
    export,
    find_device,
    find_in_place,
    local_device,
    open_handle,
)
from rollway.weights.transports.entries import (
    SHM,
    VersionGone,
    align,
    lay_out,
    prepare_directory,
    read_tensor_list,
    set_sums,
    view_entries,
    view_entry,
    write_tensor_list,
)
from rollway.weights.untrusted import is_file_name

log = logging.getLogger(__name__)

BUCKET_BYTES = 1 << 30
PREFIX = leftovers.IPC
_ALIGNMENT = 512
_MAX_REASON = 4096


class IpcLocation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The part of an offer that names the device, the memory and the file that lists tensors."""

    device: Annotated[str, msgspec.Meta(max_length=64)]
    """A GPU's UUID, or `cpu`."""
    directory: Annotated[str, msgspec.Meta(max_length=255)]
    slot: Count
    buckets: Annotated[list[Handle], msgspec.Meta(max_length=1 << 16)]
    copied_bytes: Count = 0
    """How much of the version the publisher copied; the rest is the trainer's own memory."""
    why_copied: Annotated[str, msgspec.Meta(max_length=_MAX_REASON)] = ""
    keep_open: bool = True
    """Whether readers keep the memory open for the next version."""


@dataclass(slots=True)
class _BucketSlot:
    """The copies of one version, in buckets."""

    number: int
    directory: Path
    bucket_bytes: int
    version: int = -1
    buckets: list[Tensor] = field(default_factory=list)
    """As bytes."""
    handles: list[Handle] = field(default_factory=list)

    @property
    def manifest(self) -> Path:
        return self.directory / f"{self.number}.json"

    def withdraw(self) -> None:
        """Remove the list of tensors: no reader accepts the bytes from now on."""
        self.manifest.unlink(missing_ok=True)
        self.version = -1

    def copy(self, tensors: Iterable[NamedTensor]) -> dict[str, tuple[Entry, Tensor]]:
        """Start to copy tensors into the buckets, one bucket at a time; return the copies."""
        copies: dict[str, tuple[Entry, Tensor]] = {}
        number = start = 0
        for bucket in _split_into_buckets(tensors, self.bucket_bytes):
            entries, nbytes = lay_out(bucket, _ALIGNMENT, start)
            memory = self._get_bucket(number, max(nbytes, 1), find_device(bucket.values()))
            for entry, tensor in zip(entries, bucket.values(), strict=True):
                view = view_entry(memory, entry, start)
                view.copy_(tensor, non_blocking=True)
                copies[entry.name] = entry, view
            number, start = number + 1, start + memory.numel()
            bucket.clear()
        self.release(number)
        return copies

    def _get_bucket(self, number: int, nbytes: int, device: torch.device) -> Tensor:
        """Return a bucket of this size, the one of the version before if it has it."""
        known = [(bucket.numel(), bucket.device) for bucket in self.buckets[number : number + 1]]
        if known != [(nbytes, device)]:
            # Released before the new one is allocated: the device may have space for only one.
            self.release(number)
            path = self.directory / f"{self.number}.{number}.{os.urandom(4).hex()}"
            self.buckets.append(allocate(nbytes, device, path))
            self.handles.append(export(self.buckets[-1], path))
        return self.buckets[number]

    def release(self, first: int = 0) -> None:
        """Release this bucket and those after it."""
        for handle in self.handles[first:]:
            if handle.file:
                (self.directory / handle.file).unlink(missing_ok=True)
        del self.buckets[first:], self.handles[first:]


def _split_into_buckets(tensors: Iterable[NamedTensor], most: int) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of one bucket at a time; a tensor longer than `most` has its own."""
    bucket: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if size and size + tensor.nbytes > most:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = tensor
        size += align(tensor.nbytes, _ALIGNMENT)
        del tensor  # the caller clears the bucket: no reference may stay here
    if bucket:
        yield bucket


class CudaIpcPublisher(Publisher):
    """Publishes versions to readers on this machine, copied or in place.

    The newest `keep` copies stay readable; each takes as much memory of the device as the model.
    With `in_place`, tensors are published from their own memory instead: parameters, and all
    tensors that are passed in a collection rather than by an iterator. Only what has no memory that
    can be shared is copied (`IpcLocation.copied_bytes`). There is one version then: the trainer
    must not change its tensors until the refit has returned. A change is noticed, and the refit
    fails.

    Memory that a reader has open is freed only when the reader closes it. Readers keep it open for
    the next version, unless `keep_open` is False: for a trainer that frees or offloads its
    parameters between refits."""

    transport = "cuda_ipc"

    def __init__(
        self,
        keep: int = 1,
        bucket_bytes: int = BUCKET_BYTES,
        directory: Path = SHM,
        *,
        in_place: bool = False,
        keep_open: bool = True,
    ) -> None:
        if keep < 1 or bucket_bytes < 1:
            raise UsageError(
                f"{keep} versions in buckets of {bucket_bytes} bytes keep nothing.",
                "Both must be 1 or more.",
            )
        prepare_directory(directory, PREFIX)
        self._directory = directory / f"{PREFIX}{leftovers.writer_mark()}-{os.urandom(4).hex()}"
        self._directory.mkdir(mode=0o700)
        self._guard = leftovers.Guard(self._directory)
        self._in_place, self._keep_open = in_place, keep_open
        count = 1 if in_place else keep
        self._slots = [_BucketSlot(n, self._directory, bucket_bytes) for n in range(count)]
        self._placed = InPlace({})
        """Where the tensors of the last version in place are."""

    def _publish(self, version: int, tensors: Source | None = None) -> Offer:
        """Publish a version; no more than one bucket's tensors are held at a time."""
        source = inspect_source(tensors)
        slot = min(self._slots, key=lambda slot: slot.version)
        slot.withdraw()  # before its bytes change: a reader of it then notices
        try:
            with explain_exhaustion(
                f"version {version}, which cuda_ipc copies",
                "Pass in_place=True, which publishes parameters from their own memory, or use shm.",
            ):
                copies = slot.copy(self._list_copied(source.pairs(), source.is_stream))
        except WeightsError:
            slot.release()  # half a version: the trainer needs its memory
            raise
        return self._announce(slot, version, copies)

    def wait(self, version: int, seconds: float | None = None) -> None:
        """Return at once: readers have the version when the refit has ended."""
        if not self._keep_open:
            self._placed = InPlace({})  # it refers to the parameters, which the trainer frees next

    def _close(self) -> None:
        """Remove all versions."""
        self._guard.close()
        for slot in self._slots:
            slot.release()
        self._placed = InPlace({})
        if torch.cuda.is_initialized():
            torch.cuda.ipc_collect()

    def _list_copied(
        self, tensors: Iterable[NamedTensor], is_stream: bool
    ) -> Iterator[NamedTensor]:
        """Yield what must be copied, and find where the other tensors are.

        Of a stream, only parameters stay as they are: another tensor may be one that the trainer
        gathered for this call, and the next one may get its memory."""
        names: set[str] = set()
        own: dict[str, Tensor] = {}
        for name, tensor in tensors:
            if name in names:
                raise UsageError(f"{name} came twice.", "Publish each name once.")
            names.add(name)
            if is_stream and not isinstance(tensor, torch.nn.Parameter):
                # Copied once more, in the order of the device's work, to wait for its bucket.
                yield name, tensor.detach().clone()
            elif self._in_place:
                own[name] = tensor.detach()
            else:
                yield name, tensor.detach()
        # To export memory takes milliseconds: done again only if a tensor has moved.
        if not self._placed.is_of(own):
            self._placed = find_in_place(own)
            if self._placed.refused:
                reasons = self._placed.explain_refused()
                log.warning("some tensors cannot be published in place and are copied: %s", reasons)
        for name in self._placed.refused:
            yield name, own[name]

    def _announce(
        self, slot: _BucketSlot, version: int, copies: Mapping[str, tuple[Entry, Tensor]]
    ) -> Offer:
        """Write the list of tensors, which makes the version readable."""
        placed = self._placed
        start = sum(handle.nbytes for handle in slot.handles)
        copied = [entry for entry, _ in copies.values()]
        own = [msgspec.structs.replace(e, offset=e.offset + start) for e in placed.entries]
        tensors = [view for _, view in copies.values()]
        tensors += [placed.tensors[entry.name] for entry in own]
        entries = set_sums(copied + own, word_sums(tensors))
        handles = slot.handles + placed.handles
        manifest = Manifest(version, sum(handle.nbytes for handle in handles), entries)
        write_tensor_list(slot.manifest, manifest)
        slot.version = version
        streamed = len(copied) - len(placed.refused) if self._in_place else 0
        reasons = [f"{streamed} tensors: no parameters, from an iterator"] if streamed else []
        location = IpcLocation(
            device=device_name(find_device(tensors)),
            directory=self._directory.name,
            slot=slot.number,
            buckets=handles,
            copied_bytes=sum(entry.nbytes for entry in copied),
            why_copied="; ".join(filter(None, [*reasons, placed.explain_refused()]))[:_MAX_REASON],
            keep_open=self._keep_open,
        )
        where: dict[str, Any] = msgspec.to_builtins(location)
        size = sum(entry.nbytes for entry in entries)
        return Offer("cuda_ipc", version, manifest.identity, size, where)


class CudaIpcReader(Reader):
    """Reads offers in place; opened memory stays open for later versions."""

    def __init__(self, directory: Path = SHM) -> None:
        self._directory = directory
        self._publisher = ""
        """The directory of the publisher whose memory is open."""
        self._open: dict[int, dict[Handle, Tensor]] = {}
        """By slot, so that a slot with new buckets releases the old ones."""

    def headers(self, offer: Offer) -> dict[str, TensorHeader]:
        return self._read_manifest(offer, _read_location(offer)).headers()

    def sums(self, offer: Offer) -> Mapping[str, int]:
        entries = self._read_manifest(offer, _read_location(offer)).entries
        return {entry.name: entry.word_sum for entry in entries if entry.word_sum is not None}

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

        Each is summed after the caller has copied it, on the current stream, and the sums are
        compared at the end: what was copied is what was published, or this raises."""
        location = _read_location(offer)
        manifest = self._read_manifest(offer, location)
        buckets = self._open_buckets(location, manifest.nbytes)
        views = view_entries(manifest.entries, buckets)
        started: list[tuple[Entry, Tensor]] = []
        for entry, view in zip(manifest.entries, views, strict=True):
            yield entry.name, view
            if not summed(entry.name):  # otherwise the caller compares the sum itself
                started.append((entry, start_word_sum(view)))
        sums = finish_word_sums([total for _, total in started])
        for (entry, _), total in zip(started, sums, strict=True):
            if total != entry.word_sum:
                raise WeightsError(
                    f"{entry.name} of version {offer.version} changed while it was read.",
                    "Publish the version again, and change nothing before the refit has ended.",
                )
        if self._read_manifest(offer, location) != manifest:
            raise WeightsError(f"Version {offer.version} was overwritten while it was read.")

    def finish(self, offer: Offer) -> None:
        """Close the trainer's memory, if the trainer wants it back between versions."""
        if not _read_location(offer).keep_open:
            self.close()

    def close(self) -> None:
        """Release the trainer's memory."""
        self._open = {}

    def _read_manifest(self, offer: Offer, location: IpcLocation) -> Manifest:
        try:
            if leftovers.is_abandoned(location.directory, 0.0):
                # Its publisher died: the device memory may belong to another process by now.
                raise VersionGone(offer.version)
            path = self._directory / location.directory / f"{location.slot}.json"
            return read_manifest(read_tensor_list(path, offer), offer)
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
