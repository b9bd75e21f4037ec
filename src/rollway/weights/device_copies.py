"""Bring tensors from a GPU to the host at the speed of the bus.

    GPU ──► pinned pieces ── threads ──► memory or file

`tensor.cpu()` copies into pageable memory, at a tenth of the bus. Here tensors come in pieces of
pinned memory, which torch keeps for the next ones, and threads empty them. Memory that is itself
pinned (`Pinning`) needs no pieces: the GPU writes straight into it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollway.errors import WeightsError
from rollway.weights.digest.checksums import count_threads, raw_bytes

log = logging.getLogger(__name__)

_PIECE_BYTES = 16 << 20
"""What one thread empties at a time."""
_MAX_PIECES = 16
"""How many are on their way."""
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


class HostCopier:
    """Copies tensors to the host. Copies are complete after `finish`.

    A source may change as soon as `send` or `copy` has returned, as far as that is work on the
    device's current stream: the copies come before it there."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(count_threads())
        self._running: deque[Future[None]] = deque()
        self._device: torch.device | None = None
        """The GPU that writes into pinned memory of the host itself."""

    def copy(self, target: Tensor, source: Tensor, *, is_pinned: bool = False) -> None:
        """Copy into `target`, which is contiguous CPU memory of the same size."""
        if is_pinned and source.is_cuda:
            raw_bytes(target).copy_(raw_bytes(source), non_blocking=True)
            self._device = source.device
        elif source.device.type == "cpu" and not source.is_contiguous():
            target.copy_(source.detach())
        else:
            to = raw_bytes(target).numpy()
            self.send(source, lambda at, data: np.copyto(to[at : at + len(data)], data))

    def send(self, source: Tensor, write: Write) -> None:
        """Pass all bytes to `write`, in pieces; threads call it, in any order."""
        for number, piece in enumerate(raw_bytes(source).split(_PIECE_BYTES)):
            at = number * _PIECE_BYTES
            host, wait_for_piece = _start_copy(piece)
            if host is piece:  # it was on the host, and the caller may change it
                write(at, host.numpy())
                continue
            self._running.append(self._pool.submit(_empty, wait_for_piece, write, at, host))
            if len(self._running) > _MAX_PIECES:
                self._running.popleft().result()

    def finish(self) -> None:
        """Wait until everything has arrived; raise what a `write` raised."""
        running, self._running = self._running, deque()
        wait(running)
        if self._device is not None:
            torch.cuda.current_stream(self._device).synchronize()
        for piece in running:
            piece.result()

    def close(self) -> None:
        """End the threads, after what is on its way has arrived."""
        with contextlib.suppress(Exception):  # who needs the result has called `finish`
            self.finish()
        self._pool.shutdown()

    def __enter__(self) -> HostCopier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _empty(wait_for_piece: Callable[[], object], write: Write, at: int, host: Tensor) -> None:
    wait_for_piece()
    write(at, host.numpy())


def copy_to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors in CPU memory; the host waits for the device once.

    Those of a GPU are in pinned memory, which torch uses again when they are freed."""
    hosts, wait_for_all = start_copies_to_host(tensors)
    wait_for_all()
    return hosts


def start_copies_to_host(tensors: Sequence[Tensor]) -> tuple[list[Tensor], Callable[[], None]]:
    """Start the same on the current stream; return the copies and a function that waits."""
    copies = [_start_copy(tensor) for tensor in tensors]

    def wait_for_all() -> None:
        for _, wait_for_one in copies:
            wait_for_one()

    return [host for host, _ in copies], wait_for_all


def _start_copy(tensor: Tensor) -> tuple[Tensor, Callable[[], object]]:
    """Start a copy on the current stream; return it and a function that waits for it."""
    if not tensor.is_cuda:
        return tensor, _do_nothing
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor.detach(), non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(tensor.device))
    return host, event.synchronize


def _do_nothing() -> None:
    pass


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
        is_gpu = self._device.type == "cuda"
        try:
            with torch.cuda.device(self._device) if is_gpu else contextlib.nullcontext():
                result = torch.cuda.cudart().cudaHostRegister(
                    self._memory.data_ptr(), self._memory.nbytes, self._flags
                )
            self._is_pinned = int(result) == 0
            reason = f"cudaHostRegister returned {result}"
        except (RuntimeError, AssertionError) as error:  # torch raises both without CUDA
            reason = str(error).splitlines()[0]
        if not self._is_pinned:
            log.info("shared memory cannot be pinned, so weights go through a buffer: %s", reason)
