"""Describe many runs of bytes to a kernel: a table in device memory, cut into equal parts.

A kernel that is launched once for thousands of tensors looks up here which bytes each of its
programs processes. A run begins at a multiple of eight bytes and may end anywhere: the word that
contains its last byte can be read whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollway.weights.digest.checksums import BLOCK

STEP = 2048
"""Words that a program reads at once."""
STEPS = 4
PART = STEP * STEPS
"""Words of one program; a block consists of whole parts."""
COLUMNS = 5


@dataclass(frozen=True, slots=True)
class Table:
    """Runs of bytes, as kernels read them."""

    rows: Tensor
    """For each run: two addresses, its size in bytes, its first part and its first block."""
    owners: Tensor
    """The run that each part belongs to."""
    first_parts: Tensor
    """The first part of each run, on the host; at the end the number of all parts."""
    blocks: list[int]
    """The number of blocks of each run, by whole words."""

    @property
    def parts(self) -> int:
        return int(self.owners.numel())


def table(
    first: Sequence[int], second: Sequence[int], nbytes: Sequence[int], device: torch.device
) -> Table:
    """Copy addresses and sizes to the device, without waiting for it.

    Each run has two addresses: source and target of a copy, or two versions to compare."""
    addresses, others, sizes = (torch.tensor(column) for column in (first, second, nbytes))
    parts = (sizes + (8 * PART - 1)) // (8 * PART)
    blocks = (sizes // 8 + (BLOCK - 1)) // BLOCK
    part_ends, block_ends = parts.cumsum(0), blocks.cumsum(0)
    columns = [addresses, others, sizes, part_ends - parts, block_ends - blocks, parts]
    on_device = torch.stack(columns).to(device)
    # `output_size` is known here; without it, torch would wait for the device to find it.
    owners = torch.repeat_interleave(on_device[5], output_size=int(part_ends[-1]))
    return Table(
        rows=on_device[:COLUMNS].t().contiguous(),
        owners=owners.to(torch.int32),
        first_parts=torch.cat([part_ends - parts, part_ends[-1:]]),
        blocks=blocks.tolist(),
    )


def run_of(tensor: Tensor) -> Tensor:
    """Return the tensor if it is one aligned run of bytes, or else a copy that is."""
    if not tensor.is_contiguous():
        return tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % 8 else tensor
