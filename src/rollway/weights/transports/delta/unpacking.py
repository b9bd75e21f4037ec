"""Read what changed, and unpack it on the device that needs it.

    delta ── read, zstd ──► bytes on the host ── one copy ──► device ──► flat positions, bits

Packed changes take a few bytes for each changed element, so they are all that a device receives. It
unpacks those of many tensors with few kernels.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import cast

import numpy as np
import torch
import zstandard
from torch import Tensor

from rollway.weights.device_copies import allocate_pinned
from rollway.weights.digest.checksums import INTEGERS, count_threads, word_sums
from rollway.weights.transports.base import ChangedElements
from rollway.weights.transports.delta.packing import ESCAPE, WORD
from rollway.weights.transports.delta.versions import (
    Change,
    DeltaEntry,
    StoredBytes,
    make_read_error,
)
from rollway.weights.transports.entries import align

BATCH = 1 << 24
"""Bytes of gaps that are unpacked together; each takes up to 48 bytes of scratch memory."""


@dataclass(frozen=True, slots=True)
class UnpackedTensor:
    """What changed in a tensor, and which bytes of its step's memory say so."""

    name: str
    entry: DeltaEntry
    change: Change
    start: int

    @property
    def count(self) -> int:
        return self.change.count

    @property
    def element_bytes(self) -> int:
        return self.entry.element_bytes

    @property
    def middle(self) -> int:
        """Where gaps end and steps begin."""
        return self.stop - self.count * self.change.planes

    @property
    def stop(self) -> int:
        return self.start + self.change.plain_bytes


@dataclass(frozen=True, slots=True)
class UnpackedStep:
    """What changed from one version to the next, in host memory."""

    memory: Tensor
    changes: Sequence[UnpackedTensor]

    def move(self, device: torch.device) -> Iterator[tuple[str, ChangedElements]]:
        """Yield the changed elements of each tensor on a device."""
        memory = self.memory.to(device, non_blocking=True)
        for item in self.changes:
            if item.change.is_whole:
                # Copied: what is kept of it must not keep the memory of the whole step.
                bits = view_whole(item, memory).clone()
                positions = torch.arange(item.count, device=device)
                yield item.name, ChangedElements(positions, bits, False)
        for batch in _split_batches([c for c in self.changes if not c.change.is_whole]):
            yield from _unpack(memory, batch)


def view_whole(item: UnpackedTensor, memory: Tensor) -> Tensor:
    """Return the bits of a tensor that was sent whole."""
    return memory[item.start : item.stop].view(INTEGERS[item.element_bytes])


def read_step(file: StoredBytes, entries: Mapping[str, DeltaEntry]) -> UnpackedStep:
    """Read what changed in these tensors, and raise if it is damaged; others did not change."""
    changes = {name: entry.change for name, entry in entries.items() if entry.change is not None}
    for name, change in changes.items():
        _check(name, entries[name], change)
    first = min((change.offset for change in changes.values()), default=0)
    end = max((change.offset + change.nbytes for change in changes.values()), default=0)
    memory = file.read(first, end)
    starts = [change.offset - first for change in changes.values()]
    parts = [memory[a : a + c.nbytes] for a, c in zip(starts, changes.values(), strict=True)]
    for (name, change), total in zip(changes.items(), word_sums(parts), strict=True):
        if total != change.sum:
            raise make_read_error(f"What changed in {name} is damaged.")
    if any(change.is_compressed for change in changes.values()):
        memory, starts = _decompress(parts, list(changes.values()))
    items = zip(changes.items(), starts, strict=True)
    return UnpackedStep(memory, [UnpackedTensor(n, entries[n], c, at) for (n, c), at in items])


def _check(name: str, entry: DeltaEntry, change: Change) -> None:
    """Raise unless a change can be one of its tensor: no more memory is taken for it."""
    steps = change.count * change.planes
    if change.is_whole:
        is_possible = change.count == entry.elements and change.plain_bytes == entry.nbytes
    else:
        most = steps + change.count + entry.elements // ESCAPE
        is_possible = steps < change.plain_bytes <= most and change.count <= entry.elements
    is_possible &= change.planes <= entry.element_bytes
    if not is_possible or change.nbytes > change.plain_bytes or change.offset % WORD:
        raise make_read_error(f"{name} cannot have changed as the manifest says.")


