"""What a publisher gives, divided where the ranks of an engine cut it.

A digest is that of a whole piece, so a rank that took half of one could not prove it. Divided, a
rank's half is pieces of its own; and since publishing copies them anyway, each lies in one run of
memory, so that columns are read as quickly as rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from rollway.weights.layout import Box, Piece, Shape
from rollway.weights.planning.vllm_layout import cells
from rollway.weights.planning.wants import Described


def divided(
    pieces: Sequence[Piece], headers: Mapping[str, Described], ranks: int
) -> dict[Piece, list[Piece]]:
    """Each piece, and what becomes of it; `headers` are of the whole tensors, where known."""
    if ranks == 1:
        return {piece: [piece] for piece in pieces}
    found: dict[Piece, list[Piece]] = {}
    for piece in pieces:
        boxes = cells(piece.name, headers, ranks) if piece.name in headers else ()
        common = [part for box in boxes if (part := box.cut(piece.box)) is not None]
        found[piece] = [_part(piece, box) for box in common] if len(common) > 1 else [piece]
    return found


def packed(
    tensors: Mapping[str, Tensor], parts: Mapping[Piece, list[Piece]]
) -> tuple[dict[str, Tensor], list[Piece]]:
    """Tensors and pieces to publish: those of a tensor that was divided become its parts, the
    first of all tensors side by side, then the second: one rank reads what lies together."""
    cut = {piece.source for piece, several in parts.items() if len(several) > 1} & tensors.keys()
    kept = [one for piece, some in parts.items() if piece.source not in cut for one in some]
    counts = dict.fromkeys(cut, 0)
    turns: list[tuple[int, Piece, Tensor]] = []
    for piece, several in parts.items():
        for one in several if piece.source in cut else ():
            turns.append((counts[piece.source], one, within(tensors[piece.source], one)))
            counts[piece.source] += 1
    turns.sort(key=lambda turn: turn[0])
    given = {f"{one.source} {number}": part for number, one, part in turns}
    made = [
        Piece(one.name, one.box, f"{one.source} {number}", (0,) * len(one.box.shape))
        for number, one, _ in turns
    ]
    rest = {name: tensor for name, tensor in tensors.items() if name not in cut}
    return {**given, **rest}, made + kept


def within(tensor: Tensor, piece: Piece) -> Tensor:
    """The part of a rank's tensor that a piece is about, turned as Hugging Face has it."""
    extents = _turned(piece.box.shape) if piece.transposed else piece.box.shape
    extents = (1,) * (len(piece.at) - len(extents)) + extents
    part = tensor[tuple(slice(a, a + n) for a, n in zip(piece.at, extents, strict=True))]
    part = part.transpose(-1, -2) if piece.transposed else part
    return part.reshape(piece.box.shape)


def _part(piece: Piece, box: Box) -> Piece:
    by = box.seen_from(piece.box.start).start
    by = _turned(by) if piece.transposed else by
    by = (0,) * (len(piece.at) - len(by)) + by
    at = tuple(a + b for a, b in zip(piece.at, by, strict=True))
    return Piece(piece.name, box, piece.source, at, piece.transposed)


def _turned(shape: Shape) -> Shape:
    return (*shape[:-2], shape[-1], shape[-2])
