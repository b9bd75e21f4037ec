"""Tensors one after the other in a few long runs of bytes, which are shared and copied as such.

An entry's offset counts through all buckets as if they were one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from rollway.errors import UsageError, WeightsError
from rollway.weights.bits import DTYPES, dtype_name
from rollway.weights.offer import Entry

_ALIGNED = 512


def laid_out(tensors: Mapping[str, Tensor], most: int) -> tuple[list[Entry], list[int]]:
    """Where each tensor goes, and how long the buckets are: one that is longer has its own."""
    entries: list[Entry] = []
    sizes: list[int] = [0]
    start = 0
    for name, tensor in tensors.items():
        nbytes = tensor.numel() * tensor.element_size()
        if sizes[-1] and sizes[-1] + nbytes > most:
            start += sizes[-1]
            sizes.append(0)
        shape = tuple(tensor.shape)
        entries.append(Entry(name, dtype_name(tensor), shape, start + sizes[-1], nbytes))
        sizes[-1] += -(-nbytes // _ALIGNED) * _ALIGNED
    sizes[-1] = max(sizes[-1], _ALIGNED)
    return entries, sizes


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
