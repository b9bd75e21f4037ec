"""Describe a source's memory so that others can read it: the body of a catalog listing.

The layout (tensors, and the boxes of Hugging Face tensors in them) is the same for every version,
so it is one blob by which readers recognise a plan. Addresses and digests differ by version. Every
piece has a digest, so a reader can verify whatever consists of whole pieces.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated

import msgspec

from rollway.errors import UsageError, WeightsError
from rollway.processes import boot_id
from rollway.weights.checkpoint import TensorHeader
from rollway.weights.layout import ELEMENT_BYTES, Box, Piece, Shape, check_covered
from rollway.weights.offer import Count, Text
from rollway.weights.planning.sources import Place, Source, source_from_pieces
from rollway.weights.planning.targets import LocalTensor
from rollway.weights.transports.nixl.agent import ErrorHandling, Memory
from rollway.weights.transports.nixl.catalog import Listing
from rollway.weights.untrusted import check_shape

FANOUT = "fanout"
"""The key of an offer that asks receivers to serve peers."""
DIGEST_BYTES = 16
_RECEIPT = b"rollway has "
_Shape = Annotated[tuple[Count, ...], msgspec.Meta(max_length=8)]
_Address = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class _Tensor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    name: Text
    dtype: Annotated[str, msgspec.Meta(max_length=32)]
    shape: _Shape


class _Piece(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A `Piece` on the wire; `tensor` is the number of the tensor that contains it."""

    name: Text
    start: _Shape
    stop: _Shape
    tensor: Count
    at: _Shape
    transposed: bool


class _Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tensors: list[_Tensor]
    pieces: list[_Piece]


class SourceMemory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The memory of one source for one version."""

    agent: Annotated[bytes, msgspec.Meta(max_length=16 << 20)]
    """NIXL's description of the agent and of its registered memory."""
    memory: Memory
    device: Count
    error_handling: ErrorHandling
    node: Annotated[str, msgspec.Meta(max_length=1024)]
    layout: bytes
    addresses: list[_Address]
    """One for each tensor of the layout."""
    digests: bytes
    """One for each piece of the layout."""


