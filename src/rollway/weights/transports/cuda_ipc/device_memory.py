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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from rollway.errors import UsageError, WeightsError
from rollway.weights.copies import SummedCopies
from rollway.weights.offer import Count, Entry
from rollway.weights.transports.entries import (
    align,
    lay_out,
    map_for_reading,
    map_for_writing,
    open_shared_file,
    set_checksums,
    view_entries,
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
    storage = tensor.untyped_storage()
    try:
        _, handle, _, offset, counter, counter_offset, event, event_sync = storage._share_cuda_()
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise WeightsError(f"its memory cannot be shared ({reason})") from error
    if storage.data_ptr() - offset != segment.address:
        raise WeightsError("its allocation is not the one that torch's allocator names")
    whole = (None, handle, segment.nbytes, 0, counter, counter_offset, event, event_sync)
    return _make_handle(whole)


def export(memory: Tensor, path: Path | None = None) -> Handle:
    """Return the handle by which others open a storage, or the file at `path`.

    The caller must keep the memory. torch returns it to its allocator only after every reader has
    released it as well."""
    if memory.device.type == CPU:
        assert path is not None
        return Handle(memory.numel(), file=path.name)
    try:
        shared = memory.untyped_storage()._share_cuda_()
    except RuntimeError as error:
        raise WeightsError(
            f"Memory of the GPU cannot be shared: {str(error).splitlines()[0]}",
            "Use torch's own allocator (no cudaMallocAsync), or another transport.",
        ) from error
    return _make_handle(shared)


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


_ALIGNMENT = 512
Signature = list[tuple[str, torch.dtype, torch.Size, tuple[int, ...], int]]


def sign(tensors: Mapping[str, Tensor]) -> Signature:
    """Return what must stay the same for prepared work on tensors to be used again."""
    return [(name, t.dtype, t.shape, t.stride(), t.data_ptr()) for name, t in tensors.items()]


@dataclass(frozen=True, slots=True)
class _PreparedBucket:
    """Copies of tensors at known addresses into a bucket."""

    signature: Signature
    entries: list[Entry]
    copies: SummedCopies


@dataclass(slots=True)
class Slot:
    """The memory of one version."""

    number: int
    directory: Path
    """Where the files of buckets in CPU memory are."""
    bucket_bytes: int
    version: int = -1
    buckets: list[Tensor] = field(default_factory=list)
    """As bytes."""
    handles: list[Handle] = field(default_factory=list)
    _prepared: dict[int, _PreparedBucket] = field(default_factory=dict)
    """The copies of the previous version, by bucket."""

    @property
    def nbytes(self) -> int:
        return sum(handle.nbytes for handle in self.handles)

    def copy(self, tensors: Iterable[tuple[str, Tensor]]) -> list[Entry]:
        """Copy tensors into the buckets, one bucket at a time; return their entries."""
        entries: list[Entry] = []
        names: set[str] = set()
        number = -1
        for number, bucket in enumerate(_split_into_buckets(tensors, self.bucket_bytes)):
            repeated = names & bucket.keys()
            if repeated:
                raise UsageError(f"{min(repeated)} came twice.", "Publish each name once.")
            names |= bucket.keys()
            prepared = self._prepare(number, bucket)
            # Checksums exist once the copies are complete: only then may a source be released.
            entries += set_checksums(prepared.entries, prepared.copies.start_checksums()())
            bucket.clear()
        self.release(number + 1)
        return entries

    def release(self, first: int = 0) -> None:
        """Release this bucket and those after it."""
        for handle in self.handles[first:]:
            if handle.file:
                (self.directory / handle.file).unlink(missing_ok=True)
        del self.buckets[first:], self.handles[first:]
        self._prepared = {n: bucket for n, bucket in self._prepared.items() if n < first}

    def _prepare(self, number: int, tensors: dict[str, Tensor]) -> _PreparedBucket:
        """Prepare the copies into a bucket, which is allocated again if the tensors do not fit."""
        signature = sign(tensors)
        device = find_device((*tensors.values(), *self.buckets[:number]))
        known = self._prepared.get(number)
        if (
            known is not None
            and known.signature == signature
            and self.buckets[number].device == device
        ):
            return known
        start = sum(bucket.numel() for bucket in self.buckets[:number])
        entries, nbytes = lay_out(tensors, _ALIGNMENT, start)
        size = max(nbytes, _ALIGNMENT)
        present = [(bucket.numel(), bucket.device) for bucket in self.buckets[number : number + 1]]
        if present != [(size, device)]:
            # Released before the new one is allocated: the device may have space for only one.
            self.release(number)
            path = self.directory / f"{self.number}.{number}.{os.urandom(4).hex()}"
            self.buckets.append(allocate(size, device, path))
            self.handles.append(export(self.buckets[-1], path))
        targets = view_entries(entries, self.buckets)
        copies = SummedCopies(list(zip(targets, tensors.values(), strict=True)))
        prepared = _PreparedBucket(signature, entries, copies)
        if not copies.keeps_tensors:
            self._prepared[number] = prepared
        return prepared


def find_device(tensors: Iterable[Tensor]) -> torch.device:
    """Return the device of all tensors; raise `UsageError` if they are on several."""
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1 or next(iter(devices)).type not in ("cpu", "cuda"):
        raise UsageError(
            f"These tensors are on {', '.join(sorted(map(str, devices)))}.",
            "Use one publisher for each GPU.",
        )
    return devices.pop()


def _split_into_buckets(
    tensors: Iterable[tuple[str, Tensor]], most: int
) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of one bucket at a time; a tensor longer than `most` has its own."""
    bucket: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if name in bucket:
            raise UsageError(f"{name} came twice.", "Publish each name once.")
        if size and size + tensor.nbytes > most:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = tensor
        size += align(tensor.nbytes, _ALIGNMENT)
        del tensor  # the caller clears the bucket: no reference may stay here
    if bucket:
        yield bucket
