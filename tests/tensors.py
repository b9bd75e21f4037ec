"""Tensors of any bits, and comparisons bit by bit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rollway.weights.digest.checksums import raw_bytes
from rollway.weights.offer import Offer
from rollway.weights.transports.base import Reader


def noise(shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return random bits; NaNs, infinities and subnormals are among them."""
    generator = torch.Generator().manual_seed(seed)
    size = math.prod(shape) * dtype.itemsize
    top = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, top, (size,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(tuple(shape))


def receive(reader: Reader, offer: Offer) -> dict[str, Tensor]:
    """Return copies of an offer's tensors, which outlive the reader."""
    return {name: tensor.clone() for name, tensor in reader.tensors(offer)}


def equal_bits(left: Tensor, right: Tensor) -> bool:
    return (left.dtype, left.shape) == (right.dtype, right.shape) and torch.equal(
        raw_bytes(left), raw_bytes(right)
    )


def same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    """Return whether both have the same names and, bit by bit, the same tensors."""
    return left.keys() == right.keys() and all(
        equal_bits(tensor, right[name]) for name, tensor in left.items()
    )
