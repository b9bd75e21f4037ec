"""Read versions from a store: find the shortest chain, stage it, verify it, then install it."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
from torch import Tensor

from rollway.errors import WeightsError
from rollway.weights.checkpoint import TensorHeader
from rollway.weights.digest.checksums import digest
from rollway.weights.offer import MAX_MANIFEST_BYTES, Offer
from rollway.weights.transports.base import Reader, never
from rollway.weights.transports.changes import Changes
from rollway.weights.transports.delta.changed import map_in_order, read_changes
from rollway.weights.transports.delta.format import (
    Encoded,
    apply,
    decode,
    empty,
    patch,
    read_elements,
    write_elements,
)
from rollway.weights.transports.delta.manifest import (
    MANIFESTS,
    Entry,
    Manifest,
    Step,
    manifest_key,
    needs_snapshot,
)
from rollway.weights.transports.delta.store import Store

_FEW_CHANGED = 0.02
"""Up to this share of changed elements, writing only them is faster than copying the tensor."""
_WORTH_THREADS = 1 << 20
"""From this size on, the changes of a step are read in several threads."""
_MAX_THREADS = 16
State = dict[str, Tensor]
Result = TypeVar("Result")


class DeltaVersions:
    """The versions in a store, and the chains of objects that lead from one to another."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def list_versions(self) -> list[int]:
        """Return all complete versions, oldest first."""
        names = [key.removeprefix(MANIFESTS)[:-5] for key in self._store.keys(MANIFESTS)]
        return sorted(int(name) for name in names if name.isdecimal())

    def read_manifest(self, version: int) -> Manifest:
        with self._store.open(manifest_key(version)) as blob:
            if blob.size > MAX_MANIFEST_BYTES:
                raise needs_snapshot(f"The manifest of version {version} is too large.")
            data = blob.read(0, blob.size)
        try:
            manifest = msgspec.json.decode(data, type=Manifest)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise WeightsError(
                f"The manifest of version {version} is damaged ({error})."
            ) from error
        manifest.check(version)
        return manifest

    def find_chain(self, held: int | None, wanted: int) -> list[Step]:
        """Return the steps with the fewest bytes from `held` (or from nothing) to `wanted`."""
        if held == wanted:
            return []
        chains: list[list[Step]] = []
        deltas: list[Step] = []
        version = wanted
        # Walk back from `wanted`: every snapshot on the way starts a chain, and so does `held`.
        while True:
            try:
                manifest = self.read_manifest(version)
            except WeightsError:
                if chains:
                    break  # a chain that does not need this version is already known
                raise
            if manifest.snapshot is not None:
                chains.append([Step("snapshot", manifest), *deltas])
            if manifest.base is None or manifest.delta is None or (chains and held is None):
                break
            deltas = [Step("delta", manifest), *deltas]
            if manifest.base == held:
                chains.append(deltas)
                break
            version = manifest.base
        if not chains:
            raise WeightsError(f"Nothing leads to version {wanted}.", "Publish a snapshot.")
        return min(chains, key=lambda steps: sum(step.object.size for step in steps))

    def fetch(self, state: State, held: int | None, wanted: int) -> StagedVersion:
        """Stage the shortest chain; if it is broken or was removed meanwhile, use a snapshot.

        So a reader can read every version that the publisher keeps, whatever version it holds."""
        steps = self.find_chain(held, wanted)
        try:
            return self.stage(state, steps)
        except WeightsError:
            if steps[0].kind == "snapshot":
                raise
            return self.stage(state, self.find_chain(None, wanted))

    def stage(self, state: State, steps: Sequence[Step]) -> StagedVersion:
        """Apply steps to copies of the tensors that change, and verify every tensor.

        `state` is only read, so generation continues meanwhile. It is empty for a snapshot."""
        staged = StagedVersion(state)
        for encoded in self._read(state, steps):
            staged.apply(encoded)
        if steps:
            staged.finish(steps[-1].manifest)
        return staged

    def patch(self, state: State, steps: Sequence[Step]) -> None:
        """Apply deltas to the tensors of `state` in place, and verify every tensor.

        If anything is wrong, the tensors are as they were before."""
        undo: list[Callable[[], object]] = []
        changed: set[str] = set()

        def apply_one(encoded: Encoded) -> None:
            undo.append(patch(encoded, state[encoded.header.name]))
            changed.add(encoded.header.name)

        try:
            for _ in self.map_changes(state, steps, apply_one):
                pass
            if steps:
                check_unchanged(state, steps[-1].manifest, changed)
        except BaseException:
            for undo_step in reversed(undo):
                undo_step()
            raise

    def map_changes(
        self, names: Mapping[str, object], steps: Sequence[Step], work: Callable[[Encoded], Result]
    ) -> Iterator[list[Result]]:
        """Call `work` with each change, and yield the results of each step.

        Large steps are read in a few threads. No thread works on when this raises."""
        for step in steps:
            with self._open(names, step, steps[-1]) as read:
                yield map_in_order(
                    lambda name, read=read: work(read(name)),  # type: ignore[misc]
                    step.list_tensors(),
                    threads=1 if step.object.size < _WORTH_THREADS else _MAX_THREADS,
                )

    def _read(self, state: State, steps: Sequence[Step]) -> Iterator[Encoded]:
        """Yield the changes of all steps, in order."""
        for step in steps:
            with self._open(state, step, steps[-1]) as read:
                yield from map(read, step.list_tensors())

    @contextmanager
    def _open(
        self, names: Mapping[str, object], step: Step, last: Step
    ) -> Iterator[Callable[[str], Encoded]]:
        """Open a step; yield a function that reads the change of one tensor."""
        _check_names(names, step.manifest)
        if step.manifest.headers() != last.manifest.headers():
            raise needs_snapshot(f"The {step} is of another model than the steps after it.")
        with self._store.open(step.object.key) as blob:
            if blob.size != step.object.size:
                raise needs_snapshot(
                    f"The {step} has {blob.size} bytes instead of {step.object.size}."
                )

            def read(name: str) -> Encoded:
                extent = step.extent(name)
                assert extent is not None
                encoded = decode(blob.read(*extent))
                _check_announced(encoded, name, step.manifest.tensors[name], step)
                return encoded

            yield read


