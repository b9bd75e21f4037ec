"""Weights pulled by the receivers over NIXL: RDMA between machines, direct reads on one.

    trainer rank ── publish: copy into a registered pool, digest ──► announce ──► catalog
                       ▲                                                            │ look up
    worker ────────────┴── READ of the planned slices into its own pool ◄───────────┘
           ── digests compared, tensor handed on ── … ── acknowledgement ──► trainer rank, catalog

The trainer takes no part in a transfer. There is one pool for each version that is kept: it is
registered once and used in turn. Its listing is withdrawn before its bytes are written over, and a
reader that is in the middle of it then finds digests that do not fit: it never hands on a tensor
that is not exactly what was published. A reader that `serve`s keeps what it got and becomes a
source itself.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec
import torch
from torch import Tensor

from rollway.errors import UsageError
from rollway.weights.catalog import Catalog, Listing, wait_for
from rollway.weights.catalog_http import LOOPBACK, CatalogServer, HttpCatalog
from rollway.weights.digest.bits import digest, dtype_name
from rollway.weights.layout import Box, Piece
from rollway.weights.offer import Offer
from rollway.weights.planning.wants import Described, LocalTensor
from rollway.weights.sources import Held
from rollway.weights.transports.nixl_agent import Agent, ErrorHandling, Region, Settings
from rollway.weights.transports.nixl_cards import Card, Layouts, this_node, write_layout
from rollway.weights.transports.nixl_cells import divided, packed, within
from rollway.weights.transports.nixl_memory import Pool, memory_kind, view_of
from rollway.weights.transports.nixl_windows import Landed, aligned
from rollway.weights.transports.versions import check_next

_PREFIX = b"rollway has "
FANOUT = "fanout"
"""In an offer: whoever takes it gives it to others."""


def unique_name(kind: str) -> str:
    return f"{kind}-{socket.gethostname()}-{os.getpid()}-{os.urandom(4).hex()}"


class NixlPublisher:
    """Publishes the versions of one rank of a trainer; the newest `keep` stay readable.

    The first rank runs the catalog, unless one is given; the other ranks are given its address.
    """

    def __init__(
        self,
        keep: int = 2,
        *,
        catalog: Catalog | str | None = None,
        host: str = LOOPBACK,
        port: int = 0,
        public: str = "",
        secret: str | None = None,
        rank: int = 0,
        world: int = 1,
        net_devices: Sequence[str] = (),
        error_handling: ErrorHandling | None = None,
        progress: bool = False,
        engine_ranks: int = 1,
        fanout: bool = False,
    ) -> None:
        """`engine_ranks` is the tensor parallelism of the engines, or a multiple of it: each of
        their ranks can then take its own part, which is else taken whole. With `fanout` a worker
        that has a version keeps it, and gives it to others."""
        if keep < 1:
            raise UsageError(f"At least one version must be kept, not {keep}.")
        if not 0 <= rank < world:
            raise UsageError(f"There is no rank {rank} among {world}.")
        if engine_ranks < 1:
            raise UsageError(f"An engine has at least one rank, not {engine_ranks}.")
        if catalog is None and rank:
            raise UsageError(
                f"Rank {rank} needs the catalog of rank 0.", "Give its address: catalog=url."
            )
        self.rank, self.world = rank, world
        self._engine_ranks, self._fanout = engine_ranks, fanout
        # Between machines only the network can tell that the other end died.
        alone = catalog is None and host == LOOPBACK
        mode = error_handling or ("none" if alone or _is_here(catalog) else "peer")
        self.name = unique_name(f"trainer{rank}")
        self._agent = Agent(self.name, Settings(mode, tuple(net_devices), progress))
        self._server: CatalogServer | None = None
        if isinstance(catalog, str):
            catalog = HttpCatalog(catalog, secret=secret)
        elif catalog is None:
            catalog = self._server = CatalogServer(host, port, secret=secret, public=public)
        self.catalog: Catalog = catalog
        self._pools = [Pool(self._agent) for _ in range(keep)]
        self._adopted: _Adopted | None = None
        self._newest: int | None = None
        self._layouts = Layouts()
        self._heard: dict[int, set[str]] = {}
        self._closed = False
        self._agent.listen(self._heard_of)

    def publish(
        self,
        version: int,
        tensors: Iterable[tuple[str, Tensor]] | None = None,
        pieces: Sequence[Piece] | None = None,
        *,
        timeout: float = 300.0,
    ) -> Offer:
        """Announce this rank's part, and wait until all ranks have announced theirs."""
        self.announce(version, tensors, pieces)
        return self.offer(version, timeout)

    def publish_held(self, version: int, held: Iterable[Held], *, timeout: float = 300.0) -> Offer:
        """What this rank of an FSDP or Megatron trainer holds; replicas by their owner only."""
        mine = [one for one in held if one.owned_here]
        pieces = [piece for one in mine for piece in one.pieces]
        tensors = [(one.shard.name, one.tensor) for one in mine]
        # Of a trainer with Hugging Face's names, a shard says how large its tensor is.
        headers = {
            one.shard.name: LocalTensor(one.shard.dtype, one.shard.shape)
            for one in mine
            if all(piece.name == one.shard.name for piece in one.pieces)
        }
        self.announce(version, tensors, pieces, headers)
        return self.offer(version, timeout)

    def announce(
        self,
        version: int,
        tensors: Iterable[tuple[str, Tensor]] | None = None,
        pieces: Sequence[Piece] | None = None,
        headers: Mapping[str, Described] | None = None,
    ) -> None:
        """Put this rank's part where receivers can read it; without tensors, those adopted.

        Without `pieces`, every tensor is a whole Hugging Face tensor. With them, `headers` say
        how large the whole ones are, for them to be divided for the ranks of engines."""
        check_next(version, self._newest)
        adopted = self._adopted.tensors if self._adopted is not None else None
        given = adopted if tensors is None else dict(tensors)
        if given is None:
            raise UsageError("There are no tensors to publish.", "Give them, or `adopt` them.")
        if pieces is None:
            headers = {n: LocalTensor(dtype_name(t), tuple(t.shape)) for n, t in given.items()}
            pieces = [whole_piece(name, one) for name, one in headers.items()]
        parts = divided(pieces, headers or {}, self._engine_ranks)
        if tensors is None:
            card = self._in_place(version, [one for several in parts.values() for one in several])
        else:
            card = self._copied(version, *packed(given, parts))
        if self.world == 1 and not card.addresses:
            raise UsageError("There are no tensors to publish.")
        body = msgspec.msgpack.encode(card)
        self.catalog.announce(Listing(version, self.name, self.rank, self.world, "trainer", body))
        self._newest = version

    def offer(self, version: int, timeout: float = 300.0) -> Offer:
        """What the fleet is told, when all ranks have announced the version."""
        group = self._layouts.group(wait_for(self.catalog, version, self.name, timeout))
        where = self.catalog.where()
        if self._fanout:
            where[FANOUT] = True
        return Offer("nixl", version, group.identity, group.nbytes, where)

    def adopt(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Register these tensors where they are: publishing then copies nothing. There is then
        one version at a time, and none while they change."""
        made = _Adopted.register(self._agent, dict(tensors))
        if self._adopted is not None:
            self._withdraw(self._adopted.version)
            self._adopted.release(self._agent)
        self._adopted = made

    def acknowledged(self, version: int) -> set[str]:
        """Receivers that have told this rank that they have all of the version."""
        self._agent.hear(self._heard_of)
        return set(self._heard.get(version, ()))

    def close(self) -> None:
        """Take everything away, also from those that are reading."""
        if self._closed:
            return
        self._closed = True
        self._agent.stop_listening()
        if self._server is None:
            self.catalog.leave(self.name)
        else:
            self._server.close()
        for pool in self._pools:
            pool.release()
        if self._adopted is not None:
            self._adopted.release(self._agent)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _copied(self, version: int, given: dict[str, Tensor], pieces: list[Piece]) -> Card:
        device = next((one.device for one in given.values()), torch.device("cpu"))
        landed, nbytes = _laid_out(given)
        pool = min(self._pools, key=lambda one: one.version)
        self._withdraw(pool.version)
        pool.version = -1
        memory = pool.room_for(nbytes, device)
        views = {one.name: view_of(memory, one) for one in landed}
        for name, tensor in given.items():
            if tensor.device != device:
                raise UsageError(f"{name} is on {tensor.device}, other tensors are on {device}.")
            views[name].copy_(tensor.detach())
        card = self._card(views, pieces)
        pool.version = version
        return card

    def _in_place(self, version: int, pieces: list[Piece]) -> Card:
        assert self._adopted is not None
        self._withdraw(self._adopted.version)
        self._adopted.version = version
        return self._card(self._adopted.tensors, pieces)

    def _card(self, views: dict[str, Tensor], pieces: list[Piece]) -> Card:
        tensors = {n: LocalTensor(dtype_name(t), tuple(t.shape)) for n, t in views.items()}
        layout = write_layout(tensors, pieces)
        where = next((one.device for one in views.values()), torch.device("cpu"))
        kind, device = memory_kind(where)
        if kind == "VRAM":
            torch.cuda.synchronize(where)  # readers do not wait for this process's streams
        return Card(
            agent=self._agent.metadata(),
            memory=kind,
            device=device,
            error_handling=self._agent.settings.error_handling,
            node=this_node(),
            layout=layout,
            addresses=[tensor.data_ptr() for tensor in views.values()],
            digests=b"".join(bytes.fromhex(digest(within(views[p.source], p))) for p in pieces),
        )

    def _withdraw(self, version: int) -> None:
        if version >= 0:
            self.catalog.withdraw(version, self.name)
            self._heard.pop(version, None)

    def _heard_of(self, member: str, message: bytes) -> None:
        version = message.removeprefix(_PREFIX)
        if not message.startswith(_PREFIX) or not version.isdigit() or len(version) > 20:
            return
        kept = {one.version for one in (*self._pools, self._adopted) if one is not None}
        if int(version) in kept:
            self._heard.setdefault(int(version), set()).add(member)


@dataclass(slots=True)
class _Adopted:
    """A trainer's own tensors, with the memory around them registered."""

    tensors: dict[str, Tensor]
    regions: list[Region] = field(default_factory=list)
    version: int = -1

    @classmethod
    def register(cls, agent: Agent, tensors: dict[str, Tensor]) -> _Adopted:
        made = cls({name: tensor.detach() for name, tensor in tensors.items()})
        loose = next((name for name, one in made.tensors.items() if not one.is_contiguous()), None)
        if loose is not None:
            raise UsageError(f"{loose} does not lie row after row.", "Publish copies instead.")
        storages = {t.untyped_storage().data_ptr(): t for t in made.tensors.values() if t.numel()}
        for address, tensor in storages.items():
            kind, index = memory_kind(tensor.device)
            size = tensor.untyped_storage().nbytes()
            made.regions.append(agent.register(address, size, kind, index))
        return made

    def release(self, agent: Agent) -> None:
        for region in self.regions:
            agent.deregister(region)


def acknowledgement(version: int) -> bytes:
    return _PREFIX + str(version).encode()


def whole_piece(name: str, tensor: Described) -> Piece:
    return Piece(name, Box.whole(tensor.shape), name, (0,) * len(tensor.shape))


def _laid_out(tensors: dict[str, Tensor]) -> tuple[list[Landed], int]:
    landed, offset = [], 0
    for name, tensor in tensors.items():
        landed.append(Landed(name, dtype_name(tensor), tuple(tensor.shape), offset))
        offset += aligned(landed[-1].nbytes)
    return landed, offset


def _is_here(catalog: Catalog | str | None) -> bool:
    url = catalog if isinstance(catalog, str) else getattr(catalog, "url", "")
    return f"//{LOOPBACK}:" in url or "//localhost:" in url
