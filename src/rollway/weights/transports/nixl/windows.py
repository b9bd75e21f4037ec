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

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollway.errors import UsageError, WeightsError
from rollway.weights.checkpoint import TensorHeader
from rollway.weights.digest.checksums import digest
from rollway.weights.layout import ELEMENT_BYTES, Box, Piece, Placed, Shape, count_run, place_at
from rollway.weights.offer import Entry, list_boxes
from rollway.weights.planning.plan import Method, Total, Transfer
from rollway.weights.planning.targets import Targets
from rollway.weights.transports.entries import align, view_entry
from rollway.weights.transports.nixl.agent import Agent, Pool, Prepared, TimedOut, find_memory_kind
from rollway.weights.transports.nixl.listing import (
    ListedSource,
    SourceGroup,
    count_bytes,
    list_pieces,
    write_listing,
)

ALIGNED = 256
Offsets = NDArray[np.int64]
PieceCheck = tuple[Box, tuple[str, Box]]
"""The box of a target that contains a whole piece, and the piece whose digest it must have."""


@dataclass(slots=True)
class Window:
    """Targets that are read and yielded together. Entries say where they are in the buffer."""

    offset: int
    """Where the window starts in the buffer; all offsets in it count from the buffer's start."""
    nbytes: int = 0
    targets: list[Entry] = field(default_factory=list)
    reads: dict[str, list[Offsets]] = field(default_factory=lambda: defaultdict(list))
    """By source: rows of (offset in its memory, offset in the buffer, bytes)."""
    cuts: list[tuple[Entry, Transfer]] = field(default_factory=list)
    """Source tensors that are read whole, and the transfers that copy them into targets."""

    def place(self, name: str, tensor: TensorHeader | Entry) -> Entry:
        nbytes = count_bytes(tensor)
        entry = Entry(name, tensor.dtype, tensor.shape, self.offset + self.nbytes, nbytes)
        self.nbytes += align(nbytes, ALIGNED)
        return entry

    def assemble(self, memory: Tensor) -> dict[str, Tensor]:
        """Return the targets; cut tensors that were read whole into them first."""
        views = {target.name: view_entry(memory, target) for target in self.targets}
        for whole, transfer in self.cuts:
            source = view_entry(memory, whole)
            for name, cut in transfer.copies:
                part = source[cut.box.slices]
                part = part.transpose(-1, -2) if cut.transposed else part
                views[name][cut.destination.slices] = part.reshape(cut.extent)
        return views


@dataclass(frozen=True)
class Windows:
    """Everything that one receiver does for a plan."""

    windows: list[Window]
    checks: dict[str, list[PieceCheck]]
    """The pieces to verify, by target."""
    total: Total
    """Bytes needed, bytes on the wire, and their sources."""


def make_windows(
    transfers: Sequence[Transfer],
    wants: Targets,
    sources: Mapping[str, Mapping[str, Entry]],
    pieces: Iterable[tuple[str, Box]],
    *,
    window_bytes: int,
    keep: bool = False,
) -> Windows:
    """Lay out the targets of one receiver in windows of about `window_bytes`.

    `keep` places the windows side by side, so that in the end the buffer holds all targets and can
    be served to others. Otherwise every window starts at 0, and the caller alternates buffers."""
    targets = {want.parameter: TensorHeader(want.dtype, want.part.shape) for want in wants.values()}
    windows: list[Window] = []
    where: dict[str, tuple[Window, Entry]] = {}
    for group in _group_targets(targets, transfers):
        size = sum(align(count_bytes(targets[name]), ALIGNED) for name in group)
        # A group that exceeds the limit by itself gets a window of its own size.
        if not windows or windows[-1].nbytes + size > window_bytes:
            before = windows[-1] if windows else None
            windows.append(Window(before.offset + before.nbytes if before and keep else 0))
        window = windows[-1]
        for name in group:
            window.targets.append(window.place(name, targets[name]))
            where[name] = window, window.targets[-1]
    end = max((window.offset + window.nbytes for window in windows), default=0)
    for transfer in transfers:
        source, tensor = transfer.source, sources[transfer.source][transfer.tensor]
        if transfer.method is Method.WHOLE:
            window = where[transfer.copies[0][0]][0]
            # Behind kept windows, all windows share the space of tensors that are read whole: it
            # is scratch, and only the targets stay.
            if keep and not window.cuts:
                window.nbytes = end - window.offset
            whole = window.place(transfer.tensor, tensor)
            window.cuts.append((whole, transfer))
            row = np.array([[tensor.offset, whole.offset, whole.nbytes]], dtype=np.int64)
            window.reads[source].append(row)
            continue
        for name, cut in transfer.copies:
            window, target = where[name]
            window.reads[source].append(_make_rows(cut, tensor, target))
    total = Total()
    for transfer in transfers:
        total.add(transfer)
    return Windows(windows, _find_checks(wants, pieces), total)


