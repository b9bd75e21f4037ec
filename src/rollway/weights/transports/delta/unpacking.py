"""Unpack what changed: on the host only what zstd compressed, the rest on the device.

    packed bytes ── zstd, on the host ──► Streams ── to a device ──► flat positions, bits

Streams take a few bytes for each changed element, so they are all that a device receives. A GPU
gets those of many tensors in one copy, and unpacks them with few kernels:

    gap streams of a batch ─► sums of gaps ─► positions of all tensors
    value planes of a batch ─► bits of all tensors
"""

from __future__ import annotations

import struct
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
import zstandard
from torch import Tensor

from rollway.errors import WeightsError
from rollway.weights.device_copies import join_on_device
from rollway.weights.digest.changes import ESCAPE
from rollway.weights.digest.checksums import digest
from rollway.weights.transports.base import ChangedElements
from rollway.weights.transports.delta.format import Encoded, Header, make_damage_error
from rollway.weights.transports.delta.packing import count_threads
from rollway.weights.transports.delta.store import Buffer

BATCH = 1 << 24
"""Bytes of gaps that are unpacked together; each takes up to 48 bytes of scratch memory."""
_WORTH_THREADS = 1 << 20
"""Bytes from which on threads decompress."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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

    def join_values(self, device: torch.device) -> tuple[Tensor, bool]:
        """Return the bits of the changed elements, and whether they are steps from the old bits."""
        is_relative = self.header.values == "steps"
        rows = self.values.to(device).view(self.header.value_planes, self.count)
        return join_planes(rows, self.element_bytes, is_relative), is_relative


def decompress_all(changes: Sequence[Encoded], run: Tensor | None = None) -> list[Streams]:
    """Decompress changes, in threads of zstd's own that do not need the interpreter.

    `run` is the memory that the changes were read into: streams that were not compressed are then
    slices of it, which one copy brings to a device."""
    streams: list[Buffer] = []
    frames: list[int] = []
    sizes: list[int] = []
    for change in changes:
        for data, most in zip(
            (change.places, change.values), _limit_sizes(change.header), strict=True
        ):
            if most and change.header.compression == "zstd" and change.header.places != "whole":
                frames.append(len(streams))
                sizes.append(_read_size(change.header, data, most))
            elif len(data) > most:
                raise _make_size_error(change.header)
            streams.append(data)
    plain = [_slice(data, run) for data in streams]
    if frames:
        names = [changes[at // 2].header.name for at in frames]
        decompressed = _decompress([streams[at] for at in frames], sizes, names)
        for at, tensor in zip(frames, decompressed, strict=True):
            plain[at] = tensor
    pairs = zip(changes, plain[::2], plain[1::2], strict=True)
    return [_check(Streams(change.header, *both)) for change, *both in pairs]


def _limit_sizes(header: Header) -> tuple[int, int]:
    """Return how many bytes the positions and the values can need, whatever a stream claims."""
    places = {
        "gaps": header.count + header.elements // ESCAPE,
        "bitmap": (header.elements + 7) // 8,
    }
    planes = header.element_bytes if header.places == "whole" else header.value_planes
    return places.get(header.places, 0), header.count * planes


def _check(streams: Streams) -> Streams:
    """Return the streams; raise if values are missing or a whole tensor is not what was sent."""
    header = streams.header
    if streams.values.numel() != _limit_sizes(header)[1]:
        raise make_damage_error(f"Values of {header.name} are missing.")
    if header.places == "whole" and digest(streams.values) != header.digest:
        raise make_damage_error(f"{header.name} does not match its checksum.")
    return streams


def _read_size(header: Header, frame: Buffer, at_most: int) -> int:
    try:
        size = zstandard.get_frame_parameters(frame).content_size
    except zstandard.ZstdError as error:
        raise make_damage_error(
            f"A change of {header.name} cannot be decompressed ({error})."
        ) from error
    if not 0 < size <= at_most:
        raise _make_size_error(header)
    return int(size)


def _make_size_error(header: Header) -> WeightsError:
    return make_damage_error(f"A change of {header.name} has a wrong size inside.")


def _decompress(
    frames: Sequence[Buffer], sizes: Sequence[int], names: Sequence[str]
) -> list[Tensor]:
    try:
        plain = zstandard.ZstdDecompressor().multi_decompress_to_buffer(
            list(frames),
            decompressed_sizes=struct.pack(f"={len(sizes)}Q", *sizes),
            threads=count_threads() if sum(sizes) > _WORTH_THREADS else 1,
        )
    except zstandard.ZstdError as error:
        which = f"A change of {names[0]}" if len(set(names)) == 1 else "A change"
        raise make_damage_error(f"{which} cannot be decompressed ({error}).") from error
    with warnings.catch_warnings():
        # zstd's memory is read-only, of which torch warns. Nothing writes to these tensors.
        warnings.simplefilter("ignore")
        return [torch.frombuffer(plain[i], dtype=torch.uint8) for i in range(len(plain))]


def _slice(data: Buffer, run: Tensor | None) -> Tensor:
    """Return the bytes as a tensor: as a slice of `run`, which contains them, or on their own."""
    if len(data) == 0:
        return torch.empty(0, dtype=torch.uint8)
    if run is not None:
        start = np.frombuffer(data, np.uint8).ctypes.data - run.data_ptr()
        return run[start : start + len(data)]
    # torch warns about memory that it cannot write to.
    writable = bytearray(data) if memoryview(data).readonly else data
    return torch.frombuffer(writable, dtype=torch.uint8)


def _move_alone(change: Streams, device: torch.device) -> ChangedElements:
    """Return what changed in a tensor whose positions are no gaps."""
    header = change.header
    if header.places == "none":
        positions = torch.empty(0, dtype=torch.int64, device=device)
    elif header.places == "bitmap":
        lanes = torch.arange(8, dtype=torch.uint8, device=device)
        marks = change.places.to(device).view(-1, 1) >> lanes & 1
        positions = torch.nonzero(marks.view(-1)).view(-1)
        if positions.numel() != header.count or int(positions[-1]) >= header.elements:
            raise make_damage_error(f"The positions in a change of {header.name} are wrong.")
    else:
        positions = torch.arange(header.elements, device=device)
    if header.places == "whole":
        values = change.values.to(device)
        # A slice of what was read may begin anywhere, but integers may not.
        aligned = values.clone() if values.storage_offset() % header.element_bytes else values
        return ChangedElements(positions, aligned.view(_INTEGERS[header.element_bytes]), False)
    return ChangedElements(positions, *change.join_values(device))


def join_planes(planes: Tensor, size: int, is_relative: bool) -> Tensor:
    """Return values of `size` bytes, of which the lower ones are the rows of `planes`."""
    if len(planes) == 1:
        values = planes[0].to(_INTEGERS[size])
    else:
        wide = planes.new_zeros((planes.shape[1], size))
        wide[:, : len(planes)] = planes.t()
        values = wide.view(-1).view(_INTEGERS[size])
    if is_relative:
        values = ((values >> 1) & torch.iinfo(values.dtype).max) ^ -(values & 1)  # undo the zigzag
    return values


@dataclass(frozen=True, slots=True)
class StepStreams:
    """What changed from one version to the next, in host memory."""

    changes: Sequence[Streams]

    def move(self, device: torch.device) -> Iterator[tuple[str, ChangedElements]]:
        """Yield the changed elements of each tensor on a device."""
        alone = [change for change in self.changes if change.header.places != "gaps"]
        for change in alone:
            yield change.name, _move_alone(change, device)
        if len(alone) < len(self.changes):
            for batch in _split_batches([c for c in self.changes if c.header.places == "gaps"]):
                yield from _move_batch(batch, device)


def _split_batches(changes: Sequence[Streams]) -> Iterator[list[Streams]]:
    """Yield changes with values of one kind, and bounded scratch memory."""
    by_kind: dict[tuple[int, int, str], list[Streams]] = {}
    for change in changes:
        kind = change.element_bytes, change.header.value_planes, change.header.values
        by_kind.setdefault(kind, []).append(change)
    for same_kind in by_kind.values():
        batch: list[Streams] = []
        for change in same_kind:
            if batch and sum(c.places.numel() for c in [*batch, change]) > BATCH:
                yield batch
                batch = []
            batch.append(change)
        yield batch


def _move_batch(
    batch: Sequence[Streams], device: torch.device
) -> Iterator[tuple[str, ChangedElements]]:
    ends = list(accumulate((change.count for change in batch), initial=0))
    header = batch[0].header
    count, relative = header.value_planes, header.values == "steps"
    # All first bytes together, then all second bytes, as in the values of a single tensor.
    planes = [c.values.view(count, c.count)[plane] for plane in range(count) for c in batch]
    joined = join_on_device([*(change.places for change in batch), *planes], device)
    gaps, values = joined.split([joined.numel() - count * ends[-1], count * ends[-1]])
    positions = _find_positions(batch, gaps, ends)
    bits = join_planes(values.view(count, -1), header.element_bytes, relative)
    for change, (first, end) in zip(batch, pairwise(ends), strict=True):
        elements = ChangedElements(positions[first:end], bits[first:end], relative)
        yield change.name, elements


def _find_positions(batch: Sequence[Streams], stream: Tensor, ends: list[int]) -> Tensor:
    """Return the positions of all tensors, each from the start of its own tensor."""
    device = stream.device
    lengths = list(accumulate(change.places.numel() for change in batch))
    at = torch.nonzero(stream != ESCAPE).view(-1)
    byte_ends = torch.tensor(lengths, device=device)
    if torch.searchsorted(at, byte_ends).tolist() != ends[1:]:
        raise make_damage_error(f"The positions in a change of {batch[0].name} or later are wrong.")
    sums = stream.cumsum(0, dtype=torch.int64)
    # Before a changed element are the gaps so far, and the changed elements so far.
    positions = sums.index_select(0, at)
    positions += torch.arange(positions.numel(), device=device)
    counts = torch.tensor([change.count for change in batch], device=device)
    starts = torch.zeros_like(counts)
    starts[1:] = sums.index_select(0, byte_ends[:-1] - 1) + counts.cumsum(0)[:-1]
    positions -= torch.repeat_interleave(starts, counts, output_size=positions.numel())
    lasts = positions.index_select(0, counts.cumsum(0) - 1).tolist()
    for change, last in zip(batch, lasts, strict=True):
        if last >= change.header.elements:
            raise make_damage_error(f"The positions in a change of {change.name} are wrong.")
    return positions
