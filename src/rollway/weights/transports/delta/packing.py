"""Pack what changed in tensors into bytes on the host.

    old ─┐                                 ┌─ places: gaps │ bitmap │ all of them
         ├─ compare words ─> positions ────┤                                       ─> zstd │ as is
    new ─┘                                 └─ values: the new bits │ steps from the old ones

A CPU packs one tensor at a time. A GPU compares and encodes many tensors with few launches, and
works on while the encoded bytes come to the host. One call compresses those of a whole batch: a
thread for each tensor would take the interpreter from the thread that starts the device's work.
Both ways give the same bytes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Literal, cast

import numpy as np
import zstandard
from torch import Tensor

from rollway.weights.device_copies import start_copies_to_host
from rollway.weights.digest.changes import (
    Changes,
    Comparison,
    Pair,
    compare_pairs,
    count_planes,
    count_planes_of_each,
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
Compression = Literal["zstd", "none"]

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
    place_bytes: Buffer
    values: Values
    planes: int
    """How many bytes of each value are there, the lower ones; the others are 0."""
    value_bytes: Buffer
    compression: Compression
    checksum: Checksum | None = None
    """The checksums of the new tensor, if the comparison computed them on the way."""


@dataclass(frozen=True, slots=True)
class _Plain:
    """The change of one tensor in host memory, before it is compressed."""

    kind: Places
    places: Tensor | None
    values: Values
    planes: Tensor
    """A row for each byte of the values."""


_UNCHANGED = Packed("none", 0, b"", "new", 0, b"", "none")


def pack(old: Tensor, new: Tensor, compression: Compression) -> Packed:
    """Pack the change of one tensor, given as integers."""
    if not is_mostly_changed(old, new):
        changes = find_changes(old, new)
        if not is_majority(changes[0].numel(), new.numel()):  # else the sample misjudged it
            return pack_changes(changes, new.numel(), compression)
    return _compress_one(_encode_all_elements(old, new, compression)(), compression)


def pack_changes(changes: Changes, elements: int, compression: Compression) -> Packed:
    """Pack the changes of a tensor with so many elements, of which less than half changed."""
    positions, old, new = changes
    if positions.numel() == 0:
        return _UNCHANGED
    kind, stream = encode_positions(positions, elements)
    steps = zigzag(new - old)
    values = _choose(split_planes(steps), split_planes(new), count_planes(steps), compression)
    return _compress_one(_Plain(kind, stream, *values), compression)


def _compress_one(plain: _Plain, compression: Compression) -> Packed:
    streams = [plain.planes] if plain.places is None else [plain.places, plain.planes]
    pack_stream: Callable[[Tensor], Buffer] = _flatten if compression == "none" else _compress
    packed = map(pack_stream, streams)
    return _join_packed(plain, packed, compression)


def _compress(data: Tensor) -> bytes:
    """Compress all bytes in order."""
    # One compressor per thread: creating one takes as long as compressing a small tensor.
    if not hasattr(_local, "compressor"):
        _local.compressor = zstandard.ZstdCompressor(level=_LEVEL)
    compressed: bytes = _local.compressor.compress(_flatten(data))
    return compressed


def _flatten(data: Tensor) -> memoryview:
    return np.ascontiguousarray(data.numpy()).reshape(-1).data


def _join_packed(plain: _Plain, packed: Iterator[Buffer], compression: Compression) -> Packed:
    """Return a change whose streams are the next ones of `packed`."""
    places = b"" if plain.places is None else next(packed)
    planes, count = plain.planes.shape
    return Packed(plain.kind, count, places, plain.values, planes, next(packed), compression)


def _choose(
    steps: Tensor, new: Tensor, width: int, compression: Compression
) -> tuple[Values, Tensor]:
    """Return the new bits or their distances from the old ones, whichever are shorter.

    An optimizer step mostly moves a bfloat16 to its neighbour, so distances are small numbers: of
    their bytes, the lower `width` are sent. If that is all of them, a sample shows which
    compress better."""
    if width < new.shape[0]:
        return "steps", steps[:width]
    if compression == "none":
        return "new", new
    stride = max(1, new.shape[1] // _TRIED)
    as_steps, as_new = (len(_compress(planes[:, ::stride])) for planes in (steps, new))
    return ("steps", steps) if as_steps < as_new else ("new", new)


# --- on a GPU ----------------------------------------------------------------------------------


def open_pool() -> ThreadPoolExecutor:
    """Return the threads that compress, as many as there are cores."""
    return ThreadPoolExecutor(count_threads())


def count_threads() -> int:
    return min(_MAX_THREADS, len(os.sched_getaffinity(0)))


_Fetch = Callable[[], Iterable[tuple[int, _Plain]]]
"""Waits for the streams of some tensors, and returns them with the tensors' numbers."""


