"""Follow offers inside a worker: hold the tensors of a version, or only read what changed.

Changes are verified, and undone if they are wrong: `apply` leaves a tensor with exactly the new
bytes, or as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from rollway.errors import WeightsError
from rollway.weights.checkpoint import TensorHeader
from rollway.weights.digest.changes import pick
from rollway.weights.digest.checksums import (
    DTYPES,
    describe,
    digest,
    dtype_name,
    integers,
    raw_bytes,
)
from rollway.weights.offer import Offer
from rollway.weights.transports.base import Changes, Reader, never
from rollway.weights.transports.delta.format import (
    Encoded,
    Header,
    make_damage_error,
    needs_snapshot,
)
from rollway.weights.transports.delta.store import Store
from rollway.weights.transports.delta.unpacking import (
    StepStreams,
    Streams,
    add_bits,
    decompress,
    decompress_all,
    unpack,
)
from rollway.weights.transports.delta.versions import DeltaVersions, Manifest, Step

_FEW_CHANGED = 0.02
"""Up to this share of changed elements, writing only them is faster than copying the tensor."""
State = dict[str, Tensor]


class DeltaReader(Reader):
    """Holds the tensors of the last version inside a worker, and updates them to the next.

    A delta is applied in place, where it changes something. A delta that is wrong is undone, and
    the version is read from a snapshot, whose tensors replace the held ones at the end."""

    def __init__(self) -> None:
        self._held: tuple[str, int] | None = None
        """The directory and the number of the version that `_state` holds."""
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
        """Note that the worker serves the offered version."""
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
        staged = stage(versions, {}, versions.find_chain(None, offer.version))
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
            patch_all(versions, self._state, steps)
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
        for run, encoded in versions.read_runs(digests, step, steps[-1]):
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


def fetch(versions: DeltaVersions, state: State, held: int | None, wanted: int) -> StagedVersion:
    """Stage the shortest chain; if it is broken or was removed meanwhile, use a snapshot.

    So a reader can read every version that the publisher keeps, whatever version it holds."""
    steps = versions.find_chain(held, wanted)
    try:
        return stage(versions, state, steps)
    except WeightsError:
        if steps[0].kind == "snapshot":
            raise
        return stage(versions, state, versions.find_chain(None, wanted))


def stage(versions: DeltaVersions, state: State, steps: Sequence[Step]) -> StagedVersion:
    """Apply steps to copies of the tensors that change, and verify every tensor.

    `state` is only read, so generation continues meanwhile. It is empty for a snapshot."""
    staged = StagedVersion(state)
    for encoded in versions.list_changes(state, steps):
        staged.apply(encoded)
    if steps:
        staged.finish(steps[-1].manifest)
    return staged


def patch_all(versions: DeltaVersions, state: State, steps: Sequence[Step]) -> None:
    """Apply deltas to the tensors of `state` in place, and verify every tensor.

    If anything is wrong, the tensors are as they were before."""
    undo: list[Callable[[], object]] = []
    changed: set[str] = set()

    def patch_tensor(encoded: Encoded) -> None:
        undo.append(patch(encoded, state[encoded.header.name]))
        changed.add(encoded.header.name)

    try:
        for _ in versions.map_changes(state, steps, patch_tensor):
            pass
        if steps:
            check_unchanged(state, steps[-1].manifest, changed)
    except BaseException:
        for undo_step in reversed(undo):
            undo_step()
        raise


def apply(encoded: Encoded, tensor: Tensor, out: Tensor | None = None) -> Tensor | None:
    """Apply a change to `tensor`, in place or into a copy in `out`.

    Returns the flat positions that were written, or None if that is all of them. If the result
    does not match the header's digest, the old values are restored, and the error says whether
    the base was wrong or the change is damaged."""
    header = encoded.header
    target = tensor if out is None else out
    for candidate in (tensor, target):
        _check_kind(header, candidate)
    if not target.is_contiguous():
        contiguous = target.contiguous()
        written = apply(encoded, tensor, contiguous)
        target.detach().copy_(contiguous)
        return written
    if header.places == "whole":
        _apply_whole(encoded, target)
        return None
    if target is not tensor:
        target.detach().copy_(tensor)
    return _apply_change(encoded, tensor, integers(target))[0]


def patch(encoded: Encoded, tensor: Tensor) -> Callable[[], object]:
    """Apply a change in place to a contiguous tensor; return a function that undoes it.

    The cost is that of the changed elements, and of one look at all for the digest."""
    _check_kind(encoded.header, tensor)
    bits = integers(tensor)
    if encoded.header.places == "whole":
        before = bits.clone()
        _apply_whole(encoded, tensor)
        return lambda: bits.copy_(before)
    positions, old = _apply_change(encoded, tensor, bits)
    return lambda: _write(bits, positions, old)


def _check_kind(header: Header, tensor: Tensor) -> None:
    if (dtype_name(tensor), tuple(tensor.shape)) != (header.dtype, header.shape):
        raise WeightsError(
            f"A change of {header.name} is for {header.dtype}{list(header.shape)}, "
            f"the tensor is {describe(tensor)}."
        )


def read_elements(tensor: Tensor, positions: Tensor) -> Tensor:
    """Return the bits of the elements at flat positions."""
    return _pick(integers(tensor), positions)


def write_elements(tensor: Tensor, positions: Tensor, bits: Tensor) -> None:
    """Write the bits of the elements at flat positions of a contiguous tensor."""
    _write(integers(tensor), positions, bits)


def empty(header: Header) -> Tensor:
    """Return an uninitialised CPU tensor for a whole change."""
    return torch.empty(header.shape, dtype=DTYPES[header.dtype])


def _apply_whole(encoded: Encoded, target: Tensor) -> None:
    raw_bytes(target).copy_(decompress(encoded).values)


def _apply_change(encoded: Encoded, base: Tensor, bits: Tensor) -> tuple[Tensor | None, Tensor]:
    """Write the changed elements; return their positions, and the bits that they had."""
    header = encoded.header
    positions, values, relative = unpack(decompress(encoded), bits.device)
    old = bits.clone() if positions is None else _pick(bits, positions)
    if header.places != "none":
        _write(bits, positions, add_bits(old, values) if relative else values)
    is_right = False
    try:
        is_right = digest(bits) == header.digest
    finally:  # also when the digest itself failed, as for lack of memory
        if not is_right:
            _write(bits, positions, old)
    if is_right:
        return positions, old
    if digest(base) != header.before:
        raise WeightsError(
            f"{header.name} is not of version {header.base}, which the change applies to.",
            "Apply the versions in order, or start from a snapshot.",
        )
    raise make_damage_error(f"{header.name} does not match its checksum after the change.")


def _write(bits: Tensor, positions: Tensor | None, values: Tensor) -> None:
    if positions is None:
        bits.copy_(values)
    elif bits.device.type == "cpu":
        # numpy, because torch's threads wait for each other when cores are busy.
        bits.numpy()[positions.numpy()] = values.numpy()
    else:
        bits.scatter_(0, positions, values)


def _pick(bits: Tensor, positions: Tensor) -> Tensor:
    if bits.device.type == "cpu":
        return torch.from_numpy(bits.numpy().take(positions.numpy()))
    return pick(bits, positions)


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

    def finish(self, version: Manifest) -> None:
        """Verify the tensors that no step changed, and prepare `install`."""
        check_unchanged(self.state, version, self.tensors)
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


def check_unchanged(state: State, version: Manifest, changed: Container[str]) -> None:
    """Verify the tensors that no step changed."""
    for name, expected in version.digests.items():
        if name in changed:
            continue
        if name not in state:
            raise needs_snapshot(f"{name} of version {version.version} is in none of its objects.")
        if digest(state[name]) != expected:
            raise needs_snapshot(
                f"{name} does not match its checksum in version {version.version}: "
                "the held tensor is not of the version it is recorded as."
            )
