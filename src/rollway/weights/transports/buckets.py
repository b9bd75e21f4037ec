"""Tensors one after the other in a few long runs of bytes, which are shared and copied as such.

An entry's offset counts through all buckets as if they were one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, islice

import torch
from torch import Tensor

from rollway.errors import UsageError, WeightsError
from rollway.weights.digest.bits import DTYPES, dtype_name
from rollway.weights.offer import Entry

_ALIGNED = 512


def unless_empty(
    tensors: Iterable[tuple[str, Tensor]],
) -> Iterator[tuple[str, Tensor]] | None:
    """The same tensors, or None when there are none; the first is kept no longer than others."""
    coming = iter(tensors)
    first = list(islice(coming, 1))

    def all_of_them() -> Iterator[tuple[str, Tensor]]:
        yield first.pop()
        yield from coming

    return all_of_them() if first else None


def by_bucket(tensors: Iterable[tuple[str, Tensor]], most: int) -> Iterator[dict[str, Tensor]]:
    """What goes into a bucket each, as they come: a tensor that is longer has its own."""
    some: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if size and size + _nbytes(tensor) > most:
            yield some
            some, size = {}, 0  # nothing of the last one is kept here
        some[name] = tensor
        size += _aligned(_nbytes(tensor))
        del tensor
    if some:
        yield some


def laid_out(tensors: Mapping[str, Tensor], start: int) -> tuple[list[Entry], int]:
    """Where tensors go in the bucket that begins there, and how long it is."""
    entries: list[Entry] = []
    size = 0
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        entries.append(Entry(name, dtype_name(tensor), shape, start + size, _nbytes(tensor)))
        size += _aligned(_nbytes(tensor))
    return entries, max(size, _ALIGNED)


def in_place(named: Mapping[str, Tensor]) -> tuple[list[Entry], list[Tensor]]:
    """The storages of tensors as buckets; several tensors may lie in one."""
    starts: dict[int, int] = {}
    buckets: list[Tensor] = []
    end, entries = 0, []
    for name, tensor in named.items():
        storage = tensor.untyped_storage()
        if not tensor.is_contiguous() or not storage.nbytes():
            raise UsageError(f"{name} does not lie in one run.", "Publish it by name instead.")
        if storage.data_ptr() not in starts:
            starts[storage.data_ptr()] = end
            end += storage.nbytes()
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            buckets.append(whole.set_(storage))
        size = tensor.element_size()
        at = starts[storage.data_ptr()] + tensor.storage_offset() * size
        shape = tuple(tensor.shape)
        entries.append(Entry(name, dtype_name(tensor), shape, at, tensor.numel() * size))
    return entries, buckets


def views(entries: Sequence[Entry], buckets: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, where they lie."""
    starts = [0, *accumulate(bucket.numel() for bucket in buckets)][:-1]
    found = []
    for one in entries:
        number = bisect_right(starts, one.offset) - 1
        at = one.offset - starts[number]
        part = buckets[number][at : at + one.nbytes]
        if part.numel() != one.nbytes or at % max(1, DTYPES[one.dtype].itemsize):
            raise WeightsError(f"{one.name} does not lie in one bucket.")
        found.append(part.view(DTYPES[one.dtype]).view(one.shape))
    return found


def _nbytes(tensor: Tensor) -> int:
    return int(tensor.numel() * tensor.element_size())


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED
