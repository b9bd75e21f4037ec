"""A plan as reads into a staging buffer of bounded size, one window after the other.

A window is a few targets that are read together and handed out together. What the plan takes
whole, to cut it here, lies behind the targets of its window. Offsets only, no addresses: windows
are made once for a plan and serve all versions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from rollway.errors import UsageError
from rollway.weights.layout import ELEMENT_BYTES, Box, Shape
from rollway.weights.planning.recipe import landing, run
from rollway.weights.planning.transfers import Copy, Plan, Total, Transfer
from rollway.weights.planning.wants import LocalTensor, Wants

ALIGNED = 256
Offsets = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Landed:
    """A tensor in a buffer."""

    name: str
    dtype: str
    shape: Shape
    offset: int

    @property
    def nbytes(self) -> int:
        return Box.whole(self.shape).elements * ELEMENT_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Proof:
    """Where a piece lies whole in a target, for its digest to be compared."""

    target: str
    box: Box
    piece: tuple[str, Box]


@dataclass(slots=True)
class Reads:
    """From one source: rows of (tensor, offset in it, offset in the buffer, bytes)."""

    rows: list[Offsets] = field(default_factory=list)

    def placed(self, addresses: list[int], base: int) -> tuple[Offsets, Offsets, Offsets]:
        """Remote and local addresses and lengths, in the order of the source's memory, with
        neighbours made one: NIXL moves such lists many times faster."""
        rows = np.concatenate(self.rows)
        remote = np.asarray(addresses, dtype=np.int64)[rows[:, 0]] + rows[:, 1]
        order = np.argsort(remote, kind="stable")
        remote, local, size = remote[order], rows[order, 2] + base, rows[order, 3]
        ends = (remote[1:] != remote[:-1] + size[:-1]) | (local[1:] != local[:-1] + size[:-1])
        first = np.concatenate([[0], np.flatnonzero(ends) + 1])
        return remote[first], local[first], np.add.reduceat(size, first)


@dataclass(slots=True)
class Window:
    offset: int
    """Of the window in the buffer; offsets of what is in it count from the buffer's start."""
    nbytes: int = 0
    targets: list[Landed] = field(default_factory=list)
    reads: dict[str, Reads] = field(default_factory=dict)
    """By source."""
    replays: list[tuple[Landed, tuple[Copy, ...]]] = field(default_factory=list)
    """Source tensors that were taken whole, and what to copy out of them."""

    def take(self, name: str, dtype: str, shape: Shape) -> Landed:
        landed = Landed(name, dtype, shape, self.offset + self.nbytes)
        self.nbytes += aligned(landed.nbytes)
        return landed


@dataclass(frozen=True)
class Windows:
    """All that one receiver does for a plan."""

    windows: list[Window]
    proofs: dict[str, list[Proof]]
    total: Total
    """Bytes needed, on the wire, and from whom."""


def make_windows(
    plan: Plan,
    receiver: str,
    wants: Wants,
    sources: Mapping[str, Mapping[str, LocalTensor]],
    pieces: Iterable[tuple[str, Box]],
    *,
    window_bytes: int,
    keep: bool = False,
) -> Windows:
    """`keep` lays the windows side by side, so that a buffer holds all of them in the end."""
    targets = _targets(wants)
    transfers = list(plan.transfers(receiver))
    numbers = {
        source: {name: number for number, name in enumerate(tensors)}
        for source, tensors in sources.items()
    }
    windows: list[Window] = []
    where: dict[str, tuple[Window, Landed]] = {}
    for group in _joined(targets, transfers):
        size = sum(aligned(_size(targets[name])) for name in group)
        if not windows or windows[-1].nbytes + size > window_bytes:
            before = windows[-1] if windows else None
            offset = before.offset + before.nbytes if before and keep else 0
            windows.append(Window(offset))
        for name in group:
            landed = windows[-1].take(name, targets[name].dtype, targets[name].shape)
            windows[-1].targets.append(landed)
            where[name] = windows[-1], landed
    _place_whole(windows, transfers, where, sources, keep)
    for transfer in transfers:
        if not transfer.staged:
            tensor = sources[transfer.source][transfer.tensor]
            for copy in transfer.copies:
                window, landed = where[copy.target]
                number = numbers[transfer.source][transfer.tensor]
                rows = window.reads.setdefault(transfer.source, Reads()).rows
                rows.append(_rows(copy, number, tensor, landed))
    for window in windows:
        for landed, copies in window.replays:
            tensor_number = numbers[copies[0].source][landed.name]
            row = np.array([[tensor_number, 0, landed.offset, landed.nbytes]], dtype=np.int64)
            window.reads.setdefault(copies[0].source, Reads()).rows.append(row)
    return Windows(windows, _proofs(wants, pieces), plan.totals[receiver])


