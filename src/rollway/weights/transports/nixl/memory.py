"""Registered memory of the `nixl` transport, and the tensors that lie in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollway.errors import UsageError, WeightsError
from rollway.weights.digest.bits import DTYPES, digest
from rollway.weights.layout import Box
from rollway.weights.transports.nixl_agent import Agent, Memory, Region
from rollway.weights.transports.nixl_cards import Group
from rollway.weights.transports.nixl_windows import Landed, Proof, Window


@dataclass(slots=True)
class Pool:
    """Memory of one device, registered with an agent; larger when need be, never smaller."""

    agent: Agent
    memory: Tensor | None = None
    region: Region | None = None
    version: int = -1

    def room_for(self, nbytes: int, device: torch.device) -> Tensor:
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        held = self.memory
        if held is None or held.numel() < nbytes or held.device != device:
            self.release()
            held = self.memory = torch.empty(max(nbytes, 1), dtype=torch.uint8, device=device)
            kind, index = memory_kind(device)
            self.region = self.agent.register(held.data_ptr(), held.numel(), kind, index)
        return held

    def release(self) -> None:
        if self.region is not None:
            self.agent.deregister(self.region)
        self.memory = self.region = None


def memory_kind(device: torch.device) -> tuple[Memory, int]:
    if device.type == "cpu":
        return "DRAM", 0
    if device.type == "cuda":
        return "VRAM", device.index or 0
    raise UsageError(f"NIXL cannot read the memory of {device}.", "Publish from CPU or CUDA.")


def view_of(memory: Tensor, one: Landed) -> Tensor:
    part = memory[one.offset : one.offset + one.nbytes]
    return part.view(DTYPES[one.dtype]).view(one.shape)


def like(group: Group) -> torch.device:
    """Where the sources have their tensors, seen from this process."""
    kinds = {card.memory for card in group.cards if card.addresses}
    if kinds == {"VRAM"} and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def settle(memory: Tensor) -> None:
    """Wait for copies out of the buffer that is about to be written again."""
    if memory.is_cuda:
        torch.cuda.current_stream(memory.device).synchronize()


def assembled(window: Window, memory: Tensor) -> dict[str, Tensor]:
    """The window's targets, with what was taken whole cut and put in place."""
    views = {landed.name: view_of(memory, landed) for landed in window.targets}
    for landed, copies in window.replays:
        whole = view_of(memory, landed)
        for copy in copies:
            part = whole[_slices(copy.box)]
            part = part.transpose(-1, -2) if copy.transposed else part
            place = Box(copy.at, tuple(a + n for a, n in zip(copy.at, copy.shape, strict=True)))
            views[copy.target][_slices(place)] = part.reshape(copy.shape)
    return views


def prove(tensor: Tensor, proofs: Sequence[Proof], group: Group) -> None:
    """Compare the digests of all pieces of which a tensor is made."""
    for proof in proofs:
        box = proof.piece[1]
        part = tensor[_slices(proof.box)].reshape(box.shape)
        if bytes.fromhex(digest(part)) != group.digests[proof.piece]:
            raise WeightsError(
                f"{proof.piece[0]} is not what was published: it changed while it was read, or "
                "on its way."
            )


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
