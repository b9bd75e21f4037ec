"""Bring tensors from a GPU to the host at the speed of the bus.

    GPU ── own stream ──► pinned chunk A ── threads ──► memory or file
                     └──► pinned chunk B    (the GPU fills one while threads empty the other)

`tensor.cpu()` copies into pageable memory, tensor by tensor, at a tenth of the bus. Here many small
tensors share a chunk, and large ones are divided. Memory that is itself pinned (`pin`) needs no
chunk: the GPU writes straight into it. Tensors in CPU memory are copied plainly.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollway.errors import WeightsError
from rollway.weights.digest.checksums import raw_bytes

log = logging.getLogger(__name__)

CHUNK_BYTES = 128 << 20
_PIECE_BYTES = 16 << 20
"""What one thread empties at a time."""
_MAX_THREADS = 8
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all contexts of the process
_READ_ONLY = 8  # cudaHostRegisterReadOnly: the process may not write to the memory
Write = Callable[[int, NDArray[np.uint8]], object]
"""Consumes bytes of a tensor; the number says where in the tensor they start."""


@contextlib.contextmanager
def explain_exhaustion(what: str, fix: str) -> Iterator[None]:
    """Raise `WeightsError` with figures where a trainer's device has no memory left for `what`."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        # Read before anything is released: this is what was free when it failed.
        free = torch.cuda.mem_get_info()[0] if torch.cuda.is_initialized() else 0
        held = torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0
        raise WeightsError(
            f"The device's memory does not hold {what}: {free / 1e9:.2f} GB are free, and this "
            f"process holds {held / 1e9:.2f} GB.",
            fix,
        ) from error


@dataclass(slots=True)
class _Chunk:
    """Pinned memory with pieces of tensors, and who consumes each piece."""

    memory: Tensor
    used: int = 0
    pieces: list[tuple[slice, int, Write]] = field(default_factory=list)
    emptied: Future[None] | None = None


