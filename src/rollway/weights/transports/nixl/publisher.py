"""Publish the versions of one trainer rank into registered memory that receivers read.

Tensors are divided into pieces where the ranks of engines cut them, so that each rank can read and
verify exactly its part. A piece is copied into one run of bytes, so columns are read as fast as
rows. Adopted tensors are not copied: they are divided only where a part is one run already.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rollway.errors import UsageError, WeightsError
from rollway.weights.checkpoint import TensorHeader
from rollway.weights.digest.checksums import digests, dtype_name
from rollway.weights.layout import Box, Piece
from rollway.weights.offer import Offer, PlacedBox
from rollway.weights.planning.targets import cells
from rollway.weights.transports.base import (
    NamedTensor,
    Publisher,
    Source,
    check_next,
    list_items,
)
from rollway.weights.transports.entries import make_entry, set_digests, view_entry
from rollway.weights.transports.nixl.agent import Agent, Pool, make_unique_name
from rollway.weights.transports.nixl.catalog import LOOPBACK, CatalogServer
from rollway.weights.transports.nixl.listing import (
    FANOUT,
    SAME_RANK,
    Listing,
    place,
    read_group,
    write_body,
)
from rollway.weights.transports.nixl.modelexpress import open_catalog

RANKS_SECONDS = 300.0
"""How long the ranks of a trainer wait for each other."""


class LocalPiece(NamedTuple):
    """A box of the Hugging Face tensor `name`, in this rank's memory."""

    name: str
    box: Box
    tensor: Tensor


class NixlPublisher(Publisher):
    """Publishes the versions of one rank of a trainer; the newest `keep` stay readable.

    Rank 0 runs the catalog unless one is passed. The other ranks need its address."""

    transport = "nixl"

    def __init__(
        self,
        keep: int = 2,
        *,
        catalog: str = "",
        host: str = LOOPBACK,
        port: int = 0,
        secret: str | None = None,
        rank: int = 0,
        world: int = 1,
        net_devices: Sequence[str] = (),
        engine_ranks: int = 1,
        fanout: bool = False,
        modelexpress: Mapping[str, str] | None = None,
        same_rank: bool = False,
    ) -> None:
        """Open the agent, and the catalog unless there is one.

        `engine_ranks` is the tensor parallelism of the engines, or a multiple of it: tensors are
        split so that each engine rank can receive only its part. With `fanout`, a worker that has
        received a version keeps it and serves it to others. `modelexpress` names the server, the
        model and the run, for versions that a ModelExpress server records. With `same_rank`, a rank
        of an engine reads from the trainer's rank of the same number alone, so each publishes its
        replicas, too."""
        if keep < 1:
            raise UsageError(f"At least one version must be kept, not {keep}.")
        if not 0 <= rank < world:
            raise UsageError(f"There is no rank {rank} among {world}.")
        if rank and not catalog:
            raise UsageError(
                f"Rank {rank} needs the catalog of rank 0.", "Pass its address: catalog=url."
            )
        self._rank, self._world, self._engine_ranks = rank, world, engine_ranks
        # A rank beyond those of an engine has no reader of its own number.
        self._with_replicas = same_rank and rank < engine_ranks
        # Between machines, only the network can report that the other end died.
        url = catalog or f"http://{host}:{port}"
        is_local = url.startswith((f"http://{LOOPBACK}:", "http://localhost:"))
        self.name = make_unique_name(f"trainer{rank}")
        self._agent = Agent(self.name, "none" if is_local else "peer", net_devices)
        *self._pools, self._adopted_pool = [Pool(self._agent) for _ in range(keep + 1)]
        self._adopted: dict[str, Tensor] | None = None
        self._server = None if catalog else CatalogServer(host, port, secret=secret)
        self.catalog_url = self._server.url if self._server else catalog
        self._where: dict[str, Any] = {
            "catalog": self.catalog_url,
            "modelexpress": modelexpress,
            FANOUT: fanout,
            SAME_RANK: same_rank,
        }
        self.catalog = open_catalog(self._where, secret=secret)

    def _publish(self, version: int, tensors: Source | None = None) -> Offer:
        """Announce this rank's part, and wait until all ranks have announced theirs.

        HeldTensors are published by the rank that owns them."""
        self.announce(version, tensors)
        return self.offer(version)

    def announce(self, version: int, tensors: Source | None = None) -> None:
        """Store this rank's part where receivers can read it; by default the adopted tensors."""
        check_next(version, self.newest)
        is_adopted = tensors is None
        tensors = self._adopted if is_adopted else tensors
        pieces, headers = read_source(tensors or {}, with_replicas=self._with_replicas)
        # A rank may own nothing of a model.
        if tensors is None or (not pieces and self._world == 1):
            raise UsageError("There are no tensors to publish.", "Pass them, or `adopt` them.")
        pieces = list(split(pieces, headers, self._engine_ranks, in_place=is_adopted))
        device = _find_device(pieces)
        entries = [
            make_entry(name, tensor, 0, boxes=[_make_box(name, box)])
            for name, box, tensor in pieces
        ]
        # Before the bytes are overwritten: no reader may start on the old version any more.
        pool = self._adopted_pool
        if not is_adopted:
            pool = min(self._pools, key=lambda pool: pool.version)
        self._withdraw(pool)
        views = [piece.tensor for piece in pieces]
        if not is_adopted:
            placed, nbytes = place(entries)
            memory = pool.allocate(nbytes, device)
            views = [view_entry(memory, entry) for entry in placed]
            for view, piece in zip(views, pieces, strict=True):
                view.copy_(piece.tensor)
        entries = set_digests(entries, digests(views))
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # readers do not wait for this process's streams
        body = write_body(self._agent, device, entries, views)
        pool.version = version
        listing = Listing(version, self.name, self._rank, self._world, "trainer", body)
        self.catalog.announce(listing)
        self.newest = version

    def offer(self, version: int) -> Offer:
        """Return the offer of a version, once all ranks have announced it."""
        group = read_group(self.catalog.wait_for(version, RANKS_SECONDS))
        return Offer("nixl", version, group.identity, group.nbytes, dict(self._where))

    def adopt(self, tensors: Iterable[NamedTensor]) -> None:
        """Register tensors in place, so that publishing copies nothing.

        Only one version can then be read at a time, and none while the tensors change."""
        adopted = {name: tensor.detach() for name, tensor in tensors}
        for name, tensor in adopted.items():
            if not tensor.is_contiguous():
                raise UsageError(f"{name} is not contiguous.", "Publish copies instead.")
        self._withdraw(self._adopted_pool)
        self._adopted_pool.release()
        # Tensors may share a storage, and NIXL registers memory once.
        all_storages = [tensor.untyped_storage() for tensor in adopted.values() if tensor.numel()]
        storages = {storage.data_ptr(): storage for storage in all_storages}
        self._adopted_pool.handles = [
            self._agent.register(address, storage.nbytes(), storage.device)
            for address, storage in storages.items()
        ]
        self._adopted = adopted

    def _close(self) -> None:
        """Withdraw all versions, also from receivers that are reading them."""
        for pool in (*self._pools, self._adopted_pool):
            # A catalog that has ended lists nothing any more, and the memory must be released.
            with suppress(WeightsError):
                self._withdraw(pool)
            pool.release()
        self._agent.close()
        if self._server is not None:
            self._server.close()

    def _withdraw(self, pool: Pool) -> None:
        if pool.version >= 0:
            self.catalog.withdraw(pool.version, self.name)
        pool.version = -1


