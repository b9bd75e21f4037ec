"""Find what changed between two versions where they are, and pack it into bytes on the host.

    old ─┐                                  ┌─ gaps: unchanged elements before each changed one ─┐
         ├─ words ─► elements that differ ──┤                                                    ├─►
    new ─┘                                  └─ steps: what to add to the old bits, lower bytes ──┘

Every step that needs a size on the host stalls a GPU, and so does every small tensor. So tensors
lie side by side in chunks, and a chunk is compared at once. Elements are compared as integers: a
NaN equals itself, and -0.0 differs from 0.0. The same code runs on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollway.weights.device_copies import start_copies_to_host
from rollway.weights.digest.checksums import INTEGERS, map_in_threads, raw_bytes

CHUNK_BYTES = {"cpu": 64 << 20, "cuda": 512 << 20}
"""Of most chunks. What differs in one takes up to five times as much memory for a moment."""
ESCAPE = 255
"""A gap byte that means: 255 unchanged elements, and no changed element after them."""
WORD = 8
_SLAB = 1 << 20
"""Words that a core compares at a time."""


class Chunk:
    """Tensors with elements of one size, side by side. Each begins at a word."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """Reserve places for tensors like these."""
        self.names = list(tensors)
        self._kinds = [(t.dtype, t.shape, t.nbytes) for t in tensors.values()]
        ends = accumulate((-(-t.nbytes // WORD) for t in tensors.values()), initial=0)
        self.starts = list(ends)
        """The word at which each tensor begins; at the end, the number of all words."""
        first = next(iter(tensors.values()))
        self.element_bytes = first.element_size()
        self.words = torch.empty(self.starts[-1], dtype=torch.int64, device=first.device)

    def make_empty(self, memory: Tensor | None) -> Chunk:
        """Return a chunk for the same tensors, in `memory` if that is large enough."""
        chunk, size = copy(self), self.words.numel()
        if memory is None or memory.device != self.words.device or memory.numel() < size:
            memory = torch.empty_like(self.words)
        chunk.words = memory[:size]
        return chunk

    def put(self, number: int, tensor: Tensor) -> None:
        """Copy a tensor to its place."""
        if tensor.nbytes % WORD:
            self.words[self.starts[number + 1] - 1] = 0  # the last word is not filled
        self.view(number).copy_(tensor.detach())

    def view(self, number: int) -> Tensor:
        dtype, shape, nbytes = self._kinds[number]
        start = WORD * self.starts[number]
        return self.words.view(torch.uint8)[start : start + nbytes].view(dtype).view(shape)


def split_in_chunks(tensors: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Yield the names of tensors that share a chunk."""
    by_kind: dict[Any, list[str]] = {}
    for name, tensor in tensors.items():
        by_kind.setdefault((tensor.device, tensor.element_size()), []).append(name)
    for names in by_kind.values():
        chunk: list[str] = []
        nbytes = 0
        for name in names:
            if chunk and nbytes + tensors[name].nbytes > CHUNK_BYTES[tensors[name].device.type]:
                yield chunk
                chunk, nbytes = [], 0
            chunk.append(name)
            nbytes += tensors[name].nbytes
        yield chunk


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """What changed in a tensor, in host memory."""

    name: str
    added: int
    """What the change adds to the sum of the tensor's words."""
    count: int
    planes: int
    """As in `Change`."""
    data: NDArray[np.uint8]


def start_packing(held: Chunk, new: Chunk) -> Callable[[], list[PackedTensor]]:
    """Make `held` equal to a new version of it, and start to bring what changed to the host.

    Returns a function that waits for it, and returns the changed tensors. `new` is free at once."""
    found = _update(held, new)
    changed = [i for i, count in enumerate(found.counts) if count]
    counts = [found.counts[i] for i in changed]
    per_word = WORD // held.element_bytes
    firsts = [per_word * held.starts[i] for i in changed]
    gaps, gap_counts = encode_gaps(found.positions, firsts, counts)
    widths = count_planes(found.steps, counts)
    rows = split_planes(found.steps)[: max(widths, default=0)].contiguous()
    whole = [held.view(i) for i in found.whole]
    hosts, wait = start_copies_to_host([gaps, rows, *map(raw_bytes, whole)])

    def finish() -> list[PackedTensor]:
        wait()
        gap_bytes, planes, *all_bytes = (host.numpy() for host in hosts)
        packed = [
            PackedTensor(held.names[i], found.added[i], tensor.numel(), 0, data)
            for i, tensor, data in zip(found.whole, whole, all_bytes, strict=True)
        ]
        gap_ends, ends = (pairwise(accumulate(each, initial=0)) for each in (gap_counts, counts))
        for i, (start, stop), (first, last), width in zip(
            changed, gap_ends, ends, widths, strict=True
        ):
            steps = planes[:width, first:last].reshape(-1)
            data = np.concatenate([gap_bytes[start:stop], steps])
            packed.append(PackedTensor(held.names[i], found.added[i], last - first, width, data))
        return packed

    return finish