def start_packing(
    pairs: Sequence[Pair], pool: ThreadPoolExecutor, compression: Compression
) -> Callable[[], list[Packed]]:
    """Compare and encode tensors, and compress in the background; return a function that waits.

    When this returns, the tensors are not needed any more."""
    pending: list[tuple[list[int], Future[list[Packed]]]] = []
    for batch in _split_batches(pairs):
        started = _start_batch([pairs[i] for i in batch], pool, compression)
        pending.append((batch, started))

    def wait() -> list[Packed]:
        packed = {
            i: p for batch, done in pending for i, p in zip(batch, done.result(), strict=True)
        }
        return [packed[i] for i in range(len(pairs))]

    return wait


def _start_batch(
    pairs: Sequence[Pair], pool: ThreadPoolExecutor, compression: Compression
) -> Future[list[Packed]]:
    """Start tensors with elements of one size, which are compared together."""
    comparison = compare_pairs(pairs, with_checksums=True)
    fetches: list[_Fetch] = []
    for first, end in _split_ranges(comparison.counts, [new.numel() for _, new in pairs]):
        if is_majority(comparison.counts[first], pairs[first][1].numel()):
            wait = _encode_all_elements(*pairs[first], compression)
            fetches.append(lambda first=first, wait=wait: [(first, wait())])  # type: ignore[misc]
        elif any(comparison.counts[first:end]):
            fetches.append(_encode_range(comparison, pairs, first, end, compression))
    checksums = comparison.checksums
    return pool.submit(_finish_batch, fetches, checksums, compression)


def _finish_batch(
    fetches: Sequence[_Fetch], checksums: Sequence[Checksum], compression: Compression
) -> list[Packed]:
    plains = {i: plain for fetch in fetches for i, plain in fetch()}
    streams = [
        _flatten(stream)
        for plain in plains.values()
        for stream in (plain.places, plain.planes)
        if stream is not None
    ]
    packed = iter(streams if compression == "none" else _compress_together(streams))
    changes = {i: _join_packed(plain, packed, compression) for i, plain in plains.items()}
    return [
        replace(changes.get(i, _UNCHANGED), checksum=checksum)
        for i, checksum in enumerate(checksums)
    ]


def _compress_together(streams: Sequence[Buffer]) -> list[Buffer]:
    """Compress in threads of zstd's own, which do not need the interpreter."""
    if not streams:
        return []
    compressor = zstandard.ZstdCompressor(level=_LEVEL)
    frames = compressor.multi_compress_to_buffer(list(streams), threads=count_threads())
    return [memoryview(cast("bytes", frames[i])) for i in range(len(frames))]


def _encode_range(
    comparison: Comparison,
    pairs: Sequence[Pair],
    first: int,
    end: int,
    compression: Compression,
) -> _Fetch:
    """Encode the changes in a range of tensors on the device, and start their copy to the host."""
    changed = [i for i in range(first, end) if comparison.counts[i]]
    counts = [comparison.counts[i] for i in changed]
    positions, old, new = comparison.gather(first, end)
    stream, lengths = encode_gaps(positions, counts)
    distances = zigzag(new - old)
    widths = count_planes_of_each(distances, counts)
    size = new.element_size()
    # Only planes that some tensor sends or tries leave the device.
    tried = [size if compression == "zstd" else 0] if max(widths) == size else []
    narrow = max([*tried, *(width for width in widths if width < size)], default=0)
    sent = [stream, split_planes(distances)[:narrow].contiguous()]
    sent.append(split_planes(new)[: size if tried else 0].contiguous())
    maps: dict[int, Tensor] = {}
    ends = np.cumsum(counts).tolist()
    for i, length, count, stop in zip(changed, lengths, counts, ends, strict=True):
        elements = pairs[i][1].numel()
        if not fits_gaps(length, elements):
            maps[i] = encode_bitmap(positions[stop - count : stop], elements)
    hosts, wait = start_copies_to_host([*sent, *maps.values()])

    def fetch() -> Iterator[tuple[int, _Plain]]:
        wait()
        gaps, steps, values = hosts[:3]
        bitmaps = dict(zip(maps, hosts[3:], strict=True))
        byte = 0
        for i, length, count, width, stop in zip(
            changed, lengths, counts, widths, ends, strict=True
        ):
            part = slice(stop - count, stop)
            chosen = _choose_part(steps, values, part, width, size, compression)
            places = bitmaps.get(i, gaps[byte : byte + length])
            yield i, _Plain("bitmap" if i in bitmaps else "gaps", places, *chosen)
            byte += length

    return fetch


def _choose_part(
    steps: Tensor, new: Tensor, part: slice, width: int, size: int, compression: Compression
) -> tuple[Values, Tensor]:
    """Do as `_choose` for one of many tensors, whose `new` bits are there only if needed."""
    if width < size:
        return "steps", steps[:width, part]
    return _choose(steps[:, part], new[:, part], width, compression)


def _encode_all_elements(
    old: Tensor, new: Tensor, compression: Compression
) -> Callable[[], _Plain]:
    """Encode a tensor in which most elements changed; return a function that waits for it."""
    distances = zigzag(new - old)
    width = count_planes(distances)
    planes = split_planes(distances)[:width], split_planes(new)
    hosts, wait = start_copies_to_host([plane.contiguous() for plane in planes])

    def fetch() -> _Plain:
        wait()
        return _Plain("all", None, *_choose(hosts[0], hosts[1], width, compression))

    return fetch


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
