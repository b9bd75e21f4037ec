"""What changed in many tensors on a GPU: one kernel reads all of them, another one gathers.

    old ─┐                ┌─ a byte of marks for each word ─┐
         ├─ _mark ────────┤                                 ├─ _gather ─> positions, old, new
    new ─┘   (digests)    └─ counts ─> sums of counts ──────┘
                                  └──> the host, which waits this once

The second kernel reads the marks, and of the tensors only words that are marked. Import this only
where Triton is: `changes` takes torch where it is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollway.weights import bits
from rollway.weights.gpu_digest import WARPS, digests_of, on, on_its_way
from rollway.weights.gpu_runs import COLUMNS, PART, STEP, STEPS, run_of, table

Pair = tuple[Tensor, Tensor]


class Marked:
    """Pairs of tensors, of elements of one size, that were compared."""

    def __init__(self, pairs: Sequence[Pair], with_digests: bool = False) -> None:
        """With digests of the new ones, which are read anyway."""
        old, new = ([run_of(pair[side]) for pair in pairs] for side in (0, 1))
        self._runs = old, new  # a kernel may yet read what was made here
        self._dtype, self._device = new[0].dtype, new[0].device
        sizes = [each.nbytes for each in new]
        self._table = table(
            [each.data_ptr() for each in old],
            [each.data_ptr() for each in new],
            sizes,
            self._device,
        )
        found = self._mark(with_digests)
        self._starts = torch.zeros(
            self._table.parts * STEPS + 1, dtype=torch.int64, device=self._device
        )
        torch.cumsum(self._counts, 0, out=self._starts[1:])
        firsts = (self._table.first_parts * STEPS).to(self._device, non_blocking=True)
        told = torch.cat([self._starts.index_select(0, firsts), found])
        host, ready = on_its_way(told)
        ready()
        self._ends: list[int] = host[: len(pairs) + 1].tolist()
        self.counts = [end - start for start, end in pairwise(self._ends)]
        self.digests: list[str] = []
        if with_digests:
            prefixes = [(size // 8).to_bytes(8, "little") for size in sizes]
            self.digests = digests_of(host[len(pairs) + 1 :], self._table.blocks, sizes, prefixes)

    def _mark(self, with_digests: bool) -> Tensor:
        blocks, runs = self._table.blocks, len(self._table.blocks)
        room = sum(blocks) + runs if with_digests else 0
        found = torch.zeros(room, dtype=torch.int64, device=self._device)
        parts = self._table.parts
        self._marks = torch.empty(parts * PART, dtype=torch.uint8, device=self._device)
        self._counts = torch.empty(parts * STEPS, dtype=torch.int32, device=self._device)
        if parts:
            with on(self._device):
                _mark[(parts,)](
                    self._table.rows,
                    self._table.owners,
                    bits.keys(self._device),
                    found,
                    sum(blocks),
                    self._marks,
                    self._counts,
                    SUMS=with_digests,
                    SIZE=self._dtype.itemsize,
                    BLOCK=bits.BLOCK,
                    STEP=STEP,
                    STEPS=STEPS,
                    COLUMNS=COLUMNS,
                    num_warps=WARPS,
                )
        return found

    def gather(self, first: int, end: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of the pairs from `first` to before `end`: the places of what changed, each counted
        from the start of its tensor, and the old and the new bits."""
        count = self._ends[end] - self._ends[first]
        positions = torch.empty(count, dtype=torch.int64, device=self._device)
        old, new = (torch.empty(count, dtype=self._dtype, device=self._device) for _ in range(2))
        parts = self._table.first_parts
        begin = int(parts[first]) * STEPS
        steps = int(parts[end]) * STEPS - begin
        if count:
            with on(self._device):
                _gather[(steps,)](
                    self._table.rows,
                    self._table.owners,
                    self._marks,
                    self._starts,
                    positions,
                    old,
                    new,
                    begin,
                    self._ends[first],
                    SIZE=self._dtype.itemsize,
                    STEP=STEP,
                    STEPS=STEPS,
                    COLUMNS=COLUMNS,
                    num_warps=WARPS,
                )
        return positions, old, new