class _Differences(NamedTuple):
    """How two versions of a chunk differ, by its tensors."""

    whole: list[int]
    """Tensors of which more than half of the words differ: all their bytes are hardly more."""
    added: list[int]
    """What their words add to the sums."""
    counts: list[int]
    """How many elements differ, of the other tensors."""
    positions: Tensor
    """Where in the chunk these are."""
    steps: Tensor
    """What to add to their old bits, as integers; small steps of either sign are small numbers."""


def _update(held: Chunk, new: Chunk) -> _Differences:
    words = find_different(held.words, new.words)
    before, after = (chunk.words.index_select(0, words) for chunk in (held, new))
    held.words.index_copy_(0, words, after)
    bounds = torch.tensor(held.starts, device=words.device)
    ends = torch.searchsorted(words, bounds)
    sums = torch.cat([ends.new_zeros(1), (after - before).cumsum(0)]).index_select(0, ends)
    word_counts, added = torch.stack([ends, sums]).diff().tolist()
    sizes = [stop - start for start, stop in pairwise(held.starts)]
    is_whole = [2 * count > size for count, size in zip(word_counts, sizes, strict=True)]
    if any(is_whole):
        flags = torch.tensor(is_whole, device=words.device)
        is_part = ~flags.repeat_interleave(ends.diff(), output_size=words.numel())
        words, before, after = words[is_part], before[is_part], after[is_part]
    before, after = (bits.view(INTEGERS[held.element_bytes]) for bits in (before, after))
    lanes = find_different(before, after)
    per_word = WORD // held.element_bytes
    positions = words.index_select(0, lanes // per_word) * per_word + lanes % per_word
    counts = torch.searchsorted(positions, bounds * per_word).diff().tolist()
    steps = _zigzag(after.index_select(0, lanes) - before.index_select(0, lanes))
    whole = [i for i, flag in enumerate(is_whole) if flag]
    return _Differences(whole, added, counts, positions, steps)


def find_different(old: Tensor, new: Tensor) -> Tensor:
    """Return the positions at which integers differ."""
    if old.device.type != "cpu":
        return torch.nonzero(old != new).view(-1)
    # numpy, because torch's threads wait for each other when cores are busy.
    before, after = old.numpy(), new.numpy()

    def find(start: int) -> NDArray[np.int64]:
        end = start + _SLAB
        return start + np.flatnonzero(before[start:end] != after[start:end])

    starts = range(0, max(len(before), 1), _SLAB)
    return torch.from_numpy(np.concatenate(map_in_threads(find, starts)))


def encode_gaps(
    positions: Tensor, firsts: Sequence[int], counts: Sequence[int]
) -> tuple[Tensor, list[int]]:
    """Encode how many unchanged elements precede each changed one, for several tensors at once.

    `firsts` are the positions at which the tensors begin, `counts` how many of the positions each
    has; none has 0. Returns all bytes, and how many of them each tensor has."""
    device = positions.device
    ends = torch.tensor([0, *accumulate(counts)], device=device)
    gaps = positions.clone()
    gaps[1:] -= positions[:-1] + 1
    # The first gap of a tensor counts from its own start, not from the tensor before.
    starts = torch.tensor(firsts, dtype=torch.int64, device=device)
    gaps.index_copy_(0, ends[:-1], positions.index_select(0, ends[:-1]) - starts)
    # A gap takes one byte, and one escape for each 255 before; the rest of the stream is escapes.
    to = (gaps // ESCAPE + 1).cumsum(0)
    stops = torch.cat([to.new_zeros(1), to]).index_select(0, ends)
    lengths: list[int] = stops.diff().tolist()
    stream = torch.full((sum(lengths),), ESCAPE, dtype=torch.uint8, device=device)
    stream.index_copy_(0, to - 1, (gaps % ESCAPE).to(torch.uint8))
    return stream, lengths


def split_planes(values: Tensor) -> Tensor:
    """Return first bytes together, then second bytes, and so on: one row per byte of an element.

    The upper bytes of small steps are all 0, and need not be sent."""
    return raw_bytes(values).view(-1, values.element_size()).t()


def _zigzag(steps: Tensor) -> Tensor:
    return (steps << 1) ^ (steps >> (8 * steps.element_size() - 1))


def count_planes(steps: Tensor, counts: Sequence[int]) -> list[int]:
    """Return how many lower bytes hold all steps of each tensor; none has 0 steps."""
    ends = torch.tensor([0, *accumulate(counts)], device=steps.device)
    planes = torch.ones_like(ends[1:])
    for plane in range(1, steps.element_size()):
        needing = torch.cat([ends.new_zeros(1), ((steps >> 8 * plane) != 0).cumsum(0)])
        planes += needing.index_select(0, ends).diff() > 0
    result: list[int] = planes.tolist()
    return result
