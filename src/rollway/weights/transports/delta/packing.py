"""Pack what changed in tensors into compressed bytes on the host.

A CPU packs one tensor at a time. A GPU compares and encodes many tensors with few launches, sends
the encoded bytes to the host in a few copies, and works on while threads compress them. Both ways
give the same bytes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
import zstandard
from torch import Tensor

from rollway.weights.device_copies import copy_to_host
from rollway.weights.digest.changes import (
    Changes,
    Comparison,
    Pair,
    compare_pairs,
    encode_bitmap,
    encode_gaps,
    encode_positions,
    find_changes,
    fits_gaps,
    is_majority,
    is_mostly_changed,
    split_planes,
    zigzag,
)
from rollway.weights.digest.checksums import Checksum
from rollway.weights.transports.delta.store import Buffer

Places = Literal["none", "gaps", "bitmap", "all", "whole"]
"""How positions are encoded. `none` and `all` need no positions; `whole` is the plain bytes of a
tensor, which need no base."""
Values = Literal["new", "steps"]

_LEVEL = 1  # the values that remain are noise: higher levels cost time and gain nothing
_COMPARED = 2 << 30
"""Bytes that are compared together; comparing needs an eighth of them as scratch memory."""
_LEAST = 1 << 16
"""Bytes that a small tensor counts as there."""
_GATHERED = 1 << 25
"""Changed elements that are encoded together; each needs about 50 bytes of scratch memory."""
_TRIED = 1 << 13
"""Elements of a sample that shows which values compress better."""
_MAX_THREADS = 16
_local = threading.local()


@dataclass(frozen=True, slots=True)
class Packed:
    """The change of one tensor."""

    places: Places
    count: int
    place_bytes: bytes
    values: Values
    value_bytes: Buffer
    checksum: Checksum | None = None
    """The checksums of the new tensor, if the comparison computed them on the way."""


_UNCHANGED = Packed("none", 0, b"", "new", b"")


def pack(old: Tensor, new: Tensor) -> Packed:
    """Pack the change of one tensor, given as integers."""
    if is_mostly_changed(old, new):
        return _pack_all_elements(old, new)
    changes = find_changes(old, new)
    if is_majority(changes[0].numel(), new.numel()):  # the sample misjudged it
        return _pack_all_elements(old, new)
    return pack_changes(changes, new.numel())


def pack_changes(changes: Changes, elements: int) -> Packed:
    """Pack the changes of a tensor with so many elements, of which less than half changed."""
    positions, old, new = changes
    if positions.numel() == 0:
        return _UNCHANGED
    kind, stream = encode_positions(positions, elements)
    values = _pack_values(split_planes(zigzag(new - old)), split_planes(new))
    return Packed(kind, positions.numel(), compress(stream), *values)


def open_pool() -> ThreadPoolExecutor:
    """Return the threads that compress, as many as there are cores."""
    return ThreadPoolExecutor(min(_MAX_THREADS, len(os.sched_getaffinity(0))))


def start_packing(pairs: Sequence[Pair], pool: ThreadPoolExecutor) -> Callable[[], list[Packed]]:
    """Compare and encode tensors, and let threads compress; return a function that waits for them.

    When this returns, the tensors are not needed any more."""
    pending: dict[int, Callable[[], Packed]] = {}
    for batch in _split_batches(pairs):
        started = _start_batch([pairs[i] for i in batch], pool)
        pending.update(zip(batch, started, strict=True))
    return lambda: [pending[i]() for i in range(len(pairs))]


def compress(data: Tensor) -> bytes:
    """Compress all bytes in order."""
    # One compressor per thread: creating one takes as long as compressing a small tensor.
    if not hasattr(_local, "compressor"):
        _local.compressor = zstandard.ZstdCompressor(level=_LEVEL)
    (host,) = copy_to_host([data])
    plain = np.ascontiguousarray(host.numpy()).reshape(-1)
    compressed: bytes = _local.compressor.compress(plain)
    return compressed


def _start_batch(pairs: Sequence[Pair], pool: ThreadPoolExecutor) -> Iterator[Callable[[], Packed]]:
    """Start tensors with elements of one size, which are compared together."""
    comparison = compare_pairs(pairs, with_checksums=True)
    pending: dict[int, Future[Packed]] = {}
    for first, end in _split_ranges(comparison.counts, [new.numel() for _, new in pairs]):
        if is_majority(comparison.counts[first], pairs[first][1].numel()):
            pending[first] = Future()
            pending[first].set_result(_pack_all_elements(*pairs[first]))
        else:
            pending.update(_submit_range(comparison, pairs, first, end, pool))
    for i, checksum in enumerate(comparison.checksums):
        yield partial(_finish, pending.get(i), checksum)


def _finish(pending: Future[Packed] | None, checksum: Checksum) -> Packed:
    packed = _UNCHANGED if pending is None else pending.result()
    return replace(packed, checksum=checksum)


def _submit_range(
    comparison: Comparison, pairs: Sequence[Pair], first: int, end: int, pool: ThreadPoolExecutor
) -> Iterator[tuple[int, Future[Packed]]]:
    """Encode the changes in a range of tensors on the device, and let threads compress them."""
    changed = [i for i in range(first, end) if comparison.counts[i]]
    if not changed:
        return
    positions, old, new = comparison.gather(first, end)
    stream, lengths = encode_gaps(positions, [comparison.counts[i] for i in changed])
    planes = [split_planes(bits).contiguous() for bits in (zigzag(new - old), new)]
    gaps, steps, values = copy_to_host([stream, *planes])
    at = byte = 0
    for i, length in zip(changed, lengths, strict=True):
        part = slice(at, at + comparison.counts[i])
        elements = pairs[i][1].numel()
        kind: Places = "gaps" if fits_gaps(length, elements) else "bitmap"
        places = gaps[byte : byte + length]
        if kind == "bitmap":
            (places,) = copy_to_host([encode_bitmap(positions[part], elements)])
        yield i, pool.submit(_pack_encoded, kind, places, steps[:, part], values[:, part])
        at, byte = part.stop, byte + length


def _pack_encoded(kind: Places, places: Tensor, steps: Tensor, new: Tensor) -> Packed:
    return Packed(kind, new.shape[1], compress(places), *_pack_values(steps, new))


def _pack_all_elements(old: Tensor, new: Tensor) -> Packed:
    values = _pack_values(split_planes(zigzag(new - old)), split_planes(new))
    return Packed("all", new.numel(), b"", *values)


def _pack_values(steps: Tensor, new: Tensor) -> tuple[Values, bytes]:
    """Compress the new bits or their distance from the old ones, whichever is shorter.

    An optimizer step mostly moves a bfloat16 to its neighbour, so distances are small numbers
    that compress well. A sample shows which of the two to compress."""
    stride = max(1, new.shape[1] // _TRIED)
    as_steps, as_new = (compress(planes[:, ::stride]) for planes in (steps, new))
    if len(as_steps) < len(as_new):
        return "steps", as_steps if stride == 1 else compress(steps)
    return "new", as_new if stride == 1 else compress(new)


def _split_batches(pairs: Sequence[Pair]) -> Iterator[list[int]]:
    """Yield the tensors to compare together: one element size, and bounded scratch memory."""
    by_size: dict[int, list[int]] = {}
    for i, (_, new) in enumerate(pairs):
        by_size.setdefault(new.element_size(), []).append(i)
    for same_size in by_size.values():
        batch: list[int] = []
        nbytes = 0
        for i in same_size:
            if nbytes >= _COMPARED:
                yield batch
                batch, nbytes = [], 0
            batch.append(i)
            nbytes += max(_LEAST, pairs[i][1].nbytes)
        yield batch


def _split_ranges(counts: Sequence[int], elements: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield ranges of tensors to encode together; a mostly changed tensor is a range alone."""
    first = total = 0
    for i, count in enumerate(counts):
        is_alone = is_majority(count, elements[i])
        if i > first and (is_alone or total + count > _GATHERED):
            yield first, i
            first, total = i, 0
        total += count
        if is_alone:
            yield i, i + 1
            first, total = i + 1, 0
    if first < len(counts):
        yield first, len(counts)
