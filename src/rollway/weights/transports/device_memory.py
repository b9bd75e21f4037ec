"""Memory that another process on this machine can open: on a GPU by CUDA IPC, on a CPU by a file.

This is how torch sends CUDA tensors to other processes, without its pickles. `_share_cuda_` returns
a handle of the whole allocation, the offset of the storage in it, a counter by which torch learns
that the other process released the memory, and an event that the first use waits for.
"""

from __future__ import annotations

import base64
import contextlib
import os
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from rollway.errors import UsageError, WeightsError
from rollway.weights.offer import Count, Entry
from rollway.weights.transports.entries import (
    make_entry,
    map_for_reading,
    map_for_writing,
    open_shared_file,
)
from rollway.weights.untrusted import is_file_name

CPU = "cpu"
_CONFIGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_EXPANDABLE = re.compile(r"expandable_segments:\s*True", re.IGNORECASE)
Text = Annotated[str, msgspec.Meta(max_length=1 << 16)]


class Handle(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A run of bytes: on a GPU when `memory` is set, else in `file`. Raw bytes are in base64."""

    nbytes: Count
    file: Text = ""
    memory: Text = ""
    """CUDA's handle of the whole allocation that contains the bytes."""
    offset: Count = 0
    counter: Text = ""
    counter_offset: Count = 0
    event: Text = ""
    event_sync: bool = False


class Segment(NamedTuple):
    """One allocation of torch's allocator, which may contain many tensors."""

    address: int
    nbytes: int
    is_expandable: bool = False


def allocate(nbytes: int, device: torch.device, path: Path) -> Tensor:
    """Allocate bytes on the device; those of a CPU are in a new file at `path`."""
    if device.type == CPU:
        return map_for_writing(path, nbytes)
    with _without_expandable_segments():
        return torch.empty(nbytes, dtype=torch.uint8, device=device)


def export(memory: Tensor, path: Path) -> Handle:
    """Return the handle by which others open memory that was allocated here.

    The caller must keep the memory. torch returns it to its allocator only after every reader has
    released it as well."""
    if memory.device.type == CPU:
        return Handle(memory.numel(), file=path.name)
    try:
        return _make_handle(_share(memory))
    except WeightsError as error:
        raise WeightsError(
            f"A copy on the GPU cannot be published: {error.message}.",
            "Use torch's own allocator (no cudaMallocAsync), or another transport.",
        ) from error


def list_segments(device: torch.device) -> list[Segment]:
    """List the allocations of torch's allocator on a GPU."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return [
        Segment(segment["address"], segment["total_size"], bool(segment.get("is_expandable")))
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == index
    ]


def export_segment(tensor: Tensor, segment: Segment) -> Handle:
    """Return the handle of the whole allocation that contains the tensor.

    Raises `WeightsError` for memory that has no such handle; its message is a short reason."""
    if segment.is_expandable:
        # torch has handles of its own for it, which a reader may open only if it may debug this
        # process.
        raise WeightsError("in an expandable segment (expandable_segments:True)")
    _, handle, _, offset, *rest = _share(tensor)
    if tensor.untyped_storage().data_ptr() - offset != segment.address:
        raise WeightsError("its allocation is not the one that torch's allocator names")
    return _make_handle((None, handle, segment.nbytes, 0, *rest))


def _share(tensor: Tensor) -> tuple[Any, ...]:
    try:
        shared: tuple[Any, ...] = tensor.untyped_storage()._share_cuda_()
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise WeightsError(f"its memory cannot be shared ({reason})") from error
    return shared


def _make_handle(shared: tuple[Any, ...]) -> Handle:
    """Return what `_share_cuda_` returned, as text."""
    _, handle, nbytes, offset, counter, counter_offset, event, event_sync = shared
    return Handle(
        nbytes=nbytes,
        memory=base64.b64encode(handle).decode(),
        offset=offset,
        counter=base64.b64encode(counter).decode(),
        counter_offset=counter_offset,
        event=base64.b64encode(event).decode(),
        event_sync=bool(event_sync),
    )


def open_handle(handle: Handle, device: torch.device, directory: Path) -> Tensor:
    """Open the bytes in place; they stay open as long as the returned tensor exists."""
    if device.type == CPU:
        return _open_file(handle, directory)
    # Decoded first: a malformed handle must not be reported as an error of CUDA.
    memory, counter, event = map(_decode, (handle.memory, handle.counter, handle.event))
    try:
        torch.cuda.init()
        storage = torch.UntypedStorage._new_shared_cuda(
            device.index,
            memory,
            handle.nbytes,
            handle.offset,
            counter,
            handle.counter_offset,
            event,
            handle.event_sync,
        )
    except RuntimeError as error:
        raise WeightsError(
            f"The trainer's memory on the GPU cannot be opened: {str(error).splitlines()[0]}",
            "The trainer must run in another process and share IPC and pids with this one "
            "(`--ipc=host --pid=host` of a container).",
        ) from error
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _open_file(handle: Handle, directory: Path) -> Tensor:
    if not is_file_name(handle.file):
        raise WeightsError(f"{handle.file[:255]!a} is no file of a publisher.")
    path = directory / handle.file
    with open_shared_file(path) as (descriptor, status):
        if status.st_size != handle.nbytes:
            raise WeightsError(f"{path} does not hold {handle.nbytes} bytes.")
        return map_for_reading(descriptor, status.st_size)


def _decode(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:  # not base64, or not even ASCII
        raise WeightsError("A handle in the offer is malformed.", "Publish it again.") from error


@contextlib.contextmanager
def _without_expandable_segments() -> Iterator[None]:
    """Allocate plain memory, also where the process is configured for expandable segments."""
    name = next((n for n in _CONFIGS if _EXPANDABLE.search(os.environ.get(n, ""))), None)
    configure = getattr(torch.cuda.memory, "_set_allocator_settings", None)
    if name is None or configure is None:
        yield
        return
    # Free parts of expandable segments would be used first.
    torch.cuda.empty_cache()
    # The whole setting each time: what is not named goes back to its default.
    configure(_EXPANDABLE.sub("expandable_segments:False", os.environ[name]))
    try:
        yield
    finally:
        configure(os.environ[name])


def device_name(device: torch.device) -> str:
    """Return the device's UUID, which all processes agree on whichever devices they see."""
    if device.type == CPU:
        return CPU
    return str(torch.cuda.get_device_properties(device).uuid)


def local_device(name: str) -> torch.device:
    """Return the device with that UUID, as this process numbers devices."""
    if name == CPU:
        return torch.device(CPU)
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        if device_name(torch.device("cuda", index)) == name:
            return torch.device("cuda", index)
    raise WeightsError(
        f"The weights are on the GPU {name}, which this worker does not see.",
        "Add the trainer's GPU to CUDA_VISIBLE_DEVICES, or use another transport.",
    )


def find_device(tensors: Iterable[Tensor]) -> torch.device:
    """Return the device of all tensors; raise `UsageError` if they are on several."""
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1 or next(iter(devices)).type not in ("cpu", "cuda"):
        raise UsageError(
            f"These tensors are on {', '.join(sorted(map(str, devices)))}.",
            "Use one publisher for each GPU.",
        )
    return devices.pop()


@dataclass(slots=True)
class InPlace:
    """Tensors that are published from their own memory, and those that cannot be.

        tensors ──► allocations of torch's allocator ──► one IPC handle for each
        a, b, c     [ a │ b │ … ] [ c ]                  a tensor is an offset in one of them

    Many small tensors share one allocation, and a reader opens each allocation once. Memory of
    torch's expandable segments, and of allocators that map memory themselves (vLLM's cumem), has no
    such handle. Those tensors are refused here, with the reason, and the publisher copies them.
    """

    tensors: dict[str, Tensor]
    """All of them, also those that are refused."""
    entries: list[Entry] = field(default_factory=list)
    """Offsets count through the memory of all handles."""
    handles: list[Handle] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    """The reason for each tensor that must be copied."""

    def is_of(self, tensors: Mapping[str, Tensor]) -> bool:
        """Return whether these tensors are where they were."""
        return _sign(tensors) == _sign(self.tensors)

    def explain_refused(self) -> str:
        """Return how many tensors are copied and why, most frequent reason first; or nothing."""
        counts = Counter(self.refused.values()).most_common()
        return "; ".join(f"{count} tensors: {reason}" for reason, count in counts)


def _sign(tensors: Mapping[str, Tensor]) -> list[Any]:
    return [(name, t.dtype, t.shape, t.stride(), t.data_ptr()) for name, t in tensors.items()]


def find_in_place(tensors: Mapping[str, Tensor]) -> InPlace:
    """Find the memory of tensors on one GPU, and export it."""
    placed = InPlace(dict(tensors))
    if not tensors:
        return placed
    device = find_device(tensors.values())
    if device.type == CPU:
        placed.refused = dict.fromkeys(tensors, "in CPU memory")
        return placed
    segments = sorted(list_segments(device))
    starts: dict[int, int] = {}
    """By the address of an exported segment: where it begins in the memory of all handles."""
    for name, tensor in tensors.items():
        try:
            segment = _find_segment(tensor, segments)
            if segment.address not in starts:
                handle = export_segment(tensor, segment)
                starts[segment.address] = sum(other.nbytes for other in placed.handles)
                placed.handles.append(handle)
        except WeightsError as error:
            placed.refused[name] = error.message
            continue
        offset = starts[segment.address] + tensor.data_ptr() - segment.address
        placed.entries.append(make_entry(name, tensor, offset))
    return placed


def _find_segment(tensor: Tensor, segments: list[Segment]) -> Segment:
    """Return the allocation that contains a tensor; segments are in the order of addresses."""
    if not tensor.is_contiguous():
        raise WeightsError("not contiguous")
    if not tensor.nbytes:
        raise WeightsError("empty")
    address = int(tensor.data_ptr())
    number = bisect_right(segments, address, key=lambda segment: segment.address) - 1
    if number < 0 or address + tensor.nbytes > segments[number].address + segments[number].nbytes:
        raise WeightsError("not in memory of torch's allocator")
    return segments[number]
