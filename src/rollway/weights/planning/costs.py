"""Choose the cheapest of four methods to move the bytes of one tensor to one receiver.

range     contiguous at both ends: one descriptor
strided   rows are apart at either end: every block is an operation on the wire
packed    the source first copies the needed bytes into one contiguous run
whole     the receiver reads the source's whole tensor, and copies the needed part out of it
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from rollway.errors import UsageError


class Method(StrEnum):
    RANGE = "range"
    STRIDED = "strided"
    PACKED = "packed"
    WHOLE = "whole"


@dataclass(frozen=True, slots=True)
class Costs:
    """Speeds of the machines, which decide between the methods."""

    wire_gb_per_s: float = 50.0  # Network of one receiver; the default is a NIC of 400 Gb/s
    block_seconds: float = 2.6e-6
    """One operation on the wire, alone or as part of a strided descriptor."""
    pack_gb_per_s: float = 8.0  # Copying at the source; 0 if the source can only be read
    unpack_gb_per_s: float = 8.0  # Copying at the receiver, from a staging buffer into place

    def __post_init__(self) -> None:
        if self.wire_gb_per_s <= 0 or self.unpack_gb_per_s <= 0:
            raise UsageError(
                "The wire and the receiver's memory must have a speed above 0.", "Give GB/s."
            )
        if self.block_seconds < 0 or self.pack_gb_per_s < 0:
            raise UsageError("Costs cannot be negative.", "Use 0 for an operation that is free.")


@dataclass(frozen=True, slots=True)
class Load:
    """What one receiver needs of one source tensor, in the numbers that decide the method."""

    needed: int  # Bytes that the receiver needs
    whole: int  # Bytes of the source's whole tensor
    cuts: int
    blocks: int  # Runs that are contiguous at both ends
    landings: int  # Runs that are contiguous in the target alone
    transposed: bool = False

    @property
    def strided(self) -> bool:
        return self.transposed or self.blocks > self.cuts

    @property
    def block(self) -> int:
        """The average size of a block in bytes."""
        return self.needed // self.blocks


@dataclass(frozen=True, slots=True)
class Choice:
    """A method with its estimated cost."""

    method: Method
    reason: str
    seconds: float
    moved: int  # Bytes on the wire
    descriptors: int
    blocks: int  # Operations on the wire
    staged: bool  # Whether the receiver copies the bytes into place from a staging buffer


def choose(load: Load, costs: Costs) -> Choice:
    """Return the cheapest method; of equal ones, the method that moves and copies less."""
    choices = [] if load.transposed else [_cost_direct(load, costs)]
    if costs.pack_gb_per_s:
        choices.append(_cost_packed(load, costs))
    # Moving more bytes than needed is only for strided loads: a microsecond is not worth it.
    if load.whole == load.needed or load.strided:
        choices.append(_cost_whole(load, costs))
    best = min(choices, key=lambda choice: (choice.seconds, choice.moved, choice.staged))
    return replace(best, reason=_explain(best, choices, load))


def _cost_direct(load: Load, costs: Costs) -> Choice:
    seconds = _seconds(load.needed, costs.wire_gb_per_s) + load.blocks * costs.block_seconds
    method = Method.STRIDED if load.strided else Method.RANGE
    return Choice(method, "", seconds, load.needed, load.cuts, load.blocks, staged=False)


def _cost_packed(load: Load, costs: Costs) -> Choice:
    # Packed bytes are read straight into place if every cut is one run there.
    staged = load.landings > load.cuts
    blocks = 1 if staged else load.cuts
    seconds = _seconds(load.needed, costs.pack_gb_per_s)
    seconds += _seconds(load.needed, costs.wire_gb_per_s) + blocks * costs.block_seconds
    if staged:
        seconds += _seconds(load.needed, costs.unpack_gb_per_s)
    return Choice(Method.PACKED, "", seconds, load.needed, blocks, blocks, staged)


def _cost_whole(load: Load, costs: Costs) -> Choice:
    seconds = _seconds(load.whole, costs.wire_gb_per_s) + costs.block_seconds
    seconds += _seconds(load.needed, costs.unpack_gb_per_s)
    return Choice(Method.WHOLE, "", seconds, load.whole, 1, 1, staged=True)


def _explain(best: Choice, choices: list[Choice], load: Load) -> str:
    if best.method is Method.RANGE:
        return "contiguous on both ends"
    cut = "transposed" if load.transposed else f"{load.blocks} blocks of {load.block} B"
    ordered = sorted(choices, key=lambda choice: choice.seconds)
    times = ", ".join(f"{choice.method} {choice.seconds * 1e3:.3g} ms" for choice in ordered)
    extra = best.moved - load.needed
    return f"{cut}: {times}; {extra} B more than needed" if extra else f"{cut}: {times}"


def _seconds(nbytes: int, gb_per_s: float) -> float:
    return nbytes / (gb_per_s * 1e9)
