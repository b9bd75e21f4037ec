"""Checksums of tensors, and views of tensors as bytes, integers and words.

A word sum is what a worker compares its parameters with; a digest also depends on the order of the
bytes, for transfers that could misplace some. Both are the same on every device.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from rollway.errors import UsageError

DTYPES: dict[str, torch.dtype] = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
    **{"F8_E8M0": torch.float8_e8m0fnu, "BOOL": torch.bool},
}
"""Keys are the dtype names of safetensors files."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by their number of bytes."""

BLOCK = 1 << 17  # Words of eight bytes that make up one block of a digest: 1 MiB
_BLOCKS = 512  # Blocks that a GPU processes at once; a CPU has one in its cache
_WORTH_THREADS = 16 << 20
_MAX_THREADS = 16
_PIECE = 1 << 19  # Words that a thread sums at a time: 4 MiB
Item = TypeVar("Item")
Result = TypeVar("Result")


def word_sum(tensor: Tensor) -> int:
    """Return the sum of a tensor's words of eight bytes, as a checksum of 64 bits.

    It is computed at the speed of memory, and does not depend on the order of the words."""
    return word_sums([tensor], 1)[0]


def word_sums(tensors: Sequence[Tensor], threads: int | None = None) -> list[int]:
    """Return the word sums of tensors on one device, which the host waits for once.

    On a CPU, a number of threads computes them; without that number, all cores do."""
    if tensors and tensors[0].device.type != "cpu":
        return finish_word_sums([start_word_sum(tensor) for tensor in tensors])
    split = [split_words(raw_bytes(tensor)) for tensor in tensors]
    pieces = [
        (number, words.numpy()[start : start + _PIECE])
        for number, (words, _) in enumerate(split)
        for start in range(0, words.numel(), _PIECE)
    ]
    is_small = sum(tensor.nbytes for tensor in tensors) < _WORTH_THREADS
    # numpy, because torch's threads wait for each other when cores are busy.
    sums = map_in_threads(lambda piece: int(piece[1].sum()), pieces, 1 if is_small else threads)
    totals = [int.from_bytes(tail.numpy().tobytes(), "little") for _, tail in split]
    for (number, _), total in zip(pieces, sums, strict=True):
        totals[number] += total
    return [total % (1 << 64) for total in totals]


def start_word_sum(tensor: Tensor) -> Tensor:
    """Return the word sum of a tensor as a number on its device, which nobody waits for."""
    words, tail = split_words(raw_bytes(tensor))
    total = words.sum()
    if tail.numel():
        shifts = 8 * torch.arange(tail.numel(), device=tail.device)
        total += (tail.long() << shifts).sum()
    return total


def finish_word_sums(totals: Sequence[Tensor]) -> list[int]:
    """Bring the results of `start_word_sum` to the host, all at once."""
    if not totals:
        return []
    numbers: list[int] = torch.stack(list(totals)).tolist()
    return [number % (1 << 64) for number in numbers]


def digest(tensor: Tensor) -> str:
    """Return 128 bits (in hex) that identify a tensor's bytes; equal on every device.

    Each block of words is folded, multiplied by keys for its positions and summed, which a GPU does
    near the speed of memory; the sums are hashed. Two blocks that differ in a single element of up
    to four bytes never have the same sum. The digest does not resist an attacker."""
    return digests([tensor])[0]


def digests(tensors: Sequence[Tensor]) -> list[str]:
    """Return the digests of tensors on one device; the host waits for a GPU twice."""
    if not tensors:
        return []
    split = [split_words(raw_bytes(tensor)) for tensor in tensors]
    is_small = sum(tensor.nbytes for tensor in tensors) < _WORTH_THREADS
    if tensors[0].device.type == "cpu":
        sums = map_in_threads(_sum_blocks_on_cpu, [w for w, _ in split], 1 if is_small else None)
    else:
        sums = [sum_blocks(words) for words, _ in split]
    all_sums = torch.cat(sums).cpu().split([part.numel() for part in sums])
    tails = torch.cat([tail for _, tail in split]).cpu().split([tail.numel() for _, tail in split])
    return [
        hashlib.blake2b(
            words.numel().to_bytes(8, "little") + part.numpy().tobytes() + tail.numpy().tobytes(),
            digest_size=16,
        ).hexdigest()
        for (words, _), part, tail in zip(split, all_sums, tails, strict=True)
    ]


