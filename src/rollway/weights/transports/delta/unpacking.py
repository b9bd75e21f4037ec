"""Unpack what changed in a tensor: on the host only what zstd compressed, the rest on the device.

    packed bytes ── zstd, on the host ──► Streams ── to a device ──► flat positions, bits

Streams take a few bytes for each changed element, so they are all that a device receives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import zstandard
from torch import Tensor

from rollway.errors import WeightsError
from rollway.weights.digest.changes import ESCAPE
from rollway.weights.digest.checksums import digest
from rollway.weights.transports.delta.store import Buffer

if TYPE_CHECKING:
    from rollway.weights.transports.delta.format import Encoded, Header

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Unpacked = tuple[Tensor | None, Tensor, bool]
"""Flat positions in order, or None for all elements; their bits as integers; and whether the bits
must be added to the old ones."""


@dataclass(frozen=True, slots=True)
class Streams:
    """A change of one tensor, decompressed in host memory."""

    header: Header
    places: Tensor
    values: Tensor

    @property
    def name(self) -> str:
        return self.header.name

    @property
    def count(self) -> int:
        return self.header.count

    @property
    def element_bytes(self) -> int:
        return self.header.element_bytes


def decompress(encoded: Encoded) -> Streams:
    """Decompress a change. It is called from several threads."""
    header = encoded.header
    nothing = torch.empty(0, dtype=torch.uint8)
    if header.places == "none":
        return Streams(header, nothing, nothing)
    if header.places == "whole":
        return Streams(header, nothing, read_whole(encoded))
    places = nothing
    if header.places == "gaps":
        places = _decompress(header, encoded.places, header.count + header.elements // ESCAPE)
    elif header.places == "bitmap":
        places = _decompress(header, encoded.places, (header.elements + 7) // 8)
    size = header.count * header.element_bytes
    values = _decompress(header, encoded.values, size)
    if values.numel() != size:
        raise damaged(f"Values of {header.name} are missing.")
    return Streams(header, places, values)


def read_whole(encoded: Encoded) -> Tensor:
    """Return the bytes of a tensor that was sent whole, after a look at their digest."""
    raw = _tensor_from(encoded.values)
    if digest(raw) != encoded.header.digest:
        raise damaged(f"{encoded.header.name} does not match its checksum.")
    return raw


def unpack(streams: Streams, device: torch.device) -> Unpacked:
    """Return positions and bits on a device."""
    header = streams.header
    if header.places == "whole":
        bits = streams.values.to(device).view(_INTEGERS[header.element_bytes])
        return None, bits, False
    return _unpack_places(streams, device), *_unpack_values(streams, device)


def uses_numpy(device: torch.device) -> bool:
    """Return whether numpy unpacks there. On a CPU it does, because torch's threads wait for each
    other when cores are busy."""
    return bool(device.type == "cpu")


def add_bits(old: Tensor, steps: Tensor) -> Tensor:
    """Return the sums of integers, modulo their size."""
    if uses_numpy(old.device):
        return torch.from_numpy(old.numpy() + steps.numpy())
    return old + steps


def _unpack_places(streams: Streams, device: torch.device) -> Tensor | None:
    header = streams.header
    if header.places == "all":
        return None
    if header.places == "none":
        return torch.empty(0, dtype=torch.int64, device=device)
    on_host = uses_numpy(device)
    if header.places == "gaps":
        # Before a changed element are the gaps so far, and the changed elements so far.
        if on_host:
            plain = streams.places.numpy()
            ends = np.flatnonzero(plain != ESCAPE)
            gaps = np.cumsum(plain, dtype=np.int64).take(ends)
            positions = torch.from_numpy(gaps + np.arange(len(ends)))
        else:
            stream = streams.places.to(device)
            sums = stream.cumsum(0, dtype=torch.int64)[stream != ESCAPE]
            positions = sums.add_(torch.arange(sums.numel(), device=device))
    elif on_host:
        bits = np.unpackbits(streams.places.numpy(), bitorder="little")
        positions = torch.from_numpy(np.flatnonzero(bits))
    else:
        lanes = torch.arange(8, dtype=torch.uint8, device=device)
        marks = streams.places.to(device).view(-1, 1) >> lanes & 1
        positions = torch.nonzero(marks.view(-1)).view(-1)
    if positions.numel() != header.count or int(positions[-1]) >= header.elements:
        raise damaged(f"The positions in a change of {header.name} are wrong.")
    return positions


def _unpack_values(streams: Streams, device: torch.device) -> tuple[Tensor, bool]:
    """Return the new bits, or the steps to them and True."""
    header = streams.header
    is_relative = header.values == "steps"
    size, count = header.element_bytes, header.count
    if uses_numpy(device):
        planes = np.ascontiguousarray(streams.values.numpy().reshape(size, count).T)
        plain = planes.reshape(-1).view(f"i{size}")
        if is_relative:
            plain = ((plain >> 1) & np.iinfo(plain.dtype).max) ^ -(plain & 1)  # undo the zigzag
        return torch.from_numpy(plain), is_relative
    return join_planes(streams.values.to(device), size, is_relative), is_relative


def join_planes(planes: Tensor, size: int, is_relative: bool) -> Tensor:
    """Return values of `size` bytes; all their first bytes come first, then all second bytes."""
    values = planes.view(size, -1).t().contiguous().view(-1).view(_INTEGERS[size])
    if is_relative:
        values = ((values >> 1) & torch.iinfo(values.dtype).max) ^ -(values & 1)  # undo the zigzag
    return values


def _decompress(header: Header, data: Buffer, at_most: int) -> Tensor:
    """Decompress no more bytes than the tensor can need, whatever the stream claims."""
    try:
        size = zstandard.get_frame_parameters(data).content_size
        if not 0 < size <= at_most:
            raise damaged(f"A change of {header.name} has a wrong size inside.")
        plain = np.empty(size, np.uint8)
        # `decompress` returns bytes, which must be copied: in Python, one thread at a time.
        with zstandard.ZstdDecompressor().stream_reader(data) as stream:
            rest = plain.data
            while len(rest) and (count := stream.readinto(rest)):
                rest = rest[count:]
    except zstandard.ZstdError as error:
        raise damaged(f"A change of {header.name} cannot be decompressed ({error}).") from error
    if len(rest):
        raise damaged(f"A change of {header.name} ends too early.")
    return torch.from_numpy(plain)


def damaged(message: str) -> WeightsError:
    return WeightsError(message, "It was damaged in transit, or is being written; read it again.")


def _tensor_from(data: Buffer) -> Tensor:
    if len(data) == 0:
        return torch.empty(0, dtype=torch.uint8)
    # torch warns about memory that it cannot write to.
    writable = bytearray(data) if memoryview(data).readonly else data
    return torch.frombuffer(writable, dtype=torch.uint8)