class HostCopier:
    """Copies tensors to the host. Copies are complete after `finish`.

    A source may change as soon as `send` or `copy` has returned, as far as that is work on the
    device's current stream: the copies come before it there."""

    def __init__(self, chunk_bytes: int = CHUNK_BYTES, *, through_chunks: bool = False) -> None:
        """Start without chunks. `through_chunks` sends tensors in CPU memory the way of those on a
        GPU."""
        self._chunk_bytes = chunk_bytes
        self._through_chunks = through_chunks
        self._device = torch.device("cpu")
        self._stream: Any = None
        self._chunks: list[_Chunk] = []
        self._pool: ThreadPoolExecutor | None = None
        self._emptier: ThreadPoolExecutor | None = None

    def copy(self, target: Tensor, source: Tensor, *, is_pinned: bool = False) -> None:
        """Copy into `target`, which is contiguous CPU memory of the same size."""
        if not source.nbytes:
            return
        if is_pinned and source.is_cuda:
            with self._on_stream(raw_bytes(source)) as flat:
                raw_bytes(target).copy_(flat, non_blocking=True)
            return
        to = raw_bytes(target).numpy()
        if source.device.type == "cpu" and not source.is_contiguous():
            target.copy_(source.detach())
        else:
            self.send(source, lambda at, data: np.copyto(to[at : at + len(data)], data))

    def send(self, source: Tensor, write: Write) -> None:
        """Pass all bytes to `write`, in pieces; threads call it, in any order."""
        flat = raw_bytes(source)
        if source.device.type == "cpu" and not self._through_chunks:
            write(0, flat.numpy())
            return
        with self._on_stream(flat):
            at = 0
            while at < flat.numel():
                chunk = self._find_room()
                end = min(flat.numel(), at + self._chunk_bytes - chunk.used)
                place = slice(chunk.used, chunk.used + end - at)
                chunk.memory[place].copy_(flat[at:end], non_blocking=True)
                chunk.pieces.append((place, at, write))
                chunk.used, at = place.stop, end
                if chunk.used == self._chunk_bytes:
                    self._start_emptying(chunk)

    def finish(self) -> None:
        """Wait until everything has arrived; raise what a `write` raised."""
        for chunk in self._chunks:
            if chunk.pieces and chunk.emptied is None:
                self._start_emptying(chunk)
        chunks, self._chunks = self._chunks, []
        errors = [chunk.emptied.exception() for chunk in chunks if chunk.emptied is not None]
        if self._stream is not None:
            self._stream.synchronize()
        for chunk in chunks:
            chunk.used, chunk.pieces, chunk.emptied = 0, [], None
        self._chunks = chunks
        for error in filter(None, errors):
            raise error

    def close(self) -> None:
        """Release the chunks, after what is on its way has arrived."""
        with contextlib.suppress(Exception):  # who needs the result has called `finish`
            self.finish()
        for pool in (self._emptier, self._pool):
            if pool is not None:
                pool.shutdown()
        self._chunks, self._pool, self._emptier = [], None, None

    def __enter__(self) -> HostCopier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _on_stream(self, flat: Tensor) -> Iterator[Tensor]:
        """Work on the own stream: after all work of the current one, and before what follows."""
        if not flat.is_cuda:
            yield flat
            return
        if self._stream is None or self._device != flat.device:
            self.finish()
            self._device, self._stream = flat.device, torch.cuda.Stream(flat.device)
        current = torch.cuda.current_stream(flat.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield flat
        current.wait_stream(self._stream)
        flat.record_stream(self._stream)  # its memory may be freed before it is read

    def _find_room(self) -> _Chunk:
        """Return a chunk with free bytes; wait for the one that was filled first."""
        for chunk in self._chunks:
            if chunk.emptied is None:
                return chunk
        if len(self._chunks) < 2:
            self._chunks.append(_Chunk(allocate_pinned(self._chunk_bytes)))
            return self._chunks[-1]
        chunk = self._chunks.pop(0)
        self._chunks.append(chunk)
        assert chunk.emptied is not None
        try:
            chunk.emptied.result()
        finally:
            chunk.used, chunk.pieces, chunk.emptied = 0, [], None
        return chunk

    def _start_emptying(self, chunk: _Chunk) -> None:
        if self._pool is None or self._emptier is None:
            threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
            self._pool, self._emptier = ThreadPoolExecutor(threads), ThreadPoolExecutor(1)
        wait = record_event(self._device, self._stream)
        pool, device = self._pool, self._device

        def empty() -> None:
            with _on_device(device):  # a new thread would use the first GPU
                wait()
            data = chunk.memory.numpy()
            running = [pool.submit(write, at, part) for write, at, part in _divide(chunk, data)]
            for part_done in running:
                part_done.result()

        chunk.emptied = self._emptier.submit(empty)


def _divide(
    chunk: _Chunk, data: NDArray[np.uint8]
) -> Iterator[tuple[Write, int, NDArray[np.uint8]]]:
    for place, at, write in chunk.pieces:
        for start in range(place.start, place.stop, _PIECE_BYTES):
            stop = min(place.stop, start + _PIECE_BYTES)
            yield write, at + start - place.start, data[start:stop]


def stream_to_host(
    tensors: Iterable[tuple[str, Tensor]],
) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors in CPU memory; the next one is on its way while the caller works on one."""
    waiting: tuple[str, Tensor, Callable[[], object]] | None = None
    for name, tensor in tensors:
        host, wait = _start_copy(tensor)
        if waiting is not None:
            waiting[2]()
            yield waiting[0], waiting[1]
        waiting = name, host, wait
    if waiting is not None:
        waiting[2]()
        yield waiting[0], waiting[1]


def join_on_device(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return flat parts in CPU memory as one tensor on a device.

    Parts of one piece of pinned memory are copied with what lies between them, and joined on the
    device. Others are joined in pinned memory, from which a GPU reads several times as fast and
    beside other work; torch keeps pinned memory until the copy is complete."""
    if device.type != "cuda":
        return torch.cat(list(parts)).to(device)
    span = find_span(parts)
    if span is not None and span.is_pinned():
        moved = span.to(device, non_blocking=True)
        start = span.storage_offset()
        return torch.cat(
            [moved[p.storage_offset() - start :][: p.numel()] for p in parts if p.numel()]
        )
    size = sum(part.numel() for part in parts)
    joined = torch.empty(size, dtype=parts[0].dtype, pin_memory=True)
    torch.cat(list(parts), out=joined)
    return joined.to(device, non_blocking=True)


def find_span(parts: Sequence[Tensor]) -> Tensor | None:
    """Return the memory from the first part to the last, if most of it is parts."""
    parts = [part for part in parts if part.numel()]
    if len({part.untyped_storage().data_ptr() for part in parts}) != 1:
        return None
    start = min(part.storage_offset() for part in parts)
    size = max(part.storage_offset() + part.numel() for part in parts) - start
    if size > 2 * sum(part.numel() for part in parts):
        return None
    return parts[0].as_strided((size,), (1,), start)


def copy_to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors in CPU memory; the host waits for the device once.

    Those of a GPU are in pinned memory, which torch uses again when they are freed."""
    hosts, wait = start_copies_to_host(tensors)
    wait()
    return hosts


def start_copies_to_host(tensors: Sequence[Tensor]) -> tuple[list[Tensor], Callable[[], None]]:
    """Start the same on the current stream; return the copies and a function that waits."""
    copies = [_start_copy(tensor) for tensor in tensors]

    def wait() -> None:
        for _, wait_for_one in copies:
            wait_for_one()

    return [host for host, _ in copies], wait


def _start_copy(tensor: Tensor) -> tuple[Tensor, Callable[[], object]]:
    """Start a copy on the current stream; return it and a function that waits for it."""
    if not tensor.is_cuda:
        return tensor, _do_nothing
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor.detach(), non_blocking=True)
    return host, record_event(tensor.device)


def record_event(device: torch.device, stream: Any = None) -> Callable[[], object]:
    """Mark the work of a stream, or of the current one; return a function that waits for it."""
    if device.type != "cuda":
        return _do_nothing
    event = torch.cuda.Event()
    event.record(stream or torch.cuda.current_stream(device))
    wait: Callable[[], object] = event.synchronize
    return wait


def allocate_pinned(nbytes: int) -> Tensor:
    """Allocate host memory that a GPU reads and writes at full speed; plain without a GPU."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=torch.cuda.is_initialized())


class Pinning:
    """Pins memory of the host in the background, since that takes about 0.1 s for a gigabyte."""

    def __init__(self, memory: Tensor, device: torch.device, *, read_only: bool = False) -> None:
        self._memory: Tensor | None = memory
        self._device = device
        self._flags = _PORTABLE | (_READ_ONLY if read_only else 0)
        self._is_pinned = False
        self._thread = threading.Thread(target=self._run, name="rollway-pin", daemon=True)
        self._thread.start()

    def is_pinned(self) -> bool:
        """Return whether the GPU can write straight into the memory; wait until that is known."""
        self._thread.join()
        return self._is_pinned

    def release(self) -> None:
        """Unpin the memory; only then may it be unmapped."""
        if self.is_pinned() and self._memory is not None:
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())
        self._memory, self._is_pinned = None, False

    def __del__(self) -> None:
        # CUDA would keep the addresses as pinned, and refuse them to whoever maps them next.
        with contextlib.suppress(Exception):
            self.release()

    def _run(self) -> None:
        assert self._memory is not None
        try:
            with _on_device(self._device):
                result = torch.cuda.cudart().cudaHostRegister(
                    self._memory.data_ptr(), self._memory.nbytes, self._flags
                )
            self._is_pinned = int(result) == 0
            reason = f"cudaHostRegister returned {result}"
        except (RuntimeError, AssertionError) as error:  # torch raises both without CUDA
            reason = str(error).splitlines()[0]
        if not self._is_pinned:
            log.info("shared memory cannot be pinned, so weights go through a buffer: %s", reason)


def _on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _do_nothing() -> None:
    pass