def sum_blocks(words: Tensor) -> Tensor:
    """Return the sums of a tensor's blocks, from which its digest is made."""
    factors = keys(words.device)
    full = words.numel() // BLOCK
    parts = list(words[: full * BLOCK].view(full, BLOCK).split(_BLOCKS))
    if words.numel() % BLOCK:
        parts.append(words[full * BLOCK :].view(1, -1))
    sums = [words[:0]]
    for rows in parts:
        # A product carries upwards only, so first add the upper half to the lower one. Otherwise
        # two sign bits that flip at the top of their words would cancel each other.
        folded = rows >> 32
        folded += rows
        folded *= factors[: rows.shape[1]]
        sums.append(folded.sum(1))
    return torch.cat(sums)


def _sum_blocks_on_cpu(words: Tensor) -> Tensor:
    """Do the same by numpy, block by block: each stays in a core's cache."""
    factors = keys(words.device).numpy()
    scratch = np.empty(min(BLOCK, words.numel()), np.int64)
    sums = np.empty(-(-words.numel() // BLOCK), np.int64)
    for number in range(len(sums)):
        block = words.numpy()[number * BLOCK : (number + 1) * BLOCK]
        folded = np.right_shift(block, 32, out=scratch[: len(block)])
        folded += block
        folded *= factors[: len(block)]
        sums[number] = folded.sum()
    return torch.from_numpy(sums)


@functools.cache
def keys(device: torch.device) -> Tensor:
    """Return the keys of a block's positions: pseudo-random odd numbers, the same everywhere."""
    stream = hashlib.shake_128(b"rollway digest keys").digest(8 * BLOCK)
    return torch.frombuffer(bytearray(stream), dtype=torch.int64).bitwise_or(1).to(device)


def count_threads() -> int:
    return min(_MAX_THREADS, len(os.sched_getaffinity(0)))


def map_in_threads(
    work: Callable[[Item], Result], items: Sequence[Item], threads: int | None = None
) -> list[Result]:
    """Call `work` for each item, in threads if there are several; return the results in order.

    `work` must release the GIL, as numpy does. After an error, nothing runs on."""
    threads = min(threads or count_threads(), len(items))
    if threads < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, items))


def raw_bytes(tensor: Tensor) -> Tensor:
    """Return all bytes in order; a contiguous tensor is viewed, not copied."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def integers(tensor: Tensor) -> Tensor:
    """Return all elements as integers of their size; a contiguous tensor is viewed, not copied."""
    return tensor.detach().contiguous().view(-1).view(INTEGERS[tensor.element_size()])


def split_words(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Return bytes as words of eight bytes, and the up to seven bytes that remain."""
    whole = raw.numel() // 8 * 8
    head = raw[:whole]
    if head.storage_offset() % 8:
        head = head.clone()  # torch cannot view words that begin at an unaligned offset
    return head.view(torch.int64), raw[whole:]


def dtype_name(tensor: Tensor) -> str:
    """Return the dtype's name in safetensors files; raise `UsageError` for other dtypes."""
    name = _NAMES.get(tensor.dtype)
    if name is None:
        raise UsageError(f"Tensors of {tensor.dtype} cannot be published.", "Use a plain dtype.")
    return name


def describe(tensor: Tensor) -> str:
    """Return dtype, shape and device as text for a message."""
    where = "" if tensor.device.type == "cpu" else f" on {tensor.device}"
    return f"{_NAMES.get(tensor.dtype, tensor.dtype)}{list(tensor.shape)}{where}"
