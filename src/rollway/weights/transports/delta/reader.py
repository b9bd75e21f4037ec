"""Read versions inside a worker: what changed, for engines that write only that, or all tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from rollway.errors import WeightsError
from rollway.weights.checkpoint import TensorHeader
from rollway.weights.digest.checksums import DTYPES, INTEGERS, word_sum
from rollway.weights.offer import Offer
from rollway.weights.transports.base import Changes, Reader, never
from rollway.weights.transports.delta.unpacking import UnpackedStep, read_step, view_whole
from rollway.weights.transports.delta.versions import (
    DELTA,
    SNAPSHOT,
    DeltaEntry,
    DeltaManifest,
    DeltaVersions,
    StoredBytes,
    make_read_error,
    open_stored,
)

_AHEAD = 4
"""Tensors that are made while the caller uses the one before."""


class DeltaReader(Reader):
    """Returns what changed since the version that is served, for engines that write only that; or
    all tensors of a version: those of the newest snapshot, with the changes since."""

    def __init__(self) -> None:
        self._offered: tuple[str, str, DeltaManifest] | None = None
        """Where the version that was opened last is, its identity and its manifest."""
        self._served: tuple[str, str, DeltaManifest] | None = None
        """The same of the version that this worker serves."""

    def headers(self, offer: Offer) -> dict[str, TensorHeader]:
        return self._open(offer)[1].headers()

    def sums(self, offer: Offer) -> dict[str, int]:
        return {name: entry.sum for name, entry in self._open(offer)[1].tensors.items()}

    def changes(self, offer: Offer, served: str, at_most: int) -> Changes:
        versions, wanted = self._open(offer)
        if self._served is None or self._served[:2] != (str(versions.root), served):
            return Changes(refusal="the served version did not come from the same deltas")
        try:
            steps = versions.find_deltas(self._served[2], wanted)
            if sum(step.count_changed() for step in steps) > at_most:
                return Changes(refusal=f"more than {at_most} elements changed")
            return Changes([_read_step(versions, step) for step in steps])
        except WeightsError as error:
            return Changes(refusal=error.message)

    def finish(self, offer: Offer) -> None:
        """Note that the worker serves the offered version."""
        # No file is read here, and nothing is hashed: the worker is paused.
        if self._offered is not None and self._offered[1] == offer.identity:
            self._served = self._offered

    def tensors(
        self, offer: Offer, summed: Callable[[str], bool] = never
    ) -> Iterator[tuple[str, Tensor]]:
        versions, wanted = self._open(offer)
        chain = versions.find_snapshot(wanted)
        if any(manifest.headers() != wanted.headers() for manifest in chain):
            raise make_read_error(f"Version {wanted.version} follows versions of another model.")
        directories = [versions.path(manifest.version) for manifest in chain]
        with ExitStack() as stack:
            snapshot = stack.enter_context(open_stored(directories[0] / SNAPSHOT))
            deltas = [stack.enter_context(open_stored(path / DELTA)) for path in directories[1:]]
            pool = stack.enter_context(ThreadPoolExecutor(_AHEAD))
            ahead: deque[tuple[str, Future[Tensor]]] = deque()
            for name in wanted.tensors:
                entries = [manifest.tensors[name] for manifest in chain]
                ahead.append((name, pool.submit(_rebuild, name, entries, snapshot, deltas)))
                if len(ahead) > _AHEAD:
                    name, tensor = ahead.popleft()
                    yield name, tensor.result()
            for name, tensor in ahead:
                yield name, tensor.result()

    def close(self) -> None:
        self._offered = self._served = None

    def _open(self, offer: Offer) -> tuple[DeltaVersions, DeltaManifest]:
        root = offer.where.get("root")
        if not isinstance(root, str) or "\0" in root:
            raise WeightsError(
                "An offer of deltas does not say where they are.", "Publish the version again."
            )
        versions = DeltaVersions(Path(root))
        manifest = versions.read_manifest(offer.version, offer.identity)
        self._offered = str(versions.root), offer.identity, manifest
        return versions, manifest


def _read_step(versions: DeltaVersions, manifest: DeltaManifest) -> UnpackedStep:
    with open_stored(versions.path(manifest.version) / DELTA) as file:
        return read_step(file, manifest.tensors)


def _rebuild(
    name: str,
    entries: Sequence[DeltaEntry],
    snapshot: StoredBytes,
    deltas: Sequence[StoredBytes],
) -> Tensor:
    """Return a tensor from its bytes in a snapshot and its changes in the deltas since."""
    first, wanted = entries[0], entries[-1]
    if first.snapshot is None:
        raise make_read_error(f"No snapshot has {name}.")
    raw = snapshot.read(first.snapshot, first.snapshot + first.nbytes)
    bits = raw.view(INTEGERS[wanted.element_bytes])
    for entry, file in zip(entries[1:], deltas, strict=True):
        step = read_step(file, {name: entry})
        for item in step.changes:
            if item.change.is_whole:
                bits = view_whole(item, step.memory)
                continue
            ((_, elements),) = step.move(torch.device("cpu"))
            bits.scatter_add_(0, elements.positions, elements.bits)
    tensor = bits.view(DTYPES[wanted.dtype]).view(wanted.shape)
    if word_sum(tensor) != wanted.sum:
        raise make_read_error(f"{name} does not have its sum in the manifest.")
    return tensor
