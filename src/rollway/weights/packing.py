"""What changed in tensors, as compressed bytes on the host.

A CPU packs one tensor after the other. From a GPU, many come together: they are compared and laid
out there with few launches, what is packed crosses in a few copies, and threads compress it while
the GPU goes on. The bytes are the same either way.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from rollway.errors import UsageError
from rollway.weights.changes import (
    SAMPLE,
    Compared,
    Pair,
    bitmap,
    changed,
    compared,
    fits_gaps,
    gaps,
    is_most,
    laid_out,
    mostly_changed,
    planes,
    zigzag,
)

try:
    import zstandard
except ImportError as error:
    raise UsageError(
        "Deltas are compressed with the package zstandard, which is not installed.",
        "pip install zstandard (ai-dynamo brings it).",
    ) from error

Places = Literal["none", "gaps", "bitmap", "all", "whole"]
"""`none` changed; `all` did; `whole` are the plain bytes, which need no base."""
Values = Literal["new", "steps"]

_LEVEL = 1  # what is left in values is noise; higher levels cost time and gain nothing
_COMPARED = 2 << 30
"""Bytes that are compared together; comparing takes an eighth of them for a while."""
_LEAST = 1 << 16
"""Bytes that even a small tensor counts for there."""
_GATHERED = 1 << 25
"""Changed elements that are laid out together; each takes some 50 bytes for a while."""
_MOST_THREADS = 16
_kept = threading.local()


@dataclass(frozen=True, slots=True)
class Packed:
    """One tensor's change."""

    places: Places
    count: int
    where: bytes
    values: Values
    what: bytes
    digest: str | None = None
    """Of the new tensor, where it was made in passing."""


def pack(old: Tensor, new: Tensor) -> Packed:
    """One tensor's, given as integers."""
    if mostly_changed(old, new):
        return _pack_all_elements(old, new)
    positions, old_bits, new_bits = changed(old, new)
    count = positions.numel()
    if count == 0:
        return Packed("none", 0, b"", "new", b"")
    if is_most(count, new.numel()):
        return _pack_all_elements(old, new)
    kind, stream = laid_out(positions, new.numel())
    values = _pack_values(planes(zigzag(new_bits - old_bits)), planes(new_bits))
    return Packed(kind, count, compress(stream), *values)


def pack_all(pairs: Sequence[Pair]) -> list[Packed]:
    """The same for many tensors of one device; elements may be of any size."""
    found: dict[int, Packed] = {}
    with ThreadPoolExecutor(min(_MOST_THREADS, len(os.sched_getaffinity(0)))) as pool:
        for some in _batches(pairs):
            batch = _Batch([pairs[i] for i in some], pool)
            found.update(zip(some, batch.packed(), strict=True))
    return [found[i] for i in range(len(pairs))]


def compress(data: Tensor) -> bytes:
    """All bytes in order. The compressor is kept: to make one takes as long as to compress a
    small tensor."""
    if not hasattr(_kept, "compressor"):
        _kept.compressor = zstandard.ZstdCompressor(level=_LEVEL)
    plain = np.ascontiguousarray(_on_host(data).numpy()).reshape(-1)
    compressed: bytes = _kept.compressor.compress(plain)
    return compressed


class _Batch:
    """Tensors with elements of one size that are compared together."""

    def __init__(self, pairs: Sequence[Pair], pool: ThreadPoolExecutor) -> None:
        self._pairs = pairs
        self._pool = pool

    def packed(self) -> list[Packed]:
        found = compared(self._pairs, with_digests=True)
        made: dict[int, Packed] = {}
        waiting: dict[int, Future[Packed]] = {}
        for first, end in _ranges(found.counts, self._elements()):
            if is_most(found.counts[first], self._pairs[first][1].numel()):
                made[first] = _pack_all_elements(*self._pairs[first])
            else:
                waiting.update(self._begin(found, first, end))
        made |= {i: each.result() for i, each in waiting.items()}
        none = Packed("none", 0, b"", "new", b"")
        return [replace(made.get(i, none), digest=digest) for i, digest in enumerate(found.digests)]

    def _elements(self) -> list[int]:
        return [new.numel() for _, new in self._pairs]

    def _begin(self, found: Compared, first: int, end: int) -> Iterator[tuple[int, Future[Packed]]]:
        """Lay out what changed in a range of tensors, and have threads compress it."""
        some = [i for i in range(first, end) if found.counts[i]]
        if not some:
            return
        positions, old, new = found.gather(first, end)
        stream, lengths = gaps(positions, [found.counts[i] for i in some])
        streams = _on_host(stream)
        steps, values = _on_host(planes(zigzag(new - old))), _on_host(planes(new))
        at = byte = 0
        for i, length in zip(some, lengths, strict=True):
            mine = slice(at, at + found.counts[i])
            elements = self._pairs[i][1].numel()
            kind: Places = "gaps" if fits_gaps(length, elements) else "bitmap"
            where = streams[byte : byte + length]
            if kind == "bitmap":
                where = _on_host(bitmap(positions[mine], elements))
            yield i, self._pool.submit(_pack_some, kind, where, steps[:, mine], values[:, mine])
            at, byte = mine.stop, byte + length


def _pack_some(kind: Places, where: Tensor, steps: Tensor, new: Tensor) -> Packed:
    return Packed(kind, new.shape[1], compress(where), *_pack_values(steps, new))


def _pack_all_elements(old: Tensor, new: Tensor) -> Packed:
    values = _pack_values(planes(zigzag(new - old)), planes(new))
    return Packed("all", new.numel(), b"", *values)


def _pack_values(steps: Tensor, new: Tensor) -> tuple[Values, bytes]:
    """The new bits, or how far they are from the old ones: small steps compress well.

    A trainer's step mostly moves a bfloat16 to its neighbour. A sample shows which is shorter."""
    every = max(1, new.shape[1] // SAMPLE)
    as_steps, as_new = (compress(each[:, ::every]) for each in (steps, new))
    if len(as_steps) < len(as_new):
        return "steps", as_steps if every == 1 else compress(steps)
    return "new", as_new if every == 1 else compress(new)


def _batches(pairs: Sequence[Pair]) -> Iterator[list[int]]:
    """Which are compared together: of one size of elements, and not more than a device can hold
    the marks of."""
    by_size: dict[int, list[int]] = {}
    for i, (_, new) in enumerate(pairs):
        by_size.setdefault(new.element_size(), []).append(i)
    for some in by_size.values():
        batch: list[int] = []
        nbytes = 0
        for i in some:
            if nbytes >= _COMPARED:
                yield batch
                batch, nbytes = [], 0
            batch.append(i)
            nbytes += max(_LEAST, pairs[i][1].nbytes)
        yield batch


def _ranges(counts: Sequence[int], elements: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Neighbours that are laid out together; one that mostly changed is by itself."""
    first = total = 0
    for i, count in enumerate(counts):
        alone = is_most(count, elements[i])
        if i > first and (alone or total + count > _GATHERED):
            yield first, i
            first, total = i, 0
        total += count
        if alone:
            yield i, i + 1
            first, total = i + 1, 0
    if first < len(counts):
        yield first, len(counts)


def _on_host(data: Tensor) -> Tensor:
    """From a GPU: to pinned memory, which torch uses again and a GPU writes to at full speed."""
    if not data.is_cuda:
        return data
    host = torch.empty(data.shape, dtype=data.dtype, pin_memory=True)
    return host.copy_(data.contiguous())
