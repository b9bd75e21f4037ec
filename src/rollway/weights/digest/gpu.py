"""Compute the sums of checksums on a GPU: one Triton kernel reads many tensors once, and can
copy them in the same pass.

torch would read and write each word several times and launch kernels tensor by tensor, so the GPU
would mostly wait. A kernel that is launched once for thousands of tensors looks up in a `Table`
which bytes each of its programs processes. A run of bytes begins at a multiple of eight and may end
anywhere: the word that contains its last byte can be read whole.

Import this module only where Triton is installed; `checksums` uses torch otherwise.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
        """With `targets`, also copy the tensors there; the digests are those of the copies."""
        self._device = tensors[0].device
        runs = [make_run(tensor) for tensor in tensors]
        # The table has only addresses, so this keeps the memory of runs that had to be copied.
        self._copied_runs = [r for r, t in zip(runs, tensors, strict=True) if r is not t]
        self._sizes = [run.nbytes for run in runs]
        addresses = [run.data_ptr() for run in runs]
        to = addresses if targets is None else [target.data_ptr() for target in targets]
        self._copy = targets is not None
        self._table = table(addresses, to, self._sizes, self._device)
        self._prefixes = [(size // 8).to_bytes(8, "little") for size in self._sizes]

    @property
    def keeps_copies(self) -> bool:
        """Whether some tensors were copied first: the digests are then of what they were."""
        return bool(self._copied_runs)

    def start(self) -> Callable[[], list[checksums.Checksum]]:
        """Enqueue the kernel on the current stream; return a function that waits for it."""
        sums = sum_runs(self._table, checksums.keys(self._device), copy=self._copy)
        host, wait = start_copy_to_host(sums)

        def finish() -> list[checksums.Checksum]:
            wait()
            digests = finish_digests(host, self._table.blocks, self._sizes, self._prefixes)
            totals = finish_word_sums(host, self._sizes)
            return list(map(checksums.Checksum, digests, totals))

        return finish


def sum_runs(runs: Table, keys: Tensor, copy: bool) -> Tensor:
    """Return one sum for each block of each run, then for each run the bytes that fill no word,
    then for each run the plain sum of its words."""
    blocks, count = sum(runs.blocks), len(runs.blocks)
    sums = torch.zeros(blocks + 2 * count, dtype=torch.int64, device=keys.device)
    if runs.parts:
        with on(keys.device):
            _fold[(runs.parts,)](
                runs.rows,
                runs.owners,
                keys,
                sums,
                blocks,
                blocks + count,
                COPY=copy,
                BLOCK=checksums.BLOCK,
                STEP=STEP,
                STEPS=STEPS,
                COLUMNS=COLUMNS,
                num_warps=WARPS,
            )
    return sums


def finish_digests(
    sums: Tensor, blocks: Sequence[int], sizes: Sequence[int], prefixes: Sequence[bytes]
) -> list[str]:
    """Return the digests, from sums in host memory as `sum_runs` lays them out."""
    data = sums.numpy().tobytes()
    at, tail = 0, 8 * sum(blocks)
    digests = []
    for count, size, prefix in zip(blocks, sizes, prefixes, strict=True):
        end = at + 8 * count
        hashed = prefix + data[at:end]
        if size % 8:
            hashed += data[tail : tail + size % 8]
        digests.append(hashlib.blake2b(hashed, digest_size=16).hexdigest())
        at, tail = end, tail + 8
    return digests


def finish_word_sums(sums: Tensor, sizes: Sequence[int]) -> list[int]:
    """Return the word sums, from sums in host memory as `sum_runs` lays them out."""
    count = len(sizes)
    tails, totals = sums[-2 * count : -count].tolist(), sums[-count:].tolist()
    return [
        # Little-endian: the lower bytes of the last word are those that fill no word.
        (total + tail % (1 << 8 * (size % 8))) % (1 << 64)
        for total, tail, size in zip(totals, tails, sizes, strict=True)
    ]


def start_copy_to_host(sums: Tensor) -> tuple[Tensor, Callable[[], object]]:
    """Start a copy to the host; return the host tensor and a function that waits for it.

    An event marks the copy, so the wait does not include work that is enqueued later."""
    if not sums.is_cuda:
        return sums, lambda: None
    host = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True)
    host.copy_(sums, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(sums.device))
    return host, event.synchronize


def on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make `device` the current one, where Triton launches; its interpreter runs on the CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def check() -> None:
    """Raise unless the kernel runs here and gives the same digests as torch."""
    words = torch.arange(-STEP, 5 * STEP + 7, dtype=torch.int64) * 0x9E3779B97F4A7
    raw = words.view(torch.uint8)[:-3]
    source = raw.cuda()
    copy = torch.zeros_like(source)
    right = [checksums.Checksum(checksums.digest(raw), checksums.word_sum(raw))]
    # Both forms of the kernel: the one that is not compiled here would be at the first publish.
    for targets in ([copy], None):
        if DigestKernel([source], targets).start()() != right:
            raise RuntimeError("its sums are wrong")
    if not torch.equal(copy, source):
        raise RuntimeError("its copies are wrong")


# Without types: Triton would read the names of types as variables of the kernel.
@triton.jit(do_not_specialize=["tails", "totals"])  # type: ignore[untyped-decorator]
def _fold(  # type: ignore[no-untyped-def]
    rows,
    owners,
    keys,
    sums,
    tails,
    totals,
    COPY: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    STEPS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
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
