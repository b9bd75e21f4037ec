"""What a source says of itself so that others can read its memory: the body of a listing.

The layout (tensors, and which boxes of Hugging Face tensors lie in them) stays the same from
version to version, so it is one blob by which readers know a plan again. Addresses and digests
are the version's own. A digest belongs to a piece: whoever takes pieces whole can prove them.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated

import msgspec

from rollway.errors import UsageError, WeightsError
from rollway.weights.catalog import Listing
from rollway.weights.checkpoint import TensorHeader
from rollway.weights.coverage import check_covered
from rollway.weights.layout import ELEMENT_BYTES, Box, Piece, Shape
from rollway.weights.offer import Count, Text
from rollway.weights.planning.holdings import Place, Source, source_of_pieces
from rollway.weights.planning.wants import LocalTensor
from rollway.weights.transports.nixl_agent import ErrorHandling, Memory
from rollway.weights.untrusted import check_shape

DIGEST_BYTES = 16
_Shape = Annotated[tuple[Count, ...], msgspec.Meta(max_length=8)]
_Address = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class _Tensor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    name: Text
    dtype: Annotated[str, msgspec.Meta(max_length=32)]
    shape: _Shape


class _Piece(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    name: Text
    start: _Shape
    stop: _Shape
    tensor: Count
    at: _Shape
    transposed: bool


class _Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tensors: list[_Tensor]
    pieces: list[_Piece]


class Card(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One source, for one version."""

    agent: Annotated[bytes, msgspec.Meta(max_length=16 << 20)]
    """NIXL's description of the agent and of its registered memory."""
    memory: Memory
    device: Count
    error_handling: ErrorHandling
    node: Annotated[str, msgspec.Meta(max_length=1024)]
    layout: bytes
    addresses: list[_Address]
    """By tensor of the layout."""
    digests: bytes
    """By piece of the layout."""


def write_layout(tensors: Mapping[str, LocalTensor], pieces: Sequence[Piece]) -> bytes:
    numbers = {name: number for number, name in enumerate(tensors)}
    missing = next((piece for piece in pieces if piece.source not in numbers), None)
    if missing is not None:
        raise UsageError(f"A piece of {missing.name} lies in {missing.source}, which is not given.")
    return msgspec.msgpack.encode(
        _Layout(
            [_Tensor(name, one.dtype, one.shape) for name, one in tensors.items()],
            [
                _Piece(p.name, p.box.start, p.box.stop, numbers[p.source], p.at, p.transposed)
                for p in pieces
            ],
        )
    )


@dataclass(frozen=True)
class Held:
    """A source's layout, read and looked at."""

    tensors: dict[str, LocalTensor]
    pieces: list[Piece]

    def source(self, name: str, node: str) -> Source:
        """For the planner, to which a tensor without elements is nothing."""
        full = [piece for piece in self.pieces if piece.box.elements]
        return source_of_pieces(name, self.tensors, full, Place(node))


def read_layout(raw: bytes) -> Held:
    try:
        layout = msgspec.msgpack.decode(raw, type=_Layout)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WeightsError(f"The layout of a source is damaged: {error}.") from error
    tensors = {one.name: LocalTensor(one.dtype, one.shape) for one in layout.tensors}
    if len(tensors) != len(layout.tensors):
        raise WeightsError("A source lists a tensor twice.")
    for name, one in tensors.items():
        if one.dtype not in ELEMENT_BYTES:
            raise WeightsError(f"{name} has the dtype {one.dtype}, which is not known.")
        try:
            check_shape(one.shape)
        except ValueError as error:
            raise WeightsError(f"{name}: {error}.") from error
    names = list(tensors)
    pieces = []
    for piece in layout.pieces:
        if piece.tensor >= len(names) or len(piece.start) != len(piece.stop):
            raise WeightsError(f"A piece of {piece.name} lies nowhere.")
        if any(a > b for a, b in zip(piece.start, piece.stop, strict=True)):
            raise WeightsError(f"A piece of {piece.name} ends before it begins.")
        _check_inside(piece, tensors[names[piece.tensor]].shape)
        box = Box(piece.start, piece.stop)
        pieces.append(Piece(piece.name, box, names[piece.tensor], piece.at, piece.transposed))
    return Held(tensors, pieces)


