"""What the ranks of a trainer offer, told once for all tensors of equal geometry.

A `Resident` is a tensor in a rank's memory, with the boxes of Hugging Face tensors that lie in it;
tensors of equal geometry have the very same `Holding`, so that the planner sees at once that they
are alike. `source_of_pieces` makes a source from plain pieces. Tensors stay where they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollway.errors import UsageError
from rollway.weights.layout import Box, Piece, Shape
from rollway.weights.planning.wants import Described


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank runs; an empty word is a place unlike any other."""

    node: str = ""
    device: str = ""

    def nearness(self, other: Place) -> int:
        """2 on one device, 1 on one node, else 0."""
        if self.node and self.node == other.node:
            return 2 if self.device and self.device == other.device else 1
        return 0


ANYWHERE = Place()


@dataclass(frozen=True, slots=True)
class Held:
    """A box of Hugging Face tensor number `tensor`, and where it starts in the source's memory."""

    tensor: int
    box: Box
    at: Shape
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class Holding:
    """A tensor in a rank's memory by its geometry, and what lies in it."""

    dtype: str
    shape: Shape
    held: tuple[Held, ...]


@dataclass(frozen=True, slots=True)
class Resident:
    """A tensor of a source; `names` are those of the Hugging Face tensors that lie in it."""

    names: tuple[str, ...]
    holding: Holding


@dataclass(frozen=True)
class Source:
    """A rank that offers what it holds, by the names of its own tensors."""

    name: str
    offers: Mapping[str, Resident]
    place: Place = ANYWHERE


def source_of_pieces(
    name: str,
    tensors: Mapping[str, Described],
    pieces: Sequence[Piece],
    place: Place = ANYWHERE,
) -> Source:
    """For a rank that says what it holds piece by piece; `tensors` are its own."""
    mates: dict[str, list[Piece]] = {}
    for piece in pieces:
        mates.setdefault(piece.source, []).append(piece)
    shared: dict[Holding, Holding] = {}
    offers = {}
    for tensor, mine in mates.items():
        if tensor not in tensors:
            raise UsageError(f"{name} offers pieces of {tensor}, but has no such tensor.")
        numbers: dict[str, int] = {}
        held = tuple(
            Held(numbers.setdefault(p.name, len(numbers)), p.box, p.at, p.transposed) for p in mine
        )
        holding = Holding(tensors[tensor].dtype, tensors[tensor].shape, held)
        offers[tensor] = Resident(tuple(numbers), shared.setdefault(holding, holding))
    return Source(name, offers, place)
