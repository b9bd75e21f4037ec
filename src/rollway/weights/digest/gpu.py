"""Digest and compare many tensors on a GPU, by Triton kernels that are launched once for all.

torch would read and write each word several times and launch kernels tensor by tensor, so the GPU
would mostly wait. A kernel that is launched once for thousands of tensors looks up in a `Table`
which bytes each of its programs processes. A run of bytes begins at a multiple of eight and may end
anywhere: the word that contains its last byte can be read whole.

    tensors ── _fold ──> sums of blocks ──> the host, which hashes them into digests
                  └────> a copy of the tensors, if it is wanted, in the same pass

    old ─┐              ┌─ a byte of marks for each word ─┐
         ├─ _mark ──────┤                                 ├─ _list ─> _gather ─> positions, old, new
    new ─┘  (digests)   └─ counts ─> sums of counts ──────┘
                                └──> the host, which waits only here

`_list` lists the marked words, and `_gather` reads no others. Import this module only where Triton
is installed; `checksums` and `changes` use torch otherwise.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollway.weights.digest import checksums

WARPS = 8
STEP = 2048  # Words that a program reads at once
STEPS = 4
PART = STEP * STEPS  # Words of one program; a block consists of whole parts
COLUMNS = 5
_WORDS = 512  # Marked words that one program gathers


@dataclass(frozen=True, slots=True)
class Table:
    """Runs of bytes, as kernels read them."""

    rows: Tensor
    """For each run: two addresses, its size in bytes, its first part and its first block."""
    owners: Tensor  # The run that each part belongs to
    first_parts: Tensor
    """The first part of each run, on the host; at the end the number of all parts."""
    blocks: list[int]  # The number of blocks of each run, by whole words

    @property
    def parts(self) -> int:
        return int(self.owners.numel())


def table(
    first: Sequence[int], second: Sequence[int], nbytes: Sequence[int], device: torch.device
) -> Table:
    """Copy addresses and sizes to the device, without waiting for it.

    Each run has two addresses: source and target of a copy, or two versions to compare."""
    addresses, others, sizes = (torch.tensor(column) for column in (first, second, nbytes))
    parts = (sizes + (8 * PART - 1)) // (8 * PART)
    blocks = (sizes // 8 + (checksums.BLOCK - 1)) // checksums.BLOCK
    part_ends, block_ends = parts.cumsum(0), blocks.cumsum(0)
    columns = [addresses, others, sizes, part_ends - parts, block_ends - blocks, parts]
    on_device = torch.stack(columns).to(device)
    # `output_size` is known here; without it, torch would wait for the device to find it.
    owners = torch.repeat_interleave(on_device[5], output_size=int(part_ends[-1]))
    return Table(
        rows=on_device[:COLUMNS].t().contiguous(),
        owners=owners.to(torch.int32),
        first_parts=torch.cat([part_ends - parts, part_ends[-1:]]),
        blocks=blocks.tolist(),
    )


def make_run(tensor: Tensor) -> Tensor:
    """Return the tensor if it is one aligned run of bytes, or else a copy that is."""
    if not tensor.is_contiguous():
        return tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % 8 else tensor


class DigestKernel:
    """Digests of tensors on one device, prepared once and computed for every version.

    The tensors' addresses must not change."""

    def __init__(self, tensors: Sequence[Tensor], targets: Sequence[Tensor] | None = None) -> None:
        """Prepare the digests; with `targets`, also copies there, whose digests they then are."""
        self._device = tensors[0].device
        runs = [make_run(tensor) for tensor in tensors]
        # The table has only addresses, so this keeps the memory of runs that had to be copied.
        self._copied_runs = [r for r, t in zip(runs, tensors, strict=True) if r is not t]
        self._sizes = [run.nbytes for run in runs]
        addresses = [run.data_ptr() for run in runs]
        to = addresses if targets is None else [target.data_ptr() for target in targets]
        self._copy = targets is not None
        self._table = table(addresses, to, self._sizes, self._device)

    @property
    def keeps_copies(self) -> bool:
        """Whether some tensors were copied first: the digests are then of what they were."""
        return bool(self._copied_runs)

    def start(self) -> Callable[[], list[checksums.Checksum]]:
        """Enqueue the kernel on the current stream; return a function that waits for it."""
        runs, blocks, count = self._table, sum(self._table.blocks), len(self._table.blocks)
        # After the sums of blocks: each run's bytes that fill no word, and the sum of its words.
        sums = torch.zeros(blocks + 2 * count, dtype=torch.int64, device=self._device)
        if runs.parts:
            with _on(self._device):
                _fold[(runs.parts,)](
                    runs.rows, runs.owners, checksums.keys(self._device), sums, blocks,
                    blocks + count, COPY=self._copy, BLOCK=checksums.BLOCK, STEP=STEP, STEPS=STEPS,
                    COLUMNS=COLUMNS, num_warps=WARPS,
                )  # fmt: skip
        host, wait = _start_copy_to_host(sums)

        def finish() -> list[checksums.Checksum]:
            wait()
            return _finish_checksums(host, runs.blocks, self._sizes)

        return finish


