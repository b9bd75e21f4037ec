"""The sums of a digest on a GPU: every byte of many tensors read once, by one kernel, which copies
them on the way when it is told where to.

Plain torch reads and writes each word several times, and is told tensor by tensor; told so, a GPU
waits more than it works. Import this only where Triton is: `bits` takes torch where it is not.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollway.weights.digest import bits
from rollway.weights.digest.gpu_runs import COLUMNS, STEP, STEPS, Table, run_of, table

WARPS = 8


class Summing:
    """Digests of some tensors of one device, prepared once and made again and again: addresses
    must stay what they are. What is asked of the device is asked at once, and waited for later."""

    def __init__(self, tensors: Sequence[Tensor], targets: Sequence[Tensor] | None = None) -> None:
        """With `targets`, the tensors are copied there, and what is copied is what is summed."""
        self._device = tensors[0].device
        runs = [run_of(tensor) for tensor in tensors]
        self._copies = [r for r, t in zip(runs, tensors, strict=True) if r is not t]
        self._sizes = [run.nbytes for run in runs]
        places = [run.data_ptr() for run in runs]
        to = places if targets is None else [target.data_ptr() for target in targets]
        self._copy = targets is not None
        self._table = table(places, to, self._sizes, self._device)
        self._prefixes = [(size // 8).to_bytes(8, "little") for size in self._sizes]

    def start(self) -> Callable[[], list[str]]:
        """Begin, in the order of the current stream; the answer waits for the end."""
        found = sums(self._table, bits.keys(self._device), copy=self._copy)
        host, ready = on_its_way(found)

        def digests() -> list[str]:
            ready()
            return digests_of(host, self._table.blocks, self._sizes, self._prefixes)

        return digests


def sums(runs: Table, keys: Tensor, copy: bool) -> Tensor:
    """One sum for each block of each run; after them, for each run, the bytes that fill no word."""
    found = torch.zeros(sum(runs.blocks) + len(runs.blocks), dtype=torch.int64, device=keys.device)
    if runs.parts:
        with on(keys.device):
            _fold[(runs.parts,)](
                runs.rows,
                runs.owners,
                keys,
                found,
                sum(runs.blocks),
                COPY=copy,
                BLOCK=bits.BLOCK,
                STEP=STEP,
                STEPS=STEPS,
                COLUMNS=COLUMNS,
                num_warps=WARPS,
            )
    return found


def digests_of(
    found: Tensor, blocks: Sequence[int], sizes: Sequence[int], prefixes: Sequence[bytes]
) -> list[str]:
    """From sums that have come to the host."""
    data = found.numpy().tobytes()
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


def on_its_way(found: Tensor) -> tuple[Tensor, Callable[[], object]]:
    """Where the host will have it, and what waits until it is there; later work is not waited
    for."""
    if not found.is_cuda:
        return found, lambda: None
    host = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
    host.copy_(found, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(found.device))
    return host, event.synchronize


def on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device; its interpreter has none."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def check() -> None:
    """Raise unless the kernel runs here and gives what torch gives."""
    words = torch.arange(-STEP, 5 * STEP + 7, dtype=torch.int64) * 0x9E3779B97F4A7
    there = words.cuda()
    copy = torch.zeros_like(there)
    if Summing([there], [copy]).start()() != [bits.digest(words)] or not torch.equal(copy, there):
        raise RuntimeError("its sums are wrong")


# Without types: Triton would take their names for variables of the kernel.
@triton.jit(do_not_specialize=["tails"])  # type: ignore[untyped-decorator]
def _fold(  # type: ignore[no-untyped-def]
    rows,
    owners,
    keys,
    found,
    tails,
    COPY: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    STEPS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
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
    for step in range(STEPS):  # not unrolled: all words of a part at once leave no room for others
        at = step * STEP + lanes
        inside = at < left
        word = tl.load(source + at, mask=inside, other=0)
        if COPY:
            tl.store(target + at, word, mask=inside)
        # A key of nothing: what is outside adds nothing.
        total += ((word >> 32) + word) * tl.load(key + at, mask=inside, other=0)
    if left > 0:
        # Whole numbers come to the same sum in any order.
        tl.atomic_add(found + tl.load(row + 4) + start // BLOCK, tl.sum(total, axis=0))
    tail = (nbytes % 8).to(tl.int32)
    if (tail > 0) & (left < STEP * STEPS):
        last = tl.load(source + left)
        tl.store(found + tails + owner, last)
        if COPY:
            places = tl.arange(0, 8)
            each = (last >> (places * 8).to(tl.int64)).to(tl.int8)
            end = (target + left).to(tl.pointer_type(tl.int8))
            tl.store(end + places, each, mask=places < tail)
