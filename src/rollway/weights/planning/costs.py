"""How the bytes of one tensor get to one receiver: the cheapest of four ways, and why.

range     contiguous on both ends: one descriptor each
strided   rows apart on either end: every block is an operation of its own on the wire
packed    the source first copies what is needed into one run of memory
whole     the receiver takes the source's whole tensor, and cuts it itself
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
    """Speeds that decide between the ways; they are the machines', not the plan's."""

    wire_gb_per_s: float = 50.0
    """Of one receiver: a NIC of 400 Gb/s, unless told otherwise."""
    block_seconds: float = 2.6e-6
    """One operation on the wire, whether it was asked for alone or by a strided descriptor."""
    pack_gb_per_s: float = 8.0
    """Copying at the source; 0 when a source can do nothing but be read."""
    unpack_gb_per_s: float = 8.0
    """Copying at the receiver, from a staging buffer into place."""

    def __post_init__(self) -> None:
        if self.wire_gb_per_s <= 0 or self.unpack_gb_per_s <= 0:
            raise UsageError("The wire and the receiver's memory must have a speed above 0.")
        if self.block_seconds < 0 or self.pack_gb_per_s < 0:
            raise UsageError("Costs cannot be negative.")


@dataclass(frozen=True, slots=True)
class Load:
    """What one source tensor must give to one receiver, in the numbers that decide the way."""

    needed: int
    """Bytes."""
    whole: int
    """Bytes of the source's whole tensor."""
    cuts: int
    blocks: int
    """Runs that are contiguous on both ends."""
    landings: int
    """Runs that are contiguous in the target alone."""
    transposed: bool = False

    @property
    def strided(self) -> bool:
        return self.transposed or self.blocks > self.cuts

    @property
    def block(self) -> int:
        """Bytes of one, on average."""
        return self.needed // self.blocks


@dataclass(frozen=True, slots=True)
class Choice:
    method: Method
    reason: str
    seconds: float
    moved: int
    """Bytes on the wire."""
    descriptors: int
    blocks: int
    """Operations on the wire."""
    staged: bool
    """Whether the bytes go through a buffer at the receiver, and are put in place from there."""


def choose(load: Load, costs: Costs) -> Choice:
    """The cheapest way; of two equal ones, that which moves less and copies less."""
    found = [] if load.transposed else [_direct(load, costs)]
    if costs.pack_gb_per_s:
        found.append(_packed(load, costs))
    # Bytes too many are for strided cuts only: a microsecond saved on ranges is not worth them.
    if load.whole == load.needed or load.strided:
        found.append(_whole(load, costs))
    best = min(found, key=lambda choice: (choice.seconds, choice.moved, choice.staged))
    return replace(best, reason=_reason(best, found, load))


def _direct(load: Load, costs: Costs) -> Choice:
    seconds = load.needed / _bytes(costs.wire_gb_per_s) + load.blocks * costs.block_seconds
    method = Method.STRIDED if load.strided else Method.RANGE
    return Choice(method, "", seconds, load.needed, load.cuts, load.blocks, staged=False)


def _packed(load: Load, costs: Costs) -> Choice:
    """Packed bytes land in place when every cut is one run there; else they are unpacked."""
    staged = load.landings > load.cuts
    blocks = 1 if staged else load.cuts
    seconds = load.needed / _bytes(costs.pack_gb_per_s) + load.needed / _bytes(costs.wire_gb_per_s)
    seconds += blocks * costs.block_seconds
    if staged:
        seconds += load.needed / _bytes(costs.unpack_gb_per_s)
    return Choice(Method.PACKED, "", seconds, load.needed, blocks, blocks, staged)


def _whole(load: Load, costs: Costs) -> Choice:
    seconds = load.whole / _bytes(costs.wire_gb_per_s) + costs.block_seconds
    seconds += load.needed / _bytes(costs.unpack_gb_per_s)
    return Choice(Method.WHOLE, "", seconds, load.whole, 1, 1, staged=True)


def _reason(best: Choice, found: list[Choice], load: Load) -> str:
    if best.method is Method.RANGE:
        return "contiguous on both ends"
    cut = "transposed" if load.transposed else f"{load.blocks} blocks of {load.block} B"
    ways = sorted(found, key=lambda choice: choice.seconds)
    words = f"{cut}: {', '.join(f'{way.method} {_milliseconds(way)}' for way in ways)}"
    extra = best.moved - load.needed
    return f"{words}; {extra} B more than needed" if extra else words


def _milliseconds(choice: Choice) -> str:
    return f"{choice.seconds * 1e3:.3g} ms"


def _bytes(gigabytes: float) -> float:
    return gigabytes * 1e9
