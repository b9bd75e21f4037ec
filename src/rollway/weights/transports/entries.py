"""Place tensors one after another in bytes, and view them there.

The bytes may be several buckets. An entry's offset counts through all of them as if they were one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import TypeAlias

import msgspec
import torch
from torch import Tensor

from rollway.errors import WeightsError
from rollway.weights.digest.checksums import DTYPES, Checksum, dtype_name
from rollway.weights.offer import Entry, PlacedBox

Parameters: TypeAlias = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | torch.nn.Module


def name_parameters(parameters: Parameters) -> dict[str, Tensor]:
    """Return parameters by name, from (name, tensor) pairs, a mapping or a module."""
    if isinstance(parameters, torch.nn.Module):
        return dict(parameters.named_parameters())
    return dict(parameters)


def align(nbytes: int, alignment: int) -> int:
    """Round up to a multiple of the alignment."""
    return -(-nbytes // alignment) * alignment


def make_entry(
    name: str, tensor: Tensor, offset: int, digest: str = "", boxes: Iterable[PlacedBox] = ()
) -> Entry:
    kind, shape = dtype_name(tensor), tuple(tensor.shape)
    return Entry(name, kind, shape, offset, tensor.nbytes, digest, tuple(boxes))


def set_digests(entries: Sequence[Entry], digests: Sequence[str]) -> list[Entry]:
    pairs = zip(entries, digests, strict=True)
    return [msgspec.structs.replace(entry, digest=digest) for entry, digest in pairs]


def set_checksums(entries: Sequence[Entry], checksums: Sequence[Checksum]) -> list[Entry]:
    pairs = zip(entries, checksums, strict=True)
    return [
        msgspec.structs.replace(entry, digest=checksum.digest, words=f"{checksum.word_sum:016x}")
        for entry, checksum in pairs
    ]


def lay_out(
    tensors: Mapping[str, Tensor], alignment: int, start: int = 0
) -> tuple[list[Entry], int]:
    """Place tensors from `start` on; return their entries, and how many bytes they take."""
    entries: list[Entry] = []
    end = start
    for name, tensor in tensors.items():
        entries.append(make_entry(name, tensor, end))
        end += align(tensor.nbytes, alignment)
    return entries, end - start


def view_entry(memory: Tensor, entry: Entry, start: int = 0) -> Tensor:
    """View a tensor in memory whose first byte has the offset `start`."""
    at = entry.offset - start
    if at % DTYPES[entry.dtype].itemsize:
        raise WeightsError(f"{entry.name} does not begin where an element can.")
    raw = memory[at : at + entry.nbytes]
    if raw.numel() != entry.nbytes:
        raise WeightsError(f"{entry.name} extends past the end of its memory.")
    return raw.view(DTYPES[entry.dtype]).view(entry.shape)


def view_entries(entries: Sequence[Entry], buckets: Sequence[Tensor]) -> list[Tensor]:
    """View tensors in buckets; each tensor must be in one bucket."""
    starts = [0, *accumulate(bucket.numel() for bucket in buckets)][:-1]
    numbers = [bisect_right(starts, entry.offset) - 1 for entry in entries]
    return [
        view_entry(buckets[number], entry, starts[number])
        for number, entry in zip(numbers, entries, strict=True)
    ]
