"""Unpack the changes of many tensors together: a GPU starts few kernels, and the host seldom waits.

gap streams of a batch ─► one copy to the device ─► sums of gaps ─► positions of all tensors
value planes of a batch ─► one copy to the device ─► bits of all tensors
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from rollway.weights.device_copies import join_on_device
from rollway.weights.digest.changes import ESCAPE
from rollway.weights.transports.changes import ChangedElements
from rollway.weights.transports.delta.unpacking import (
    Streams,
    damaged,
    join_planes,
    unpack,
    uses_numpy,
)

BATCH = 1 << 24
"""Bytes of gaps that are unpacked together; each takes up to 48 bytes of scratch memory."""


@dataclass(frozen=True, slots=True)
class Step:
    """What changed from one version to the next, in host memory."""

    changes: Sequence[Streams]

    def move(self, device: torch.device) -> Iterator[tuple[str, ChangedElements]]:
        """Yield the changed elements of each tensor on a device."""
        alone = [c for c in self.changes if uses_numpy(device) or c.header.places != "gaps"]
        for change in alone:
            positions, bits, relative = unpack(change, device)
            if positions is None:
                positions = torch.arange(bits.numel(), device=device)
            yield change.name, ChangedElements(positions, bits, relative)
        if len(alone) < len(self.changes):
            for batch in _split_batches([c for c in self.changes if c.header.places == "gaps"]):
                yield from _move_batch(batch, device)


def _split_batches(changes: Sequence[Streams]) -> Iterator[list[Streams]]:
    """Yield changes with values of one kind, and bounded scratch memory."""
    by_kind: dict[tuple[int, str], list[Streams]] = {}
    for change in changes:
        kind = change.element_bytes, change.header.values
        by_kind.setdefault(kind, []).append(change)
    for same_kind in by_kind.values():
        batch: list[Streams] = []
        for change in same_kind:
            if batch and sum(c.places.numel() for c in [*batch, change]) > BATCH:
                yield batch
                batch = []
            batch.append(change)
        yield batch


def _move_batch(
    batch: Sequence[Streams], device: torch.device
) -> Iterator[tuple[str, ChangedElements]]:
    ends = list(accumulate((change.count for change in batch), initial=0))
    positions = _move_positions(batch, ends, device)
    header = batch[0].header
    size, relative = header.element_bytes, header.values == "steps"
    # All first bytes together, then all second bytes, as in the values of a single tensor.
    planes = [c.values.view(size, c.count)[plane] for plane in range(size) for c in batch]
    bits = join_planes(join_on_device(planes, device), size, relative)
    for change, (first, end) in zip(batch, pairwise(ends), strict=True):
        elements = ChangedElements(positions[first:end], bits[first:end], relative)
        yield change.name, elements


def _move_positions(batch: Sequence[Streams], ends: list[int], device: torch.device) -> Tensor:
    """Return the positions of all tensors, each from the start of its own tensor."""
    lengths = list(accumulate(change.places.numel() for change in batch))
    stream = join_on_device([change.places for change in batch], device)
    at = torch.nonzero(stream != ESCAPE).view(-1)
    byte_ends = torch.tensor(lengths, device=device)
    if torch.searchsorted(at, byte_ends).tolist() != ends[1:]:
        raise damaged(f"The positions in a change of {batch[0].name} or later are wrong.")
    sums = stream.cumsum(0, dtype=torch.int64)
    # Before a changed element are the gaps so far, and the changed elements so far.
    positions = sums.index_select(0, at)
    positions += torch.arange(positions.numel(), device=device)
    counts = torch.tensor([change.count for change in batch], device=device)
    starts = torch.zeros_like(counts)
    starts[1:] = sums.index_select(0, byte_ends[:-1] - 1) + counts.cumsum(0)[:-1]
    positions -= torch.repeat_interleave(starts, counts, output_size=positions.numel())
    lasts = positions.index_select(0, counts.cumsum(0) - 1).tolist()
    for change, last in zip(batch, lasts, strict=True):
        if last >= change.header.elements:
            raise damaged(f"The positions in a change of {change.name} are wrong.")
    return positions
