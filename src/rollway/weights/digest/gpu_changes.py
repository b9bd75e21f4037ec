"""Find what changed in many tensors on a GPU: one kernel reads them all, two others gather.

    old ─┐              ┌─ a byte of marks for each word ─┐
         ├─ _mark ──────┤                                 ├─ _list ─> _gather ─> positions, old, new
    new ─┘  (digests)   └─ counts ─> sums of counts ──────┘
                                └──> the host, which waits only here

The second kernel lists the marked words, and the third reads no others. Import this module only
where Triton is installed; `changes` uses torch elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollway.weights.digest import checksums
from rollway.weights.digest.gpu import (
    COLUMNS,
    PART,
    STEP,
    STEPS,
    WARPS,
    finish_digests,
    make_run,
    on,
    start_copy_to_host,
    table,
)

Pair = tuple[Tensor, Tensor]
_WORDS = 512
"""How many marked words one program gathers."""


class TritonComparison:
    """A `changes.Comparison` by kernels; the digests of the new tensors cost no further read."""

    def __init__(self, pairs: Sequence[Pair], with_digests: bool = False) -> None:
        old, new = ([make_run(pair[side]) for pair in pairs] for side in (0, 1))
        self._runs = old, new  # kept alive: kernels still read copies that `make_run` made
        self._dtype, self._device = new[0].dtype, new[0].device
        sizes = [run.nbytes for run in new]
        old_addresses, new_addresses = ([run.data_ptr() for run in runs] for runs in (old, new))
        self._table = table(old_addresses, new_addresses, sizes, self._device)
        sums = self._mark(with_digests)
        steps = self._table.parts * STEPS
        # Row 0: how many words are marked before each step. Row 1: how many elements.
        self._starts = torch.zeros(2, steps + 1, dtype=torch.int64, device=self._device)
        self._starts[:, 1:] = self._counts.cumsum(1)
        firsts = (self._table.first_parts * STEPS).to(self._device)
        # One copy brings counts and sums to the host: this is the only wait.
        results = torch.cat([self._starts.index_select(1, firsts).view(-1), sums])
        host, wait = start_copy_to_host(results)
        wait()
        bounds = len(pairs) + 1
        self._word_ends: list[int] = host[:bounds].tolist()
        self._ends: list[int] = host[bounds : 2 * bounds].tolist()
        self.counts = [end - start for start, end in pairwise(self._ends)]
        self.digests: list[str] = []
        if with_digests:
            prefixes = [(size // 8).to_bytes(8, "little") for size in sizes]
            self.digests = finish_digests(host[2 * bounds :], self._table.blocks, sizes, prefixes)

    def _mark(self, with_digests: bool) -> Tensor:
        """Mark and count what differs; return the sums of blocks, and then each tensor's tail."""
        blocks = self._table.blocks
        size = sum(blocks) + len(blocks) if with_digests else 0
        sums = torch.zeros(size, dtype=torch.int64, device=self._device)
        parts = self._table.parts
        self._marks = torch.empty(parts * PART, dtype=torch.uint8, device=self._device)
        self._counts = torch.empty(2, parts * STEPS, dtype=torch.int32, device=self._device)
        if parts:
            with on(self._device):
                _mark[(parts,)](
                    self._table.rows, self._table.owners, checksums.keys(self._device),
                    sums, sum(blocks), self._marks, self._counts, parts * STEPS,
                    SUMS=with_digests, SIZE=self._dtype.itemsize, BLOCK=checksums.BLOCK,
                    STEP=STEP, STEPS=STEPS, COLUMNS=COLUMNS, num_warps=WARPS,
                )  # fmt: skip
        return sums

    def gather(self, first: int, end: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return positions, old bits and new bits of the pairs from `first` up to `end`."""
        count = self._ends[end] - self._ends[first]
        positions = torch.empty(count, dtype=torch.int64, device=self._device)
        old, new = (torch.empty(count, dtype=self._dtype, device=self._device) for _ in range(2))
        if count:
            words, places = self._list(first, end)
            with on(self._device):
                _gather[(triton.cdiv(words.numel(), _WORDS),)](
                    self._table.rows, self._table.owners, self._marks,
                    words, places, positions, old, new, words.numel(),
                    SIZE=self._dtype.itemsize, WORDS=_WORDS, PART=PART, COLUMNS=COLUMNS,
                    num_warps=4,
                )  # fmt: skip
        return positions, old, new

    def _list(self, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Return the marked words of a range of pairs, and how many changes precede each."""
        count = self._word_ends[end] - self._word_ends[first]
        words, places = (
            torch.empty(count, dtype=torch.int64, device=self._device) for _ in range(2)
        )
        begin, stop = (int(self._table.first_parts[i]) * STEPS for i in (first, end))
        with on(self._device):
            _list[(stop - begin,)](
                self._marks, self._starts, words, places, begin, self._starts.shape[1],
                self._word_ends[first], self._ends[first], STEP=STEP, num_warps=4,
            )  # fmt: skip
        return words, places


def check() -> None:
    """Raise unless the kernels run on this machine and find the right changes."""
    old = torch.zeros(9 * STEP + 3, dtype=torch.int16, device="cuda")
    new = old.clone()
    places = torch.tensor([0, 7, 4 * STEP, 9 * STEP + 2], device="cuda")
    new[places] = -1
    comparison = TritonComparison([(old, old), (old, new)], with_digests=True)
    positions, before, after = comparison.gather(0, 2)
    is_right = (
        comparison.counts == [0, 4]
        and comparison.digests == [checksums.digest(old.cpu()), checksums.digest(new.cpu())]
        and torch.equal(positions, places)
        and torch.equal(before, old[places])
        and torch.equal(after, new[places])
    )
    if not is_right:
        raise RuntimeError("the kernels find other changes than torch does")


# No annotations in kernels: Triton reads a type's name as a variable of the kernel.
@triton.jit(do_not_specialize=["tails", "steps"])  # type: ignore[untyped-decorator]
def _mark(  # type: ignore[no-untyped-def]
    rows, owners, keys, sums, tails, marks, counts, steps,
    SUMS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    STEP: tl.constexpr, STEPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    owner = tl.load(owners + program)
    row = rows + owner * COLUMNS
    nbytes = tl.load(row + 2)
    start = (program - tl.load(row + 3)) * (STEP * STEPS)
    old = tl.load(row).to(tl.pointer_type(tl.int64)) + start
    new = tl.load(row + 1).to(tl.pointer_type(tl.int64)) + start
    whole = tl.minimum(nbytes // 8 - start, STEP * STEPS).to(tl.int32)
    tail = nbytes % 8
    words = whole + ((tail > 0) & (whole < STEP * STEPS)).to(tl.int32)
    key = keys + start % BLOCK
    lanes = tl.arange(0, STEP)
    total = tl.zeros((STEP,), dtype=tl.int64)
    for step in range(STEPS):
        at = step * STEP + lanes
        before = tl.load(old + at, mask=at < words, other=0)
        after = tl.load(new + at, mask=at < words, other=0)
        differ = before ^ after
        # The bytes after the last one belong to another tensor: mask them out.
        differ = tl.where(at < whole, differ, differ & ((tl.full((), 1, tl.int64) << 8 * tail) - 1))
        mark = tl.zeros((STEP,), dtype=tl.int32)
        count = tl.zeros((STEP,), dtype=tl.int32)
        for lane in tl.static_range(8 // SIZE):
            element = differ
            if SIZE < 8:
                element = (differ >> (8 * SIZE * lane)) & ((1 << 8 * SIZE) - 1)
            changed = (element != 0).to(tl.int32)
            mark |= changed << lane
            count += changed
        tl.store(marks + program * (STEP * STEPS) + at, mark.to(tl.uint8))
        # One reduction for both counts: a step has fewer than 2**16 elements.
        both = tl.sum(count + ((mark != 0).to(tl.int32) << 16), axis=0)
        tl.store(counts + program * STEPS + step, both >> 16)
        tl.store(counts + steps + program * STEPS + step, both & 0xFFFF)
        if SUMS:
            total += ((after >> 32) + after) * tl.load(key + at, mask=at < whole, other=0)
    if SUMS:
        if whole > 0:
            tl.atomic_add(sums + tl.load(row + 4) + start // BLOCK, tl.sum(total, axis=0))
        if words > whole:
            tl.store(sums + tails + owner, tl.load(new + whole))


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["begin", "length", "skipped_words", "skipped"]
)
def _list(  # type: ignore[no-untyped-def]
    marks, starts, words, places, begin, length, skipped_words, skipped, STEP: tl.constexpr
):
    step = tl.program_id(0).to(tl.int64) + begin
    first = tl.load(starts + step)
    if tl.load(starts + step + 1) > first:
        lanes = tl.arange(0, STEP)
        mark = tl.load(marks + step * STEP + lanes).to(tl.int32)
        count = (mark & 0x55) + ((mark >> 1) & 0x55)  # count the bits of a byte by pairs, fours, …
        count = (count & 0x33) + ((count >> 2) & 0x33)
        count = (count & 0x0F) + (count >> 4)
        marked = mark != 0
        both = count + (marked.to(tl.int32) << 16)
        before = tl.cumsum(both, 0) - both
        at = first - skipped_words + (before >> 16)
        tl.store(words + at, step * STEP + lanes, mask=marked)
        elements = tl.load(starts + length + step) - skipped
        tl.store(places + at, elements + (before & 0xFFFF), mask=marked)


@triton.jit(do_not_specialize=["total"])  # type: ignore[untyped-decorator]
def _gather(  # type: ignore[no-untyped-def]
    rows, owners, marks, words, places, positions, old_bits, new_bits, total,
    SIZE: tl.constexpr, WORDS: tl.constexpr, PART: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    lanes = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    inside = lanes < total
    word = tl.load(words + lanes, mask=inside, other=0)
    at = tl.load(places + lanes, mask=inside, other=0)
    mark = tl.load(marks + word, mask=inside, other=0).to(tl.int32)
    row = rows + tl.load(owners + word // PART, mask=inside, other=0) * COLUMNS
    word -= tl.load(row + 3, mask=inside, other=0) * PART  # from the start of its tensor
    old = tl.load(row, mask=inside, other=0).to(tl.pointer_type(tl.int64)) + word
    new = tl.load(row + 1, mask=inside, other=0).to(tl.pointer_type(tl.int64)) + word
    before = tl.load(old, mask=inside, other=0)
    after = tl.load(new, mask=inside, other=0)
    for lane in tl.static_range(8 // SIZE):
        chosen = ((mark >> lane) & 1) != 0
        shift = 8 * SIZE * lane
        tl.store(positions + at, word * (8 // SIZE) + lane, mask=chosen)
        tl.store(old_bits + at, (before >> shift).to(old_bits.dtype.element_ty), mask=chosen)
        tl.store(new_bits + at, (after >> shift).to(new_bits.dtype.element_ty), mask=chosen)
        at += (mark >> lane) & 1
