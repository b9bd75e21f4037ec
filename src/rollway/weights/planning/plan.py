"""Plan transfers: which box of which source tensor goes into which box of which parameter.

    sources     ranks of a trainer: their tensors, and the boxes of Hugging Face tensors in them
       │        ranks that hold the same can replace each other
       ▼
    cuts        each element that a receiver needs is cut out of one source tensor
       │        cuts of one source tensor are read together, from the least busy rank that has it
       ▼
    transfers   what a receiver reads of one source tensor, by the method that takes least time

Every element that a receiver needs is written exactly once, or the plan is refused. More bytes than
needed move only where a source tensor is read whole (tests/unit/weights/test_plan_properties.py).
The layers of a model are alike, so a cut is computed once, without names, and used for all.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from rollway.errors import UsageError
from rollway.weights.checkpoint import TensorHeader
from rollway.weights.layout import (
    ELEMENT_BYTES,
    Box,
    Piece,
    Placed,
    Shape,
    count_run,
    place_at,
    swap_last,
)
from rollway.weights.offer import Entry
from rollway.weights.planning.targets import Target, TargetPart, Targets


class ResidentTensor(NamedTuple):
    """A tensor in a rank's memory, and the boxes that are stored in it.

    A box refers to its Hugging Face tensor by the index in `names`."""

    names: tuple[str, ...]
    dtype: str
    shape: Shape
    held: tuple[Placed, ...]


class Source(NamedTuple):
    """A rank that receivers can read from, with its tensors by the trainer's names."""

    name: str
    tensors: Mapping[str, ResidentTensor]


def source_from_pieces(
    name: str, tensors: Mapping[str, TensorHeader | Entry], pieces: Sequence[Piece]
) -> Source:
    """Return a source for a rank from its own tensors and the pieces that are stored in them."""
    by_tensor: dict[str, list[Piece]] = {}
    for piece in pieces:
        by_tensor.setdefault(piece.source, []).append(piece)
    resident = {}
    for tensor, inside in by_tensor.items():
        names = tuple(dict.fromkeys(piece.name for piece in inside))
        held = tuple(Placed(p.box, p.at, p.transposed, names.index(p.name)) for p in inside)
        resident[tensor] = ResidentTensor(names, tensors[tensor].dtype, tensors[tensor].shape, held)
    return Source(name, resident)


class Method(StrEnum):
    """How a receiver reads what it needs of a source tensor."""

    DIRECT = "direct"  # Each run of bytes that is contiguous at both ends, into its place
    PACKED = "packed"  # The source copies the needed bytes into one run first, as it publishes
    WHOLE = "whole"  # All of the source tensor; the receiver copies the needed part out of it


@dataclass(frozen=True, slots=True)
class Costs:
    """Speeds of the machines, which decide between the methods."""

    wire_gb_per_s: float = 50.0  # Network of one receiver; the default is a NIC of 400 Gb/s
    read_seconds: float = 2.6e-6  # One operation on the wire
    pack_gb_per_s: float = 8.0  # Copying at the source; 0 if the source can only be read
    unpack_gb_per_s: float = 8.0  # Copying at the receiver, from a staging buffer into place


@dataclass(slots=True)
class Transfer:
    """Everything that a receiver reads of one source tensor, by one method."""

    receiver: str
    source: str
    tensor: str
    copies: list[tuple[str, Placed]]
    """Boxes of the source tensor, each after the name of the parameter that it goes into."""
    needed: int  # Bytes
    seconds: float  # Estimated
    moved: int  # Bytes on the wire
    reads: int  # Operations on the wire
    method: Method


@dataclass(slots=True)
class Total:
    """Sums over transfers, which run one after another."""

    needed: int = 0
    moved: int = 0
    reads: int = 0
    seconds: float = 0.0
    methods: Counter[str] = field(default_factory=Counter)  # Bytes on the wire, by method
    sources: Counter[str] = field(default_factory=Counter)  # Bytes on the wire, by source

    @property
    def ratio(self) -> float:
        return self.moved / self.needed if self.needed else 1.0

    def add(self, transfer: Transfer) -> None:
        self.needed += transfer.needed
        self.moved += transfer.moved
        self.reads += transfer.reads
        self.seconds += transfer.seconds
        self.methods[transfer.method] += transfer.moved
        self.sources[transfer.source] += transfer.moved

    def as_json(self) -> dict[str, Any]:
        return {
            "bytes_needed": self.needed,
            "bytes_moved": self.moved,
            "bytes_ratio": round(self.ratio, 6),
            "descriptors": self.reads,
            "estimated_seconds": round(self.seconds, 6),
            "bytes_by_method": dict(self.methods),
            "bytes_by_source": dict(self.sources),
        }


