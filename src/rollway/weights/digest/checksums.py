"""Digests and checksums of tensors, and views of tensors as bytes, integers and words.

The same code runs on CPU and GPU, and gives the same digests on both.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollway.errors import UsageError

if TYPE_CHECKING:
    from rollway.weights.digest.gpu import DigestKernel

log = logging.getLogger(__name__)

DTYPES: dict[str, torch.dtype] = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
    **{"F8_E8M0": torch.float8_e8m0fnu, "BOOL": torch.bool},
}
"""Keys are the dtype names of safetensors files."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

BLOCK = 1 << 17  # Words of eight bytes that make up one block of a digest: 1 MiB
_WORTH_THREADS = 16 << 20
_MAX_THREADS = 8
_PIECE = 1 << 19  # Words that a thread sums at a time: 4 MiB
Piece = TypeVar("Piece")
Result = TypeVar("Result")
_compiling = threading.Lock()
_kernels: Future[bool] | None = None
"""Whether the Triton kernels work, once they are compiled."""


class Checksum(NamedTuple):
    """The two checksums of a tensor's bytes: which bytes they are, and the sum of their words."""

    digest: str
    word_sum: int


def digest(tensor: Tensor) -> str:
    """Return 128 bits (in hex) that identify a tensor's bytes; equal on every device.

    Each block of words is folded, multiplied by keys for its positions and summed, which a GPU does
    at the speed of memory; the sums are hashed. Two blocks that differ in a single element of up to
    four bytes never have the same sum. The digest does not resist an attacker."""
    return digests([tensor])[0]


def digests(tensors: Sequence[Tensor]) -> list[str]:
    """Return the digests of tensors on one device.

    A GPU computes all of them before the host waits: waiting for each takes longer than reading it.
    """
    return start_digests(tensors)() if tensors else []


def start_digests(tensors: Sequence[Tensor]) -> Callable[[], list[str]]:
    """Start digests on the device's current stream; return a function that waits for them."""
    if uses_triton(tensors[0].device):
        wait = prepare_checksums(tensors)()
        return lambda: [checksum.digest for checksum in wait()]
    results = _digests_by_torch(tensors)
    return lambda: results


def prepare_checksums(
    tensors: Sequence[Tensor],
) -> Callable[[], Callable[[], list[Checksum]]]:
    """Prepare the checksums of tensors on one device whose addresses stay the same.

    Returns a function that starts them on the current stream, as often as the bytes change; it
    returns a function that waits for them."""
    kernel: DigestKernel | None = None

    def start() -> Callable[[], list[Checksum]]:
        nonlocal kernel
        # Each time: the kernels may have been compiled since the last version.
        if tensors and uses_triton(tensors[0].device):
            from rollway.weights.digest.gpu import DigestKernel

            # A tensor that had to be copied first must be copied again each time.
            if kernel is None or kernel.keeps_copies:
                kernel = DigestKernel(tensors)
            return kernel.start()
        results = list(map(Checksum, digests(tensors), word_sums(tensors)))
        return lambda: results

    return start


