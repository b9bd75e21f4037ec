"""Publish the versions of one trainer rank into registered memory that receivers read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import Tensor

from rollway.errors import UsageError
from rollway.weights.digest.checksums import digest, dtype_name
from rollway.weights.layout import Box, Piece
from rollway.weights.offer import Offer
from rollway.weights.planning.targets import LocalTensor, TensorInfo
from rollway.weights.transports.base import NamedTensor, Publisher, Source
from rollway.weights.transports.nixl.agent import (
    Agent,
    ErrorHandling,
    Settings,
    unique_name,
)
from rollway.weights.transports.nixl.catalog import Catalog, Listing, wait_for
from rollway.weights.transports.nixl.catalog_http import LOOPBACK, CatalogServer, HttpCatalog
from rollway.weights.transports.nixl.listing import (
    FANOUT,
    SourceMemory,
    read_group,
    read_receipt,
    this_node,
    write_layout,
)
from rollway.weights.transports.nixl.memory import Pool, memory_kind, view_tensor
from rollway.weights.transports.nixl.split import pack_parts, slice_piece, split_for_ranks
from rollway.weights.transports.nixl.windows import BufferTensor, align
from rollway.weights.transports.versions import check_next


class NixlPublisher(Publisher):
    """Publishes the versions of one rank of a trainer; the newest `keep` stay readable.

    Rank 0 runs the catalog unless one is passed. The other ranks need its address."""

    transport = "nixl"

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
        """Open the agent, and the catalog unless there is one.

        `engine_ranks` is the tensor parallelism of the engines, or a multiple of it: tensors are
        split so that each engine rank can receive only its part. With `fanout`, a worker that has
        received a version keeps it and serves it to others."""
        if keep < 1:
            raise UsageError(f"At least one version must be kept, not {keep}.")
        if not 0 <= rank < world:
            raise UsageError(f"There is no rank {rank} among {world}.")
        if engine_ranks < 1:
            raise UsageError(f"An engine has at least one rank, not {engine_ranks}.")
        if catalog is None and rank:
            raise UsageError(
                f"Rank {rank} needs the catalog of rank 0.", "Pass its address: catalog=url."
            )
        self.rank, self.world = rank, world
        self._engine_ranks, self._fanout = engine_ranks, fanout
        # Between machines, only the network can report that the other end died.
        is_local = host == LOOPBACK if catalog is None else _is_local(catalog)
        mode = error_handling or ("none" if is_local else "peer")
        self.name = unique_name(f"trainer{rank}")
        self._agent = Agent(self.name, Settings(mode, tuple(net_devices), progress))
        self._server: CatalogServer | None = None
        if isinstance(catalog, str):
            catalog = HttpCatalog(catalog, secret=secret)
        elif catalog is None:
            catalog = self._server = CatalogServer(host, port, secret=secret, public=public)
        self.catalog: Catalog = catalog
        self._pools = [Pool(self._agent) for _ in range(keep)]
        self._adopted: _AdoptedTensors | None = None
        self._newest: int | None = None
        self._receipts: dict[int, set[str]] = {}
        self._closed = False
        self._agent.listen(self._record_receipts)

    def publish(
        self, version: int, tensors: Source | None = None, *, timeout: float = 300.0
    ) -> Offer:
        """Announce this rank's part, and wait until all ranks have announced theirs.

        HeldTensors are published by the rank that owns them."""
        self.announce(version, tensors)
        return self.offer(version, timeout)

    def announce(self, version: int, tensors: Source | None = None) -> None:
        """Store this rank's part where receivers can read it; by default the adopted tensors."""
        check_next(version, self._newest)
        source = tensors
        if source is None and self._adopted is not None:
            source = self._adopted.tensors.items()
        if source is None:
            raise UsageError("There are no tensors to publish.", "Pass them, or `adopt` them.")
        named, pieces, headers = _read_source(source)
        parts = split_for_ranks(pieces, headers, self._engine_ranks)
        if tensors is None:
            split = [piece for several in parts.values() for piece in several]
            memory = self._publish_adopted(version, split)
        else:
            memory = self._copy_to_pool(version, *pack_parts(named, parts))
        if self.world == 1 and not memory.addresses:
            raise UsageError("There are no tensors to publish.")
        body = msgspec.msgpack.encode(memory)
        self.catalog.announce(Listing(version, self.name, self.rank, self.world, "trainer", body))
        self._newest = version

    def offer(self, version: int, timeout: float = 300.0) -> Offer:
        """Return the offer of a version, once all ranks have announced it."""
        group = read_group(wait_for(self.catalog, version, self.name, timeout))
        where = self.catalog.where()
        if self._fanout:
            where[FANOUT] = True
        return Offer("nixl", version, group.identity, group.nbytes, where)

    def adopt(self, tensors: Iterable[NamedTensor]) -> None:
        """Register tensors in place, so that publishing copies nothing.

        Only one version can then be read at a time, and none while the tensors change."""
        adopted = _AdoptedTensors.register(self._agent, dict(tensors))
        if self._adopted is not None:
            self._withdraw(self._adopted.version)
            self._adopted.release(self._agent)
        self._adopted = adopted

    def acknowledged(self, version: int) -> set[str]:
        """Return the receivers that have notified this rank that they have all of the version."""
        self._record_receipts()
        return set(self._receipts.get(version, ()))

    def close(self) -> None:
        """Withdraw all versions, also from receivers that are reading them."""
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

    def _copy_to_pool(
        self, version: int, tensors: dict[str, Tensor], pieces: list[Piece]
    ) -> SourceMemory:
        device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
        placed, nbytes = _lay_out(tensors)
        pool = min(self._pools, key=lambda pool: pool.version)
        # Before the bytes are overwritten: no reader may start on the old version any more.
        self._withdraw(pool.version)
        pool.version = -1
        memory = pool.allocate(nbytes, device)
        views = {target.name: view_tensor(memory, target) for target in placed}
        for name, tensor in tensors.items():
            if tensor.device != device:
                raise UsageError(f"{name} is on {tensor.device}, other tensors are on {device}.")
            views[name].copy_(tensor.detach())
        described = self._describe(views, pieces)
        pool.version = version
        return described

    def _publish_adopted(self, version: int, pieces: list[Piece]) -> SourceMemory:
        assert self._adopted is not None
        self._withdraw(self._adopted.version)
        self._adopted.version = version
        return self._describe(self._adopted.tensors, pieces)

    def _describe(self, views: dict[str, Tensor], pieces: list[Piece]) -> SourceMemory:
        tensors = {name: _describe_tensor(view) for name, view in views.items()}
        layout = write_layout(tensors, pieces)
        device = next((view.device for view in views.values()), torch.device("cpu"))
        kind, index = memory_kind(device)
        if kind == "VRAM":
            torch.cuda.synchronize(device)  # readers do not wait for this process's streams
        digests = (digest(slice_piece(views[piece.source], piece)) for piece in pieces)
        return SourceMemory(
            agent=self._agent.metadata(),
            memory=kind,
            device=index,
            error_handling=self._agent.settings.error_handling,
            node=this_node(),
            layout=layout,
            addresses=[view.data_ptr() for view in views.values()],
            digests=b"".join(map(bytes.fromhex, digests)),
        )

    def _withdraw(self, version: int) -> None:
        if version >= 0:
            self.catalog.withdraw(version, self.name)
            self._receipts.pop(version, None)

    def _record_receipts(self) -> None:
        kept = {item.version for item in (*self._pools, self._adopted) if item is not None}
        for member, message in self._agent.poll():
            version = read_receipt(message)
            if version is not None and version in kept:
                self._receipts.setdefault(version, set()).add(member)