def read_source(
    source: Source, *, with_replicas: bool = False
) -> tuple[list[LocalPiece], dict[str, TensorHeader]]:
    """Return the pieces of a source, and the headers of the whole tensors; of tensors that other
    ranks publish nothing, unless `with_replicas`."""
    pieces: list[LocalPiece] = []
    headers: dict[str, TensorHeader] = {}
    for item in list_items(source):
        if isinstance(item, tuple):
            name, tensor = item
            headers[name] = TensorHeader(dtype_name(tensor), tuple(tensor.shape))
            pieces.append(LocalPiece(name, Box.whole(headers[name].shape), tensor.detach()))
        elif item.owned_here or with_replicas:
            for piece in item.pieces:
                pieces.append(LocalPiece(piece.name, piece.box, slice_piece(item.tensor, piece)))
                headers[piece.name] = TensorHeader(item.shard.dtype, piece.shape)
    return pieces, headers


def slice_piece(tensor: Tensor, piece: Piece) -> Tensor:
    """Return a piece of a rank's tensor, in the orientation of the Hugging Face tensor."""
    part = tensor.detach()[piece.slices]
    part = part.transpose(-1, -2) if piece.transposed else part
    return part.reshape(piece.box.shape)


def split(
    pieces: Sequence[LocalPiece], headers: Mapping[str, TensorHeader], ranks: int, *, in_place: bool
) -> Iterator[LocalPiece]:
    """Yield the pieces, divided where engines of up to `ranks` ranks cut their tensors; with
    `in_place`, only if each part is one run of bytes."""
    for piece in pieces:
        boxes = cells(piece.name, headers, ranks) if ranks > 1 else ()
        parts = [
            LocalPiece(piece.name, inside, piece.tensor[inside.relative_to(piece.box.start).slices])
            for box in boxes
            if (inside := box.intersect(piece.box)) is not None
        ]
        is_divided = parts and not (in_place and any(not p.tensor.is_contiguous() for p in parts))
        yield from parts if is_divided else [piece]


def _make_box(name: str, box: Box) -> PlacedBox:
    return PlacedBox(name, box.start, box.stop, (0,) * len(box.start))


def _find_device(pieces: Sequence[LocalPiece]) -> torch.device:
    devices = {piece.tensor.device for piece in pieces}
    if len(devices) > 1:
        raise UsageError(
            f"The tensors are on {', '.join(sorted(map(str, devices)))}.",
            "Publish tensors that are all on one device.",
        )
    return devices.pop() if devices else torch.device("cpu")
