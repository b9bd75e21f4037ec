"""The sums of a digest on a GPU: every byte of many tensors read once, by one kernel.

Plain torch reads and writes each word several times, and is told tensor by tensor; told so, a GPU
waits more than it works. Import this only where Triton is: `bits` takes torch where it is not.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_STEP = 2048
"""Words that a program reads at once."""

Runs = list[tuple[int, int]]
"""Addresses on the device, and how many words lie there: at most one block."""


def sums(runs: Runs, keys: Tensor) -> Tensor:
    """One sum for each run."""
    table = torch.tensor(runs, dtype=torch.int64).to(keys.device)
    found = torch.empty(len(runs), dtype=torch.int64, device=keys.device)
    with torch.cuda.device(keys.device):
        _fold[(len(runs),)](table, keys, found, STEP=_STEP, num_warps=8)
    return found


def check() -> None:
    """Raise unless the kernel runs here and gives what torch gives."""
    words = torch.arange(-_STEP, _STEP + 7, dtype=torch.int64, device="cuda") * 0x9E3779B97F4A7
    keys = torch.arange(1, 2 * words.numel(), 2, dtype=torch.int64, device="cuda")
    wanted = (((words >> 32) + words) * keys).sum()
    if int(sums([(words.data_ptr(), words.numel())], keys)[0]) != int(wanted):
        raise RuntimeError("its sums are wrong")


# Without types: Triton would take their names for variables of the kernel.
@triton.jit  # type: ignore[untyped-decorator]
def _fold(table, keys, found, STEP: tl.constexpr):  # type: ignore[no-untyped-def]
    run = tl.program_id(0)
    words = tl.load(table + 2 * run).to(tl.pointer_type(tl.int64))
    count = tl.load(table + 2 * run + 1).to(tl.int32)
    lanes = tl.arange(0, STEP)
    total = tl.zeros((STEP,), dtype=tl.int64)
    for start in range(0, count, STEP):
        inside = start + lanes < count
        word = tl.load(words + start + lanes, mask=inside, other=0)
        key = tl.load(keys + start + lanes, mask=inside, other=0)
        total += ((word >> 32) + word) * key
    tl.store(found + run, tl.sum(total, axis=0))
