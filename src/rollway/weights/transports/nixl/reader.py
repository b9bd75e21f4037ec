"""Receive versions over NIXL: look up, plan, then pull window by window.

    look up ──► plan ──► connect ──► read window 0 │ read window 1 │ read window 2 │ …
    (catalog)  (once per                           │ cut, verify,  │ cut, verify,  │ …
                layout)                            │ yield 0       │ yield 1       │

    on a failure:  look up again without the failed sources, and pull what is still missing
    at the end:    announce this receiver as a source (with fanout), then acknowledge

One window is read while the one before it is verified and yielded, so two buffers alternate. A
receiver that serves peers keeps the whole version in one buffer instead. With fan-out, receivers
wait for their turn: the catalog lets the trainer serve one of them, and each receiver that has the
version two others. A receiver whose turn does not come in time reads from any source.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Self

import msgspec
import torch
from torch import Tensor

from rollway.errors import WeightsError
from rollway.weights.checkpoint import TensorHeader
from rollway.weights.layout import Box, Slices
from rollway.weights.offer import Offer
from rollway.weights.planning.plan import Costs, Total, plan
from rollway.weights.planning.targets import hf_targets
from rollway.weights.transports.base import Reader, never
from rollway.weights.transports.nixl.agent import Agent, TimedOut, make_unique_name
from rollway.weights.transports.nixl.catalog import Catalog, Listing, wait_for
from rollway.weights.transports.nixl.listing import (
    FANOUT,
    SAME_RANK,
    SourceGroup,
    read_group,
)
from rollway.weights.transports.nixl.modelexpress import open_catalog
from rollway.weights.transports.nixl.windows import (
    Connections,
    Window,
    Windows,
    make_windows,
    verify,
)

log = logging.getLogger(f"vllm.{__name__}")  # vLLM shows only the loggers below its own name

WINDOW_BYTES = 32 << 20
_COSTS = Costs(wire_gb_per_s=5.0, pack_gb_per_s=0.0)
"""Sources are passive, so a plan must not ask them to pack anything."""
_ATTEMPTS = 3
_MAX_PLANS = 4
_ARITY = 2
"""How many peers a receiver serves at the same time."""
_ABANDONED: list[Connections | None] = []
"""Connections with reads that timed out. They may still write, so the memory must never be freed
for other use: it stays here as long as the process lives."""


class NixlReader(Reader):
    """Pulls offered versions; buffers and plans are kept between them."""

    can_restrict = True

    def __init__(
        self,
        *,
        secret: str | None = None,
        window_bytes: int = WINDOW_BYTES,
        timeout: float = 120.0,
        serve: bool | None = None,
        patience: float = 60.0,
        net_devices: tuple[str, ...] = (),
    ) -> None:
        """`timeout` limits the read of every window, in seconds.

        With `serve`, the reader keeps each version in memory and serves it to peers; by default,
        if the offer asks for it. It then waits for its turn to read, but at most `patience`
        seconds. A reader that is restricted to parts serves nobody."""
        self._secret, self._window_bytes, self._timeout = secret, window_bytes, timeout
        self._serve, self._patience, self._net_devices = serve, patience, net_devices
        self._catalogs: dict[bytes, Catalog] = {}
        self._windows: OrderedDict[str, Windows] = OrderedDict()
        self.connections: Connections | None = None
        self._serving: tuple[Catalog, int] | None = None
        self._slices = Slices()
        self.plans = 0
        """How many times a plan was made."""
        self.total = Total()
        """Bytes needed, bytes on the wire, and their sources, for the last version."""
        self._set_mode(False, self._slices)

    def headers(self, offer: Offer) -> dict[str, TensorHeader]:
        return dict(self.look_up(offer)[1].headers)

    def restrict(self, offer: Offer, slices: Slices) -> Slices:
        """Receive only these parts from now on, as far as they consist of whole pieces."""
        pieces: dict[str, list[Box]] = {}
        if slices.boxes:
            for name, box in self.look_up(offer)[1].digests:
                pieces.setdefault(name, []).append(box)
        self._slices = slices.keep_whole_pieces(pieces)
        return self._slices

    def tensors(
        self, offer: Offer, summed: Callable[[str], bool] = never
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors, verified; if a source dies, pull the rest from another one."""
        self.release()  # its buffer is about to be overwritten
        done: set[str] = set()
        failed: list[str] = []
        for attempt in range(_ATTEMPTS):
            catalog, group = self.look_up(offer, failed, in_turn=True)
            try:
                yield from self.pull(group, done)
                break
            except WeightsError as error:
                failed += group.names
                if attempt + 1 == _ATTEMPTS or not self._has_source(catalog, offer, failed):
                    raise WeightsError(
                        f"Version {offer.version} could not be pulled: {error.message}",
                        error.hint or "Check that the trainer still runs, and publish it again.",
                    ) from error
        assert self.connections is not None
        # Announce first: after the acknowledgement alone, the catalog would consider the trainer
        # free and send the next receiver to it.
        if self._serves_peers:
            body = self.connections.describe(self.windows(group), group, self.rank)
            catalog.announce(Listing(offer.version, self.name, 0, 1, "receiver", body))
            self._serving = catalog, offer.version
        self.connections.acknowledge(group, offer.version)
        catalog.acknowledge(offer.version, self.name)
        counts = self.total.moved, self.total.needed, offer.nbytes
        sources = ", ".join(self.total.sources)
        message = "version %d over nixl: %d bytes moved, %d needed, %d offered, from %s"
        log.info(message, offer.version, *counts, sources)

    def release(self) -> None:
        """Stop serving peers; those that are reading can finish until the next version arrives."""
        if self._serving is not None:
            catalog, version = self._serving
            self._serving = None
            with suppress(WeightsError):  # without the catalog no peer finds this receiver
                catalog.withdraw(version, self.name)

    def close(self) -> None:
        self.release()
        for catalog in self._catalogs.values():
            with suppress(WeightsError):  # the catalog may have closed before
                catalog.leave(self.name)
        self._close_connections()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def look_up(
        self, offer: Offer, without: Sequence[str] = (), *, in_turn: bool = False
    ) -> tuple[Catalog, SourceGroup]:
        """Return the catalog of an offer and the sources to read from; with fan-out in turn."""
        requested = bool(offer.where.get(FANOUT)) if self._serve is None else self._serve
        mode = requested and not self._slices.boxes, self._slices
        if mode != (self._serves_peers, self._mode_slices):
            self.close()
            self._set_mode(*mode)
        key = msgspec.json.encode(offer.where, order="deterministic")
        if key not in self._catalogs:
            self._catalogs[key] = open_catalog(offer.where, secret=self._secret)
        catalog = self._catalogs[key]
        listings = None
        if in_turn and self._serves_peers:
            # The receiver whose turn it is may be dead: after `patience`, ignore turns.
            with suppress(WeightsError):
                listings = wait_for(
                    catalog, offer.version, self.name, self._patience, without, fanout=_ARITY
                )
        if listings is None:
            # No wait: all ranks announce a version before it is offered.
            listings = catalog.look_up(offer.version, self.name, without)
        rank = self.rank if offer.where.get(SAME_RANK) else None
        group = read_group(listings, rank)
        if group.identity != offer.identity:
            raise WeightsError(
                f"The weights published as version {offer.version} are not what was offered.",
                "A restarted trainer counts its versions from the start; offer its own version.",
            )
        return catalog, group

    def pull(self, group: SourceGroup, done: set[str]) -> Iterator[tuple[str, Tensor]]:
        """Read all windows and yield their targets, verified, without those in `done`."""
        windows = self.windows(group)
        connections = self._connect(group)
        buffers = connections.allocate(windows, _find_device(group))
        # After a failure, windows that were yielded are skipped. A receiver that serves peers
        # reads them again, because its buffer must hold the whole version.
        turns = [
            (window, buffers[number % len(buffers)])
            for number, window in enumerate(windows.windows)
            if self._serves_peers or any(target.name not in done for target in window.targets)
        ]

        def read(window: Window, buffer: Tensor) -> None:
            # The caller may close the generator before it sees this failure, so clean up here.
            try:
                connections.read(group, window, buffer, self._timeout)
            except TimedOut:
                self.abandon_connections()
                raise
            except WeightsError:
                connections.forget(group)
                raise

        with ThreadPoolExecutor(1, thread_name_prefix="rollway-nixl-read") as thread:

            def start(number: int) -> Future[None]:
                # The caller may still copy, on its CUDA stream, from the buffer of this window:
                # NIXL knows no streams.
                if buffers[0].is_cuda:
                    torch.cuda.current_stream(buffers[0].device).synchronize()
                return thread.submit(read, *turns[number])

            reading = start(0) if turns else None
            for number, (window, buffer) in enumerate(turns):
                assert reading is not None
                reading.result()
                reading = None
                # Before the next read: windows that are kept side by side share the space of the
                # tensors that are read whole and cut here.
                views = window.assemble(buffer)
                has_next = number + 1 < len(turns)
                # Windows were left out if two turns in a row have the same buffer. The next read
                # must then wait until the caller has used all targets of this window.
                if has_next and (self._serves_peers or turns[number + 1][1] is not buffer):
                    reading = start(number + 1)
                for target in window.targets:
                    checks = windows.checks.get(target.name, ())
                    verify(views[target.name], checks, group.digests)
                    if target.name not in done:
                        done.add(target.name)
                        yield target.name, views[target.name]
                if has_next and reading is None:
                    reading = start(number + 1)
        self.total = windows.total

    def windows(self, group: SourceGroup) -> Windows:
        """Return the windows for these sources; plan them if their layouts are new."""
        windows = self._windows.get(group.key)
        if windows is None:
            wants = hf_targets(group.headers, self._slices.boxes)
            # The planner does not know tensors without elements; windows have them as targets.
            to_plan = {n: want for n, want in wants.items() if 0 not in group.headers[n].shape}
            group.check_reach(to_plan)
            sources = [source.for_planner() for source in group.readable]
            windows = make_windows(
                list(plan(sources, [(self.name, to_plan)], _COSTS)),
                wants,
                {source.name: source.layout.tensors for source in group.sources},
                group.digests,
                window_bytes=self._window_bytes,
                keep=self._serves_peers,
            )
            self.plans += 1
        self._windows[group.key] = windows
        self._windows.move_to_end(group.key)
        while len(self._windows) > _MAX_PLANS:
            self._windows.popitem(last=False)
        return windows

    def abandon_connections(self) -> None:
        """Start with a new agent and new buffers, because a read that timed out may still write."""
        _ABANDONED.append(self.connections)
        self.connections = None

    def _set_mode(self, serves_peers: bool, slices: Slices) -> None:
        """Start with new buffers and plans, under a new name: both depend on the mode."""
        self._serves_peers, self._mode_slices = serves_peers, slices
        self.name = make_unique_name("receiver")
        self._windows.clear()

    def _has_source(self, catalog: Catalog, offer: Offer, failed: list[str]) -> bool:
        try:
            catalog.look_up(offer.version, self.name, failed)
        except WeightsError:
            return False
        return True

    def _connect(self, group: SourceGroup) -> Connections:
        """Return connections to these sources as they are now."""
        modes = {source.memory.error_handling for source in group.sources}
        if len(modes) != 1:
            raise WeightsError("The ranks of the trainer have different settings of NIXL.")
        mode = modes.pop()
        if self.connections is not None and self.connections.agent.error_handling != mode:
            self._close_connections()
        if self.connections is None:
            agent = Agent(self.name, mode, self._net_devices)
            if self._serves_peers:
                agent.listen()  # a peer that reads from here connects first
            # A receiver that serves peers needs one buffer that holds a whole version.
            self.connections = Connections(agent, 1 if self._serves_peers else 2)
        self.connections.connect(group)
        return self.connections

    def _close_connections(self) -> None:
        if self.connections is not None:
            self.connections.close()
            self.connections = None


def _find_device(group: SourceGroup) -> torch.device:
    """Return the kind of device that holds the sources' tensors, as this process numbers it."""
    kinds = {source.memory.memory for source in group.sources if source.layout.tensors}
    if kinds == {"VRAM"} and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