@dataclass(eq=False, slots=True)
class _Replicas:
    """A tensor that one or more ranks hold alike."""

    shared: ResidentTensor
    kind: int  # Equal for tensors of equal geometry
    holders: list[tuple[str, str]] = field(default_factory=list)  # Source, and the tensor in it


class _Portion(NamedTuple):
    """What one parameter receives of one source tensor."""

    cuts: tuple[Placed, ...]
    elements: int
    runs: int  # Runs of elements that are contiguous at both ends
    landings: int  # Runs of elements that are contiguous in the parameter alone


def plan(
    sources: Sequence[Source],
    receivers: Iterable[tuple[str, Targets]],
    costs: Costs | None = None,
) -> Iterator[Transfer]:
    """Find where every element that a receiver needs comes from, and how it is moved.

    Parameters:
        sources: the ranks that can be read.
        receivers: the ranks that receive, with what goes into their parameters.
        costs: speeds of the machines, for the choice of methods.

    Raises `UsageError` if an element has no source, or if dtypes differ."""
    finder = _Finder(sources)
    needed: dict[tuple[str, _Replicas], list[tuple[str, _Portion]]] = {}
    for receiver, targets in receivers:
        for name, target in targets.items():
            for group, portion in finder.find(name, target):
                needed.setdefault((receiver, group), []).append((target.parameter, portion))

    def order(key: tuple[str, _Replicas]) -> tuple[int, int]:
        """Tensors of few ranks come first, so that others can avoid the ranks that they load; of
        these, large ones, so that small ones can even out the loads."""
        return len(key[1].holders), -sum(portion.elements for _, portion in needed[key])

    busy: Counter[str] = Counter()  # Bytes that are read of each source
    for receiver, group in sorted(needed, key=order):
        source, tensor = min(group.holders, key=lambda holder: busy[holder[0]])
        parts = needed[receiver, group]
        copies = [(parameter, cut) for parameter, portion in parts for cut in portion.cuts]
        size = ELEMENT_BYTES[group.shared.dtype]
        bytes_needed = size * sum(portion.elements for _, portion in parts)
        whole = size * math.prod(group.shared.shape)
        choice = min(_list_choices(costs or Costs(), bytes_needed, whole, copies, parts))
        transfer = Transfer(receiver, source, tensor, copies, bytes_needed, *choice)
        busy[source] += transfer.moved
        yield transfer


