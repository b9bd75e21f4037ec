"""Describe a source's memory so that others can read it: the body of a catalog listing.

The layout (tensors, where they are from the first one on, and the boxes of Hugging Face tensors in
them) is the same for every version, so it is one blob by which readers recognise a plan. The first
address and the digests differ by version. Every piece has a digest, so a reader can verify whatever
consists of whole pieces.

A rank of an engine that read half of a piece could not verify it. So a publisher splits tensors
where the ranks cut them: a rank's part then consists of pieces with digests. Publishing copies them
anyway, so each part becomes one run of memory, and columns are read as fast as rows.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import zip_longest
from typing import Annotated

import msgspec
import torch
from torch import Tensor

from rollway.errors import WeightsError
from rollway.weights.checkpoint import TensorHeader
from rollway.weights.layout import (
    ELEMENT_BYTES,
    Box,
    Piece,
    Placed,
    Shape,
    check_covered,
    place_at,
    swap_last,
)
from rollway.weights.offer import Count, Entry, check_entries
from rollway.weights.planning.plan import Source, source_from_pieces
from rollway.weights.planning.targets import Headers, Targets, cells
from rollway.weights.transports.nixl.agent import Agent, ErrorHandling, Memory, find_memory_kind
from rollway.weights.transports.nixl.catalog import Listing
from rollway.weights.untrusted import MAX_ELEMENTS

FANOUT = "fanout"
"""The key of an offer that asks receivers to serve peers."""
SAME_RANK = "same_rank"
"""The key of an offer whose receivers read from sources of their own rank alone."""
DIGEST_BYTES = 16


class SourceMemory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The memory of one source for one version."""

    agent: Annotated[bytes, msgspec.Meta(max_length=16 << 20)]
    """NIXL's description of the agent and of its registered memory."""
    memory: Memory
    device: Count
    error_handling: ErrorHandling
    layout: bytes
    base: Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
    """The address from which the offsets of the layout's tensors count."""
    digests: bytes
    """One for each piece of the layout."""
    rank: Count = 0
    """The source's rank in its trainer or engine: the network card that reads go through."""


@dataclass(frozen=True)
class Layout:
    """A source's layout, decoded and checked."""

    tensors: dict[str, Entry]
    pieces: list[Piece]
    """In the order of their digests."""


def list_pieces(entries: Iterable[Entry]) -> list[Piece]:
    return [
        Piece(p.name, Box(p.start, p.stop), entry.name, p.at, p.transposed)
        for entry in entries
        for p in entry.placed
    ]


@lru_cache(maxsize=1024)  # a source has the same layout in every version
def read_layout(raw: bytes) -> Layout:
    """Decode a layout; raise unless every piece is inside its tensor."""
    try:
        entries = msgspec.msgpack.decode(raw, type=list[Entry])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WeightsError(f"The layout of a source is damaged: {error}.") from error
    check_entries(entries, MAX_ELEMENTS)
    return Layout({entry.name: entry for entry in entries}, list_pieces(entries))


@dataclass(frozen=True)
class ListedSource:
    """One source of a version, as it was announced."""

    name: str
    memory: SourceMemory
    layout: Layout

    def for_planner(self) -> Source:
        """Return it without tensors that have no elements, which the planner does not know."""
        pieces = [piece for piece in self.layout.pieces if piece.box.elements]
        return source_from_pieces(self.name, self.layout.tensors, pieces)


