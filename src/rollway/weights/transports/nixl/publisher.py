"""Publish the versions of one trainer rank into registered memory that receivers read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from rollway.errors import UsageError, WeightsError
from rollway.weights.checkpoint import TensorHeader
from rollway.weights.digest.checksums import digest, dtype_name
from rollway.weights.layout import Box, Piece
from rollway.weights.offer import Offer, list_boxes
from rollway.weights.transports.base import (
    NamedTensor,
    Publisher,
    Source,
    check_next,
    list_items,
)
from rollway.weights.transports.entries import lay_out, make_entry, view_entry
from rollway.weights.transports.nixl.agent import Agent, ErrorHandling, Pool, make_unique_name
from rollway.weights.transports.nixl.catalog import (
    LOOPBACK,
    Catalog,
    CatalogServer,
    HttpCatalog,
    Listing,
    wait_for,
)
from rollway.weights.transports.nixl.listing import (
    FANOUT,
    SAME_RANK,
    list_pieces,
    read_group,
    slice_piece,
    split_for_ranks,
    write_listing,
)
from rollway.weights.transports.nixl.modelexpress import Recorder
from rollway.weights.transports.nixl.windows import ALIGNED


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
        secret: str | None = None,
        rank: int = 0,
        world: int = 1,
        net_devices: Sequence[str] = (),
        error_handling: ErrorHandling | None = None,
        engine_ranks: int = 1,
        fanout: bool = False,
        modelexpress: Recorder | None = None,
        same_rank: bool = False,
    ) -> None:
        """Open the agent, and the catalog unless there is one.

        `engine_ranks` is the tensor parallelism of the engines, or a multiple of it: tensors are
        split so that each engine rank can receive only its part. With `fanout`, a worker that has
        received a version keeps it and serves it to others. `modelexpress` records versions on a
        ModelExpress server, too. With `same_rank`, a rank of an engine reads from the trainer's
        rank of the same number alone, so each publishes its replicas, too."""
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
        self._engine_ranks, self._fanout, self._same_rank = engine_ranks, fanout, same_rank
        # Between machines, only the network can report that the other end died.
        is_local = host == LOOPBACK if catalog is None else _is_local(catalog)
        mode = error_handling or ("none" if is_local else "peer")
        self.name = make_unique_name(f"trainer{rank}")
        self._agent = Agent(self.name, mode, net_devices)
        self._server: CatalogServer | None = None
        if isinstance(catalog, str):
            catalog = HttpCatalog(catalog, secret=secret)
        elif catalog is None:
            catalog = self._server = CatalogServer(host, port, secret=secret)
        self.catalog: Catalog = catalog if modelexpress is None else modelexpress.wrap(catalog)
        self._pools = [Pool(self._agent) for _ in range(keep)]
        self._adopted: tuple[Pool, dict[str, Tensor]] | None = None
        self._agent.listen()  # receivers connect only meanwhile

    def _publish(
        self, version: int, tensors: Source | None = None, *, timeout: float = 300.0
    ) -> Offer:
        """Announce this rank's part, and wait until all ranks have announced theirs.

        HeldTensors are published by the rank that owns them."""
        self.announce(version, tensors)
        return self.offer(version, timeout)

    def announce(self, version: int, tensors: Source | None = None) -> None:
        """Store this rank's part where receivers can read it; by default the adopted tensors."""
        check_next(version, self.newest)
        adopted = self._adopted if tensors is None else None
        source = adopted[1].items() if adopted else tensors
        # A rank beyond those of an engine has no reader of its own number.
        with_replicas = self._same_rank and self.rank < self._engine_ranks
        named, pieces, headers = _read_source(
            () if source is None else source, with_replicas=with_replicas
        )
        if source is None or (self.world == 1 and not named):
            raise UsageError("There are no tensors to publish.", "Pass them, or `adopt` them.")
        named, pieces = split_for_ranks(
            named, pieces, headers, self._engine_ranks, pack=not adopted
        )
        # Before the bytes are overwritten: no reader may start on the old version any more.
        pool = adopted[0] if adopted else min(self._pools, key=lambda pool: pool.version)
        self._withdraw(pool)
        views = adopted[1] if adopted else _copy_to_pool(pool, named)
        body = self._describe(views, pieces)
        pool.version = version
        self.catalog.announce(Listing(version, self.name, self.rank, self.world, "trainer", body))
        self.newest = version

    def offer(self, version: int, timeout: float = 300.0) -> Offer:
        """Return the offer of a version, once all ranks have announced it."""
        group = read_group(wait_for(self.catalog, version, self.name, timeout))
        where = self.catalog.where()
        if self._fanout:
            where[FANOUT] = True
        if self._same_rank:
            where[SAME_RANK] = True
        return Offer("nixl", version, group.identity, group.nbytes, where)

    def adopt(self, tensors: Iterable[NamedTensor]) -> None:
        """Register tensors in place, so that publishing copies nothing.

        Only one version can then be read at a time, and none while the tensors change."""
        adopted = {name: tensor.detach() for name, tensor in tensors}
        for name, tensor in adopted.items():
            if not tensor.is_contiguous():
                raise UsageError(f"{name} is not contiguous.", "Publish copies instead.")
        # Tensors may share a storage, and NIXL registers memory once.
        all_storages = [tensor.untyped_storage() for tensor in adopted.values() if tensor.numel()]
        storages = {storage.data_ptr(): storage for storage in all_storages}
        handles = [
            self._agent.register(address, storage.nbytes(), storage.device)
            for address, storage in storages.items()
        ]
        if self._adopted is not None:
            self._withdraw(self._adopted[0])
            self._adopted[0].release()
        self._adopted = Pool(self._agent, handles=handles), adopted

    def list_receivers(self, version: int) -> set[str]:
        """Return the receivers that have all of the version."""
        return set(self.catalog.list_receivers(version))

    def _close(self) -> None:
        """Withdraw all versions, also from receivers that are reading them."""
        self._agent.stop_listening()
        if self.catalog is not self._server:
            # A catalog that has ended lists nothing any more, and the memory must be released.
            with contextlib.suppress(WeightsError):
                self.catalog.leave(self.name)
        if self._server is not None:
            self._server.close()
        for pool in self._pools:
            pool.release()
        if self._adopted is not None:
            self._adopted[0].release()

    def _describe(self, views: dict[str, Tensor], pieces: list[Piece]) -> bytes:
        device = _find_device(views)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # readers do not wait for this process's streams
        held: dict[str, list[Piece]] = {name: [] for name in views}
        for piece in pieces:
            if piece.source not in held:
                raise UsageError(
                    f"A piece of {piece.name} is in {piece.source}, which is not published."
                )
            held[piece.source].append(piece)
        # A tensor without elements is at address 0.
        base = min((view.data_ptr() for view in views.values() if view.numel()), default=0)
        entries = [
            make_entry(name, view, max(view.data_ptr() - base, 0), boxes=list_boxes(held[name]))
            for name, view in views.items()
        ]
        sums = (
            bytes.fromhex(digest(slice_piece(views[piece.source], piece)))
            for piece in list_pieces(entries)
        )
        return write_listing(self._agent, device, entries, base, sums, self.rank)

    def _withdraw(self, pool: Pool) -> None:
        if pool.version >= 0:
            self.catalog.withdraw(pool.version, self.name)
        pool.version = -1


