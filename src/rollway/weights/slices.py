"""The parts of tensors that one rank of an engine receives.

vLLM's loaders accept whole tensors and cut them. A rank that received only its part passes them a
zero-padded tensor: the shape of the whole tensor, with the part in its place. The zeros are never
touched, so on a CPU they take no memory. A loader that cut elsewhere would load zeros, and the
verification after the load would fail.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rollway.weights.layout import Box, Shape

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Slices:
    """The boxes that a rank receives of tensors that ranks divide. Empty: all tensors whole."""

    boxes: Mapping[str, Box | None] = field(default_factory=dict)
    """By tensor; None where this rank holds nothing of it."""
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    """Shapes of the whole tensors."""
    parameters: Mapping[str, str] = field(default_factory=dict)
    """The engine's parameter that each tensor is loaded into."""

    def keep_whole_pieces(self, pieces: Mapping[str, list[Box]]) -> Slices:
        """Keep the slices that consist of whole pieces, which have digests of their own.

        The tensors of one parameter stay all sliced or all whole, because they are verified
        together."""
        unaligned = {
            self.parameters[name]
            for name, box in self.boxes.items()
            if box is not None
            and not all(piece.intersect(box) in (None, piece) for piece in pieces.get(name, []))
        }
        return self.without(unaligned)

    def zero_padded(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors, with each part at its place in a zero-padded whole tensor."""
        for name, tensor in tensors:
            box = self.boxes.get(name)
            if box is not None and box != Box.whole(self.shapes[name]):
                tensor = zero_pad(tensor, box, self.shapes[name])
            yield name, tensor

    def without(self, parameters: set[str]) -> Slices:
        """Return the slices of all other parameters."""
        boxes = {n: box for n, box in self.boxes.items() if self.parameters[n] not in parameters}
        return Slices(boxes, self.shapes, self.parameters)


WHOLE = Slices()


def zero_pad(part: Tensor, box: Box, shape: Shape) -> Tensor:
    """Return a zero-padded tensor of this shape with `part` at `box`."""
    import numpy as np
    import torch

    if part.device.type == "cpu":
        # numpy's zeros are pages that the kernel provides when they are touched; torch's are
        # written.
        raw = np.zeros(Box.whole(shape).elements * part.element_size(), dtype=np.uint8)
        whole = torch.from_numpy(raw).view(part.dtype).view(shape)
    else:
        whole = torch.zeros(shape, dtype=part.dtype, device=part.device)
    whole[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))] = part
    return whole