def _digests_by_torch(tensors: Sequence[Tensor]) -> list[str]:
    split = [split_words(raw_bytes(tensor)) for tensor in tensors]
    sums = _sum_blocks([words for words, _ in split]).cpu().numpy()
    tails = torch.cat([tail for _, tail in split]).cpu().numpy()
    results, at, end = [], 0, 0
    for words, tail in split:
        final = hashlib.blake2b(words.numel().to_bytes(8, "little"), digest_size=16)
        blocks = -(-words.numel() // BLOCK)
        final.update(sums[at : at + blocks].tobytes())
        final.update(tails[end : end + tail.numel()].tobytes())
        results.append(final.hexdigest())
        at, end = at + blocks, end + tail.numel()
    return results


def _sum_blocks(tensors: list[Tensor]) -> Tensor:
    """Return the sums of all blocks of all tensors, in order."""
    device = tensors[0].device
    if device.type == "cpu":
        return torch.from_numpy(np.concatenate(map_in_threads(_sum_blocks_on_cpu, tensors)))
    all_keys = keys(device)
    sums = [all_keys[:0]]
    for words in tensors:
        full = words.numel() // BLOCK
        blocks = words[: full * BLOCK].view(full, BLOCK)
        sums += [_sum_rows(rows, all_keys) for rows in blocks.split(blocks_at_once(device))]
        if words.numel() % BLOCK:
            rest = words[full * BLOCK :]
            sums.append(_sum_rows(rest.view(1, -1), all_keys[: rest.numel()]))
    return torch.cat(sums)


def uses_triton(device: torch.device) -> bool:
    """Return whether Triton kernels process many tensors at once there; otherwise torch does.

    The first question starts to compile them in a thread. That takes seconds, so torch does the
    work until they are ready: the first refit of a process need not wait."""
    if device.type != "cuda":
        return False
    kernels = _compile_kernels(device)
    return kernels.done() and kernels.result()


def warm_up() -> None:
    """Compile the kernels for the current device, where they are used, and wait for them.

    It does nothing in a process that has not chosen its GPU yet."""
    if torch.cuda.is_initialized():
        device = torch.device("cuda", torch.cuda.current_device())
        _compile_kernels(device).result()
        keys(device)


def _compile_kernels(device: torch.device) -> Future[bool]:
    """Start to compile the kernels, once in a process; return whether they work, when known."""
    global _kernels
    with _compiling:
        if _kernels is None:
            future = _kernels = Future()

            def run() -> None:
                with torch.cuda.device(device):  # a new thread would use the first GPU
                    future.set_result(_check_triton())

            threading.Thread(target=run, name="rollway-compile", daemon=True).start()
        return _kernels


def _check_triton() -> bool:
    try:
        _check_kernels()
    except Exception as error:  # noqa: BLE001 (torch can do the same whatever the error is)
        log.info("Triton does not work here, so torch digests tensor by tensor: %s", error)
        return False
    return True


def _check_kernels() -> None:
    """Raise unless the kernels run on this machine and give the same results as torch."""
    from rollway.weights.digest.gpu import STEP, DigestKernel, TritonComparison

    words = torch.arange(-STEP, 5 * STEP + 7, dtype=torch.int64) * 0x9E3779B97F4A7
    raw = words.view(torch.uint8)[:-3]
    source = raw.cuda()
    copy = torch.zeros_like(source)
    right = [_compute_checksum(raw)]
    # Both forms of the kernel: the one that is not compiled here would be at the first publish.
    for targets in ([copy], None):
        if DigestKernel([source], targets).start()() != right:
            raise RuntimeError("the kernel's sums are wrong")
    if not torch.equal(copy, source):
        raise RuntimeError("the kernel's copies are wrong")
    old = torch.zeros(9 * STEP + 3, dtype=torch.int16, device="cuda")
    new = old.clone()
    places = torch.tensor([0, 7, 4 * STEP, 9 * STEP + 2], device="cuda")
    new[places] = -1
    comparison = TritonComparison([(old, old), (old, new)], with_checksums=True)
    positions, before, after = comparison.gather(0, 2)
    is_right = (
        comparison.counts == [0, 4]
        and comparison.checksums == [_compute_checksum(old.cpu()), _compute_checksum(new.cpu())]
        and torch.equal(positions, places)
        and torch.equal(before, old[places])
        and torch.equal(after, new[places])
    )
    if not is_right:
        raise RuntimeError("the kernels find other changes than torch does")


def _compute_checksum(tensor: Tensor) -> Checksum:
    return Checksum(digest(tensor), word_sum(tensor))


def word_sum(tensor: Tensor) -> int:
    """Return the sum of a tensor's words of eight bytes, as a checksum of 64 bits.

    It is computed at the speed of memory; a `digest` would take longer than the copy it verifies.
    """
    words, tail = split_words(raw_bytes(tensor))
    # numpy, because torch's threads wait for each other when cores are busy.
    total = words.numpy().sum() if words.device.type == "cpu" else words.sum()
    return (int(total) + _sum_tail(tail)) % (1 << 64)


def _sum_tail(tail: Tensor) -> int:
    return int.from_bytes(tail.cpu().numpy().tobytes(), "little")


def start_word_sum(tensor: Tensor) -> Tensor:
    """Return the word sum of a tensor as a number on its device, which nobody waits for."""
    words, tail = split_words(raw_bytes(tensor))
    total = words.sum()
    if tail.numel():
        shifts = 8 * torch.arange(tail.numel(), device=tail.device)
        total += (tail.long() << shifts).sum()
    return total


def word_sums(tensors: Sequence[Tensor], threads: int | None = None) -> list[int]:
    """Return the word sums of tensors on one device, which the host waits for once.

    On a CPU, a number of threads computes them; without that number, all cores do."""
    if not tensors or tensors[0].device.type == "cpu":
        return _sum_words_on_cpu(tensors, threads)
    if uses_triton(tensors[0].device):
        return [checksum.word_sum for checksum in prepare_checksums(tensors)()()]
    return finish_word_sums([start_word_sum(tensor) for tensor in tensors])


def finish_word_sums(totals: Sequence[Tensor]) -> list[int]:
    """Bring the results of `start_word_sum` to the host, all at once."""
    if not totals:
        return []
    numbers: list[int] = torch.stack(list(totals)).tolist()
    return [number % (1 << 64) for number in numbers]


def _sum_words_on_cpu(tensors: Sequence[Tensor], threads: int | None) -> list[int]:
    split = [split_words(raw_bytes(tensor)) for tensor in tensors]
    pieces = [
        (number, words.numpy()[start : start + _PIECE])
        for number, (words, _) in enumerate(split)
        for start in range(0, words.numel(), _PIECE)
    ]
    totals = [_sum_tail(tail) for _, tail in split]
    is_small = sum(tensor.nbytes for tensor in tensors) < _WORTH_THREADS
    with Team(1 if is_small else threads or _count_threads()) as team:
        sums = team.map(lambda piece: int(piece[1].sum()), pieces)
    for (number, _), total in zip(pieces, sums, strict=True):
        totals[number] += total
    return [total % (1 << 64) for total in totals]


def _count_threads() -> int:
    return min(_MAX_THREADS, len(os.sched_getaffinity(0)))


def map_in_threads(work: Callable[[Tensor], Result], tensors: Sequence[Tensor]) -> list[Result]:
    """Call `work` for each tensor in CPU memory, in a few threads if the tensors are large.

    `work` must use numpy, which releases the GIL."""
    is_small = sum(tensor.nbytes for tensor in tensors) < _WORTH_THREADS
    with Team(1 if is_small else _count_threads()) as team:
        return team.map(work, tensors)


class Team:
    """A number of threads, of which the caller's is one; each takes the next piece when it is free.

    torch divides an operation evenly among its threads, and all of them wait for the last one. If
    another process uses one of the cores, two of torch's threads take longer than one. Here the
    free cores do the rest."""

    def __init__(self, size: int) -> None:
        self._helpers = size - 1
        self._pool = ThreadPoolExecutor(size - 1) if size > 1 else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def map(self, work: Callable[[Piece], Result], pieces: Sequence[Piece]) -> list[Result]:
        """Call `work` for each piece; return the results in order.

        `work` must release the GIL, as numpy does."""
        if self._pool is None or len(pieces) < 2:
            return [work(piece) for piece in pieces]
        results: dict[int, Result] = {}
        todo = iter(enumerate(pieces))
        helpers = min(self._helpers, len(pieces) - 1)
        running = [self._pool.submit(_work_off, work, todo, results) for _ in range(helpers)]
        try:
            _work_off(work, todo, results)
        finally:
            wait(running)  # also after an error: nobody uses the memory once this has returned
        for helper in running:
            helper.result()
        return [results[number] for number in range(len(pieces))]


def _work_off(
    work: Callable[[Piece], Result],
    todo: Iterator[tuple[int, Piece]],
    results: dict[int, Result],
) -> None:
    # The iterator is written in C, so taking the next piece is one step under the GIL.
    for number, piece in todo:
        results[number] = work(piece)


def _sum_blocks_on_cpu(tensor: Tensor) -> NDArray[np.int64]:
    return sum_blocks(tensor.view(-1).view(torch.int64).numpy())


def sum_blocks(words: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the sums of a tensor's blocks in CPU memory, from which its digest is made."""
    factors = keys(torch.device("cpu")).numpy()
    scratch = np.empty(min(BLOCK, len(words)), np.int64)
    sums = np.empty(-(-len(words) // BLOCK), np.int64)
    for number in range(len(sums)):
        block = words[number * BLOCK : (number + 1) * BLOCK]
        folded = np.right_shift(block, 32, out=scratch[: len(block)])  # as in `_sum_rows`
        folded += block
        folded *= factors[: len(block)]
        sums[number] = folded.sum()
    return sums


def _sum_rows(rows: Tensor, factors: Tensor) -> Tensor:
    # A product carries upwards only, so first add the upper half to the lower one. Otherwise two
    # sign bits that flip at the top of their words would cancel each other.
    folded = rows >> 32
    folded += rows
    folded *= factors
    return folded.sum(1)


@functools.cache
def keys(device: torch.device) -> Tensor:
    """Return the keys of a block's positions: pseudo-random odd numbers, the same everywhere."""
    stream = hashlib.shake_128(b"rollway digest keys").digest(8 * BLOCK)
    return torch.frombuffer(bytearray(stream), dtype=torch.int64).bitwise_or(1).to(device)


def blocks_at_once(device: torch.device) -> int:
    """Return how many blocks to process at once: one fits a CPU's cache, a GPU has many cores."""
    return 1 if device.type == "cpu" else 512


def raw_bytes(tensor: Tensor) -> Tensor:
    """Return all bytes in order; a contiguous tensor is viewed, not copied."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def integers(tensor: Tensor) -> Tensor:
    """Return all elements as integers of their size; a contiguous tensor is viewed, not copied."""
    return tensor.detach().contiguous().view(-1).view(_INTEGERS[tensor.element_size()])


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
