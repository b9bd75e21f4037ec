"""Which elements of a tensor changed, found and laid out on the device that it is on.

Torch alone, the same code for a CPU and a GPU. Each step that needs a size on the host makes a GPU
wait, so there are few: how many words differ, how many elements, and how long their gaps are.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rollway.weights.bits import BLOCK, blocks_at_once, raw_bytes, words_of

ESCAPE = 255
"""As a gap: so many unchanged elements, and no changed one after them."""
SAMPLE = 1 << 16


def mostly_changed(old: Tensor, new: Tensor) -> bool:
    """By a sample; then it is not worth saying where, and finding out takes long."""
    every = max(1, new.numel() // SAMPLE)
    differ = old[::every] != new[::every]
    return bool(2 * differ.sum() > differ.numel())


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
    gaps = positions.clone()
    torch.sub(positions[1:], positions[:-1] + 1, out=gaps[1:])
    ends = (gaps // ESCAPE + 1).cumsum(0)
    gap_bytes = int(ends[-1])
    if gap_bytes <= elements // 8:
        stream = torch.full((gap_bytes,), ESCAPE, dtype=torch.uint8, device=gaps.device)
        stream.index_copy_(0, ends - 1, (gaps % ESCAPE).to(torch.uint8))
        return "gaps", stream
    marks = torch.zeros((elements + 7) // 8 * 8, dtype=torch.uint8, device=positions.device)
    marks[positions] = 1
    bits = marks.view(-1, 8) << torch.arange(8, dtype=torch.uint8, device=positions.device)
    return "bitmap", bits.sum(1, dtype=torch.uint8)


def planes(values: Tensor) -> Tensor:
    """First bytes together, then second bytes, …: exponents are alike, mantissas are not."""
    return raw_bytes(raw_bytes(values).view(-1, values.element_size()).t())


def zigzag(steps: Tensor) -> Tensor:
    """Small steps of either sign as small numbers: their upper bytes are all zero."""
    return (steps << 1) ^ (steps >> (8 * steps.element_size() - 1))


def pick(bits: Tensor, positions: Tensor) -> Tensor:
    return bits.index_select(0, positions)  # several times as fast as bits[positions]
