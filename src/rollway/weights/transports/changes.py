"""What changed since the version that a worker serves, for workers that patch their parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class ChangedElements(NamedTuple):
    """The changed elements of one tensor, on a device."""

    positions: Tensor
    """Flat positions in the tensor, in order."""
    bits: Tensor
    """Integers of the elements' size."""
    relative: bool
    """Whether the bits must be added to the old ones."""


class TensorChange(Protocol):
    """What changed in one tensor from a version to the next, in host memory."""

    @property
    def name(self) -> str: ...
    @property
    def count(self) -> int:
        """How many elements changed."""
        ...

    @property
    def element_bytes(self) -> int: ...


class ChangedStep(Protocol):
    """What changed from one version to the next; each tensor at most once."""

    @property
    def changes(self) -> Sequence[TensorChange]: ...
    def move(self, device: torch.device) -> Iterator[tuple[str, ChangedElements]]:
        """Yield the changed elements of each tensor, in any order."""
        ...


@dataclass(frozen=True, slots=True)
class Changes:
    """What leads from the served version to another, or why nothing does."""

    steps: Sequence[ChangedStep] = ()
    """In the order in which they apply."""
    refusal: str = ""

    def __iter__(self) -> Iterator[TensorChange]:
        for step in self.steps:
            yield from step.changes