@dataclass(slots=True)
class _AdoptedTensors:
    """A trainer's own tensors, whose storages are registered."""

    tensors: dict[str, Tensor]
    handles: list[Any] = field(default_factory=list)
    version: int = -1

    @classmethod
    def register(cls, agent: Agent, tensors: Mapping[str, Tensor]) -> _AdoptedTensors:
        adopted = cls({name: tensor.detach() for name, tensor in tensors.items()})
        for name, tensor in adopted.tensors.items():
            if not tensor.is_contiguous():
                raise UsageError(f"{name} is not contiguous.", "Publish copies instead.")
        # Tensors may share a storage, and NIXL registers memory once.
        storages = {
            tensor.untyped_storage().data_ptr(): tensor
            for tensor in adopted.tensors.values()
            if tensor.numel()
        }
        for address, tensor in storages.items():
            kind, index = memory_kind(tensor.device)
            size = tensor.untyped_storage().nbytes()
            adopted.handles.append(agent.register(address, size, kind, index))
        return adopted

    def release(self, agent: Agent) -> None:
        for handle in self.handles:
            agent.deregister(handle)


def _read_source(
    source: Source,
) -> tuple[dict[str, Tensor], list[Piece], dict[str, TensorInfo]]:
    """Return tensors, their pieces, and the whole tensors' headers, as far as those are known."""
    tensors: dict[str, Tensor] = {}
    pieces: list[Piece] = []
    headers: dict[str, TensorInfo] = {}
    for item in source:
        if isinstance(item, tuple):
            name, tensor = item
            headers[name] = header = _describe_tensor(tensor)
            box = Box.whole(header.shape)
            pieces.append(Piece(name, box, name, (0,) * len(header.shape)))
        elif item.owned_here:
            name, tensor = item.shard.name, item.tensor
            pieces += item.pieces
            # Only a shard with the name of its Hugging Face tensor knows that tensor's shape.
            if all(piece.name == name for piece in item.pieces):
                headers[name] = LocalTensor(item.shard.dtype, item.shard.shape)
        else:
            continue
        tensors[name] = tensor
    return tensors, pieces, headers


def _describe_tensor(tensor: Tensor) -> LocalTensor:
    return LocalTensor(dtype_name(tensor), tuple(tensor.shape))


def _lay_out(tensors: dict[str, Tensor]) -> tuple[list[BufferTensor], int]:
    placed, offset = [], 0
    for name, tensor in tensors.items():
        placed.append(BufferTensor(name, dtype_name(tensor), tuple(tensor.shape), offset))
        offset += align(placed[-1].nbytes)
    return placed, offset


def _is_local(catalog: Catalog | str) -> bool:
    url = catalog if isinstance(catalog, str) else getattr(catalog, "url", "")
    return f"//{LOOPBACK}:" in url or "//localhost:" in url
