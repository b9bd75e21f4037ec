"""Find which elements of tensors changed, on the device that holds them, and encode where.

Every step that needs a size on the host stalls a GPU. So many tensors are compared together there
(`compare_pairs`): by Triton kernels where Triton works, by torch elsewhere. A CPU compares one
tensor at a time, because a single tensor stays in its cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from rollway.weights.digest.checksums import (
    BLOCK,
    Checksum,
    blocks_at_once,
    digests,
    raw_bytes,
    split_words,
    uses_triton,
    word_sums,
)

Pair = tuple[Tensor, Tensor]
"""The old and the new elements of a tensor, as integers of their size."""
Changes = tuple[Tensor, Tensor, Tensor]
"""Flat positions of the changed elements, their old bits and their new bits."""

ESCAPE = 255
"""A gap byte that means: 255 unchanged elements, and no changed element after them."""
_SAMPLE = 1 << 12


def is_mostly_changed(old: Tensor, new: Tensor) -> bool:
    """Return whether more than half of the elements changed; positions are then not worth sending.

    A sample decides first, since counting all of them is slow."""
    stride = max(1, new.numel() // _SAMPLE)
    if not is_majority(_count_different(old[::stride], new[::stride]), -(-new.numel() // stride)):
        return False
    return is_majority(_count_different(old, new), new.numel())


def _count_different(old: Tensor, new: Tensor) -> int:
    if old.device.type == "cpu":
        # numpy, because torch's threads wait for each other when cores are busy.
        return int(np.count_nonzero(old.numpy() != new.numpy()))
    return int((old != new).sum())


def is_majority(count: int, elements: int) -> bool:
    return 2 * count > elements


class Comparison(Protocol):
    """The result of comparing pairs of tensors whose elements have one size."""

    counts: list[int]
    """How many elements of each tensor changed."""
    checksums: list[Checksum]
    """The checksums of the new tensors, if they were requested."""

    def gather(self, first: int, end: int) -> Changes:
        """Return the changes in the pairs from `first` up to `end`, one tensor after the other.

        Positions count from the start of their own tensor."""
        ...


def compare_pairs(pairs: Sequence[Pair], with_checksums: bool = False) -> Comparison:
    """Compare pairs on one device; the host waits for the device once."""
    if uses_triton(pairs[0][0].device):
        from rollway.weights.digest.gpu import TritonComparison

        return TritonComparison(pairs, with_checksums)
    return _TorchComparison(pairs, with_checksums)


class _TorchComparison:
    """Compares all pairs as one long tensor, since a call costs more than a small tensor does."""

    def __init__(self, pairs: Sequence[Pair], with_checksums: bool) -> None:
        old, new = (torch.cat([pair[side].view(-1) for pair in pairs]) for side in (0, 1))
        self._changes = find_changes(old, new)
        bounds = [0, *accumulate(pair[0].numel() for pair in pairs)]
        starts = torch.tensor(bounds, device=old.device)
        ends = torch.searchsorted(self._changes[0], starts)
        self._ends: list[int] = ends.tolist()
        self.counts = [end - start for start, end in pairwise(self._ends)]
        offsets = torch.repeat_interleave(starts[:-1], ends.diff(), output_size=self._ends[-1])
        self._changes[0].sub_(offsets)
        tensors = [new for _, new in pairs] if with_checksums else []
        self.checksums = list(map(Checksum, digests(tensors), word_sums(tensors)))

    def gather(self, first: int, end: int) -> Changes:
        part = slice(self._ends[first], self._ends[end])
        positions, old, new = self._changes
        return positions[part], old[part], new[part]


def find_changes(old: Tensor, new: Tensor) -> Changes:
    """Return where the bits of elements differ, and the old and the new bits there."""
    # Slab by slab: what a CPU has compared is then still in its cache when it is gathered.
    slab = blocks_at_once(old.device) * BLOCK * 8 // old.element_size()
    if old.numel() <= slab:
        return _find_in_slab(old, new, 0)
    slabs = []
    for start in range(0, old.numel(), slab):
        part = slice(start, start + slab)
        slabs.append(_find_in_slab(old[part], new[part], start))
    positions, old_bits, new_bits = zip(*slabs, strict=True)
    return torch.cat(positions), torch.cat(old_bits), torch.cat(new_bits)


def _find_in_slab(old: Tensor, new: Tensor, start: int) -> Changes:
    """Compare whole words, then the elements of unequal words, then the tail that fills no word."""
    old_words, old_tail = split_words(raw_bytes(old))
    new_words, new_tail = split_words(raw_bytes(new))
    words = _find_different(old_words, new_words)
    old_bits = pick(old_words, words).view(old.dtype)
    new_bits = pick(new_words, words).view(new.dtype)
    at = _find_different(old_bits, new_bits)
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


def _find_different(old: Tensor, new: Tensor) -> Tensor:
    if old.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(old.numpy() != new.numpy()))
    return torch.nonzero(old != new).view(-1)


def encode_positions(positions: Tensor, elements: int) -> tuple[Literal["gaps", "bitmap"], Tensor]:
    """Return positions (not none, not all) as bytes, in the shorter of the two encodings."""
    stream, _ = encode_gaps(positions, [positions.numel()])
    if fits_gaps(stream.numel(), elements):
        return "gaps", stream
    return "bitmap", encode_bitmap(positions, elements)


def fits_gaps(gap_bytes: int, elements: int) -> bool:
    """Return whether gaps take no more bytes than a bitmap."""
    return gap_bytes <= elements // 8


def encode_gaps(positions: Tensor, counts: Sequence[int]) -> tuple[Tensor, list[int]]:
    """Encode how many unchanged elements precede each changed one, for several tensors at once.

    `counts` says how many positions belong to each tensor; none is 0. Returns all bytes, and how
    many of them belong to each tensor."""
    ends = list(accumulate(counts))
    steps = positions.clone()
    torch.sub(positions[1:], positions[:-1] + 1, out=steps[1:])
    if len(counts) > 1:
        # The first gap of a tensor counts from its own start, not from the tensor before.
        firsts = torch.tensor([0, *ends[:-1]], device=positions.device)
        steps.index_copy_(0, firsts, pick(positions, firsts))
    lasts = torch.tensor(ends, device=positions.device) - 1
    # A gap takes one byte, and one escape for each 255 before; the rest of the stream is escapes.
    to = (steps // ESCAPE + 1).cumsum(0)
    bounds = [0, *pick(to, lasts).tolist()]
    stream = torch.full((bounds[-1],), ESCAPE, dtype=torch.uint8, device=positions.device)
    stream.index_copy_(0, to - 1, (steps % ESCAPE).to(torch.uint8))
    return stream, [end - start for start, end in pairwise(bounds)]


def encode_bitmap(positions: Tensor, elements: int) -> Tensor:
    marks = torch.zeros((elements + 7) // 8 * 8, dtype=torch.uint8, device=positions.device)
    marks[positions] = 1
    bits = marks.view(-1, 8) << torch.arange(8, dtype=torch.uint8, device=positions.device)
    return bits.sum(1, dtype=torch.uint8)


def split_planes(values: Tensor) -> Tensor:
    """Return first bytes together, then second bytes, and so on: one row per byte of an element.

    Exponents resemble each other and compress well; mantissas do not. The result is a view, so
    that a sample of it costs no copy of the whole."""
    return raw_bytes(values).view(-1, values.element_size()).t()


def zigzag(steps: Tensor) -> Tensor:
    """Map small steps of either sign to small numbers, whose upper bytes are all zero."""
    return (steps << 1) ^ (steps >> (8 * steps.element_size() - 1))


def pick(bits: Tensor, positions: Tensor) -> Tensor:
    return bits.index_select(0, positions)  # several times as fast as bits[positions]
