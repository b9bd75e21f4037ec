"""The receiving end of `nixl`: look up, plan, pull window by window, prove, hand on."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Self

import msgspec
import numpy as np
import torch
from torch import Tensor

from rollway.errors import UsageError, WeightsError
from rollway.weights.catalog import Catalog, Listing, wait_for
from rollway.weights.catalog_http import open_catalog
from rollway.weights.checkpoint import TensorHeader
from rollway.weights.layout import Box, Piece
from rollway.weights.offer import Offer
from rollway.weights.planning.costs import Costs
from rollway.weights.planning.holdings import Place
from rollway.weights.planning.plan import Receiver, plan
from rollway.weights.planning.transfers import Total
from rollway.weights.planning.wants import LocalTensor, Wants, hf_target
from rollway.weights.transports.nixl import acknowledgement, unique_name
from rollway.weights.transports.nixl_agent import Agent, Numbers, Prepared, Settings, TimedOut
from rollway.weights.transports.nixl_cards import (
    DIGEST_BYTES,
    Card,
    Group,
    Layouts,
    this_node,
    write_layout,
)
from rollway.weights.transports.nixl_memory import (
    Pool,
    assembled,
    like,
    memory_kind,
    prove,
    settle,
)
from rollway.weights.transports.nixl_windows import Window, Windows, make_windows

WINDOW_BYTES = 32 << 20
"""Two of them are in memory: one is read while the other is proved and handed on."""
PASSIVE = Costs(wire_gb_per_s=5.0, pack_gb_per_s=0.0)
"""Of one machine; sources are read and do nothing, so they pack nothing."""
_ATTEMPTS = 3
_ARITY = 2
"""How many take a version from one receiver at the same time."""
_KEPT = 4
"""Layouts and sets of addresses for which windows and prepared reads are kept."""
Wanting = Callable[[Mapping[str, TensorHeader]], Wants]


class NixlReader:
    """Pulls offered versions; pools, plans and prepared reads are kept between them."""

    def __init__(
        self,
        catalog: Catalog | None = None,
        *,
        secret: str | None = None,
        wants: Wanting | None = None,
        window_bytes: int = WINDOW_BYTES,
        device: str | None = None,
        timeout: float = 120.0,
        serve: bool = False,
        patience: float = 60.0,
        net_devices: tuple[str, ...] = (),
        costs: Costs = PASSIVE,
    ) -> None:
        """`wants` says what of the offered tensors goes where, for one receiver; all of them as
        they are, when it is not given. `device` is where tensors are handed out; where the
        sources have them, CPU or GPU, when not given. `timeout` bounds every window.

        One that serves others keeps all of a version in memory, and takes it when it is its
        turn: the trainer gives it to one, and those who have it to two others at a time. After
        `patience` seconds it takes it from whoever has it."""
        if serve and wants is not None:
            raise UsageError("Only a receiver that takes everything can serve others.")
        self.name = unique_name("receiver")
        self._given, self._secret = catalog, secret
        self._wants, self._window_bytes, self._serve = wants, window_bytes, serve
        self._device = torch.device(device) if device else None
        self._patience = patience
        self._timeout, self._net_devices, self._costs = timeout, net_devices, costs
        self._layouts = Layouts()
        self._catalogs: dict[str, Catalog] = {}
        self._known: OrderedDict[str, Windows] = OrderedDict()
        self._agent: Agent | None = None
        self._pools: list[Pool] = []
        self._peers: dict[str, tuple[bytes, str]] = {}
        self._prepared: OrderedDict[str, list[list[Prepared]]] = OrderedDict()
        self._given_up: list[tuple[Agent | None, list[Pool]]] = []
        """Whose reads may still write; kept so that nobody else gets their memory."""
        self._serving: tuple[Catalog, int] | None = None
        self.plans = 0
        """How many times there was something to plan."""
        self.total = Total()
        """For the last version: bytes needed, bytes on the wire, and from whom."""

    def headers(self, offer: Offer) -> dict[str, TensorHeader]:
        """Of the Hugging Face tensors that are offered."""
        return dict(self._look_up(offer, [])[1].headers)

    def pieces(self, offer: Offer) -> dict[str, list[Box]]:
        """The boxes of each tensor that have a digest: what is made of them can be proved."""
        found: dict[str, list[Box]] = {}
        for name, box in self._look_up(offer, [])[1].digests:
            found.setdefault(name, []).append(box)
        return found

    def tensors(self, offer: Offer) -> Iterator[tuple[str, Tensor]]:
        """Every tensor that is wanted, proved, and valid until the next is asked for. When a
        source dies, what is left is taken from another, if there is one."""
        self.stop_serving()
        done: set[str] = set()
        failed: list[str] = []
        for attempt in range(_ATTEMPTS):
            catalog, group = self._look_up(offer, failed, in_turn=self._serve)
            try:
                yield from self._pulled(group, done)
                break
            except WeightsError as error:
                self._forget(group, given_up=isinstance(error, TimedOut))
                failed += group.names
                if attempt + 1 == _ATTEMPTS or not self._others(catalog, offer, failed):
                    raise _failed(offer, error) from error
        if self._serve:  # first, so that there is no moment in which only the trainer is free
            self._announce(catalog, group, offer.version)
        self._acknowledge(catalog, group, offer.version)

    def stop_serving(self) -> None:
        """Be no source any more; what others are reading stays until the next version comes."""
        if self._serving is not None:
            catalog, version = self._serving
            self._serving = None
            with suppress(WeightsError):  # without its catalog nobody finds us
                catalog.withdraw(version, self.name)

    def close(self) -> None:
        self.stop_serving()
        for catalog in self._catalogs.values():
            with suppress(WeightsError):  # it may be gone before us
                catalog.leave(self.name)
        self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    # --- who has it ------------------------------------------------------------------------------

    def _look_up(
        self, offer: Offer, without: list[str], *, in_turn: bool = False
    ) -> tuple[Catalog, Group]:
        catalog = self._catalog(offer)
        listings = None
        if in_turn:
            with suppress(WeightsError):  # whoever has the turn may be dead: then without turns
                listings = wait_for(
                    catalog, offer.version, self.name, self._patience, without, fanout=_ARITY
                )
        if listings is None:
            # An offer is made when all ranks have announced, so there is nothing to wait for.
            listings = catalog.look_up(offer.version, self.name, without)
        group = self._layouts.group(listings)
        if group.identity != offer.identity:
            raise WeightsError(
                f"What is published as version {offer.version} is not what was offered.",
                "A trainer that was started anew counts from a new start; offer its version.",
            )
        return catalog, group

    def _catalog(self, offer: Offer) -> Catalog:
        key = msgspec.json.encode(offer.where, order="deterministic").decode()
        if key not in self._catalogs:
            self._catalogs[key] = self._given or open_catalog(offer.where, secret=self._secret)
        return self._catalogs[key]

    def _others(self, catalog: Catalog, offer: Offer, failed: list[str]) -> bool:
        try:
            wait_for(catalog, offer.version, self.name, 0.0, failed)
        except WeightsError:
            return False
        return True

    # --- pulling ---------------------------------------------------------------------------------

    def _pulled(self, group: Group, done: set[str]) -> Iterator[tuple[str, Tensor]]:
        windows = self._windows(group)
        agent = self._connected(group)
        memory = self._staging(agent, windows, self._device or like(group))
        reads = self._reads(group, windows, memory)
        turns = [
            (window, mine, memory[number % 2])
            for number, (window, mine) in enumerate(zip(windows.windows, reads, strict=True))
            if self._serve or any(one.name not in done for one in window.targets)
        ]
        with ThreadPoolExecutor(1, thread_name_prefix="rollway-nixl-read") as thread:

            def start(number: int) -> Future[None]:
                settle(memory[0])
                return thread.submit(agent.read, turns[number][1], self._timeout)

            reading = start(0) if turns else None
            for number, (window, _, held) in enumerate(turns):
                assert reading is not None
                reading.result()
                reading = None
                views = assembled(window, held)
                more = number + 1 < len(turns)
                if more and (self._serve or turns[number + 1][2] is not held):
                    reading = start(number + 1)
                for landed in window.targets:
                    prove(views[landed.name], windows.proofs.get(landed.name, ()), group)
                    if landed.name not in done:
                        done.add(landed.name)
                        yield landed.name, views[landed.name]
                if more and reading is None:
                    reading = start(number + 1)
        self.total = windows.total

    def _staging(
        self, agent: Agent, windows: Windows, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """For even windows and odd ones; one buffer holds all when they stay to be served."""
        if not self._pools:
            self._pools = [Pool(agent) for _ in range(1 if self._serve else 2)]
        before = [pool.memory for pool in self._pools]
        step = len(self._pools)
        sizes = [_largest(windows.windows[first::step]) for first in range(step)]
        now = [one.room_for(size, device) for one, size in zip(self._pools, sizes, strict=True)]
        if any(one is not other for one, other in zip(before, now, strict=True)):
            self._drop_prepared()
        return now[0], now[-1]

    def _windows(self, group: Group) -> Windows:
        found = self._known.get(group.key)
        if found is None:
            wanted = (self._wants or hf_target)(group.headers)
            sources = [
                held.source(name, card.node)
                for name, card, held in zip(group.names, group.cards, group.held, strict=True)
            ]
            receiver = Receiver(self.name, Place(this_node()))
            full = {n: some for n, some in wanted.items() if group.headers[n].shape.count(0) == 0}
            made = plan(sources, [receiver], full, self._costs)
            self.plans += 1
            found = make_windows(
                made,
                self.name,
                wanted,
                {n: held.tensors for n, held in zip(group.names, group.held, strict=True)},
                group.digests,
                window_bytes=self._window_bytes,
                keep=self._serve,
            )
        self._known[group.key] = found
        self._known.move_to_end(group.key)
        while len(self._known) > _KEPT:
            self._known.popitem(last=False)
        return found

    def _connected(self, group: Group) -> Agent:
        """The agent, knowing these sources as they are now."""
        modes = {card.error_handling for card in group.cards}
        if len(modes) != 1:
            raise WeightsError("The ranks of the trainer have different settings of NIXL.")
        mode = modes.pop()
        if self._agent is not None and self._agent.settings.error_handling != mode:
            self._release()
        if self._agent is None:
            self._agent = Agent(self.name, Settings(mode, self._net_devices))
            if self._serve:  # whoever reads from here gets in touch first
                self._agent.listen(_ignore)
        for name, card in zip(group.names, group.cards, strict=True):
            known = self._peers.get(name)
            if known is not None and known[0] == card.agent:
                continue
            if known is not None:  # its memory is registered anew
                self._drop_prepared()
                self._agent.remove_peer(known[1])
            self._peers[name] = card.agent, self._agent.add_peer(card.agent)
        return self._agent

    def _reads(
        self, group: Group, windows: Windows, memory: tuple[Tensor, Tensor]
    ) -> list[list[Prepared]]:
        """By window. Kept by layout and addresses: those of a source's pools come in turn."""
        assert self._agent is not None
        told = hashlib.sha256(group.key.encode())
        for card in group.cards:
            told.update(msgspec.msgpack.encode(card.addresses))
        key = told.hexdigest()
        found = self._prepared.get(key)
        if found is None:
            cards = dict(zip(group.names, group.cards, strict=True))
            found = [
                [
                    self._prepare(name, cards[name], window, memory[number % 2])
                    for name in window.reads
                ]
                for number, window in enumerate(windows.windows)
            ]
        self._prepared[key] = found
        self._prepared.move_to_end(key)
        while len(self._prepared) > _KEPT:
            _release_all(self._prepared.popitem(last=False)[1])
        return found

    def _prepare(self, name: str, card: Card, window: Window, memory: Tensor) -> Prepared:
        assert self._agent is not None
        kind, index = memory_kind(memory.device)
        remote, local, sizes = window.reads[name].placed(card.addresses, memory.data_ptr())
        return self._agent.prepare(
            self._peers[name][1],
            (kind, _rows(local, sizes, index)),
            (card.memory, _rows(remote, sizes, card.device)),
        )

    # --- afterwards ------------------------------------------------------------------------------

    def _acknowledge(self, catalog: Catalog, group: Group, version: int) -> None:
        assert self._agent is not None
        for name in group.names:
            with suppress(WeightsError):  # the version is here, whether it can be told or not
                self._agent.notify(self._peers[name][1], acknowledgement(version))
        with suppress(WeightsError):
            self._agent.hear(_ignore)  # so that what was sent leaves this process
        catalog.acknowledge(version, self.name)

    def _announce(self, catalog: Catalog, group: Group, version: int) -> None:
        """Become a source of what is now in the pool."""
        assert self._agent is not None and self._pools[0].memory is not None
        windows = self._known[group.key]
        landed = [one for window in windows.windows for one in window.targets]
        tensors = {one.name: LocalTensor(one.dtype, one.shape) for one in landed}
        pieces = [Piece(name, box, name, box.start) for name, box in group.digests]
        kind, index = memory_kind(self._pools[0].memory.device)
        base = self._pools[0].memory.data_ptr()
        digests = b"".join(group.digests.values())
        assert len(digests) == DIGEST_BYTES * len(pieces)
        card = Card(
            agent=self._agent.metadata(),
            memory=kind,
            device=index,
            error_handling=self._agent.settings.error_handling,
            node=this_node(),
            layout=write_layout(tensors, pieces),
            addresses=[base + one.offset for one in landed],
            digests=digests,
        )
        body = msgspec.msgpack.encode(card)
        catalog.announce(Listing(version, self.name, 0, 1, "receiver", body))
        self._serving = catalog, version

    def _forget(self, group: Group, *, given_up: bool) -> None:
        """After a failure: start from nothing with these sources, or altogether."""
        if given_up:
            self._given_up.append((self._agent, self._pools))
            self._prepared.clear()
            self._agent, self._pools, self._peers = None, [], {}
            return
        self._drop_prepared()
        for name in group.names:
            known = self._peers.pop(name, None)
            if known is not None and self._agent is not None:
                self._agent.remove_peer(known[1])

    def _drop_prepared(self) -> None:
        for found in self._prepared.values():
            _release_all(found)
        self._prepared.clear()

    def _release(self) -> None:
        self._drop_prepared()
        for pool in self._pools:
            pool.release()
        if self._agent is not None:
            self._agent.stop_listening()
        self._agent, self._pools, self._peers = None, [], {}


def _largest(windows: list[Window]) -> int:
    return max((window.offset + window.nbytes for window in windows), default=0)


def _ignore(_: str, __: bytes) -> None:
    """For notices: a receiver that serves is thanked, and that is all."""


def _rows(addresses: Any, sizes: Any, device: int) -> Numbers:
    rows = np.empty((len(addresses), 3), dtype=np.uint64)
    rows[:, 0], rows[:, 1], rows[:, 2] = addresses, sizes, device
    return rows


def _release_all(found: list[list[Prepared]]) -> None:
    for window in found:
        for one in window:
            one.release()


def _failed(offer: Offer, error: WeightsError) -> WeightsError:
    return WeightsError(
        f"Version {offer.version} could not be pulled: {error.message}",
        error.hint or "See whether the trainer still runs, then publish the version again.",
    )
