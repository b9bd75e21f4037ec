"""Which elements of tensors changed, found and laid out on the device that they are on.

Each step that needs a size on the host makes a GPU wait, so many tensors are taken together there:
by `compared`, which has kernels of its own where Triton is, and torch's where it is not. A CPU
takes one tensor after the other, which stays in its cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Literal, Protocol

import torch
from torch import Tensor

from rollway.weights.digest.bits import (
    BLOCK,
    blocks_at_once,
    by_triton,
    digests,
    raw_bytes,
    words_of,
)

Pair = tuple[Tensor, Tensor]
"""The old and the new elements of a tensor, as integers of their size."""

ESCAPE = 255
"""As a gap: so many unchanged elements, and no changed one after them."""
SAMPLE = 1 << 16


def mostly_changed(old: Tensor, new: Tensor) -> bool:
    """More than half; then it is not worth saying where, and finding out takes long. A sample
    tells whether it is worth counting."""
    every = max(1, new.numel() // SAMPLE)
    differ = old[::every] != new[::every]
    return bool(2 * differ.sum() > differ.numel()) and is_most(int((old != new).sum()), new.numel())


def is_most(count: int, elements: int) -> bool:
    return 2 * count > elements


class Compared(Protocol):
    """Pairs of tensors, of elements of one size, that were compared together."""

    counts: list[int]
    """How many elements of each changed."""
    digests: list[str]
    """Of the new ones, where they were asked for."""

    def gather(self, first: int, end: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of the pairs from `first` to before `end`: the places of what changed, each counted
        from the start of its tensor, and the old and the new bits."""
        ...


def compared(pairs: Sequence[Pair], with_digests: bool = False) -> Compared:
    """Compare some pairs on one device, which is waited for once."""
    if by_triton(pairs[0][0].device):
        from rollway.weights.gpu_changes import Marked

        return Marked(pairs, with_digests)
    return _Joined(pairs, with_digests)


class _Joined:
    """Compared by torch: as one long tensor, since each call takes longer than a small one."""

    def __init__(self, pairs: Sequence[Pair], with_digests: bool) -> None:
        old, new = (torch.cat([pair[side].view(-1) for pair in pairs]) for side in (0, 1))
        self._found = changed(old, new)
        bounds = [0, *accumulate(pair[0].numel() for pair in pairs)]
        starts = torch.tensor(bounds, device=old.device)
        ends = torch.searchsorted(self._found[0], starts)
        self._ends: list[int] = ends.tolist()
        self.counts = [end - start for start, end in pairwise(self._ends)]
        each = torch.repeat_interleave(starts[:-1], ends.diff(), output_size=self._ends[-1])
        self._found[0].sub_(each)
        self.digests = digests([new for _, new in pairs]) if with_digests else []

    def gather(self, first: int, end: int) -> tuple[Tensor, Tensor, Tensor]:
        some = slice(self._ends[first], self._ends[end])
        positions, old, new = self._found
        return positions[some], old[some], new[some]


def changed(old: Tensor, new: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where the bits of elements differ, and the old and the new bits there.

    Slab by slab, so that what a CPU compares is still in its cache when it is gathered."""
    slab = blocks_at_once(old.device) * BLOCK * 8 // old.element_size()
    if old.numel() <= slab:
        return _changed_in(old, new, 0)
    found = []
    for start in range(0, old.numel(), slab):
        some = slice(start, start + slab)
        found.append(_changed_in(old[some], new[some], start))
    positions, old_bits, new_bits = zip(*found, strict=True)
    return torch.cat(positions), torch.cat(old_bits), torch.cat(new_bits)


def _changed_in(old: Tensor, new: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor]:
    """Unequal words first, then which elements of those, then the elements that fill no word."""
    old_words, old_tail = words_of(raw_bytes(old))
    new_words, new_tail = words_of(raw_bytes(new))
    words = torch.nonzero(old_words != new_words).view(-1)
    old_bits = pick(old_words, words).view(old.dtype)
    new_bits = pick(new_words, words).view(new.dtype)
    at = torch.nonzero(old_bits != new_bits).view(-1)
    shift = 3 - old.element_size().bit_length() + 1  # 1, 2, 4, 8 bytes: 8, 4, 2, 1 to a word
    positions = (pick(words, at >> shift) << shift) + (at & (1 << shift) - 1) + start
    old_bits, new_bits = pick(old_bits, at), pick(new_bits, at)
    if old_tail.numel() == 0:
        return positions, old_bits, new_bits
    old_tail, new_tail = old_tail.view(old.dtype), new_tail.view(new.dtype)
    at = torch.nonzero(old_tail != new_tail).view(-1)
    return (
        torch.cat([positions, at + (start + old.numel() - old_tail.numel())]),
        torch.cat([old_bits, old_tail[at]]),
        torch.cat([new_bits, new_tail[at]]),
    )


def laid_out(positions: Tensor, elements: int) -> tuple[Literal["gaps", "bitmap"], Tensor]:
    """Some positions, not none and not all, as bytes: by whichever way is shorter."""
    stream, _ = gaps(positions, [positions.numel()])
    if fits_gaps(stream.numel(), elements):
        return "gaps", stream
    return "bitmap", bitmap(positions, elements)


def fits_gaps(gap_bytes: int, elements: int) -> bool:
    """Whether gaps are no longer than a bitmap."""
    return gap_bytes <= elements // 8


def gaps(positions: Tensor, counts: Sequence[int]) -> tuple[Tensor, list[int]]:
    """How many unchanged elements lie before each changed one, in bytes: of tensors with so many
    positions each, none of them 0, one after the other. And how many bytes each has."""
    ends = list(accumulate(counts))
    steps = positions.clone()
    torch.sub(positions[1:], positions[:-1] + 1, out=steps[1:])
    if len(counts) > 1:
        firsts = torch.tensor([0, *ends[:-1]], device=positions.device)
        steps.index_copy_(0, firsts, pick(positions, firsts))
    lasts = torch.tensor(ends, device=positions.device) - 1
    to = (steps // ESCAPE + 1).cumsum(0)
    bounds = [0, *pick(to, lasts).tolist()]
    stream = torch.full((bounds[-1],), ESCAPE, dtype=torch.uint8, device=positions.device)
    stream.index_copy_(0, to - 1, (steps % ESCAPE).to(torch.uint8))
    return stream, [end - start for start, end in pairwise(bounds)]


def bitmap(positions: Tensor, elements: int) -> Tensor:
    marks = torch.zeros((elements + 7) // 8 * 8, dtype=torch.uint8, device=positions.device)
    marks[positions] = 1
    bits = marks.view(-1, 8) << torch.arange(8, dtype=torch.uint8, device=positions.device)
    return bits.sum(1, dtype=torch.uint8)


def planes(values: Tensor) -> Tensor:
    """First bytes together, then second bytes, …: exponents are alike, mantissas are not. A row
    for each; as a view, so that rows of a sample are not made from all."""
    return raw_bytes(values).view(-1, values.element_size()).t()


def zigzag(steps: Tensor) -> Tensor:
    """Small steps of either sign as small numbers: their upper bytes are all zero."""
    return (steps << 1) ^ (steps >> (8 * steps.element_size() - 1))


def pick(bits: Tensor, positions: Tensor) -> Tensor:
    return bits.index_select(0, positions)  # several times as fast as bits[positions]
