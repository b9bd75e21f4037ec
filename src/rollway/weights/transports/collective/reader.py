"""Receive broadcast versions, as one rank of an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rollway.errors import WeightsError
from rollway.weights.checkpoint import TensorHeader
from rollway.weights.digest.checksums import DTYPES, digest
from rollway.weights.offer import Entry, Manifest, Offer
from rollway.weights.transports.base import Reader, never
from rollway.weights.transports.collective import rendezvous
from rollway.weights.transports.collective.group import Group, address_towards
from rollway.weights.transports.collective.messages import (
    DoubleBuffer,
    place,
    split_into_messages,
)
from rollway.weights.transports.collective.rendezvous import Location, ReceiverSide


class CollectiveReader(Reader):
    """Joins broadcasts. It must be created on the thread whose GPU the engine uses."""

    def __init__(self) -> None:
        self._gpu = torch.cuda.current_device() if torch.cuda.is_available() else None

    def headers(self, offer: Offer) -> dict[str, TensorHeader]:
        return self.manifest(offer).headers()

    def manifest(self, offer: Offer) -> Manifest:
        location = rendezvous.read_location(offer)
        return rendezvous.fetch_manifest(rendezvous.connect_store(location, offer), location, offer)

    def tensors(
        self, offer: Offer, summed: Callable[[str], bool] = never
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor as it arrives, and compare its digest when the next is requested.

        So what the caller has copied by then is what was published, or this raises."""
        location = rendezvous.read_location(offer)
        device = self._find_device(location)
        store = rendezvous.connect_store(location, offer)
        manifest = rendezvous.fetch_manifest(store, location, offer)
        side = ReceiverSide(store, location, offer)
        group: Group | None = None
        try:
            side.wait_for_go()
            group = _open_group(store, location, side.rank)
            for entry, tensor in _receive(group, manifest.entries, location, device, side.check):
                yield entry.name, tensor
                if digest(tensor) != entry.digest:
                    raise WeightsError(
                        f"{entry.name} of version {offer.version} is not what was published.",
                        "Publish it again, and change nothing before the refit has ended.",
                    )
            side.confirm()
        except BaseException as error:
            side.report_failure(error)
            raise
        finally:
            if group is not None:
                group.close()

    def _find_device(self, location: Location) -> torch.device:
        if location.backend == "gloo":
            return torch.device("cpu")
        if self._gpu is None:
            raise WeightsError(
                "These weights are sent by NCCL, and this worker has no GPU.",
                "Publish tensors that are in CPU memory.",
            )
        return torch.device("cuda", self._gpu)


def _open_group(store: Any, location: Location, rank: int) -> Group:
    address = address_towards(location.host, location.port)
    store = dist.PrefixStore("group", store)
    size = location.receivers + 1
    return Group(store, rank, size, location.backend, address, location.init_seconds)


def _receive(
    group: Group,
    entries: Sequence[Entry],
    location: Location,
    device: torch.device,
    check: Callable[[], None],
) -> Iterator[tuple[Entry, Tensor]]:
    """Yield views into received messages; the next message arrives while one is in use."""
    buffer = DoubleBuffer(device)
    messages = list(split_into_messages(entries, location.bucket_bytes))

    def post(number: int) -> Tensor:
        flat = buffer.get(number, place(messages[number])[1])
        group.post(flat, location.bucket_bytes, location.step_seconds)
        return flat

    arriving = post(0)
    for number, message in enumerate(messages):
        flat = arriving
        if number + 1 < len(messages):
            arriving = post(number + 1)
        group.finish(location.step_seconds, check)
        for entry, start in zip(message, place(message)[0], strict=True):
            raw = flat[start : start + entry.nbytes]
            yield entry, raw.view(DTYPES[entry.dtype]).view(entry.shape)
