"""Turn a plan into reads into a staging buffer of bounded size, one window after the other.

    buffer   │ target a │ target b │ target c │ fused qkv, read whole │     one window
                ▲          ▲ ▲ ▲                     │
     reads ─────┘          └─┴─┘                     └── cut into target c after the read
             one run     three runs

A window is a few targets that are read together and yielded together. If cutting a source tensor at
the source would take too many small reads, the plan reads it whole; it is stored behind the
targets of its window and cut on arrival. Windows contain offsets and no addresses, so they are
made once per plan and used for all versions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from rollway.errors import UsageError
from rollway.weights.layout import ELEMENT_BYTES, Box, Placed, Shape, place_at
from rollway.weights.planning.recipe import run
from rollway.weights.planning.targets import LocalTensor, Targets
from rollway.weights.planning.transfers import Plan, Total, Transfer

ALIGNED = 256
Offsets = NDArray[np.int64]
PieceCheck = tuple[Box, tuple[str, Box]]
"""The box of a target that contains a whole piece, and the piece whose digest it must have."""


@dataclass(frozen=True, slots=True)
class BufferTensor:
    """A tensor at an offset of a buffer."""

    name: str
    dtype: str
    shape: Shape
    offset: int

    @property
    def nbytes(self) -> int:
        return Box.whole(self.shape).elements * ELEMENT_BYTES[self.dtype]


@dataclass(slots=True)
class Window:
    """Targets that are read and yielded together."""

    offset: int
    """Where the window starts in the buffer; all offsets in it count from the buffer's start."""
    nbytes: int = 0
    targets: list[BufferTensor] = field(default_factory=list)
    reads: dict[str, list[Offsets]] = field(default_factory=dict)
    """By source: rows of (number of the tensor, offset in it, offset in the buffer, bytes)."""
    cuts: list[tuple[BufferTensor, Transfer]] = field(default_factory=list)
    """Source tensors that are read whole, and the transfers that copy them into targets."""

    def add_target(self, name: str, tensor: LocalTensor) -> BufferTensor:
        target = BufferTensor(name, tensor.dtype, tensor.shape, self.offset + self.nbytes)
        self.nbytes += align(target.nbytes)
        self.targets.append(target)
        return target

    def add_reads(self, source: str, rows: Offsets) -> None:
        self.reads.setdefault(source, []).append(rows)


@dataclass(frozen=True)
class Windows:
    """Everything that one receiver does for a plan."""

    windows: list[Window]
    checks: dict[str, list[PieceCheck]]
    """The pieces to verify, by target."""
    total: Total
    """Bytes needed, bytes on the wire, and their sources."""


def make_windows(
    plan: Plan,
    receiver: str,
    wants: Targets,
    sources: Mapping[str, Mapping[str, LocalTensor]],
    pieces: Iterable[tuple[str, Box]],
    *,
    window_bytes: int,
    keep: bool = False,
) -> Windows:
    """Lay out the targets of one receiver in windows of about `window_bytes`.

    `keep` places the windows side by side, so that in the end the buffer holds all targets and can
    be served to others. Otherwise every window starts at 0, and the caller alternates buffers."""
    targets = _list_targets(wants)
    transfers = list(plan.transfers(receiver))
    numbers = {
        source: {name: number for number, name in enumerate(tensors)}
        for source, tensors in sources.items()
    }
    windows: list[Window] = []
    where: dict[str, tuple[Window, BufferTensor]] = {}
    for group in _group_targets(targets, transfers):
        size = sum(align(_nbytes(targets[name])) for name in group)
        # A group that exceeds the limit by itself gets a window of its own size.
        if not windows or windows[-1].nbytes + size > window_bytes:
            before = windows[-1] if windows else None
            windows.append(Window(before.offset + before.nbytes if before and keep else 0))
        for name in group:
            where[name] = windows[-1], windows[-1].add_target(name, targets[name])
    _place_whole_tensors(windows, transfers, where, sources, keep)
    for transfer in transfers:
        if not transfer.step.choice.staged:
            tensor = sources[transfer.source][transfer.tensor]
            number = numbers[transfer.source][transfer.tensor]
            for name, cut in transfer.copies():
                window, target = where[name]
                window.add_reads(transfer.source, _make_rows(cut, number, tensor, target))
    for window in windows:
        for whole, transfer in window.cuts:
            number = numbers[transfer.source][whole.name]
            row = np.array([[number, 0, whole.offset, whole.nbytes]], dtype=np.int64)
            window.add_reads(transfer.source, row)
    return Windows(windows, _find_checks(wants, pieces), plan.totals[receiver])