def _decompress(parts: Sequence[Tensor], changes: Sequence[Change]) -> tuple[Tensor, list[int]]:
    """Return memory with the plain bytes of all changes, and where those of each begin."""
    *starts, end = accumulate((align(c.plain_bytes, WORD) for c in changes), initial=0)
    frames = [i for i, change in enumerate(changes) if change.is_compressed]
    sizes = [changes[i].plain_bytes for i in frames]
    try:
        # Threads of zstd's own do not need the interpreter.
        plain = zstandard.ZstdDecompressor().multi_decompress_to_buffer(
            [parts[i].numpy().data for i in frames],
            decompressed_sizes=struct.pack(f"={len(sizes)}Q", *sizes),
            threads=count_threads(),
        )
    except zstandard.ZstdError as error:
        raise make_read_error(f"A change cannot be decompressed ({error}).") from error
    sources = {i: part.numpy() for i, part in enumerate(parts)}
    sources |= {i: np.frombuffer(cast("bytes", plain[at]), np.uint8) for at, i in enumerate(frames)}
    memory = allocate_pinned(end)
    for i, start in enumerate(starts):
        memory.numpy()[start : start + changes[i].plain_bytes] = sources[i]
    return memory, starts


def _split_batches(changes: Sequence[UnpackedTensor]) -> Iterator[list[UnpackedTensor]]:
    """Yield changes with steps of one size, and bounded scratch memory."""
    by_kind: dict[tuple[int, int], list[UnpackedTensor]] = {}
    for item in changes:
        by_kind.setdefault((item.element_bytes, item.change.planes), []).append(item)
    for same_kind in by_kind.values():
        batch: list[UnpackedTensor] = []
        size = 0
        for item in same_kind:
            if batch and size + item.middle - item.start > BATCH:
                yield batch
                batch, size = [], 0
            batch.append(item)
            size += item.middle - item.start
        yield batch


def _unpack(
    memory: Tensor, batch: Sequence[UnpackedTensor]
) -> Iterator[tuple[str, ChangedElements]]:
    positions = _find_positions(memory, batch)
    planes = [memory[c.middle : c.stop].view(c.change.planes, c.count) for c in batch]
    steps = _join_planes(torch.cat(planes, dim=1), batch[0].element_bytes)
    for item, (first, end) in zip(
        batch, pairwise(accumulate((c.count for c in batch), initial=0)), strict=True
    ):
        yield item.name, ChangedElements(positions[first:end], steps[first:end], True)


def _join_planes(planes: Tensor, size: int) -> Tensor:
    """Return steps of `size` bytes, of which the lower ones are the rows of `planes`."""
    wide = planes.new_zeros((planes.shape[1], size))
    wide[:, : len(planes)] = planes.t()
    steps = wide.view(-1).view(INTEGERS[size])
    return ((steps >> 1) & torch.iinfo(steps.dtype).max) ^ -(steps & 1)  # undo the zigzag


def _find_positions(memory: Tensor, batch: Sequence[UnpackedTensor]) -> Tensor:
    """Return the positions of all tensors, each from the start of its own tensor."""
    device = memory.device
    stream = torch.cat([memory[item.start : item.middle] for item in batch])
    lengths = list(accumulate(item.middle - item.start for item in batch))
    ends = list(accumulate(item.count for item in batch))
    at = torch.nonzero(stream != ESCAPE).view(-1)
    byte_ends = torch.tensor(lengths, device=device)
    if torch.searchsorted(at, byte_ends).tolist() != ends:
        raise make_read_error(f"The positions in a change of {batch[0].name} or later are wrong.")
    sums = stream.cumsum(0, dtype=torch.int64)
    # Before a changed element are the gaps so far, and the changed elements so far.
    positions = sums.index_select(0, at)
    positions += torch.arange(positions.numel(), device=device)
    counts = torch.tensor([item.count for item in batch], device=device)
    starts = torch.zeros_like(counts)
    starts[1:] = sums.index_select(0, byte_ends[:-1] - 1) + counts.cumsum(0)[:-1]
    positions -= torch.repeat_interleave(starts, counts, output_size=positions.numel())
    lasts = positions.index_select(0, torch.tensor(ends, device=device) - 1).tolist()
    for item, last in zip(batch, lasts, strict=True):
        if last >= item.entry.elements:
            raise make_read_error(f"The positions in a change of {item.name} are wrong.")
    return positions
