"""Publish versions in device memory that other processes open by CUDA IPC."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from torch import Tensor

from rollway.errors import UsageError
from rollway.weights import leftovers
from rollway.weights.copies import SummedCopies
from rollway.weights.digest.checksums import digests
from rollway.weights.offer import Count, Entry, Manifest, Offer
from rollway.weights.transports.base import Publisher, Source, inspect_source
from rollway.weights.transports.cuda_ipc.device_memory import (
    Handle,
    allocate,
    device_name,
    export,
)
from rollway.weights.transports.entries import (
    Parameters,
    align,
    lay_out,
    make_entry,
    name_parameters,
    set_digests,
    view_entries,
)
from rollway.weights.transports.shared_memory import SHM, prepare_directory, write_tensor_list

BUCKET_BYTES = 1 << 30
PREFIX = "rollway-ipc-"
_ALIGNMENT = 512


class IpcLocation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The part of an offer that names the device, the buckets and the file that lists tensors."""

    device: Annotated[str, msgspec.Meta(max_length=64)]
    """A GPU's UUID, or `cpu`."""
    directory: Annotated[str, msgspec.Meta(max_length=255)]
    slot: Count
    buckets: Annotated[list[Handle], msgspec.Meta(max_length=1 << 16)]


@dataclass(slots=True)
class _Slot:
    """The memory of one version."""

    number: int
    version: int = -1
    buckets: list[Tensor] = field(default_factory=list)
    """As bytes."""
    handles: list[Handle] = field(default_factory=list)
    prepared: dict[int, _PreparedBucket] = field(default_factory=dict)
    """The copies of the previous version, by bucket."""


@dataclass(frozen=True, slots=True)
class _PreparedBucket:
    """Copies of tensors at known addresses into a bucket."""

    signature: list[tuple[str, torch.dtype, torch.Size, tuple[int, ...], int]]
    entries: list[Entry]
    copies: SummedCopies


@dataclass(slots=True)
class _Adopted:
    """Parameters that are published from their own memory."""

    slot: _Slot
    entries: list[Entry]
    parameters: Mapping[str, Tensor]
    addresses: list[int]

    def views(self) -> list[Tensor]:
        for (name, parameter), address in zip(self.parameters.items(), self.addresses, strict=True):
            if parameter.data_ptr() != address:
                raise UsageError(
                    f"{name} has moved in memory since it was adopted.",
                    "Adopt the parameters again, or pass them to `publish`.",
                )
        return [parameter.detach() for parameter in self.parameters.values()]