def verify(
    tensor: Tensor, checks: Iterable[PieceCheck], digests: Mapping[tuple[str, Box], bytes]
) -> None:
    """Raise unless all pieces of a tensor have the digests that were published."""
    for place, piece in checks:
        part = tensor[place.slices].reshape(piece[1].shape)
        if bytes.fromhex(digest(part)) != digests[piece]:
            raise WeightsError(
                f"{piece[0]} is not what was published: it changed during the read, or in transit."
            )


def resolve_reads(
    reads: list[Offsets], remote_base: int, local_base: int
) -> tuple[Offsets, Offsets, Offsets]:
    """Return the remote addresses, local addresses and lengths of a window's reads of a source.

    They are in the order of the source's memory, and reads that are neighbours at both ends are
    merged: NIXL moves such lists many times faster."""
    rows = np.concatenate(reads)
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    remote, local, size = rows[:, 0] + remote_base, rows[:, 1] + local_base, rows[:, 2]
    ends = (remote[1:] != remote[:-1] + size[:-1]) | (local[1:] != local[:-1] + size[:-1])
    first = np.concatenate([[0], np.flatnonzero(ends) + 1])
    return remote[first], local[first], np.add.reduceat(size, first)


def _group_targets(
    targets: Mapping[str, TensorHeader], transfers: Sequence[Transfer]
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
        if transfer.method is Method.WHOLE:
            for first, second in pairwise(name for name, _ in transfer.copies):
                leader[find(second)] = find(first)
    groups: dict[str, list[str]] = {}
    for name in targets:
        groups.setdefault(find(name), []).append(name)
    yield from groups.values()


def _make_rows(cut: Placed, tensor: Entry, target: Entry) -> Offsets:
    """Return one row for each run of elements that is contiguous at both ends."""
    size, extent = ELEMENT_BYTES[tensor.dtype], cut.extent
    length = min(count_run(cut.box.shape, tensor.shape), count_run(extent, target.shape))
    blocks = np.arange(0, cut.box.elements, length, dtype=np.int64)
    remote = _flatten(blocks, cut.box.shape, cut.box.start, tensor.shape)
    local = _flatten(blocks, extent, cut.at, target.shape)
    rows = np.empty((len(blocks), 3), dtype=np.int64)
    rows[:, 0], rows[:, 1] = tensor.offset + remote * size, target.offset + local * size
    rows[:, 2] = length * size
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
        want = wants.get(name)
        common = box.intersect(want.part.box) if want else None
        if want is None or common is None:
            continue
        if common != box:
            raise UsageError(
                f"Only a part of a piece of {name} is wanted, which cannot be verified.",
                "Receive whole tensors; digests are those of the pieces that ranks hold.",
            )
        place = place_at(want.part.at, box.relative_to(want.part.box.start))
        checks.setdefault(want.parameter, []).append((place, (name, box)))
    return checks


class Connections:
    """A receiver's agent, staging buffers and peers, which it keeps between versions."""

    def __init__(self, agent: Agent, buffers: int) -> None:
        """Start without peers. With two `buffers`, even and odd windows alternate."""
        self.agent = agent
        self._pools = [Pool(agent) for _ in range(buffers)]
        self._peers: dict[str, tuple[bytes, str]] = {}
        """By source: NIXL's description of it, and the name by which the agent knows it."""
        self._unfinished: list[Prepared] = []
        """Reads that timed out. They may still write, so nothing releases them."""

    def connect(self, group: SourceGroup) -> None:
        for source in group.readable:
            entry = self._peers.get(source.name)
            if entry is not None and entry[0] == source.memory.agent:
                continue
            if entry is not None:  # the source registered other memory
                self.agent.remove_peer(entry[1])
            peer = self.agent.add_peer(source.memory.agent)
            self._peers[source.name] = source.memory.agent, peer

    def allocate(self, windows: Windows, device: torch.device) -> list[Tensor]:
        buffers = []
        for number, pool in enumerate(self._pools):
            ends = [w.offset + w.nbytes for w in windows.windows[number :: len(self._pools)]]
            buffers.append(pool.allocate(max(ends, default=0), device))
        return buffers

    def read(self, group: SourceGroup, window: Window, buffer: Tensor, timeout: float) -> None:
        """Read a window into its buffer.

        After a `TimedOut`, use neither the buffers nor these connections again."""
        reads: list[Prepared] = []
        try:
            for source in group.readable:
                if source.name in window.reads:
                    reads.append(self._prepare(source, window, buffer))
            self.agent.read(reads, timeout)
        except TimedOut:
            self._unfinished, reads = reads, []
            raise
        finally:
            for read in reads:
                read.release()

    def _prepare(self, source: ListedSource, window: Window, buffer: Tensor) -> Prepared:
        memory = source.memory
        reads = window.reads[source.name]
        remote, local, sizes = resolve_reads(reads, memory.base, buffer.data_ptr())
        return self.agent.prepare(
            self._peers[source.name][1],
            (*find_memory_kind(buffer.device), local),
            (memory.memory, memory.device, remote),
            sizes,
        )

    def acknowledge(self, group: SourceGroup, version: int) -> None:
        """Notify sources that this receiver has a version, as far as they still listen."""
        for source in group.readable:
            with suppress(WeightsError):
                self.agent.notify(self._peers[source.name][1], f"rollway has {version}".encode())
        # Notifications leave this process only while it polls. The catalog has the receipt; they
        # matter because without one, reads from a stopped trainer (`peer`, one machine) still
        # succeeded for a while, so a trainer that hangs was noticed later.
        with suppress(WeightsError):
            self.agent.poll()

    def describe(self, windows: Windows, group: SourceGroup, rank: int = 0) -> bytes:
        """Return the body of a listing of the received version, for peers to read."""
        buffer = self._pools[0].memory
        assert buffer is not None
        held: dict[str, list[Piece]] = {}
        for name, box in group.digests:
            held.setdefault(name, []).append(Piece(name, box, name, box.start))
        entries = [
            msgspec.structs.replace(target, boxes=list_boxes(held[target.name]))
            for window in windows.windows
            for target in window.targets
        ]
        digests = (group.digests[piece.name, piece.box] for piece in list_pieces(entries))
        base = buffer.data_ptr()
        return write_listing(self.agent, buffer.device, entries, base, digests, rank)

    def forget(self, group: SourceGroup) -> None:
        """Disconnect sources after a failure, so that the next attempt connects again."""
        for name in group.names:
            entry = self._peers.pop(name, None)
            if entry is not None:
                self.agent.remove_peer(entry[1])

    def close(self) -> None:
        for pool in self._pools:
            pool.release()
        self.agent.stop_listening()