def _check_inside(piece: _Piece, shape: Shape) -> None:
    """A piece lies in its tensor: a reader takes its place in memory from there."""
    extents = tuple(b - a for a, b in zip(piece.start, piece.stop, strict=True))
    extents = extents[::-1] if piece.transposed else extents
    if (
        not len(piece.at) == len(extents) == len(shape)
        or (piece.transposed and len(shape) != 2)
        or any(a + n > size for a, n, size in zip(piece.at, extents, shape, strict=True))
    ):
        raise WeightsError(f"A piece of {piece.name} lies outside of its tensor.")


@dataclass(frozen=True)
class Group:
    """Sources that have all of a version together."""

    names: tuple[str, ...]
    cards: tuple[Card, ...]
    held: tuple[Held, ...]

    @cached_property
    def key(self) -> str:
        """Equal for equal layouts: of the same sources, whatever the version."""
        told = hashlib.sha256()
        for name, card in zip(self.names, self.cards, strict=True):
            told.update(f"{name} {card.node} {len(card.layout)} ".encode() + card.layout)
        return told.hexdigest()

    @cached_property
    def digests(self) -> dict[tuple[str, Box], bytes]:
        """By piece. Ranks that hold the same must hold the same bytes."""
        found: dict[tuple[str, Box], bytes] = {}
        for card, held in zip(self.cards, self.held, strict=True):
            for number, piece in enumerate(held.pieces):
                digest = card.digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
                if found.setdefault((piece.name, piece.box), digest) != digest:
                    raise WeightsError(
                        f"Two ranks of the trainer hold different values of {piece.name}.",
                        "Their replicas have drifted apart; synchronise them, then publish again.",
                    )
        return found

    @cached_property
    def headers(self) -> dict[str, TensorHeader]:
        """Of the Hugging Face tensors that the pieces make up, all of them whole."""
        dtypes: dict[str, str] = {}
        boxes: dict[str, set[Box]] = {}
        for held in self.held:
            for piece in held.pieces:
                dtypes[piece.name] = held.tensors[piece.source].dtype
                boxes.setdefault(piece.name, set()).add(piece.box)
        headers = {}
        for name, some in boxes.items():
            if len({len(box.stop) for box in some}) != 1:
                raise WeightsError(f"The pieces of {name} have different numbers of dimensions.")
            shape: Shape = tuple(map(max, zip(*(box.stop for box in some), strict=True)))
            check_covered(name, shape, [box for box in some if box.elements])
            headers[name] = TensorHeader(dtypes[name], shape, "")
        return headers

    @cached_property
    def identity(self) -> str:
        """By the digests of all pieces, whoever holds them."""
        facts = sorted(
            (name, self.headers[name].dtype, box.start, box.stop, digest.hex())
            for (name, box), digest in self.digests.items()
        )
        return hashlib.sha256(msgspec.json.encode(facts)).hexdigest()[:32]

    @property
    def nbytes(self) -> int:
        sizes = self.headers.values()
        return sum(Box.whole(one.shape).elements * ELEMENT_BYTES[one.dtype] for one in sizes)


class Layouts:
    """Layouts that were read before, by their bytes."""

    def __init__(self, size: int = 1024) -> None:
        self._size = size
        self._known: dict[bytes, Held] = {}

    def group(self, listings: Iterable[Listing]) -> Group:
        names, cards, held = [], [], []
        for listing in listings:
            try:
                card = msgspec.msgpack.decode(listing.body, type=Card)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise WeightsError(
                    f"{listing.source} announced no NIXL source: {error}."
                ) from error
            known = self._read(card.layout)
            if len(card.addresses) != len(known.tensors):
                raise WeightsError(f"{listing.source} does not say where its tensors lie.")
            if len(card.digests) != DIGEST_BYTES * len(known.pieces):
                raise WeightsError(f"{listing.source} does not give all digests.")
            names.append(listing.source)
            cards.append(card)
            held.append(known)
        return Group(tuple(names), tuple(cards), tuple(held))

    def _read(self, raw: bytes) -> Held:
        mark = hashlib.sha256(raw).digest()
        if mark not in self._known:
            while len(self._known) >= self._size:
                del self._known[next(iter(self._known))]
            self._known[mark] = read_layout(raw)
        return self._known[mark]


def this_node() -> str:
    """Equal for processes that can read each other's memory, as far as one can tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = Path("/proc/self/ns/pid").readlink()
    except OSError:
        return socket.gethostname()
    return f"{boot} {space}"
