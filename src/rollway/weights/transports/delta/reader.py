"""Follow offers inside a worker: hold the tensors of a version, or only read what changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from torch import Tensor

from rollway.errors import WeightsError
from rollway.weights.checkpoint import TensorHeader
from rollway.weights.offer import Offer
from rollway.weights.transports.base import Changes, Reader, never
from rollway.weights.transports.delta.installing import State, check_unchanged
from rollway.weights.transports.delta.store import Store
from rollway.weights.transports.delta.unpacking import StepStreams, Streams, decompress_all
from rollway.weights.transports.delta.versions import DeltaVersions, Manifest, Step


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