@dataclass(slots=True)
class StagedVersion:
    """New weights that are verified and not served yet."""

    state: State
    tensors: State = field(default_factory=dict)
    """The new value of each tensor that changed."""
    _positions: dict[str, list[Tensor] | None] = field(default_factory=dict)
    """The elements that changed, by step; None if all of them may have."""
    _sparse: dict[str, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)
    """Positions and bits of the tensors in which few elements changed."""

    def apply(self, encoded: Encoded) -> None:
        """Apply the change of one tensor to its staged copy."""
        name = encoded.header.name
        before = self.tensors.get(name, self.state.get(name))
        if before is None:
            if encoded.header.places != "whole":
                raise needs_snapshot(f"There is no {name} to apply a change to.")
            before = empty(encoded.header)
        if name not in self.tensors:
            self.tensors[name] = torch.empty_like(before, memory_format=torch.contiguous_format)
        written = apply(encoded, before, self.tensors[name])
        positions = self._positions.setdefault(name, [])
        if written is None or positions is None:
            self._positions[name] = None
        else:
            positions.append(written)

    def finish(self, manifest: Manifest) -> None:
        """Verify the tensors that no step changed, and prepare `install`."""
        check_unchanged(self.state, manifest, self.tensors)
        for name, positions in self._positions.items():
            tensor = self.tensors[name]
            if positions is not None and sum(map(len, positions)) <= _FEW_CHANGED * tensor.numel():
                self._sparse[name] = [(at, read_elements(tensor, at)) for at in positions]

    def install(self) -> None:
        """Write the changes into the held tensors; only this needs a pause."""
        for name, tensor in self.tensors.items():
            live = self.state.get(name)
            if live is None:
                self.state[name] = tensor
            elif name in self._sparse and live.is_contiguous():
                for positions, bits in self._sparse[name]:
                    write_elements(live, positions, bits)
            else:
                live.detach().copy_(tensor)


