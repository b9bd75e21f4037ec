"""Registered memory of the `nixl` transport, and the tensors in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rollway.errors import UsageError, WeightsError
from rollway.weights.digest.checksums import DTYPES, digest
from rollway.weights.transports.nixl.agent import Agent, Memory
from rollway.weights.transports.nixl.listing import SourceGroup
from rollway.weights.transports.nixl.windows import BufferTensor, PieceCheck, Window


@dataclass(slots=True)
class Pool:
    """Memory of one device that is registered with an agent. It grows when needed."""

    agent: Agent
    memory: Tensor | None = None
    handle: Any = None
    version: int = -1

    def allocate(self, nbytes: int, device: torch.device) -> Tensor:
        """Return memory of at least `nbytes`; registering is slow, so it is reused if it fits."""
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        memory = self.memory
        if memory is None or memory.numel() < nbytes or memory.device != device:
            self.release()
            memory = self.memory = torch.empty(max(nbytes, 1), dtype=torch.uint8, device=device)
            kind, index = memory_kind(device)
            self.handle = self.agent.register(memory.data_ptr(), memory.numel(), kind, index)
        return memory

    def release(self) -> None:
        if self.handle is not None:
            self.agent.deregister(self.handle)
        self.memory = self.handle = None


def memory_kind(device: torch.device) -> tuple[Memory, int]:
    """Return NIXL's name for a device's memory, and the device's number."""
    if device.type == "cpu":
        return "DRAM", 0
    if device.type == "cuda":
        return "VRAM", device.index or 0
    raise UsageError(f"NIXL cannot read the memory of {device}.", "Publish from CPU or CUDA.")


def view_tensor(memory: Tensor, tensor: BufferTensor) -> Tensor:
    part = memory[tensor.offset : tensor.offset + tensor.nbytes]
    return part.view(DTYPES[tensor.dtype]).view(tensor.shape)


def find_device(group: SourceGroup) -> torch.device:
    """Return the kind of device that holds the sources' tensors, as this process numbers it."""
    kinds = {memory.memory for memory in group.memories if memory.addresses}
    if kinds == {"VRAM"} and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def wait_for_stream(memory: Tensor) -> None:
    """Wait for copies out of a buffer that is about to be overwritten: NIXL knows no streams."""
    if memory.is_cuda:
        torch.cuda.current_stream(memory.device).synchronize()


def assemble(window: Window, memory: Tensor) -> dict[str, Tensor]:
    """Return the window's targets; cut tensors that were read whole into them first."""
    views = {target.name: view_tensor(memory, target) for target in window.targets}
    for whole, transfer in window.cuts:
        source = view_tensor(memory, whole)
        for target, cut in transfer.copies():
            part = source[cut.box.slices]
            part = part.transpose(-1, -2) if cut.transposed else part
            views[target][cut.destination.slices] = part.reshape(cut.extent)
    return views


def verify(tensor: Tensor, checks: Sequence[PieceCheck], group: SourceGroup) -> None:
    """Raise unless all pieces of a tensor have the digests that were published."""
    for place, piece in checks:
        part = tensor[place.slices].reshape(piece[1].shape)
        if bytes.fromhex(digest(part)) != group.digests[piece]:
            raise WeightsError(
                f"{piece[0]} is not what was published: it changed during the read, or in transit."
            )