def write_layout(tensors: Mapping[str, LocalTensor], pieces: Sequence[Piece]) -> bytes:
    numbers = {name: number for number, name in enumerate(tensors)}
    missing = next((piece for piece in pieces if piece.source not in numbers), None)
    if missing is not None:
        raise UsageError(
            f"A piece of {missing.name} is in {missing.source}, which is not published."
        )
    return msgspec.msgpack.encode(
        _Layout(
            [_Tensor(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()],
            [
                _Piece(p.name, p.box.start, p.box.stop, numbers[p.source], p.at, p.transposed)
                for p in pieces
            ],
        )
    )


@dataclass(frozen=True)
class Layout:
    """A source's layout, decoded and checked."""

    tensors: dict[str, LocalTensor]
    pieces: list[Piece]

    def as_source(self, name: str, node: str) -> Source:
        """Return a source for the planner, which does not know tensors without elements."""
        pieces = [piece for piece in self.pieces if piece.box.elements]
        return source_from_pieces(name, self.tensors, pieces, Place(node))


@lru_cache(maxsize=1024)  # a source has the same layout in every version
def read_layout(raw: bytes) -> Layout:
    """Decode a layout; raise unless every piece is inside its tensor."""
    try:
        layout = msgspec.msgpack.decode(raw, type=_Layout)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WeightsError(f"The layout of a source is damaged: {error}.") from error
    tensors = {tensor.name: LocalTensor(tensor.dtype, tensor.shape) for tensor in layout.tensors}
    if len(tensors) != len(layout.tensors):
        raise WeightsError("A source lists a tensor twice.")
    for name, tensor in tensors.items():
        if tensor.dtype not in ELEMENT_BYTES:
            raise WeightsError(f"{name} has the dtype {tensor.dtype}, which is not known.")
        try:
            check_shape(tensor.shape)
        except ValueError as error:
            raise WeightsError(f"{name}: {error}.") from error
    names = list(tensors)
    pieces = []
    for piece in layout.pieces:
        if piece.tensor >= len(names) or len(piece.start) != len(piece.stop):
            raise WeightsError(f"A piece of {piece.name} is in no tensor.")
        if any(a > b for a, b in zip(piece.start, piece.stop, strict=True)):
            raise WeightsError(f"A piece of {piece.name} ends before it begins.")
        _check_inside(piece, tensors[names[piece.tensor]].shape)
        box = Box(piece.start, piece.stop)
        pieces.append(Piece(piece.name, box, names[piece.tensor], piece.at, piece.transposed))
    return Layout(tensors, pieces)


def _check_inside(piece: _Piece, shape: Shape) -> None:
    """Raise unless a piece is inside its tensor: a reader computes addresses from it."""
    extents = tuple(b - a for a, b in zip(piece.start, piece.stop, strict=True))
    extents = extents[::-1] if piece.transposed else extents
    if (
        not len(piece.at) == len(extents) == len(shape)
        or (piece.transposed and len(shape) != 2)
        or any(a + n > size for a, n, size in zip(piece.at, extents, shape, strict=True))
    ):
        raise WeightsError(f"A piece of {piece.name} is outside of its tensor.")


@dataclass(frozen=True)
class SourceGroup:
    """Sources that together hold all of a version."""

    names: tuple[str, ...]
    memories: tuple[SourceMemory, ...]
    layouts: tuple[Layout, ...]

    @cached_property
    def key(self) -> str:
        """A key for plans: equal for the same sources with the same layouts in any version."""
        hasher = hashlib.sha256()
        for name, memory in zip(self.names, self.memories, strict=True):
            hasher.update(f"{name} {memory.node} {len(memory.layout)} ".encode() + memory.layout)
        return hasher.hexdigest()

    @cached_property
    def digests(self) -> dict[tuple[str, Box], bytes]:
        """The digest of each piece. Ranks that hold the same piece must hold the same bytes."""
        digests: dict[tuple[str, Box], bytes] = {}
        for memory, layout in zip(self.memories, self.layouts, strict=True):
            for number, piece in enumerate(layout.pieces):
                digest = memory.digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
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
        for layout in self.layouts:
            for piece in layout.pieces:
                dtypes[piece.name] = layout.tensors[piece.source].dtype
                boxes.setdefault(piece.name, set()).add(piece.box)
        headers = {}
        for name, several in boxes.items():
            if len({len(box.stop) for box in several}) != 1:
                raise WeightsError(f"The pieces of {name} have different numbers of dimensions.")
            shape: Shape = tuple(map(max, zip(*(box.stop for box in several), strict=True)))
            check_covered(name, shape, [box for box in several if box.elements])
            headers[name] = TensorHeader(dtypes[name], shape, "")
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
        return sum(
            Box.whole(header.shape).elements * ELEMENT_BYTES[header.dtype]
            for header in self.headers.values()
        )


def read_group(listings: Iterable[Listing]) -> SourceGroup:
    """Decode the listings of sources that together hold a version."""
    names, memories, layouts = [], [], []
    for listing in listings:
        try:
            memory = msgspec.msgpack.decode(listing.body, type=SourceMemory)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise WeightsError(f"{listing.source} announced no NIXL source: {error}.") from error
        layout = read_layout(memory.layout)
        if len(memory.addresses) != len(layout.tensors):
            raise WeightsError(f"{listing.source} lacks addresses of its tensors.")
        if len(memory.digests) != DIGEST_BYTES * len(layout.pieces):
            raise WeightsError(f"{listing.source} lacks digests of its pieces.")
        names.append(listing.source)
        memories.append(memory)
        layouts.append(layout)
    return SourceGroup(tuple(names), tuple(memories), tuple(layouts))


def write_receipt(version: int) -> bytes:
    """Return the notification by which a receiver acknowledges a version to its source."""
    return _RECEIPT + str(version).encode()


def read_receipt(message: bytes) -> int | None:
    """Return the acknowledged version, or None for any other notification."""
    version = message.removeprefix(_RECEIPT)
    if not message.startswith(_RECEIPT) or not version.isdigit() or len(version) > 20:
        return None
    return int(version)


def this_node() -> str:
    """Return a name that is equal for processes that can probably read each other's memory."""
    try:
        return f"{boot_id()} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return socket.gethostname()