class CudaIpcPublisher(Publisher):
    """Publishes versions to readers on this machine; the newest `keep` stay readable.

    Each takes as much memory of the device as the model. Memory that a reader still has open is
    freed only when the reader releases it."""

    transport = "cuda_ipc"

    def __init__(
        self, keep: int = 1, bucket_bytes: int = BUCKET_BYTES, directory: Path = SHM
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
        self._bucket_bytes = bucket_bytes
        self._slots = [_Slot(number) for number in range(keep)]
        self._adopted: _Adopted | None = None

    def publish(self, version: int, tensors: Source | None = None) -> Offer:
        """Publish a version; no more than one bucket's tensors are held at a time."""
        if tensors is None and self._adopted is not None:
            slot = self._adopted.slot
            self._withdraw(slot)
            entries = set_digests(self._adopted.entries, digests(self._adopted.views()))
        else:
            source = inspect_source(tensors)
            slot = min(self._slots, key=lambda slot: slot.version)
            self._withdraw(slot)  # before its bytes change: a reader of it then notices
            pairs = ((name, tensor.detach()) for name, tensor in source.pairs())
            entries = self._copy(slot, pairs)
        return self._announce(slot, version, entries)

    def adopt(self, tensors: Parameters) -> None:
        """Publish these parameters (`model.named_parameters()`) from their own memory.

        On a CPU, they are first moved into shared memory. They must not change while a refit reads
        them: readers notice, and reject the version."""
        parameters = name_parameters(tensors)
        if not parameters:
            raise UsageError("There are no parameters to adopt.", "Pass `named_parameters()`.")
        device = _find_device(parameters.values())
        slot = _Slot(len(self._slots))
        if device.type == "cpu":
            entries = self._copy(slot, ((name, p.detach()) for name, p in parameters.items()))
            views = view_entries(entries, slot.buckets)
            for parameter, view in zip(parameters.values(), views, strict=True):
                parameter.data = view
        else:
            entries, slot.buckets = _use_storages(parameters)
            slot.handles = [export(bucket) for bucket in slot.buckets]
        addresses = [parameter.data_ptr() for parameter in parameters.values()]
        self._adopted = _Adopted(slot, entries, parameters, addresses)

    def close(self) -> None:
        """Remove all versions."""
        self._guard.close()
        for slot in self._slots:
            slot.buckets, slot.handles, slot.prepared = [], [], {}
        self._adopted = None
        if torch.cuda.is_initialized():
            torch.cuda.ipc_collect()

    def _withdraw(self, slot: _Slot) -> None:
        """Remove the list of tensors: no reader accepts the bytes from now on."""
        self._manifest_path(slot).unlink(missing_ok=True)
        slot.version = -1

    def _manifest_path(self, slot: _Slot) -> Path:
        return self._directory / f"{slot.number}.json"

    def _copy(self, slot: _Slot, tensors: Iterable[tuple[str, Tensor]]) -> list[Entry]:
        """Copy tensors into the slot's buckets, one bucket at a time."""
        entries: list[Entry] = []
        names: set[str] = set()
        number = -1
        for number, bucket in enumerate(_split_into_buckets(tensors, self._bucket_bytes)):
            repeated = names & bucket.keys()
            if repeated:
                raise UsageError(f"{min(repeated)} came twice.", "Publish each name once.")
            names |= bucket.keys()
            prepared = self._prepare(slot, number, bucket)
            # The digests exist once the copies are complete: only then may a source be released.
            entries += set_digests(prepared.entries, prepared.copies.start()())
            bucket.clear()
        self._release_from(slot, number + 1)
        return entries

    def _prepare(self, slot: _Slot, number: int, tensors: dict[str, Tensor]) -> _PreparedBucket:
        """Prepare the copies into a bucket, which is allocated again if the tensors do not fit."""
        signature = [
            (name, t.dtype, t.shape, t.stride(), t.data_ptr()) for name, t in tensors.items()
        ]
        device = _find_device((*tensors.values(), *slot.buckets[:number]))
        known = slot.prepared.get(number)
        if (
            known is not None
            and known.signature == signature
            and slot.buckets[number].device == device
        ):
            return known
        start = sum(bucket.numel() for bucket in slot.buckets[:number])
        entries, nbytes = lay_out(tensors, _ALIGNMENT, start)
        size = max(nbytes, _ALIGNMENT)
        present = [(bucket.numel(), bucket.device) for bucket in slot.buckets[number : number + 1]]
        if present != [(size, device)]:
            # Released before the new one is allocated: the device may have space for only one.
            self._release_from(slot, number)
            path = self._directory / f"{slot.number}.{number}.{os.urandom(4).hex()}"
            slot.buckets.append(allocate(size, device, path))
            slot.handles.append(export(slot.buckets[-1], path))
        targets = view_entries(entries, slot.buckets)
        copies = SummedCopies(list(zip(targets, tensors.values(), strict=True)))
        prepared = _PreparedBucket(signature, entries, copies)
        if not copies.keeps_tensors:
            slot.prepared[number] = prepared
        return prepared

    def _release_from(self, slot: _Slot, number: int) -> None:
        """Release this bucket and those after it."""
        for handle in slot.handles[number:]:
            if handle.file:
                (self._directory / handle.file).unlink(missing_ok=True)
        del slot.buckets[number:], slot.handles[number:]
        slot.prepared = {n: bucket for n, bucket in slot.prepared.items() if n < number}

    def _announce(self, slot: _Slot, version: int, entries: list[Entry]) -> Offer:
        """Write the list of tensors, which makes the version readable."""
        manifest = Manifest(version, sum(bucket.numel() for bucket in slot.buckets), entries)
        write_tensor_list(self._manifest_path(slot), manifest)
        slot.version = version
        device = device_name(slot.buckets[0].device)
        location = IpcLocation(device, self._directory.name, slot.number, slot.handles)
        where: dict[str, Any] = msgspec.to_builtins(location)
        size = sum(entry.nbytes for entry in entries)
        return Offer("cuda_ipc", version, manifest.identity, size, where)


def _split_into_buckets(
    tensors: Iterable[tuple[str, Tensor]], most: int
) -> Iterator[dict[str, Tensor]]:
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


def _use_storages(parameters: Mapping[str, Tensor]) -> tuple[list[Entry], list[Tensor]]:
    """Use the storages of parameters as buckets; several parameters may share one."""
    starts: dict[int, int] = {}
    buckets: list[Tensor] = []
    entries: list[Entry] = []
    end = 0
    for name, tensor in parameters.items():
        storage = tensor.untyped_storage()
        if not tensor.is_contiguous() or not storage.nbytes():
            raise UsageError(f"{name} is not contiguous.", "Pass it to `publish` instead.")
        if storage.data_ptr() not in starts:
            starts[storage.data_ptr()] = end
            end += storage.nbytes()
            empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            buckets.append(empty.set_(storage))
        offset = starts[storage.data_ptr()] + tensor.storage_offset() * tensor.element_size()
        entries.append(make_entry(name, tensor, offset))
    return entries, buckets


def _find_device(tensors: Iterable[Tensor]) -> torch.device:
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1 or next(iter(devices)).type not in ("cpu", "cuda"):
        raise UsageError(
            f"These tensors are on {', '.join(sorted(map(str, devices)))}.",
            "Use one publisher for each GPU.",
        )
    return devices.pop()
