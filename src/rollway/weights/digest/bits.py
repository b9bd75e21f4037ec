"""A tensor as bits: integers of the size of its elements, words of eight bytes, and a digest.

The same code for a CPU and a GPU, and the same digest on both.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollway.errors import UsageError

log = logging.getLogger(__name__)

DTYPES: dict[str, torch.dtype] = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
    **{"F8_E8M0": torch.float8_e8m0fnu, "BOOL": torch.bool},
}
"""By the names that safetensors files use."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

BLOCK = 1 << 17
"""Words that are looked at together: 1 MiB."""
_WORTH_THREADS = 16 << 20
_MOST_THREADS = 8
Result = TypeVar("Result")


def digest(tensor: Tensor) -> str:
    """128 bits that tell a tensor's bytes from any other's, but for malice; same on every device.

    Each block of words is folded, multiplied by keys of its positions and summed, which a GPU
    does in passing; the sums are hashed. A block in which one element of up to four bytes changed
    never has the same sum."""
    return digests([tensor])[0]


def digests(tensors: Sequence[Tensor]) -> list[str]:
    """The digest of each of some tensors of one device. A GPU is asked once for all of them: to
    wait for each would take longer than to read it."""
    if not tensors:
        return []
    return started_digests(tensors)()


def started_digests(tensors: Sequence[Tensor]) -> Callable[[], list[str]]:
    """The same, begun in the order of the device's current stream; the answer waits for it."""
    if by_triton(tensors[0].device):
        from rollway.weights.digest.gpu import Summing

        return Summing(tensors).start()
    found = _digests_by_torch(tensors)
    return lambda: found


def _digests_by_torch(tensors: Sequence[Tensor]) -> list[str]:
    split = [words_of(raw_bytes(tensor)) for tensor in tensors]
    sums = _all_sums([words for words, _ in split]).cpu().numpy()
    tails = torch.cat([tail for _, tail in split]).cpu().numpy()
    found, at, end = [], 0, 0
    for words, tail in split:
        final = hashlib.blake2b(words.numel().to_bytes(8, "little"), digest_size=16)
        blocks = -(-words.numel() // BLOCK)
        final.update(sums[at : at + blocks].tobytes())
        final.update(tails[end : end + tail.numel()].tobytes())
        found.append(final.hexdigest())
        at, end = at + blocks, end + tail.numel()
    return found


def _all_sums(tensors: list[Tensor]) -> Tensor:
    """Of every block of every tensor, one after the other."""
    device = tensors[0].device
    if device.type == "cpu":
        return torch.from_numpy(np.concatenate(spread(_cpu_sums, tensors)))
    every_key = keys(device)
    found = [every_key[:0]]
    for words in tensors:
        full = words.numel() // BLOCK
        blocks = words[: full * BLOCK].view(full, BLOCK)
        found += [_sums(rows, every_key) for rows in blocks.split(blocks_at_once(device))]
        if words.numel() % BLOCK:
            rest = words[full * BLOCK :]
            found.append(_sums(rest.view(1, -1), every_key[: rest.numel()]))
    return torch.cat(found)


def by_triton(device: torch.device) -> bool:
    """Whether many tensors there are looked at by one kernel; torch does it where not."""
    return device.type == "cuda" and _triton_works()


@functools.cache
def _triton_works() -> bool:
    try:
        from rollway.weights.digest import gpu, gpu_changes

        gpu.check()
        gpu_changes.check()
    except Exception as error:  # noqa: BLE001 (whatever it is, torch does it too)
        log.info("torch looks at each tensor, since Triton does not work here: %s", error)
        return False
    return True


def word_sum(tensor: Tensor) -> int:
    """The sum of a tensor's words of eight bytes: 64 bits against chance, at the speed of memory,
    where a `digest` would take longer than the copy it checks."""
    words, tail = words_of(raw_bytes(tensor))
    rest = int.from_bytes(tail.cpu().numpy().tobytes(), "little")
    if words.device.type == "cpu":
        # By numpy: torch's threads wait for each other when cores are busy.
        return (int(words.numpy().sum()) + rest) % (1 << 64)
    return (int(words.sum()) + rest) % (1 << 64)


def spread(work: Callable[[Tensor], Result], tensors: Sequence[Tensor]) -> list[Result]:
    """The work for each of some tensors in CPU memory, on a few threads when they are large.

    It must be numpy's: that lets threads run side by side and none waits for another, while
    torch's own threads meet after every step and wait when cores are busy."""
    if len(tensors) < 2 or sum(tensor.nbytes for tensor in tensors) < _WORTH_THREADS:
        return [work(tensor) for tensor in tensors]
    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as threads:
        return list(threads.map(work, tensors))


def _cpu_sums(tensor: Tensor) -> NDArray[np.int64]:
    words = tensor.view(-1).view(torch.int64).numpy()
    factors, scratch = keys(tensor.device).numpy(), np.empty(min(BLOCK, len(words)), np.int64)
    found = np.empty(-(-len(words) // BLOCK), np.int64)
    for number in range(len(found)):
        block = words[number * BLOCK : (number + 1) * BLOCK]
        folded = np.right_shift(block, 32, out=scratch[: len(block)])  # as in `_sums`
        folded += block
        folded *= factors[: len(block)]
        found[number] = folded.sum()
    return found


def _sums(rows: Tensor, factors: Tensor) -> Tensor:
    # Multiplying carries upwards only, so the upper half is first added to the lower: else two
    # sign bits that flip at the top of their words would cancel each other.
    folded = rows >> 32
    folded += rows
    folded *= factors
    return folded.sum(1)


@functools.cache
def keys(device: torch.device) -> Tensor:
    """Odd numbers without a pattern, the same ones everywhere."""
    stream = hashlib.shake_128(b"rollway digest keys").digest(8 * BLOCK)
    return torch.frombuffer(bytearray(stream), dtype=torch.int64).bitwise_or(1).to(device)


def blocks_at_once(device: torch.device) -> int:
    """As many blocks as suit the device: a CPU's cache, or a GPU's many cores."""
    return 1 if device.type == "cpu" else 512


def raw_bytes(tensor: Tensor) -> Tensor:
    """All bytes, in order; shares memory with a contiguous tensor."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def integers(tensor: Tensor) -> Tensor:
    """All elements as integers of their size, in order; shares memory with a contiguous tensor."""
    return tensor.detach().contiguous().view(-1).view(_INTEGERS[tensor.element_size()])


def words_of(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes by eights, and the few that are left over."""
    whole = raw.numel() // 8 * 8
    head = raw[:whole]
    if head.storage_offset() % 8:
        head = head.clone()  # a view that starts inside a word
    return head.view(torch.int64), raw[whole:]


def dtype_name(tensor: Tensor) -> str:
    name = _NAMES.get(tensor.dtype)
    if name is None:
        raise UsageError(f"Tensors of {tensor.dtype} cannot be published.", "Use a plain dtype.")
    return name


def describe(tensor: Tensor) -> str:
    where = "" if tensor.device.type == "cpu" else f" on {tensor.device}"
    return f"{_NAMES.get(tensor.dtype, tensor.dtype)}{list(tensor.shape)}{where}"