def check() -> None:
    """Raise unless the kernels run here and find what was changed."""
    old = torch.zeros(9 * STEP + 3, dtype=torch.int16, device="cuda")
    new = old.clone()
    places = torch.tensor([0, 7, 4 * STEP, 9 * STEP + 2], device="cuda")
    new[places] = -1
    marked = Marked([(old, old), (old, new)], with_digests=True)
    positions, before, after = marked.gather(0, 2)
    right = (
        marked.counts == [0, 4]
        and marked.digests == [bits.digest(old.cpu()), bits.digest(new.cpu())]
        and torch.equal(positions, places)
        and torch.equal(before, old[places])
        and torch.equal(after, new[places])
    )
    if not right:
        raise RuntimeError("it finds other changes")


# Without types: Triton would take their names for variables of the kernel.
@triton.jit(do_not_specialize=["tails"])  # type: ignore[untyped-decorator]
def _mark(  # type: ignore[no-untyped-def]
    rows,
    owners,
    keys,
    found,
    tails,
    marks,
    counts,
    SUMS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    STEPS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
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
    for step in tl.static_range(STEPS):
        at = step * STEP + lanes
        before = tl.load(old + at, mask=at < words, other=0)
        after = tl.load(new + at, mask=at < words, other=0)
        differ = before ^ after
        # What lies after the last byte is another tensor's.
        differ = tl.where(at < whole, differ, differ & ((tl.full((), 1, tl.int64) << 8 * tail) - 1))
        mark = tl.zeros((STEP,), dtype=tl.int32)
        count = tl.zeros((STEP,), dtype=tl.int32)
        for lane in tl.static_range(8 // SIZE):
            one = differ
            if SIZE < 8:
                one = (differ >> (8 * SIZE * lane)) & ((1 << 8 * SIZE) - 1)
            changed = (one != 0).to(tl.int32)
            mark |= changed << lane
            count += changed
        tl.store(marks + program * (STEP * STEPS) + at, mark.to(tl.uint8))
        tl.store(counts + program * STEPS + step, tl.sum(count, axis=0))
        if SUMS:
            total += ((after >> 32) + after) * tl.load(key + at, mask=at < whole, other=0)
    if SUMS:
        if whole > 0:
            tl.atomic_add(found + tl.load(row + 4) + start // BLOCK, tl.sum(total, axis=0))
        if words > whole:
            tl.store(found + tails + owner, tl.load(new + whole))


@triton.jit(do_not_specialize=["begin", "skipped"])  # type: ignore[untyped-decorator]
def _gather(  # type: ignore[no-untyped-def]
    rows,
    owners,
    marks,
    starts,
    positions,
    old_bits,
    new_bits,
    begin,
    skipped,
    SIZE: tl.constexpr,
    STEP: tl.constexpr,
    STEPS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    step = tl.program_id(0).to(tl.int64) + begin
    first = tl.load(starts + step)
    if tl.load(starts + step + 1) > first:
        row = rows + tl.load(owners + step // STEPS) * COLUMNS
        lanes = tl.arange(0, STEP)
        words = (step - tl.load(row + 3) * STEPS) * STEP + lanes
        mark = tl.load(marks + step * STEP + lanes).to(tl.int32)
        old = tl.load(tl.load(row).to(tl.pointer_type(tl.int64)) + words, mask=mark != 0, other=0)
        new = tl.load(
            tl.load(row + 1).to(tl.pointer_type(tl.int64)) + words, mask=mark != 0, other=0
        )
        count = tl.zeros((STEP,), dtype=tl.int32)
        for lane in tl.static_range(8 // SIZE):
            count += (mark >> lane) & 1
        at = first - skipped + tl.cumsum(count, 0) - count
        for lane in tl.static_range(8 // SIZE):
            chosen = ((mark >> lane) & 1) != 0
            tl.store(positions + at, words * (8 // SIZE) + lane, mask=chosen)
            shift = 8 * SIZE * lane
            tl.store(old_bits + at, (old >> shift).to(old_bits.dtype.element_ty), mask=chosen)
            tl.store(new_bits + at, (new >> shift).to(new_bits.dtype.element_ty), mask=chosen)
            at += (mark >> lane) & 1