def resolve_reads(
    reads: list[Offsets], addresses: list[int], base: int
) -> tuple[Offsets, Offsets, Offsets]:
    """Return the remote addresses, local addresses and lengths of a window's reads of a source.

    They are in the order of the source's memory, and reads that are neighbours at both ends are
    merged: NIXL moves such lists many times faster."""
    rows = np.concatenate(reads)
    remote = np.asarray(addresses, dtype=np.int64)[rows[:, 0]] + rows[:, 1]
    order = np.argsort(remote, kind="stable")
    remote, local, size = remote[order], rows[order, 2] + base, rows[order, 3]
    ends = (remote[1:] != remote[:-1] + size[:-1]) | (local[1:] != local[:-1] + size[:-1])
    first = np.concatenate([[0], np.flatnonzero(ends) + 1])
    return remote[first], local[first], np.add.reduceat(size, first)


def _place_whole_tensors(
    windows: list[Window],
    transfers: list[Transfer],
    where: dict[str, tuple[Window, BufferTensor]],
    sources: Mapping[str, Mapping[str, LocalTensor]],
    keep: bool,
) -> None:
    """Place source tensors that are read whole: behind their window, or behind all kept ones.

    Behind kept windows, all windows share that space: it is scratch, and only the targets stay."""
    end = max((window.offset + window.nbytes for window in windows), default=0)
    used: dict[int, int] = {}
    for transfer in transfers:
        if not transfer.step.choice.staged:
            continue
        window = where[next(transfer.copies())[0]][0]
        tensor = sources[transfer.source][transfer.tensor]
        start = end if keep else window.offset + window.nbytes
        start += used.get(id(window), 0)
        whole = BufferTensor(transfer.tensor, tensor.dtype, tensor.shape, start)
        used[id(window)] = used.get(id(window), 0) + align(whole.nbytes)
        window.cuts.append((whole, transfer))
    for window in windows:  # only now: `nbytes` was the end of the targets until here
        if window.cuts:
            last = window.cuts[-1][0]
            window.nbytes = last.offset + align(last.nbytes) - window.offset


def _list_targets(wants: Targets) -> dict[str, LocalTensor]:
    return {
        want.target: LocalTensor(want.dtype, part.shape)
        for several in wants.values()
        for want in several
        if (part := want.parts[0]) is not None
    }


def _group_targets(
    targets: Mapping[str, LocalTensor], transfers: list[Transfer]
) -> Iterator[list[str]]:
    """Yield targets in order, with those that are cut from one whole source tensor together.

    They must share a window, or the tensor would be read once for each. A union-find joins them,
    because a target may be cut from several source tensors."""
    leader = {name: name for name in targets}

    def find(name: str) -> str:
        while leader[name] != name:
            leader[name] = name = leader[leader[name]]
        return name

    for transfer in transfers:
        if transfer.step.choice.staged:
            for first, second in pairwise(name for name, _ in transfer.copies()):
                leader[find(second)] = find(first)
    groups: dict[str, list[str]] = {}
    for name in targets:
        groups.setdefault(find(name), []).append(name)
    yield from groups.values()


def _make_rows(cut: Placed, number: int, tensor: LocalTensor, target: BufferTensor) -> Offsets:
    """Return one row for each run of elements that is contiguous at both ends."""
    size, extent = ELEMENT_BYTES[tensor.dtype], cut.extent
    length = min(run(cut.box.shape, tensor.shape), run(extent, target.shape))
    blocks = np.arange(0, cut.box.elements, length, dtype=np.int64)
    remote = _flatten(blocks, cut.box.shape, cut.box.start, tensor.shape)
    local = _flatten(blocks, extent, cut.at, target.shape)
    rows = np.empty((len(blocks), 4), dtype=np.int64)
    rows[:, 0], rows[:, 1] = number, remote * size
    rows[:, 2], rows[:, 3] = target.offset + local * size, length * size
    return rows


def _flatten(blocks: Offsets, extent: Shape, start: Shape, shape: Shape) -> Offsets:
    """Convert the numbers of elements in a box to their numbers in the tensor around it."""
    if not shape:
        return blocks
    inside = np.unravel_index(blocks, extent)
    at = tuple(index + first for index, first in zip(inside, start, strict=True))
    return np.asarray(np.ravel_multi_index(at, shape), dtype=np.int64)


def _find_checks(wants: Targets, pieces: Iterable[tuple[str, Box]]) -> dict[str, list[PieceCheck]]:
    """Find where each piece is in the targets; a digest covers a whole piece only."""
    checks: dict[str, list[PieceCheck]] = {}
    for name, box in pieces:
        for want in wants.get(name, ()):
            part = want.parts[0]
            common = box.intersect(part.box) if part else None
            if part is None or common is None:
                continue
            if common != box:
                raise UsageError(
                    f"Only a part of a piece of {name} is wanted, which cannot be verified.",
                    "Receive whole tensors; digests are those of the pieces that ranks hold.",
                )
            place = place_at(part.at, box.relative_to(part.box.start))
            checks.setdefault(want.target, []).append((place, (name, box)))
    return checks


def _nbytes(tensor: LocalTensor) -> int:
    return Box.whole(tensor.shape).elements * ELEMENT_BYTES[tensor.dtype]


def align(nbytes: int) -> int:
    return -(-nbytes // ALIGNED) * ALIGNED
