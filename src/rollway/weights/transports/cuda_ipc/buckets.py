"""Buckets: device memory into which a publisher copies tensors, and which readers open."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from rollway.errors import UsageError
from rollway.weights.copies import SummedCopies
from rollway.weights.offer import Entry
from rollway.weights.transports.cuda_ipc.device_memory import Handle, allocate, export
from rollway.weights.transports.entries import align, lay_out, set_checksums, view_entries

_ALIGNMENT = 512
Signature = list[tuple[str, torch.dtype, torch.Size, tuple[int, ...], int]]


def sign(tensors: Mapping[str, Tensor]) -> Signature:
    """Return what must stay the same for prepared work on tensors to be used again."""
    return [(name, t.dtype, t.shape, t.stride(), t.data_ptr()) for name, t in tensors.items()]


@dataclass(frozen=True, slots=True)
class _PreparedBucket:
    """Copies of tensors at known addresses into a bucket."""

    signature: Signature
    entries: list[Entry]
    copies: SummedCopies


@dataclass(slots=True)
class Slot:
    """The memory of one version."""

    number: int
    directory: Path
    """Where the files of buckets in CPU memory are."""
    bucket_bytes: int
    version: int = -1
    buckets: list[Tensor] = field(default_factory=list)
    """As bytes."""
    handles: list[Handle] = field(default_factory=list)
    _prepared: dict[int, _PreparedBucket] = field(default_factory=dict)
    """The copies of the previous version, by bucket."""

    @property
    def nbytes(self) -> int:
        return sum(handle.nbytes for handle in self.handles)

    def copy(self, tensors: Iterable[tuple[str, Tensor]]) -> list[Entry]:
        """Copy tensors into the buckets, one bucket at a time; return their entries."""
        entries: list[Entry] = []
        names: set[str] = set()
        number = -1
        for number, bucket in enumerate(_split_into_buckets(tensors, self.bucket_bytes)):
            repeated = names & bucket.keys()
            if repeated:
                raise UsageError(f"{min(repeated)} came twice.", "Publish each name once.")
            names |= bucket.keys()
            prepared = self._prepare(number, bucket)
            # Checksums exist once the copies are complete: only then may a source be released.
            entries += set_checksums(prepared.entries, prepared.copies.start_checksums()())
            bucket.clear()
        self.release(number + 1)
        return entries

    def release(self, first: int = 0) -> None:
        """Release this bucket and those after it."""
        for handle in self.handles[first:]:
            if handle.file:
                (self.directory / handle.file).unlink(missing_ok=True)
        del self.buckets[first:], self.handles[first:]
        self._prepared = {n: bucket for n, bucket in self._prepared.items() if n < first}

    def _prepare(self, number: int, tensors: dict[str, Tensor]) -> _PreparedBucket:
        """Prepare the copies into a bucket, which is allocated again if the tensors do not fit."""
        signature = sign(tensors)
        device = find_device((*tensors.values(), *self.buckets[:number]))
        known = self._prepared.get(number)
        if (
            known is not None
            and known.signature == signature
            and self.buckets[number].device == device
        ):
            return known
        start = sum(bucket.numel() for bucket in self.buckets[:number])
        entries, nbytes = lay_out(tensors, _ALIGNMENT, start)
        size = max(nbytes, _ALIGNMENT)
        present = [(bucket.numel(), bucket.device) for bucket in self.buckets[number : number + 1]]
        if present != [(size, device)]:
            # Released before the new one is allocated: the device may have space for only one.
            self.release(number)
            path = self.directory / f"{self.number}.{number}.{os.urandom(4).hex()}"
            self.buckets.append(allocate(size, device, path))
            self.handles.append(export(self.buckets[-1], path))
        targets = view_entries(entries, self.buckets)
        copies = SummedCopies(list(zip(targets, tensors.values(), strict=True)))
        prepared = _PreparedBucket(signature, entries, copies)
        if not copies.keeps_tensors:
            self._prepared[number] = prepared
        return prepared


def find_device(tensors: Iterable[Tensor]) -> torch.device:
    """Return the device of all tensors; raise `UsageError` if they are on several."""
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1 or next(iter(devices)).type not in ("cpu", "cuda"):
        raise UsageError(
            f"These tensors are on {', '.join(sorted(map(str, devices)))}.",
            "Use one publisher for each GPU.",
        )
    return devices.pop()


def _split_into_buckets(
    tensors: Iterable[tuple[str, Tensor]], most: int
) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of one bucket at a time; a tensor longer than `most` has its own."""
    bucket: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if name in bucket:
            raise UsageError(f"{name} came twice.", "Publish each name once.")
        if size and size + tensor.nbytes > most:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = tensor
        size += align(tensor.nbytes, _ALIGNMENT)
        del tensor  # the caller clears the bucket: no reference may stay here
    if bucket:
        yield bucket
