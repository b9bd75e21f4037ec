"""Split a publisher's tensors where the ranks of an engine cut them.

A digest covers a whole piece, so a rank that read half of one could not verify it. After the split,
a rank's part consists of pieces with digests. Publishing copies them anyway, so each part becomes
one run of memory, and columns are read as fast as rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from rollway.weights.layout import Box, Piece, place_at, swap_last
from rollway.weights.planning.targets import TensorInfo, cells


def split_for_ranks(
    pieces: Sequence[Piece], headers: Mapping[str, TensorInfo], ranks: int
) -> dict[Piece, list[Piece]]:
    """Return the parts of each piece; `headers` describe the whole tensors, where known."""
    if ranks == 1:
        return {piece: [piece] for piece in pieces}
    parts: dict[Piece, list[Piece]] = {}
    for piece in pieces:
        boxes = cells(piece.name, headers, ranks) if piece.name in headers else ()
        common = [part for box in boxes if (part := box.intersect(piece.box)) is not None]
        parts[piece] = [_cut(piece, box) for box in common] if len(common) > 1 else [piece]
    return parts


def pack_parts(
    tensors: Mapping[str, Tensor], parts: Mapping[Piece, list[Piece]]
) -> tuple[dict[str, Tensor], list[Piece]]:
    """Return the tensors and pieces to publish, with each part of a split tensor as its own tensor.

    The first parts of all tensors come first, then the second parts, and so on: what one rank
    reads is then stored together."""
    split = {piece.source for piece, several in parts.items() if len(several) > 1} & tensors.keys()
    counts = dict.fromkeys(split, 0)
    numbered: list[tuple[int, Piece]] = []
    unsplit: list[Piece] = []
    for piece, several in parts.items():
        if piece.source not in split:
            unsplit += several
            continue
        for part in several:
            numbered.append((counts[piece.source], part))
            counts[piece.source] += 1
    numbered.sort(key=lambda item: item[0])
    part_tensors: dict[str, Tensor] = {}
    part_pieces: list[Piece] = []
    for number, part in numbered:
        name = f"{part.source} {number}"
        part_tensors[name] = slice_piece(tensors[part.source], part)
        part_pieces.append(Piece(part.name, part.box, name, (0,) * len(part.box.shape)))
    rest = {name: tensor for name, tensor in tensors.items() if name not in split}
    return {**part_tensors, **rest}, part_pieces + unsplit


def slice_piece(tensor: Tensor, piece: Piece) -> Tensor:
    """Return a piece of a rank's tensor, in the orientation of the Hugging Face tensor."""
    shape = swap_last(piece.box.shape) if piece.transposed else piece.box.shape
    part = tensor[place_at(piece.at, Box.whole(shape)).slices]
    part = part.transpose(-1, -2) if piece.transposed else part
    return part.reshape(piece.box.shape)


def _cut(piece: Piece, box: Box) -> Piece:
    inside = box.relative_to(piece.box.start)
    if piece.transposed:
        inside = Box(swap_last(inside.start), swap_last(inside.stop))
    at = place_at(piece.at, inside).start
    return Piece(piece.name, box, piece.source, at, piece.transposed)