def _place_whole(
    windows: list[Window],
    transfers: list[Transfer],
    where: dict[str, tuple[Window, Landed]],
    sources: Mapping[str, Mapping[str, LocalTensor]],
    keep: bool,
) -> None:
    """Room for what is taken whole: behind its window, or behind all of them when those stay."""
    end = max((window.offset + window.nbytes for window in windows), default=0)
    used: dict[int, int] = {}
    for transfer in transfers:
        if not transfer.staged:
            continue
        window = where[transfer.copies[0].target][0]
        tensor = sources[transfer.source][transfer.tensor]
        start = end if keep else window.offset + window.nbytes
        start += used.get(id(window), 0)
        landed = Landed(transfer.tensor, tensor.dtype, tensor.shape, start)
        used[id(window)] = used.get(id(window), 0) + aligned(landed.nbytes)
        window.replays.append((landed, transfer.copies))
    for window in windows:
        if window.replays:
            last = window.replays[-1][0]
            window.nbytes = last.offset + aligned(last.nbytes) - window.offset


def _targets(wants: Wants) -> dict[str, LocalTensor]:
    found = {}
    for several in wants.values():
        for want in several:
            if (part := want.parts[0]) is not None:
                found[want.target] = LocalTensor(want.dtype, part.shape)
    return found


def _joined(targets: Mapping[str, LocalTensor], transfers: list[Transfer]) -> Iterator[list[str]]:
    """Targets in their order; those that are cut from one source tensor stay together."""
    leader = {name: name for name in targets}

    def lead(name: str) -> str:
        while leader[name] != name:
            leader[name] = name = leader[leader[name]]
        return name

    for transfer in transfers:
        if transfer.staged:
            for one, other in pairwise(copy.target for copy in transfer.copies):
                leader[lead(other)] = lead(one)
    groups: dict[str, list[str]] = {}
    for name in targets:
        groups.setdefault(lead(name), []).append(name)
    yield from groups.values()


def _rows(copy: Copy, number: int, tensor: LocalTensor, landed: Landed) -> Offsets:
    """One row for each run that is contiguous at both ends."""
    size = ELEMENT_BYTES[tensor.dtype]
    length = min(run(copy.box.shape, tensor.shape), run(copy.shape, landed.shape))
    blocks = np.arange(0, copy.box.elements, length, dtype=np.int64)
    there = _flat(blocks, copy.box.shape, copy.box.start, tensor.shape)
    here = _flat(blocks, copy.shape, copy.at, landed.shape)
    rows = np.empty((len(blocks), 4), dtype=np.int64)
    rows[:, 0], rows[:, 1] = number, there * size
    rows[:, 2], rows[:, 3] = landed.offset + here * size, length * size
    return rows


def _flat(blocks: Offsets, extent: Shape, start: Shape, shape: Shape) -> Offsets:
    """Elements of a box, by their number in it, as numbers in the tensor around it."""
    if not shape:
        return blocks
    inside = np.unravel_index(blocks, extent)
    at = tuple(one + first for one, first in zip(inside, start, strict=True))
    return np.asarray(np.ravel_multi_index(at, shape), dtype=np.int64)


def _proofs(wants: Wants, pieces: Iterable[tuple[str, Box]]) -> dict[str, list[Proof]]:
    proofs: dict[str, list[Proof]] = {}
    for name, box in pieces:
        for want in wants.get(name, ()):
            part = want.parts[0]
            common = box.cut(part.box) if part else None
            if part is None or common is None:
                continue
            if common != box:
                raise UsageError(
                    f"Only a part of a piece of {name} is wanted, and that cannot be proved.",
                    "Take whole tensors; digests are those of the pieces that ranks hold.",
                )
            inside = box.seen_from(part.box.start).start
            inside = (0,) * (len(part.at) - len(inside)) + inside
            start = tuple(a + b for a, b in zip(part.at, inside, strict=True))
            place = landing(start, box.shape)
            proofs.setdefault(want.target, []).append(Proof(want.target, place, (name, box)))
    return proofs


def _size(tensor: LocalTensor) -> int:
    return Box.whole(tensor.shape).elements * ELEMENT_BYTES[tensor.dtype]


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNED) * ALIGNED
