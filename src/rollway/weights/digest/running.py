"""Compare two versions of a tensor in CPU memory once, and carry its checksums over to the new one.

    old ─┐                        ┌─► positions, old and new bits
         ├─ unequal words ────────┼─► the words are written over the old ones
    new ─┘  (while in the cache)  └─► digest and word sum + what these words add to them

Digests and word sums add up over words. So only the words that changed are summed, and no version
is read a second time.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollway.weights.digest.changes import Changes
from rollway.weights.digest.checksums import BLOCK, Checksum, keys, raw_bytes, sum_blocks

_SLAB = 1 << 16
"""Words that are compared at once: half a megabyte of each version stays in a core's cache."""
_PART = 8 * BLOCK
"""Words that one thread compares: 8 MiB of each version."""
assert BLOCK % _SLAB == 0


@dataclass(slots=True)
class RunningSums:
    """The checksums of a tensor's bytes in a form that changes can be added to."""

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
