"""Find which elements of tensors changed, on the device that holds them, and encode where.

Every step that needs a size on the host stalls a GPU. So many tensors are compared together there
(`compare_pairs`): by Triton kernels where Triton works, by torch elsewhere. A CPU compares one
tensor at a time, because a single tensor stays in its cache.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollway.weights.digest.checksums import (
    BLOCK,
    Checksum,
    blocks_at_once,
    digests,
    keys,
    raw_bytes,
    split_words,
    sum_blocks,
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


def count_planes(values: Tensor) -> int:
    """Return how many lower bytes hold all values, which are taken as unsigned."""
    if values.device.type == "cpu":
        least, most = int(values.numpy().min()), int(values.numpy().max())
    else:
        least, most = torch.stack(values.aminmax()).tolist()
    return values.element_size() if least < 0 else max(1, (most.bit_length() + 7) // 8)


def count_planes_of_each(values: Tensor, counts: Sequence[int]) -> list[int]:
    """Do the same for several tensors, which have so many values each; none has 0."""
    lasts = torch.tensor(list(accumulate(counts)), device=values.device) - 1
    # For each further byte: how many values up to the end of each tensor need it.
    rows = [
        pick(((values >> 8 * plane) != 0).cumsum(0), lasts)
        for plane in range(1, values.element_size())
    ]
    if not rows:
        return [1] * len(counts)
    ends = torch.stack(rows)
    is_needed = ends.diff(dim=1, prepend=torch.zeros_like(ends[:, :1])) > 0
    planes: list[int] = (1 + is_needed.sum(0)).tolist()
    return planes


def pick(bits: Tensor, positions: Tensor) -> Tensor:
    return bits.index_select(0, positions)  # several times as fast as bits[positions]


_SLAB = 1 << 16
"""Words that are compared at once: half a megabyte of each version stays in a core's cache."""
_PART = 8 * BLOCK
"""Words that one thread compares: 8 MiB of each version."""
assert BLOCK % _SLAB == 0


@dataclass(slots=True)
class RunningSums:
    """The checksums of a tensor's bytes in a form that changes can be added to.

        old ─┐                        ┌─► positions, old and new bits
             ├─ unequal words ────────┼─► the words are written over the old ones
        new ─┘  (while in the cache)  └─► digest and word sum + what these words add to them

    Digests and word sums add up over words. So only the words that changed are summed, and no
    version is read a second time.
    """

    words: int
    blocks: NDArray[np.int64]
    tail: bytes
    """The up to seven bytes that fill no word."""
    total: int

    @classmethod
    def of(cls, tensor: Tensor) -> RunningSums:
        """Read a tensor in CPU memory."""
        words, tail = _split(tensor)
        with np.errstate(over="ignore"):
            return cls(len(words), sum_blocks(words), tail.tobytes(), int(words.sum()))

    @property
    def checksum(self) -> Checksum:
        """Return the same as `digest` and `word_sum` of the tensor."""
        hashed = hashlib.blake2b(self.words.to_bytes(8, "little"), digest_size=16)
        hashed.update(self.blocks.tobytes())
        hashed.update(self.tail)
        rest = int.from_bytes(self.tail, "little")
        return Checksum(hashed.hexdigest(), (self.total + rest) % (1 << 64))

    def advance(self, old: Tensor, new: Tensor, pool: ThreadPoolExecutor | None = None) -> Changes:
        """Make `old`, whose sums these are, equal to `new`; return what changed.

        Both are contiguous CPU tensors of integers, and have the same size. With a `pool`, its
        threads compare a part each of a large tensor."""
        old_words, old_tail = _split(old)
        new_words, new_tail = _split(new)
        kind = np.dtype(f"i{old.element_size()}")
        compare = partial(self._compare, old_words, new_words, kind)
        starts = range(0, len(old_words), _PART)
        if pool is None or len(starts) < 2:
            parts = [part for start in starts for part in compare(start)]
        else:
            parts = [part for changes in pool.map(compare, starts) for part in changes]
        self.total += sum(part[3] for part in parts)
        columns = [part[:3] for part in parts]
        if len(old_tail) and old_tail.tobytes() != new_tail.tobytes():
            base = len(old_words) * 8 // kind.itemsize
            olds, news = old_tail.view(kind).copy(), new_tail.view(kind)
            at = np.flatnonzero(olds != news)
            columns.append((at + base, olds[at], news[at]))
            old_tail[:] = new_tail
            self.tail = new_tail.tobytes()
        if not columns:
            nothing = torch.empty(0, dtype=old.dtype)
            return torch.empty(0, dtype=torch.int64), nothing, nothing.clone()
        positions, olds, news = (np.concatenate(column) for column in zip(*columns, strict=True))
        return torch.from_numpy(positions), torch.from_numpy(olds), torch.from_numpy(news)

    def _compare(
        self, old: NDArray[np.int64], new: NDArray[np.int64], kind: np.dtype[Any], first: int
    ) -> list[tuple[NDArray[Any], NDArray[Any], NDArray[Any], int]]:
        """Compare the words of one part, and update their blocks, which no other part has."""
        factors = keys(torch.device("cpu")).numpy()
        last = min(first + _PART, len(old))
        marks = np.empty(min(_SLAB, last - first), np.bool_)
        changes = []
        for start in range(first, last, _SLAB):
            end = min(start + _SLAB, last)
            before, after = old[start:end], new[start:end]
            at = np.flatnonzero(np.not_equal(before, after, out=marks[: len(before)]))
            if not len(at):
                continue
            olds, news = before.take(at), after.take(at)
            added = self._add(olds, news, factors[start % BLOCK :].take(at), start // BLOCK)
            before[at] = news
            changes.append((*_list_elements(at + start, olds, news, kind), added))
        return changes

    def _add(
        self,
        old: NDArray[np.int64],
        new: NDArray[np.int64],
        factors: NDArray[np.int64],
        block: int,
    ) -> int:
        """Add changed words to the sum of their block; return what they add to the word sum."""
        with np.errstate(over="ignore"):
            folded = (new >> 32) + new
            folded -= (old >> 32) + old
            folded *= factors
            self.blocks[block] += folded.sum()
            return int((new - old).sum())


def _split(tensor: Tensor) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """View a tensor as words, and the bytes that fill no word."""
    raw = raw_bytes(tensor).numpy()
    whole = len(raw) // 8 * 8
    return raw[:whole].view(np.int64), raw[whole:]


def _list_elements(
    at: NDArray[np.int64], old: NDArray[np.int64], new: NDArray[np.int64], kind: np.dtype[Any]
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return positions, old bits and new bits of the elements that differ within words."""
    lane_bits = (8 // kind.itemsize).bit_length() - 1  # 1, 2, 4, 8 bytes: 8, 4, 2, 1 to a word
    # Marks first: numpy finds those that are true ten times as fast as numbers that are not 0.
    lanes = np.flatnonzero(old.view(kind) != new.view(kind))
    positions = at.take(lanes >> lane_bits)
    positions <<= lane_bits
    positions += lanes & ((1 << lane_bits) - 1)
    return positions, old.view(kind).take(lanes), new.view(kind).take(lanes)
