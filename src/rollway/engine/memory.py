"""Memory for staged weights: how much is free, and where copies of tensors are placed.

An engine that serves must never run out of memory because a version is staged beside it. So a
reserve stays free, all memory is allocated before the first tensor is read, and a failed allocation
is an error of the staging, with figures. vLLM's sleep mode has an allocator of its own; staging
never allocates from it, because it is used only inside vLLM's own context, on vLLM's own thread.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import torch

from rollway.weights.checkpoint import TensorHeader
from rollway.weights.digest.checksums import DTYPES
from rollway.weights.layout import ELEMENT_BYTES, Shape, Slices

RESERVE = "ROLLWAY_STAGING_RESERVE_BYTES"
"""The environment variable for the device memory that staging leaves free."""
_GIB = 1 << 30
_ALIGNED = 64
_BUFFER_BYTES = 1 << 30
"""torch rounds pinned buffers up to a power of two; large ones could take twice the memory."""
_HOST_SPARE = 0.25
"""Host memory that must stay free, as a share of the weights."""


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """The free memory of a device or of the host, and how much of it must stay free."""

    where: str
    free: int
    reserve: int

    def holds(self, nbytes: int) -> bool:
        return self.free - self.reserve >= nbytes

    def __str__(self) -> str:
        return (
            f"{self.where} has {self.free / 1e9:.2f} GB free, of which {self.reserve / 1e9:.2f} GB "
            "stay free"
        )


def read_device_memory(device: torch.device, nbytes: int) -> FreeMemory:
    """Return the memory that weights of `nbytes` may use beside the model."""
    if device.type != "cuda":
        return read_host_memory(nbytes)
    free, total = torch.cuda.mem_get_info(device)
    configured = os.environ.get(RESERVE, "")
    reserve = int(configured) if configured.isdigit() else max(_GIB, total // 50)
    if free - reserve < nbytes:  # torch's list of its memory holds Python's lock for milliseconds
        index = torch.cuda._get_device_index(device, True)
        free += count_reusable(torch.cuda.memory_snapshot(), index)
    return FreeMemory(str(device), free, reserve)


def read_host_memory(nbytes: int, kept: int = 0) -> FreeMemory:
    """Return the memory that weights of `nbytes` may use; `kept` is held for them already."""
    return FreeMemory("the host", count_free_bytes() + kept, int(_HOST_SPARE * nbytes))


def count_free_bytes() -> int:
    """Return the free memory of this machine, within the limit of this container."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    cgroup = Path("/sys/fs/cgroup")
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
    except (OSError, ValueError):
        return free  # no limit
    return min(free, limit - used)


def count_reusable(segments: Sequence[Mapping[str, object]], index: int) -> int:
    """Return the bytes that torch's allocator holds but does not use, in a snapshot of its memory.

    It returns these to the device by itself when an allocation needs them. Pools of CUDA graphs and
    of vLLM's sleep mode do not count: nobody else can use their memory."""
    total = 0
    for segment in segments:
        if segment["device"] != index or tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0):  # type: ignore[arg-type]
            continue
        # Active memory includes blocks that were freed, but whose stream still works on them.
        size, used = int(segment["total_size"]), int(segment["active_size"])  # type: ignore[call-overload]
        if used == 0 or segment.get("is_expandable"):
            total += size - used
    return total


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory was not sufficient. torch has several forms of it:
    on a device, for pinned memory, and for plain memory; a file that cannot be mapped has its own.
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    text = str(error).lower()
    return isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate" in text)


@dataclass(slots=True)
class StagedTensors:
    """Copies of tensors, one after the other in a few large buffers."""

    device: torch.device
    host: list[torch.Tensor] | None = None
    """Where buffers in pinned host memory come from, and where they return to: pinning takes longer
    than filling."""
    views: dict[str, torch.Tensor] = field(default_factory=dict)
    _buffers: list[torch.Tensor] = field(default_factory=list)

    def allocate(self, shapes: Mapping[str, tuple[str, Shape]]) -> None:
        """Allocate memory for tensors of these dtypes and shapes, all of it at once."""
        layout = list(_lay_out(shapes))
        sizes = [part[-1][-1] for part in layout]
        if self.host is None:
            self._buffers = [allocate(size, self.device, pinned=False) for size in sizes]
        else:
            self._buffers = self._take_host_buffers(sizes)
        for buffer, part in zip(self._buffers, layout, strict=True):
            for name, start, _ in part:
                dtype, shape = shapes[name]
                end = start + prod(shape) * ELEMENT_BYTES[dtype]
                self.views[name] = buffer[start:end].view(DTYPES[dtype]).view(shape)

    def _take_host_buffers(self, sizes: list[int]) -> list[torch.Tensor]:
        """Return the kept buffers if they have these sizes, otherwise new ones."""
        assert self.host is not None
        kept = list(self.host)
        self.host.clear()
        if [buffer.nbytes for buffer in kept] == sizes:
            return kept
        kept.clear()
        is_pinned = torch.cuda.is_available()
        return [allocate(size, torch.device("cpu"), pinned=is_pinned) for size in sizes]

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Copy a tensor to its place. On a GPU this waits only for copies from plain memory."""
        view = self.views[name]
        if view.shape != tensor.shape or view.dtype != tensor.dtype:
            raise RuntimeError(f"{name} arrived as {tensor.dtype}{list(tensor.shape)}")
        view.copy_(tensor)

    def release(self, *, wait: bool) -> None:
        """Give the memory back, to the host's buffers or to the device. Without `wait`, a thread
        returns it to the device."""
        buffers, self._buffers, self.views = self._buffers, [], {}
        if buffers and self.host is not None:
            self.host[:] = buffers
        elif buffers:
            del buffers
            return_unused(self.device, wait=wait)


def return_unused(device: torch.device, *, wait: bool) -> None:
    """Return memory that torch keeps for later to the device; without `wait`, in a thread."""
    if device.type != "cuda":
        return
    if wait:
        _empty_cache(device)
    else:
        threading.Thread(target=_empty_cache, args=(device,), daemon=True).start()


def _empty_cache(device: torch.device) -> None:
    with torch.cuda.device(device):
        torch.cuda.empty_cache()


def allocate(nbytes: int, device: torch.device, *, pinned: bool) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=device, pin_memory=pinned)


def list_received_shapes(
    headers: Mapping[str, TensorHeader], slices: Slices
) -> dict[str, tuple[str, Shape]]:
    """Return dtype and shape of each tensor that a rank receives, whole or in part."""
    shapes = {}
    for name, header in headers.items():
        box = slices.boxes.get(name)
        if name in slices.boxes and box is None:
            continue  # this rank holds nothing of it
        shapes[name] = header.dtype, header.shape if box is None else box.shape
    return shapes


def count_bytes(shapes: Mapping[str, tuple[str, Shape]]) -> int:
    return sum(part[-1][-1] for part in _lay_out(shapes))


def _lay_out(shapes: Mapping[str, tuple[str, Shape]]) -> Iterator[list[tuple[str, int, int]]]:
    """Yield the tensors of each buffer, each with the offsets where it starts and ends."""
    part: list[tuple[str, int, int]] = []
    offset = 0
    for name, (dtype, shape) in shapes.items():
        nbytes = prod(shape) * ELEMENT_BYTES[dtype]
        end = offset + -(-nbytes // _ALIGNED) * _ALIGNED
        if part and end > _BUFFER_BYTES:
            yield part
            part, end = [], end - offset
            offset = 0
        part.append((name, offset, end))
        offset = end
    if part:
        yield part
