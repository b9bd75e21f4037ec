"""Follow offers inside a worker: read what changed, for engines that write only that.

An engine that needs whole tensors has them held here, and changes are written into these. They are
verified at the end; if anything is wrong, they are read from a snapshot. A reading has the held
tensors for itself until it ends: the reading of a discarded version may still run when the next one
begins, and that one then reads a snapshot into tensors of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from rollway.errors import WeightsError
from rollway.weights.checkpoint import TensorHeader
from rollway.weights.digest.checksums import DTYPES, digest, dtype_name, integers, raw_bytes
from rollway.weights.offer import Offer
from rollway.weights.transports.base import Changes, Reader, never
from rollway.weights.transports.delta.format import needs_snapshot
from rollway.weights.transports.delta.packing import count_threads
from rollway.weights.transports.delta.store import Store
from rollway.weights.transports.delta.unpacking import StepStreams, Streams, decompress_all
from rollway.weights.transports.delta.versions import DeltaVersions, Manifest, Step, map_in_order

State = dict[str, Tensor]


class DeltaReader(Reader):
    """Tells what changed since the version that is served, or holds all tensors of the last version
    and updates them to the next."""

    def __init__(self) -> None:
        self._held: tuple[str, int, State] | None = None
        """The tensors of a version, with its directory and number. Digests tell if the directory
        has another publisher's versions meanwhile: then a snapshot is read."""
        self._lock = threading.Lock()
        """Lets one reading alone take what is held."""
        self._offered: tuple[str, str, Manifest] | None = None
        """Where the version that was opened last is, with its identity."""
        self._served: tuple[str, str, Manifest] | None = None
        """The same of the version that this worker serves."""

    def headers(self, offer: Offer) -> dict[str, TensorHeader]:
        return self._open(offer)[1].headers()

    def sums(self, offer: Offer) -> dict[str, int]:
        entries = self._open(offer)[1].tensors
        return {name: entry.sum for name, entry in entries.items() if entry.sum is not None}

    def count_kept(self, offer: Offer) -> int:
        return offer.nbytes if self._held is None else 0

    def changes(self, offer: Offer, served: str, at_most: int) -> Changes:
        """Return what leads from the served version to the offered one; the tensors that this
        reader holds stay as they are."""
        versions, manifest = self._open(offer)
        if self._served is None or self._served[:2] != (str(offer.where["root"]), served):
            return Changes(refusal="the served version did not come from the same deltas")
        if served == offer.identity:
            return Changes()
        base = self._served[2]
        try:
            steps = versions.find_chain(base.version, manifest.version)
            changes = read_changes(versions, base, steps, at_most)
        except WeightsError as error:
            return Changes(refusal=error.message)
        if not changes.refusal:
            # The parameters hold the version: the tensors kept here have no further use.
            self._held = None
        return changes

    def finish(self, offer: Offer) -> None:
        """Note that the worker serves the offered version."""
        # No file is read here, and nothing is hashed: the worker is paused.
        if self._offered is not None and self._offered[1] == offer.identity:
            self._served = self._offered

    def tensors(
        self, offer: Offer, summed: Callable[[str], bool] = never
    ) -> Iterator[tuple[str, Tensor]]:
        versions, manifest = self._open(offer)
        root = str(offer.where["root"])
        base, state = self._take(root)
        steps = versions.find_chain(base, offer.version)
        try:
            write_steps(versions, state, steps, manifest)
        except WeightsError:
            if base is None:
                raise
            # Something is broken, was removed meanwhile, or is of another publisher at this place.
            steps = versions.find_chain(None, offer.version)
            write_steps(versions, state, steps, manifest)
        try:
            yield from ((name, state[name]) for name in manifest.tensors)
        finally:
            self._held = (root, offer.version, state)

    def close(self) -> None:
        self._held = self._offered = self._served = None

    def _take(self, root: str) -> tuple[int | None, State]:
        """Return the version of `root` that is held, and its tensors, which are then held no more;
        None and no tensors if there is none."""
        with self._lock:
            held, self._held = self._held, None
        return held[1:] if held is not None and held[0] == root else (None, {})

    def _open(self, offer: Offer) -> tuple[DeltaVersions, Manifest]:
        try:
            root = Path(str(offer.where["root"]))
            exists = root.is_dir()
        except (KeyError, OSError) as error:
            raise WeightsError(
                "An offer of deltas does not say where they are.", "Publish the version again."
            ) from error
        if not exists:
            raise WeightsError(
                f"There are no published versions at {root}.", "Mount the directory here."
            )
        versions = DeltaVersions(Store(root))
        manifest = versions.read_manifest(offer.version)
        if manifest.identity != offer.identity:
            raise WeightsError(f"Version {offer.version} at {root} is not the offered one.")
        self._offered = str(offer.where["root"]), offer.identity, manifest
        return versions, manifest