def _copy_to_pool(pool: Pool, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    device = _find_device(tensors)
    entries, nbytes = lay_out(tensors, ALIGNED)
    memory = pool.allocate(nbytes, device)
    views = {entry.name: view_entry(memory, entry) for entry in entries}
    for name, tensor in tensors.items():
        if tensor.device != device:
            raise UsageError(f"{name} is on {tensor.device}, other tensors are on {device}.")
        views[name].copy_(tensor.detach())
    return views


def _read_source(
    source: Source, *, with_replicas: bool = False
) -> tuple[dict[str, Tensor], list[Piece], dict[str, TensorHeader]]:
    """Return tensors, their pieces, and the whole tensors' headers, as far as those are known; of
    tensors that other ranks publish nothing, unless `with_replicas`."""
    tensors: dict[str, Tensor] = {}
    pieces: list[Piece] = []
    headers: dict[str, TensorHeader] = {}
    for item in list_items(source):
        if isinstance(item, tuple):
            name, tensor = item
            headers[name] = header = _describe_tensor(tensor)
            box = Box.whole(header.shape)
            pieces.append(Piece(name, box, name, (0,) * len(header.shape)))
        elif item.pieces and (item.owned_here or with_replicas):  # or it is padding alone
            name, tensor = item.shard.name, item.tensor
            pieces += item.pieces
            # Only a shard with the name of its Hugging Face tensor knows that tensor's shape.
            if all(piece.name == name for piece in item.pieces):
                headers[name] = TensorHeader(item.shard.dtype, item.shard.shape)
        else:
            continue
        tensors[name] = tensor
    return tensors, pieces, headers


def _describe_tensor(tensor: Tensor) -> TensorHeader:
    return TensorHeader(dtype_name(tensor), tuple(tensor.shape))


def _find_device(tensors: dict[str, Tensor]) -> torch.device:
    return next((tensor.device for tensor in tensors.values()), torch.device("cpu"))


def _is_local(catalog: Catalog | str) -> bool:
    url = catalog if isinstance(catalog, str) else getattr(catalog, "url", "")
    return f"//{LOOPBACK}:" in url or "//localhost:" in url
