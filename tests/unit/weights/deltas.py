"""Versions of one tensor by delta, and both ways to read them."""

from __future__ import annotations

from pathlib import Path

import msgspec
from torch import Tensor

from rollway.errors import WeightsError
from rollway.weights.digest.checksums import integers
from rollway.weights.offer import Offer
from rollway.weights.transports.base import Changes
from rollway.weights.transports.delta.publisher import Compression, DeltaPublisher
from rollway.weights.transports.delta.reader import DeltaReader
from rollway.weights.transports.delta.versions import MANIFEST, DeltaManifest, DeltaVersions

State = dict[str, Tensor]


def serve(root: Path, offer: Offer) -> DeltaReader:
    """Return the reader of a worker that serves a version."""
    reader = DeltaReader()
    reader.headers(offer)
    reader.finish(offer)
    return reader


def apply(state: State, changes: Changes) -> State:
    """Apply changes one by one, as a plain loop would; raise if they are refused."""
    if changes.refusal:
        raise WeightsError(changes.refusal)
    result = {name: tensor.detach().contiguous().clone() for name, tensor in state.items()}
    for step in changes.steps:
        for name, (positions, bits, relative) in step.move(next(iter(state.values())).device):
            target = integers(result[name])
            target[positions] = target[positions] + bits if relative else bits
    return result


class Pair:
    """A delta from one version of a tensor to another."""

    def __init__(
        self, root: Path, old: Tensor, new: Tensor, compression: Compression = "zstd"
    ) -> None:
        self.versions, self._old = DeltaVersions(root), old
        with DeltaPublisher(root, snapshot_every=100, compression=compression) as publisher:
            first = publisher.publish(1, [("w", old)])
            self.offer = publisher.publish(2, [("w", new)])
        self._reader = serve(root, first)
        self._served = first.identity

    @property
    def manifest(self) -> DeltaManifest:
        return self.versions.read_manifest(2)

    def rewrite(self, manifest: DeltaManifest) -> None:
        write_manifest(self.versions, manifest)

    def patch(self) -> Tensor:
        """Return the tensor as a worker makes it that can patch the old one."""
        return apply({"w": self._old}, self._reader.changes(self.offer, self._served, 1 << 60))["w"]

    def read(self) -> Tensor:
        """Return the tensor as any other worker reads it."""
        ((_, tensor),) = DeltaReader().tensors(self.offer)
        return tensor


def write_manifest(versions: DeltaVersions, manifest: DeltaManifest) -> None:
    path = versions.path(manifest.version) / MANIFEST
    path.write_bytes(msgspec.json.encode(manifest))