class _Finder:
    """Finds which source tensors have what a parameter needs."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._replicas: dict[str, list[tuple[_Replicas, int]]] = {}
        """By Hugging Face tensor: where it is held, and its index there."""
        self._found: dict[tuple[Any, ...], tuple[list[tuple[int, _Portion]], Box | None]] = {}
        groups: dict[ResidentTensor, _Replicas] = {}
        kinds: dict[tuple[Any, ...], int] = {}
        for source in sources:
            for tensor, resident in source.tensors.items():
                group = groups.get(resident)
                if group is None:
                    kind = kinds.setdefault(resident[1:], len(kinds))
                    group = groups[resident] = _Replicas(resident, kind)
                    for index, name in enumerate(resident.names):
                        self._replicas.setdefault(name, []).append((group, index))
                group.holders.append((source.name, tensor))

    def find(self, name: str, target: Target) -> Iterator[tuple[_Replicas, _Portion]]:
        places = self._replicas.get(name, [])
        # The layers of a model are alike: what was found for one is found for all.
        key = target.part, target.dtype, *[(group.kind, index) for group, index in places]
        if key not in self._found:
            for group, _ in places:
                _check_dtype(name, group, target.dtype)
            self._found[key] = _cover(target.part, [(g.shared, index) for g, index in places])
        portions, missing = self._found[key]
        if missing is not None:
            raise UsageError(
                f"No source holds {name} at {list(missing.start)} to {list(missing.stop)}.",
                "Check that every rank of the trainer is among the sources.",
            )
        return ((places[number][0], portion) for number, portion in portions)


def _list_choices(
    costs: Costs,
    needed: int,
    whole: int,
    copies: Sequence[tuple[str, Placed]],
    parts: Sequence[tuple[str, _Portion]],
) -> Iterator[tuple[float, int, int, Method]]:
    """Yield seconds, bytes on the wire and reads of each method that is possible."""
    cuts = len(copies)
    runs = sum(portion.runs for _, portion in parts)
    landings = sum(portion.landings for _, portion in parts)
    is_transposed = any(cut.transposed for _, cut in copies)
    on_wire = needed / (costs.wire_gb_per_s * 1e9)
    if not is_transposed:
        yield on_wire + runs * costs.read_seconds, needed, runs, Method.DIRECT
    if costs.pack_gb_per_s and landings == cuts:
        pack = needed / (costs.pack_gb_per_s * 1e9)
        yield on_wire + pack + cuts * costs.read_seconds, needed, cuts, Method.PACKED
    # Bytes beyond the need move only to avoid many small reads: a microsecond is not worth it.
    if whole == needed or is_transposed or runs > cuts:
        unpack = needed / (costs.unpack_gb_per_s * 1e9)
        seconds = whole / (costs.wire_gb_per_s * 1e9) + unpack + costs.read_seconds
        yield seconds, whole, 1, Method.WHOLE


def _check_dtype(name: str, group: _Replicas, needed: str) -> None:
    dtype, (source, _) = group.shared.dtype, group.holders[0]
    if dtype != needed or dtype not in ELEMENT_BYTES:
        raise UsageError(
            f"{name} is {dtype} in the source ({source}) and {needed} in the receiver.",
            "Offer it in the dtype that the receiver has: a plan moves bytes, it does not cast.",
        )


def _cover(
    part: TargetPart, places: Sequence[tuple[ResidentTensor, int]]
) -> tuple[list[tuple[int, _Portion]], Box | None]:
    """Cover a box with boxes of one source tensor after the other, until nothing is left of it.

    Return the portions with the numbers of their source tensors, and a box that none of them has.
    """
    left = [part.box] if part.box.elements else []
    portions = []
    for number, (resident, tensor) in enumerate(places):
        cuts = []
        for held in resident.held:
            if held.tensor != tensor:
                continue
            uncovered = []
            for box in left:
                common = box.intersect(held.box)
                if common is None:
                    uncovered.append(box)
                    continue
                cuts.append(_connect(part, held, common))
                uncovered += _subtract(box, common)
            left = uncovered
        if cuts:
            portions.append((number, _measure(tuple(cuts), resident.shape, part.shape)))
    return portions, left[0] if left else None


def _connect(part: TargetPart, held: Placed, common: Box) -> Placed:
    """Translate `common`, in Hugging Face coordinates, to a box of the source and its target."""
    inside = common.relative_to(held.box.start)
    if held.transposed:
        inside = Box(swap_last(inside.start), swap_last(inside.stop))
    at = place_at(part.at, common.relative_to(part.box.start)).start
    return Placed(place_at(held.at, inside), at, held.transposed)


def _subtract(box: Box, hole: Box) -> list[Box]:
    """Return `box` without `hole`, which is inside it, as boxes that do not overlap."""
    parts = []
    # On each axis, split off the parts before and after the hole, then continue with the rest.
    for axis, (start, stop) in enumerate(zip(hole.start, hole.stop, strict=True)):
        for first, last in ((box.start[axis], start), (stop, box.stop[axis])):
            if first < last:
                parts.append(box.narrow(axis, first, last))
        box = box.narrow(axis, start, stop)
    return parts


def _measure(cuts: tuple[Placed, ...], source: Shape, parameter: Shape) -> _Portion:
    elements = runs = landings = 0
    for cut in cuts:
        count = cut.box.elements
        here, there = count_run(cut.box.shape, source), count_run(cut.extent, parameter)
        elements += count
        runs += count if cut.transposed else count // min(here, there)
        landings += count // there
    return _Portion(cuts, elements, runs, landings)