def read_changes(
    versions: DeltaVersions, base: Manifest, steps: Sequence[Step], at_most: int
) -> Changes:
    """Read the changes of all steps, which must begin at exactly the tensors of `base`."""
    if not steps:
        return Changes(refusal="another version with the number of the served one is offered")
    if any(step.kind == "snapshot" for step in steps):
        return Changes(refusal="a snapshot is shorter than the deltas since the served version")
    digests = base.digests
    count = 0
    changes: list[StepStreams] = []
    for step in steps:
        streams: list[Streams] = []
        for run, encoded in versions.read_runs(digests, step, steps[-1].manifest):
            for header in (change.header for change in encoded):
                # The base's manifest may be gone, and another one may have its number meanwhile.
                if header.before is not None and header.before != digests[header.name]:
                    raise WeightsError(
                        f"{header.name} changed since another version {header.base}."
                    )
                digests[header.name] = header.digest
                count += header.count
            if count > at_most:
                raise WeightsError(f"More than {at_most} elements changed.")
            streams += decompress_all(encoded, run)
        changes.append(StepStreams(streams))
    if digests != steps[-1].manifest.digests:
        raise WeightsError("The deltas do not lead to the offered version.")
    return Changes(changes)


def write_steps(
    versions: DeltaVersions, state: State, steps: Sequence[Step], wanted: Manifest
) -> None:
    """Write steps into the tensors of `state`; raise unless these are then the wanted version."""
    if steps and steps[0].kind == "snapshot":
        state.clear()
    for step in steps:
        for run, encoded in versions.read_runs(state, step, wanted):
            write_changes(decompress_all(encoded, run), state)
    names = list(wanted.tensors)
    missing = wanted.tensors.keys() - state.keys()
    if missing:
        raise needs_snapshot(f"{min(missing)} of version {wanted.version} is in no object.")
    held = map_in_order(lambda name: digest(state[name]), names, threads=count_threads())
    for name, actual in zip(names, held, strict=True):
        if actual != wanted.tensors[name].digest:
            raise needs_snapshot(
                f"{name} does not match its checksum in version {wanted.version}: "
                "the held tensor is not of the version it is recorded as, or a change is damaged."
            )


def write_changes(changes: Sequence[Streams], state: State) -> None:
    """Write changes into the tensors of `state`, which are contiguous."""
    for change in changes:
        header, held = change.header, state.get(change.name)
        if header.places == "whole":
            held = torch.empty(header.shape, dtype=DTYPES[header.dtype])
            raw_bytes(held).copy_(change.values)
            state[change.name] = held
        elif held is None or (dtype_name(held), tuple(held.shape)) != (header.dtype, header.shape):
            raise needs_snapshot(f"There is no {change.name} that the change applies to.")
        elif header.places == "all":
            # Positions would take eight bytes for each element.
            live, (bits, is_relative) = integers(held), change.join_values(torch.device("cpu"))
            live.add_(bits) if is_relative else live.copy_(bits)
    parts = StepStreams([c for c in changes if c.header.places not in ("all", "whole")])
    for name, (positions, bits, is_relative) in parts.move(torch.device("cpu")):
        live = integers(state[name])
        if is_relative:
            bits = bits + live.index_select(0, positions)
        live.scatter_(0, positions, bits)