class DeltaReader(Reader):
    """Holds the tensors of the last version inside a worker, and updates them to the next.

    A delta is applied in place, where it changes something. A delta that is wrong is undone, and
    the version is read from a snapshot, whose tensors replace the held ones at the end."""

    def __init__(self) -> None:
        self._held: tuple[str, int] | None = None
        self._state: State = {}
        self._offered: tuple[str, str, Manifest] | None = None
        """Where the version that was opened last is, with its identity."""
        self._served: tuple[str, str, Manifest] | None = None
        """The same of the version that this worker serves."""

    def headers(self, offer: Offer) -> dict[str, TensorHeader]:
        return self._open(offer)[1].headers()

    def sums(self, offer: Offer) -> dict[str, int]:
        entries = self._open(offer)[1].tensors
        return {name: entry.sum for name, entry in entries.items() if entry.sum is not None}

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
            # The caller holds the version itself: a second model in memory has no use.
            self._held, self._state = None, {}
        return changes

    def finish(self, offer: Offer) -> None:
        # No file is read here, and nothing is hashed: the worker is paused.
        if self._offered is not None and self._offered[1] == offer.identity:
            self._served = self._offered

    def tensors(
        self, offer: Offer, summed: Callable[[str], bool] = never
    ) -> Iterator[tuple[str, Tensor]]:
        versions, manifest = self._open(offer)
        root = str(offer.where["root"])
        held = self._held[1] if self._held is not None and self._held[0] == root else None
        if held is not None and self._patch(versions, held, manifest):
            self._held = (root, offer.version)
            yield from ((name, self._state[name]) for name in manifest.tensors)
            return
        staged = versions.stage({}, versions.find_chain(None, offer.version))
        for name in manifest.tensors:
            yield name, staged.tensors[name] if name in staged.tensors else self._state[name]
        self._held = None  # a version that is half installed must not serve as a base
        staged.install()
        self._state, self._held = staged.state, (root, offer.version)

    def _patch(self, versions: DeltaVersions, held: int, manifest: Manifest) -> bool:
        """Update the held tensors in place; return False if only a snapshot leads there."""
        steps = versions.find_chain(held, manifest.version)
        if steps and steps[0].kind == "snapshot":
            return False
        try:
            versions.patch(self._state, steps)
            if not steps:  # another publisher at the same place may have numbered its own alike
                check_unchanged(self._state, manifest, ())
        except WeightsError:
            return False  # broken, or removed meanwhile
        return True

    def close(self) -> None:
        self._held, self._state = None, {}
        self._offered = self._served = None

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


def check_unchanged(state: State, manifest: Manifest, changed: Container[str]) -> None:
    """Verify the tensors that no step changed."""
    for name, entry in manifest.tensors.items():
        if name in changed:
            continue
        if name not in state:
            raise needs_snapshot(f"{name} of version {manifest.version} is in none of its objects.")
        if digest(state[name]) != entry.digest:
            raise needs_snapshot(
                f"{name} does not match its checksum in version {manifest.version}: "
                "the held tensor is not of the version it is recorded as."
            )


def _check_names(state: Mapping[str, object], manifest: Manifest) -> None:
    different = sorted(state.keys() ^ manifest.tensors.keys()) if state else []
    if different:
        raise WeightsError(
            f"Version {manifest.version} and the held one differ in {', '.join(different[:5])}.",
            "They are different models.",
        )


def _check_announced(encoded: Encoded, name: str, entry: Entry, step: Step) -> None:
    """Raise unless a change is the one that the manifest announces."""
    header = encoded.header
    base = None if header.places == "whole" else step.manifest.base
    expected = (name, entry.dtype, entry.shape, entry.digest, step.manifest.version, base)
    actual = (header.name, header.dtype, header.shape, header.digest, header.version, header.base)
    if expected != actual:
        raise needs_snapshot(f"The {step} has another tensor where {name} should be.")
