"""Receive versions over NIXL: look up, connect, then pull window by window.

    look up ──► connect ──► read window 0 │ read window 1   │ read window 2   │ …
    (catalog)                             │ verify, yield 0 │ verify, yield 1 │

    on a failure:  look up again without the failed sources, and yield what is still missing
    at the end:    announce this receiver as a source (with fan-out)

A window is a few tensors, whose pieces are read side by side, verified, and put together. One
window is read while the one before it is yielded, so two buffers alternate. A receiver that serves
peers keeps the whole version in one buffer instead. With fan-out, receivers wait for a source: the
trainer serves one of them at a time, and each receiver that has the version two others. A receiver
that has waited for too long reads from any source.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from rollway.errors import WeightsError
from rollway.weights.checkpoint import TensorHeader
from rollway.weights.digest.checksums import DTYPES, digests
from rollway.weights.layout import Box, Slices
from rollway.weights.offer import Offer
from rollway.weights.transports.base import Reader, never
from rollway.weights.transports.entries import split_in_chunks, view_entry
from rollway.weights.transports.nixl.agent import (
    Agent,
    ErrorHandling,
    Pool,
    Read,
    TimedOut,
    find_memory_kind,
    make_unique_name,
)
from rollway.weights.transports.nixl.catalog import Catalog
from rollway.weights.transports.nixl.listing import (
    FANOUT,
    SAME_RANK,
    Listing,
    Part,
    Source,
    SourceGroup,
    place,
    read_group,
    write_body,
)
from rollway.weights.transports.nixl.modelexpress import open_catalog

log = logging.getLogger(f"vllm.{__name__}")  # vLLM shows only the loggers below its own name

WINDOW_BYTES = 32 << 20
READ_SECONDS = 120.0
"""How long the read of a window may take."""
WAIT_SECONDS = 60.0
"""How long a receiver waits for a source of its own."""
Held = list[tuple[Part, Tensor]]
"""Parts, and where this process has them."""


class NixlReader(Reader):
    """Pulls offered versions; buffers and connections are kept between them."""

    can_restrict = True

    def __init__(self) -> None:
        self.name = make_unique_name("receiver")
        self.moved: Counter[str] = Counter()
        """The bytes of the last version, by source."""
        self._slices = Slices()
        self._connections: Connections | None = None
        self._serving: tuple[Catalog, int] | None = None

    def headers(self, offer: Offer) -> dict[str, TensorHeader]:
        return dict(self._look_up(offer).headers)

    def restrict(self, offer: Offer, slices: Slices) -> Slices:
        """Receive only these parts from now on, as far as they consist of whole pieces."""
        parts = self._look_up(offer).parts if slices.boxes else {}
        self._slices = slices.keep_whole_pieces(
            {name: list(boxes) for name, boxes in parts.items()}
        )
        return self._slices

    def tensors(
        self, offer: Offer, summed: Callable[[str], bool] = never
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors, verified; if a source dies, pull the rest from another one.

        A reader that is restricted to parts serves nobody."""
        self.release()  # its buffer is about to be overwritten
        serves = bool(offer.where.get(FANOUT)) and not self._slices.boxes
        held = yield from self._pull_from_any(offer, serves)
        if serves:
            self._serve(offer, held)
        self.moved = Counter()
        for part, _ in held:
            self.moved[part.source.name] += part.entry.nbytes
        moved, sources = self.moved.total(), ", ".join(self.moved)
        message = "version %d over nixl: %d bytes moved, %d offered, from %s"
        log.info(message, offer.version, moved, offer.nbytes, sources)

    def release(self) -> None:
        """Stop serving peers; those that are reading can finish until the next version arrives."""
        if self._serving is not None:
            catalog, version = self._serving
            self._serving = None
            with suppress(WeightsError):  # without the catalog no peer finds this receiver
                catalog.withdraw(version, self.name)

    def close(self) -> None:
        self.release()
        if self._connections is not None:
            self._connections.close()
            self._connections = None

    def _serve(self, offer: Offer, held: Held) -> None:
        assert self._connections is not None
        entries = [part.entry for part, _ in held]
        views = [view for _, view in held]
        body = write_body(self._connections.agent, views[0].device, entries, views)
        catalog = open_catalog(offer.where)
        catalog.announce(Listing(offer.version, self.name, self.rank, 1, "receiver", body))
        self._serving = catalog, offer.version

    def _look_up(
        self, offer: Offer, without: Sequence[str] = (), *, waits: bool = False
    ) -> SourceGroup:
        """Return the sources to read from."""
        catalog = open_catalog(offer.where)
        listings = None
        if waits:
            # The receiver that reads from the source may be dead.
            with suppress(WeightsError):
                listings = catalog.wait_for(offer.version, WAIT_SECONDS, without, self.name)
        if listings is None:
            # No wait: all ranks announce a version before it is offered.
            listings = catalog.look_up(offer.version, without)
        group = read_group(listings, self.rank if offer.where.get(SAME_RANK) else None)
        if group.identity != offer.identity:
            raise WeightsError(
                f"The weights published as version {offer.version} are not what was offered.",
                "A restarted trainer counts its versions from the start; offer its own version.",
            )
        return group

    def _pull_from_any(
        self, offer: Offer, serves: bool
    ) -> Generator[tuple[str, Tensor], None, Held]:
        """Yield the tensors; return the pieces that were received, and where they are."""
        done: set[str] = set()
        failed: list[str] = []
        problem: WeightsError | None = None
        while True:
            try:
                group = self._look_up(offer, failed, waits=serves)
            except WeightsError as error:
                raise problem or error from None  # nobody else has it
            try:
                return (yield from self._pull(group, done, serves))
            except WeightsError as error:
                failed += group.names
                problem = WeightsError(
                    f"Version {offer.version} could not be pulled: {error.message}",
                    error.hint or "Check that the trainer still runs, and publish it again.",
                )

    def _pull(
        self, group: SourceGroup, done: set[str], serves: bool
    ) -> Generator[tuple[str, Tensor], None, Held]:
        """Read all windows and yield their tensors, verified, without those in `done`."""
        targets = self._list_targets(group)
        windows = list(split_in_chunks(targets, lambda target: target.nbytes, WINDOW_BYTES))
        device = _find_device(group)
        connections = self._connect(group)
        parts = [[part for target in window for part in target.parts] for window in windows]
        held = connections.place(parts, device, side_by_side=serves)

        def start(number: int) -> Future[None]:
            # The caller may still copy, on its CUDA stream, from the buffer of this window: NIXL
            # knows no streams.
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
            return thread.submit(connections.read, held[number])

        with ThreadPoolExecutor(1, thread_name_prefix="rollway-nixl-read") as thread:
            reading = start(0) if windows else None
            for number, window in enumerate(windows):
                assert reading is not None
                reading.result()
                if number + 1 < len(windows):
                    reading = start(number + 1)
                received = iter(held[number])
                for target in window:
                    tensor = target.join([next(received)[1] for _ in target.parts], device)
                    if target.name not in done:
                        done.add(target.name)
                        yield target.name, tensor
        return [pair for pairs in held for pair in pairs]

    def _list_targets(self, group: SourceGroup) -> list[WantedTensor]:
        """Return what this reader receives."""
        targets = []
        for name, header in group.headers.items():
            parts, whole = list(group.parts[name].values()), Box.whole(header.shape)
            box = self._slices.boxes.get(name, whole)
            if box is None:
                continue
            if box != whole:
                parts = [part for part in parts if part.box.intersect(box)]
            others = {part.source.rank for part in parts} - {group.rank}
            if others and group.rank is not None:
                raise WeightsError(
                    f"Rank {group.rank} of the engine would read {name} through the network card "
                    f"of another rank of the trainer ({', '.join(map(str, sorted(others)))}), and "
                    "only like ranks may read from each other.",
                    "Give the engine the trainer's tensor parallelism, or set `same_rank_only` to "
                    "false if the network connects all cards.",
                )
            if sum(part.box.elements for part in parts) != box.elements:
                raise WeightsError(
                    f"Only a part of a piece of {name} is wanted, which cannot be verified.",
                    "Receive whole tensors; digests are those of the pieces that ranks hold.",
                )
            targets.append(WantedTensor(name, box, DTYPES[header.dtype], parts))
        return targets

    def _connect(self, group: SourceGroup) -> Connections:
        """Return connections that sources like these accept."""
        mode = group.sources[0].memory.error_handling
        connections = self._connections
        if connections is not None:
            if connections.agent.error_handling == mode and connections not in _ABANDONED:
                return connections
            connections.close()
        self._connections = connections = Connections(self.name, mode)
        return connections


