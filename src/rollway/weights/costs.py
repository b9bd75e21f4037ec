"""How the bytes of one tensor get to one receiver: the cheapest of four ways, and why.

range     contiguous on both ends: one descriptor each
strided   rows apart on either end: every block is an operation of its own on the wire
packed    the source first copies what is needed into one run of memory
whole     the receiver takes the source's whole tensor, and cuts it itself
"""

from __future__ import annotations

from dataclasses import dataclass
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
    ways = [way for way in (_direct, _packed, _whole) if way is not _direct or not load.transposed]
    found = [choice for way in ways if (choice := way(load, costs)) is not None]
    best = min(found, key=lambda choice: (choice.seconds, choice.moved, choice.staged))
    others = [choice for choice in found if choice is not best]
    return _explained(best, others, load)


def _direct(load: Load, costs: Costs) -> Choice:
    seconds = load.needed / _bytes(costs.wire_gb_per_s) + load.blocks * costs.block_seconds
    method = Method.RANGE if load.blocks == load.cuts else Method.STRIDED
    return Choice(method, "", seconds, load.needed, load.cuts, load.blocks, staged=False)


def _packed(load: Load, costs: Costs) -> Choice | None:
    """Packed bytes land in place when every cut is one run there; else they are unpacked."""
    if not costs.pack_gb_per_s:
        return None
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


def _explained(best: Choice, others: list[Choice], load: Load) -> Choice:
    if best.method is Method.RANGE:
        words = "contiguous on both ends"
    else:
        words = f"{load.blocks} blocks of {load.needed // load.blocks} B"
        if load.transposed:
            words = "transposed"
        words += f": {best.method} {_milliseconds(best)}"
        words += "".join(f", {other.method} {_milliseconds(other)}" for other in others)
        if best.moved > load.needed:
            words += f"; {best.moved - load.needed} B more than needed"
    return Choice(
        best.method,
        words,
        best.seconds,
        best.moved,
        best.descriptors,
        best.blocks,
        best.staged,
    )


def _milliseconds(choice: Choice) -> str:
    return f"{choice.seconds * 1e3:.3g} ms"


def _bytes(gigabytes: float) -> float:
    return gigabytes * 1e9
