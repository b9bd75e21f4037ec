"""Many runs of bytes as a kernel sees them: a table in device memory, cut into equal parts.

A kernel that is launched once for thousands of tensors asks here which bytes are its own. Runs
begin where words of eight bytes do; they may end anywhere, since a word that holds a byte of a
tensor can be read whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollway.weights.digest.bits import BLOCK

STEP = 2048
"""Words that a program reads at once."""
STEPS = 4
PART = STEP * STEPS
"""Words of one program; a block is whole parts."""
COLUMNS = 5


@dataclass(frozen=True, slots=True)
class Table:
    """Of each run: two addresses, how many bytes, its first part and its first block."""

    rows: Tensor
    owners: Tensor
    """Which run each part belongs to."""
    first_parts: Tensor
    """On the host, with the number of all parts at the end."""
    blocks: list[int]
    """Of each run, by whole words."""

    @property
    def parts(self) -> int:
        return int(self.owners.numel())


def table(
    first: Sequence[int], second: Sequence[int], nbytes: Sequence[int], device: torch.device
) -> Table:
    """Put addresses and sizes where kernels can read them; nothing waits for the device."""
    addresses, others, sizes = (torch.tensor(each) for each in (first, second, nbytes))
    parts = (sizes + (8 * PART - 1)) // (8 * PART)
    blocks = (sizes // 8 + (BLOCK - 1)) // BLOCK
    part_ends, block_ends = parts.cumsum(0), blocks.cumsum(0)
    columns = [addresses, others, sizes, part_ends - parts, block_ends - blocks, parts]
    moved = torch.stack(columns).to(device)
    owners = torch.repeat_interleave(moved[5], output_size=int(part_ends[-1]))
    return Table(
        rows=moved[:COLUMNS].t().contiguous(),
        owners=owners.to(torch.int32),
        first_parts=torch.cat([part_ends - parts, part_ends[-1:]]),
        blocks=blocks.tolist(),
    )


def run_of(tensor: Tensor) -> Tensor:
    """The same bytes in one run that begins with a word: mostly the tensor itself."""
    if not tensor.is_contiguous():
        return tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % 8 else tensor
