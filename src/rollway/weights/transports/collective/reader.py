"""Receive broadcast versions, as one rank of an engine."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from rollway.errors import WeightsError
from rollway.weights.checkpoint import TensorHeader
from rollway.weights.digest.checksums import digest
from rollway.weights.offer import Entry, Manifest, Offer
from rollway.weights.transports.base import Reader, never
from rollway.weights.transports.collective.group import Group, make_buffers, split_into_messages
from rollway.weights.transports.collective.rendezvous import (
    Location,
    ReceiverSide,
    connect_store,
    fetch_manifest,
    read_location,
)
from rollway.weights.transports.entries import view_entry


class CollectiveReader(Reader):
    """Joins broadcasts. It must be created on the thread whose GPU the engine uses."""

    def __init__(self) -> None:
        self._gpu = torch.cuda.current_device() if torch.cuda.is_available() else None

    def headers(self, offer: Offer) -> dict[str, TensorHeader]:
        return self.manifest(offer).headers()

    def manifest(self, offer: Offer) -> Manifest:
        location = read_location(offer)
        return fetch_manifest(connect_store(location, offer), location, offer)

    def tensors(
        self, offer: Offer, summed: Callable[[str], bool] = never
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor as it arrives, and compare its digest when the next is requested.

        So what the caller has copied by then is what was published, or this raises."""
        location = read_location(offer)
        device = self._find_device(location)
        store = connect_store(location, offer)
        manifest = fetch_manifest(store, location, offer)
        messages = split_into_messages(manifest.entries, location.bucket_bytes)
        side = ReceiverSide(store, location, offer)
        group: Group | None = None
        try:
            side.wait_for_go()
            group = Group(store, side.rank, location, _address_towards(location), side.check)
            for entry, tensor in _receive(group, messages, device):
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


def _receive(
    group: Group, messages: Sequence[Sequence[Entry]], device: torch.device
) -> Iterator[tuple[Entry, Tensor]]:
    """Yield views into received messages; the next message arrives while one is in use."""
    buffers = make_buffers([m[-1].offset + m[-1].nbytes for m in messages], device)
    group.post(buffers[0])
    for number, message in enumerate(messages):
        if number + 1 < len(messages):
            group.post(buffers[number + 1])
        group.finish()
        for entry in message:
            yield entry, view_entry(buffers[number], entry)


def _address_towards(location: Location) -> str:
    """Return the address by which this machine reaches the publisher, and is reached from there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((location.host, location.port))  # a datagram socket sends nothing
        return str(probe.getsockname()[0])
