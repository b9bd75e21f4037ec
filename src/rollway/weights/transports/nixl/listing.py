"""What a source has of a version, as a catalog lists it, and what several sources have together.

A source publishes pieces: boxes of Hugging Face tensors, each one run of bytes with a digest of its
own. So a reader reads and verifies a piece as it is, whichever source holds it, and it needs no
trainer installed to put a tensor together from pieces.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
import torch
from torch import Tensor

from rollway.errors import WeightsError
from rollway.weights.checkpoint import TensorHeader
from rollway.weights.layout import Box, check_covered
from rollway.weights.offer import Count, Entry, check_entries
from rollway.weights.transports.entries import align
from rollway.weights.transports.nixl.agent import Agent, ErrorHandling, Memory, find_memory_kind
from rollway.weights.untrusted import MAX_ELEMENTS

FANOUT = "fanout"
"""The key of an offer that asks receivers to serve peers."""
SAME_RANK = "same_rank"
"""The key of an offer whose receivers read from sources of their own rank alone."""
_ALIGNED = 256
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class Listing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one source has of one version."""

    version: Count
    source: Name
    """A unique name."""
    rank: Count
    """The source's rank in its trainer or engine: the network card that reads go through."""
    world: Count
    """How many sources have the version together; a receiver that serves peers has all of it."""
    role: Literal["trainer", "receiver"]
    body: bytes
    """A `SourceMemory`, which catalogs do not read."""


class SourceMemory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The memory of a source for one version."""

    agent: bytes
    """NIXL's description of the agent and of its registered memory."""
    memory: Memory
    device: Count
    error_handling: ErrorHandling
    pieces: list[Entry]
    """The offset of a piece is its address, its only box says which part of a tensor it is, and its
    name is its number."""


@dataclass(frozen=True)
class Source:
    """One source of a version, as it was announced."""

    name: str
    rank: int
    memory: SourceMemory


@dataclass(frozen=True)
class Part:
    """A piece of a tensor, and a source that has it."""

    source: Source
    entry: Entry
    box: Box


@dataclass(frozen=True)
class SourceGroup:
    """Sources that together hold all of a version, and what they hold."""

    sources: list[Source]
    parts: Mapping[str, Mapping[Box, Part]]
    """By tensor and box. Sources that hold the same piece must hold the same bytes."""
    headers: Mapping[str, TensorHeader]
    """The Hugging Face tensors."""
    rank: int | None
    """The only rank that may be read from; None if all may."""

    @property
    def names(self) -> list[str]:
        return [source.name for source in self.sources]

    @property
    def identity(self) -> str:
        """The identity of the weights: the digests of all pieces, whichever source holds them."""
        facts = sorted(
            (name, self.headers[name].dtype, box.start, box.stop, part.entry.digest)
            for name, parts in self.parts.items()
            for box, part in parts.items()
        )
        return hashlib.sha256(msgspec.json.encode(facts)).hexdigest()[:32]

    @property
    def nbytes(self) -> int:
        return sum(part.entry.nbytes for parts in self.parts.values() for part in parts.values())


def read_group(listings: Iterable[Listing], rank: int | None = None) -> SourceGroup:
    """Decode the listings of sources that together hold a version.

    Where several sources hold a piece, choose the one of this rank, or else the first. Raise
    `WeightsError` unless the pieces make up each tensor exactly."""
    sources = [_read_source(listing) for listing in listings]
    parts: dict[str, dict[Box, Part]] = {}
    for source in sorted(sources, key=lambda source: source.rank != rank):
        for entry in source.memory.pieces:
            name, part = entry.boxes[0].name, Part(source, entry, _get_box(entry))
            first = parts.setdefault(name, {}).setdefault(part.box, part)
            if (first.entry.digest, first.entry.dtype) != (entry.digest, entry.dtype):
                raise WeightsError(
                    f"Two ranks of the trainer hold different values of {name}.",
                    "Their replicas have drifted apart; synchronise them, then publish again.",
                )
    headers = {name: _join(name, boxes) for name, boxes in parts.items()}
    return SourceGroup(sources, parts, headers, rank)


def _read_source(listing: Listing) -> Source:
    try:
        memory = msgspec.msgpack.decode(listing.body, type=SourceMemory)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WeightsError(f"{listing.source} announced no NIXL source: {error}.") from error
    check_entries(memory.pieces, MAX_ELEMENTS)
    for entry in memory.pieces:
        if len(entry.boxes) != 1 or _get_box(entry).shape != entry.shape:
            raise WeightsError(f"{listing.source} announced {entry.name}, which is no piece.")
    return Source(listing.source, listing.rank, memory)


def _get_box(entry: Entry) -> Box:
    return Box(entry.boxes[0].start, entry.boxes[0].stop)


def _join(name: str, parts: Mapping[Box, Part]) -> TensorHeader:
    """Return the header of a tensor that consists of these pieces."""
    if len({(len(box.stop), part.entry.dtype) for box, part in parts.items()}) != 1:
        raise WeightsError(f"The pieces of {name} have different dtypes or dimensions.")
    shape = tuple(map(max, zip(*(box.stop for box in parts), strict=True)))
    check_covered(name, shape, [box for box in parts if box.elements])
    return TensorHeader(next(iter(parts.values())).entry.dtype, shape)


def place(entries: Iterable[Entry]) -> tuple[list[Entry], int]:
    """Place pieces one after another in memory; return them, and how many bytes they take."""
    placed: list[Entry] = []
    end = 0
    for entry in entries:
        placed.append(msgspec.structs.replace(entry, offset=end))
        end += align(entry.nbytes, _ALIGNED)
    return placed, end


def write_body(
    agent: Agent, device: torch.device, entries: Iterable[Entry], views: Iterable[Tensor]
) -> bytes:
    """Return the body of a listing of pieces; `views` are in memory that is registered with this
    process's agent."""
    memory, index = find_memory_kind(device)
    pieces = [
        msgspec.structs.replace(entry, name=str(number), offset=view.data_ptr())
        for number, (entry, view) in enumerate(zip(entries, views, strict=True))
    ]
    return msgspec.msgpack.encode(
        SourceMemory(agent.metadata(), memory, index, agent.error_handling, pieces)
    )
