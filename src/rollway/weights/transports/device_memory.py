"""Memory that another process of this machine can open: a GPU's by CUDA IPC, a CPU's by a file.

torch's own way of sending CUDA tensors, without its pickles. What `_share_cuda_` returns names the
whole allocation, where the storage lies in it, a counter that tells torch when the other side let
go, and an event that its first use waits for.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from torch import Tensor

from rollway.errors import WeightsError
from rollway.weights.offer import Count
from rollway.weights.transports.shm import mapped, mapped_for_writing, plain_file
from rollway.weights.untrusted import is_file_name

CPU = "cpu"
Text = Annotated[str, msgspec.Meta(max_length=1 << 16)]


class Handle(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One run of bytes: of a GPU when `memory` is set, else those of `file`. Bytes are base64."""

    nbytes: Count
    file: Text = ""
    memory: Text = ""
    """Of the whole allocation that the bytes lie in."""
    offset: Count = 0
    counter: Text = ""
    counter_offset: Count = 0
    event: Text = ""
    event_sync: bool = False


def room(nbytes: int, device: torch.device, path: Path) -> Tensor:
    """New bytes; those of a CPU are in a file at `path`."""
    if device.type == CPU:
        return mapped_for_writing(path, nbytes)
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def export(memory: Tensor, path: Path | None = None) -> Handle:
    """How others can open this: all bytes of a storage, or of the file at `path`. Whoever exports
    keeps the memory; torch gives it back to its allocator when a reader has let go as well."""
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
    _, handle, nbytes, offset, counter, counter_offset, event, event_sync = shared
    return Handle(
        nbytes=nbytes,
        memory=_text(handle),
        offset=offset,
        counter=_text(counter),
        counter_offset=counter_offset,
        event=_text(event),
        event_sync=bool(event_sync),
    )


def opened(handle: Handle, device: torch.device, directory: Path) -> Tensor:
    """The bytes, in place; they stay open for as long as this tensor is there."""
    if device.type == CPU:
        return _opened_file(handle, directory)
    arguments: tuple[Any, ...] = (
        device.index,
        _bytes(handle.memory),
        handle.nbytes,
        handle.offset,
        _bytes(handle.counter),
        handle.counter_offset,
        _bytes(handle.event),
        handle.event_sync,
    )
    try:
        torch.cuda.init()
        storage = torch.UntypedStorage._new_shared_cuda(*arguments)
    except RuntimeError as error:
        raise WeightsError(
            f"The trainer's memory on the GPU cannot be opened: {str(error).splitlines()[0]}",
            "Its process must run, be another one than this, and share IPC and pids with it "
            "(`--ipc=host --pid=host` of a container).",
        ) from error
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def device_name(device: torch.device) -> str:
    """The same in every process, whichever devices it sees."""
    if device.type == CPU:
        return CPU
    return str(torch.cuda.get_device_properties(device).uuid)


def local_device(name: str) -> torch.device:
    """The device of that name, as this process counts."""
    if name == CPU:
        return torch.device(CPU)
    seen = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    for index in seen:
        if device_name(torch.device("cuda", index)) == name:
            return torch.device("cuda", index)
    raise WeightsError(
        f"The weights are on the GPU {name}, which this worker does not see.",
        "Let CUDA_VISIBLE_DEVICES name the trainer's GPU too, or use another transport.",
    )


def _opened_file(handle: Handle, directory: Path) -> Tensor:
    if not is_file_name(handle.file):
        raise WeightsError(f"{handle.file[:255]!a} is no file of a publisher.")
    path = directory / handle.file
    with plain_file(path) as (number, found):
        if found.st_size != handle.nbytes:
            raise WeightsError(f"{path} does not hold {handle.nbytes} bytes.")
        return mapped(number, found.st_size)


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:  # not base64, or not even ASCII
        raise WeightsError("An offer has a handle that is none.") from error