def _finish_checksums(
    sums: Tensor, blocks: Sequence[int], sizes: Sequence[int]
) -> list[checksums.Checksum]:
    """Return the checksums, from sums in host memory: one for each block of each run, then for each
    run the bytes that fill no word, and the sum of its words."""
    digests, word_sums = _finish_digests(sums, blocks, sizes), _finish_word_sums(sums, sizes)
    return list(map(checksums.Checksum, digests, word_sums))


def _finish_digests(sums: Tensor, blocks: Sequence[int], sizes: Sequence[int]) -> list[str]:
    """Return the digests, from the beginning of sums in host memory."""
    data = sums.numpy().tobytes()
    at, tail = 0, 8 * sum(blocks)
    digests = []
    for count, size in zip(blocks, sizes, strict=True):
        end = at + 8 * count
        hashed = (size // 8).to_bytes(8, "little") + data[at:end] + data[tail : tail + size % 8]
        digests.append(hashlib.blake2b(hashed, digest_size=16).hexdigest())
        at, tail = end, tail + 8
    return digests


def _finish_word_sums(sums: Tensor, sizes: Sequence[int]) -> list[int]:
    """Return the word sums, from the end of sums in host memory."""
    count = len(sizes)
    tails, totals = sums[-2 * count : -count].tolist(), sums[-count:].tolist()
    return [
        # Little-endian: the lower bytes of the last word are those that fill no word.
        (total + tail % (1 << 8 * (size % 8))) % (1 << 64)
        for total, tail, size in zip(totals, tails, sizes, strict=True)
    ]


class TritonComparison:
    """A `changes.Comparison` by kernels; the checksums of the new tensors cost no further read."""

    def __init__(
        self, pairs: Sequence[tuple[Tensor, Tensor]], with_checksums: bool = False
    ) -> None:
        old, new = ([make_run(pair[side]) for pair in pairs] for side in (0, 1))
        self._runs = old, new  # kept alive: kernels still read copies that `make_run` made
        self._dtype, self._device = new[0].dtype, new[0].device
        sizes = [run.nbytes for run in new]
        old_addresses, new_addresses = ([run.data_ptr() for run in runs] for runs in (old, new))
        self._table = table(old_addresses, new_addresses, sizes, self._device)
        sums = self._mark(with_checksums)
        steps = self._table.parts * STEPS
        # Row 0: how many words are marked before each step. Row 1: how many elements.
        self._starts = torch.zeros(2, steps + 1, dtype=torch.int64, device=self._device)
        self._starts[:, 1:] = self._counts.cumsum(1)
        firsts = (self._table.first_parts * STEPS).to(self._device)
        # One copy brings counts and sums to the host: this is the only wait.
        results = torch.cat([self._starts.index_select(1, firsts).view(-1), sums])
        host, wait = _start_copy_to_host(results)
        wait()
        bounds = len(pairs) + 1
        self._word_ends: list[int] = host[:bounds].tolist()
        self._ends: list[int] = host[bounds : 2 * bounds].tolist()
        self.counts = [end - start for start, end in pairwise(self._ends)]
        self.checksums: list[checksums.Checksum] = []
        if with_checksums:
            self.checksums = _finish_checksums(host[2 * bounds :], self._table.blocks, sizes)

    def _mark(self, with_checksums: bool) -> Tensor:
        """Mark and count what differs; return the sums of blocks, and then each tensor's tail and
        the sum of its words."""
        blocks = self._table.blocks
        size = sum(blocks) + 2 * len(blocks) if with_checksums else 0
        sums = torch.zeros(size, dtype=torch.int64, device=self._device)
        parts = self._table.parts
        self._marks = torch.empty(parts * PART, dtype=torch.uint8, device=self._device)
        self._counts = torch.empty(2, parts * STEPS, dtype=torch.int32, device=self._device)
        if parts:
            with _on(self._device):
                _mark[(parts,)](
                    self._table.rows, self._table.owners, checksums.keys(self._device),
                    sums, sum(blocks), sum(blocks) + len(blocks),
                    self._marks, self._counts, parts * STEPS, SUMS=with_checksums,
                    SIZE=self._dtype.itemsize, BLOCK=checksums.BLOCK,
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
            with _on(self._device):
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
        with _on(self._device):
            _list[(stop - begin,)](
                self._marks, self._starts, words, places, begin, self._starts.shape[1],
                self._word_ends[first], self._ends[first], STEP=STEP, num_warps=4,
            )  # fmt: skip
        return words, places


def _start_copy_to_host(sums: Tensor) -> tuple[Tensor, Callable[[], object]]:
    """Start a copy to the host; return the host tensor and a function that waits for it.

    An event marks the copy, so the wait does not include work that is enqueued later."""
    if not sums.is_cuda:
        return sums, lambda: None
    host = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True)
    host.copy_(sums, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(sums.device))
    return host, event.synchronize


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make `device` the current one, where Triton launches; its interpreter runs on the CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


# No annotations in kernels: Triton reads a type's name as a variable of the kernel.
@triton.jit(do_not_specialize=["tails", "totals"])  # type: ignore[untyped-decorator]
def _fold(  # type: ignore[no-untyped-def]
    rows, owners, keys, sums, tails, totals,
    COPY: tl.constexpr, BLOCK: tl.constexpr,
    STEP: tl.constexpr, STEPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    # Each program sums one part (STEP * STEPS words) of one run.
    program = tl.program_id(0)
    owner = tl.load(owners + program)
    row = rows + owner * COLUMNS
    nbytes = tl.load(row + 2)
    start = (program - tl.load(row + 3)) * (STEP * STEPS)
    source = tl.load(row).to(tl.pointer_type(tl.int64)) + start
    target = tl.load(row + 1).to(tl.pointer_type(tl.int64)) + start
    left = tl.minimum(nbytes // 8 - start, STEP * STEPS).to(tl.int32)
    key = keys + start % BLOCK
    lanes = tl.arange(0, STEP)
    total = tl.zeros((STEP,), dtype=tl.int64)
    plain = tl.zeros((STEP,), dtype=tl.int64)
    for step in range(STEPS):  # not unrolled: all words of a part would need too many registers
        at = step * STEP + lanes
        inside = at < left
        word = tl.load(source + at, mask=inside, other=0)
        if COPY:
            tl.store(target + at, word, mask=inside)
        plain += word
        # Words outside have the key 0, so they add nothing.
        total += ((word >> 32) + word) * tl.load(key + at, mask=inside, other=0)
    if left > 0:
        # Integer sums do not depend on the order in which the programs add.
        tl.atomic_add(sums + tl.load(row + 4) + start // BLOCK, tl.sum(total, axis=0))
        tl.atomic_add(sums + totals + owner, tl.sum(plain, axis=0))
    tail = (nbytes % 8).to(tl.int32)
    if (tail > 0) & (left < STEP * STEPS):
        # Reading the whole last word is safe: memory is allocated in larger units than a word.
        last = tl.load(source + left)
        tl.store(sums + tails + owner, last)
        if COPY:
            lane = tl.arange(0, 8)
            byte = (last >> (lane * 8).to(tl.int64)).to(tl.int8)
            end = (target + left).to(tl.pointer_type(tl.int8))
            tl.store(end + lane, byte, mask=lane < tail)


@triton.jit(do_not_specialize=["tails", "totals", "steps"])  # type: ignore[untyped-decorator]
def _mark(  # type: ignore[no-untyped-def]
    rows, owners, keys, sums, tails, totals, marks, counts, steps,
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
    plain = tl.zeros((STEP,), dtype=tl.int64)
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
            plain += tl.where(at < whole, after, 0)
    if SUMS:
        if whole > 0:
            tl.atomic_add(sums + tl.load(row + 4) + start // BLOCK, tl.sum(total, axis=0))
            tl.atomic_add(sums + totals + owner, tl.sum(plain, axis=0))
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