@dataclass(frozen=True)
class SourceGroup:
    """Sources that together hold all of a version."""

    sources: list[ListedSource]
    rank: int | None = None
    """Where like rank reads from like rank: the reader's rank."""

    @cached_property
    def readable(self) -> list[ListedSource]:
        """The sources that may be read."""
        return [s for s in self.sources if self.rank is None or s.memory.rank == self.rank]

    @property
    def names(self) -> list[str]:
        return [source.name for source in self.sources]

    @cached_property
    def key(self) -> str:
        """A key for plans: equal for the same sources with the same layouts in any version."""
        hasher = hashlib.sha256(f"{self.rank} ".encode())
        for source in self.sources:
            layout = source.memory.layout
            hasher.update(f"{source.name} {len(layout)} ".encode() + layout)
        return hasher.hexdigest()

    @cached_property
    def digests(self) -> dict[tuple[str, Box], bytes]:
        """The digest of each piece. Ranks that hold the same piece must hold the same bytes."""
        digests: dict[tuple[str, Box], bytes] = {}
        for source in self.sources:
            raw = source.memory.digests
            for number, piece in enumerate(source.layout.pieces):
                digest = raw[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
                if digests.setdefault((piece.name, piece.box), digest) != digest:
                    raise WeightsError(
                        f"Two ranks of the trainer hold different values of {piece.name}.",
                        "Their replicas have drifted apart; synchronise them, then publish again.",
                    )
        return digests

    @cached_property
    def headers(self) -> dict[str, TensorHeader]:
        """The Hugging Face tensors; raise unless the pieces make up each of them exactly."""
        dtypes: dict[str, str] = {}
        boxes: dict[str, set[Box]] = {}
        for source in self.sources:
            for piece in source.layout.pieces:
                dtypes[piece.name] = source.layout.tensors[piece.source].dtype
                boxes.setdefault(piece.name, set()).add(piece.box)
        headers = {}
        for name, parts in boxes.items():
            if len({len(box.stop) for box in parts}) != 1:
                raise WeightsError(f"The pieces of {name} have different numbers of dimensions.")
            shape: Shape = tuple(map(max, zip(*(box.stop for box in parts), strict=True)))
            check_covered(name, shape, [box for box in parts if box.elements])
            headers[name] = TensorHeader(dtypes[name], shape)
        return headers

    @cached_property
    def identity(self) -> str:
        """The identity of the weights: the digests of all pieces, whichever source holds them."""
        facts = sorted(
            (name, self.headers[name].dtype, box.start, box.stop, digest.hex())
            for (name, box), digest in self.digests.items()
        )
        return hashlib.sha256(msgspec.json.encode(facts)).hexdigest()[:32]

    @property
    def nbytes(self) -> int:
        return sum(map(count_bytes, self.headers.values()))

    def check_reach(self, wants: Targets) -> None:
        """Raise if what is wanted is not all at sources that may be read."""
        if self.rank is None:
            return
        held: dict[str, list[Box]] = {}
        for source in self.readable:
            for piece in source.layout.pieces:
                held.setdefault(piece.name, []).append(piece.box)
        for name, want in wants.items():
            box = want.part.box
            common = (box.intersect(other) for other in set(held.get(name, ())))
            if sum(part.elements for part in common if part is not None) < box.elements:
                raise self._describe_reach(name, box)

    def _describe_reach(self, name: str, box: Box) -> WeightsError:
        holders = {
            source.memory.rank
            for source in self.sources
            for piece in source.layout.pieces
            if piece.name == name and piece.box.intersect(box)
        }
        ranks = ", ".join(map(str, sorted(holders - {self.rank})))
        return WeightsError(
            f"Rank {self.rank} of the engine would read {name} through the network card of another "
            f"rank of the trainer ({ranks}), and only like ranks may read from each other.",
            "Give the engine the trainer's tensor parallelism, or set `same_rank_only` to false if "
            "the network connects all cards.",
        )


def read_group(listings: Iterable[Listing], rank: int | None = None) -> SourceGroup:
    """Decode the listings of sources that together hold a version, for a reader of this rank if
    like rank reads from like rank."""
    sources = []
    for listing in listings:
        try:
            memory = msgspec.msgpack.decode(listing.body, type=SourceMemory)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise WeightsError(f"{listing.source} announced no NIXL source: {error}.") from error
        layout = read_layout(memory.layout)
        if len(memory.digests) != DIGEST_BYTES * len(layout.pieces):
            raise WeightsError(f"{listing.source} lacks digests of its pieces.")
        sources.append(ListedSource(listing.source, memory, layout))
    return SourceGroup(sources, rank)


def write_listing(
    agent: Agent,
    device: torch.device,
    entries: Sequence[Entry],
    base: int,
    digests: Iterable[bytes],
    rank: int = 0,
) -> bytes:
    """Return the body of a listing of tensors that are registered with this process's agent.

    `digests` are those of `list_pieces(entries)`."""
    memory, index = find_memory_kind(device)
    return msgspec.msgpack.encode(
        SourceMemory(
            agent=agent.metadata(),
            memory=memory,
            device=index,
            error_handling=agent.error_handling,
            layout=msgspec.msgpack.encode(entries),
            base=base,
            digests=b"".join(digests),
            rank=rank,
        )
    )


def count_bytes(tensor: TensorHeader | Entry) -> int:
    return math.prod(tensor.shape) * ELEMENT_BYTES[tensor.dtype]


def split_for_ranks(
    tensors: dict[str, Tensor],
    pieces: Iterable[Piece],
    headers: Headers,
    ranks: int,
    *,
    pack: bool,
) -> tuple[dict[str, Tensor], list[Piece]]:
    """Return the tensors and pieces to publish; `headers` describe the whole tensors, where known.

    With `pack`, each part of a split tensor becomes a tensor of its own. The first parts of all
    tensors come first, then the second parts, and so on: what one rank reads is then stored
    together."""
    parts: list[Piece] = []
    split: set[str] = set()
    for piece in dict.fromkeys(pieces):
        boxes = cells(piece.name, headers, ranks) if ranks > 1 and piece.name in headers else ()
        common = [inside for box in boxes if (inside := box.intersect(piece.box)) is not None]
        if len(common) > 1:
            split.add(piece.source)
            parts += [_cut(piece, box) for box in common]
        else:
            parts.append(piece)
    split &= tensors.keys()
    if not pack or not split:
        return tensors, parts
    by_tensor: dict[str, list[Piece]] = {name: [] for name in tensors if name in split}
    for part in parts:
        if part.source in split:
            by_tensor[part.source].append(part)
    packed: dict[str, Tensor] = {}
    packed_pieces: list[Piece] = []
    for number, row in enumerate(zip_longest(*by_tensor.values())):
        for part in filter(None, row):
            name = f"{part.source} {number}"
            packed[name] = slice_piece(tensors[part.source], part)
            packed_pieces.append(Piece(part.name, part.box, name, (0,) * len(part.box.shape)))
    packed |= {name: tensor for name, tensor in tensors.items() if name not in split}
    return packed, packed_pieces + [part for part in parts if part.source not in split]


def slice_piece(tensor: Tensor, piece: Piece) -> Tensor:
    """Return a piece of a rank's tensor, in the orientation of the Hugging Face tensor."""
    part = tensor[Placed(piece.box, piece.at, piece.transposed).destination.slices]
    part = part.transpose(-1, -2) if piece.transposed else part
    return part.reshape(piece.box.shape)


def _cut(piece: Piece, box: Box) -> Piece:
    inside = box.relative_to(piece.box.start)
    if piece.transposed:
        inside = Box(swap_last(inside.start), swap_last(inside.stop))
    at = place_at(piece.at, inside).start
    return Piece(piece.name, box, piece.source, at, piece.transposed)