@dataclass(frozen=True)
class WantedTensor:
    """A tensor, or the box of one, that this reader receives, and the parts it is made of."""

    name: str
    box: Box
    dtype: torch.dtype
    parts: list[Part]

    @property
    def nbytes(self) -> int:
        return sum(part.entry.nbytes for part in self.parts)

    def join(self, views: Sequence[Tensor], device: torch.device) -> Tensor:
        """Return the tensor, in place if it is one part; raise unless every part has the digest
        that was published."""
        if digests(views) != [part.entry.digest for part in self.parts]:
            raise WeightsError(
                f"{self.name} is not what was published: it changed during the read, or in transit."
            )
        if len(views) == 1:
            return views[0]
        whole = torch.empty(self.box.shape, dtype=self.dtype, device=device)
        for part, view in zip(self.parts, views, strict=True):
            whole[part.box.relative_to(self.box.start).slices] = view
        return whole


_ABANDONED: list[Connections] = []
"""Connections with reads that timed out. They may still write, so the memory must never be freed
for other use: it stays here as long as the process lives."""


class Connections:
    """A receiver's agent, staging buffers and peers, which it keeps between versions."""

    def __init__(self, name: str, error_handling: ErrorHandling) -> None:
        self.agent = Agent(name, error_handling)
        self._pools = [Pool(self.agent) for _ in range(2)]
        self._peers: dict[str, tuple[bytes, str]] = {}
        """By source: NIXL's description of it, and the name by which the agent knows it."""

    def place(
        self, windows: Sequence[Sequence[Part]], device: torch.device, *, side_by_side: bool
    ) -> list[Held]:
        """Return where the parts of each window go: side by side in one pool, or into two pools by
        turns."""
        placed = [place(part.entry for part in parts) for parts in windows]
        sizes = [nbytes for _, nbytes in placed]
        if side_by_side:
            buffers = self._pools[0].allocate(sum(sizes), device).split(sizes)
        else:
            pools = [
                pool.allocate(max(sizes[number::2], default=0), device)
                for number, pool in enumerate(self._pools)
            ]
            buffers = tuple(pools[number % 2] for number in range(len(sizes)))
        return [
            [(part, view_entry(buffer, entry)) for part, entry in zip(parts, entries, strict=True)]
            for parts, buffer, (entries, _) in zip(windows, buffers, placed, strict=True)
        ]

    def read(self, held: Held) -> None:
        """Read parts to where they belong; after an error, which breaks the connection, connect to
        their sources again.

        The caller may not see the error, if it has given up this version meanwhile."""
        held = [(part, view) for part, view in held if view.nbytes]
        sources = {part.source.name: part.source for part, _ in held}
        try:
            reads = [
                self._make_read(source, [pair for pair in held if pair[0].source is source])
                for source in sources.values()
            ]
            self.agent.read(reads, READ_SECONDS)
        except TimedOut:
            _ABANDONED.append(self)
            raise
        except WeightsError:
            for name in sources.keys() & self._peers.keys():
                self.agent.remove_peer(self._peers.pop(name)[1])
            raise

    def close(self) -> None:
        self.agent.close()
        if self not in _ABANDONED:
            for pool in self._pools:
                pool.release()

    def _make_read(self, source: Source, held: Held) -> Read:
        kind, device = find_memory_kind(held[0][1].device)
        blocks = [(part.entry.offset, view.data_ptr(), view.nbytes) for part, view in held]
        remote = [(address, size, source.memory.device) for address, _, size in blocks]
        local = [(address, size, device) for _, address, size in blocks]
        return Read(self._connect(source), (source.memory.memory, remote), (kind, local))

    def _connect(self, source: Source) -> str:
        """Return the name of a source, which is connected to as it is now."""
        agent, peer = self._peers.get(source.name, (b"", ""))
        if agent != source.memory.agent:
            if peer:  # the source has registered other memory
                self.agent.remove_peer(peer)
            peer = self.agent.add_peer(source.memory.agent)
            self._peers[source.name] = source.memory.agent, peer
        return peer


def _find_device(group: SourceGroup) -> torch.device:
    """Return the kind of device that holds the sources' tensors, as this process numbers it."""
    kinds = {source.memory.memory for source in group.sources if source.memory.pieces}
    if kinds == {"VRAM"} and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
