"""Weights as what changed since the version before, with a whole snapshot now and then.

    version     4          5          6          7          8          9
    delta       3->4  ───  4->5  ───  5->6  ───  6->7  ───  7->8  ───  8->9
    snapshot    4                                           8

A worker that holds 6 takes 6->7 to 8->9; one that comes late takes snapshot 8 and 8->9. A version
is there when its manifest is, which is written last: a publisher that dies before leaves bytes
that nobody reads and the next publisher removes. A reader stages and verifies everything before
it touches what is served. The carrier is a directory, or shared memory on one machine.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import torch
from torch import Tensor

from rollway.errors import UsageError, WeightsError
from rollway.weights import delta, leftovers
from rollway.weights.checkpoint import TensorHeader
from rollway.weights.copies import copy_all
from rollway.weights.delta import Buffer, Count, Digest, Encoded
from rollway.weights.digest.bits import digest
from rollway.weights.layout import ELEMENT_BYTES
from rollway.weights.offer import MOST_MANIFEST_BYTES, Offer, Text
from rollway.weights.store import Carrier, Store
from rollway.weights.transports.versions import Versions, check_next, check_retention
from rollway.weights.untrusted import check_shape

_MANIFESTS, _OBJECTS = "manifests/", "objects/"
_FEW = 0.02
_TOGETHER = 1 << 30
"""Bytes that a GPU is asked for at once."""
_AGAIN = "Take a snapshot: hold no version, and apply the chain that leads to the wanted one."

Extent = tuple[Count, Count]
"""Where in an object, and how many bytes."""
Kind = Literal["delta", "snapshot"]
State = dict[str, Tensor]


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor of a version; it is unchanged when it is not in the delta."""

    dtype: Annotated[str, msgspec.Meta(max_length=32)]
    shape: Annotated[tuple[Count, ...], msgspec.Meta(max_length=16)]
    digest: Digest
    delta: Extent | None = None
    snapshot: Extent | None = None


class Object(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the bytes are, and how many."""

    key: Annotated[str, msgspec.Meta(max_length=512)]
    size: Count


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A version: what it holds, and the ways to get there."""

    format: Literal[1]
    version: Count
    base: Count | None
    """The version that the delta starts from."""
    tensors: dict[Text, Entry]
    delta: Object | None = None
    snapshot: Object | None = None
    digest: str = ""
    """Of all the rest."""

    @property
    def identity(self) -> str:
        """By the tensors alone, whatever the way to them."""
        facts = [(name, one.dtype, one.shape, one.digest) for name, one in self.tensors.items()]
        return hashlib.sha256(msgspec.json.encode(facts)).hexdigest()[:32]

    @property
    def nbytes(self) -> int:
        return sum(
            math.prod(one.shape) * ELEMENT_BYTES.get(one.dtype, 0) for one in self.tensors.values()
        )

    def headers(self) -> dict[str, TensorHeader]:
        return {n: TensorHeader(one.dtype, tuple(one.shape), "") for n, one in self.tensors.items()}

    @property
    def objects(self) -> list[Object]:
        return [each for each in (self.delta, self.snapshot) if each is not None]

    def to_bytes(self) -> bytes:
        return msgspec.json.encode(msgspec.structs.replace(self, digest=self._digest()))

    def check(self, version: int) -> None:
        """See that it is what was written under that number."""
        if self.digest != self._digest() or self.version != version:
            raise WeightsError(f"The manifest of version {version} is damaged.", _AGAIN)
        if self.base is not None and self.base >= version:
            raise WeightsError(
                f"Version {version} is said to follow version {self.base}, which is no older.",
                _AGAIN,
            )
        for name, one in self.tensors.items():
            _check_entry(name, one)

    def _digest(self) -> str:
        rest = msgspec.json.encode(msgspec.structs.replace(self, digest=""))
        return hashlib.blake2b(rest, digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class Step:
    """One object to apply: a snapshot, or a delta to what came before."""

    kind: Kind
    manifest: Manifest

    @property
    def object(self) -> Object:
        found = self.manifest.snapshot if self.kind == "snapshot" else self.manifest.delta
        assert found is not None
        return found

    def __str__(self) -> str:
        base = "" if self.kind == "snapshot" else f"{self.manifest.base}->"
        return f"{self.kind} {base}{self.manifest.version}"


class DeltaReader(Versions):
    """The versions that a publisher wrote, and how to get from one to another."""

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier

    def versions(self) -> list[int]:
        names = [key[len(_MANIFESTS) :] for key in self._carrier.keys(_MANIFESTS)]
        return sorted(int(name[:-5]) for name in names if name[:-5].isdecimal())

    def manifest(self, version: int) -> Manifest:
        with self._carrier.open(_manifest_key(version)) as blob:
            if blob.size > MOST_MANIFEST_BYTES:
                raise WeightsError(f"The manifest of version {version} is too large.", _AGAIN)
            data = blob.read(0, blob.size)
        try:
            found = msgspec.json.decode(data, type=Manifest)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise WeightsError(
                f"The manifest of version {version} is damaged ({error})."
            ) from error
        found.check(version)
        return found

    def chain(self, held: int | None, wanted: int) -> list[Step]:
        """The fewest bytes that lead from `held` (or from nothing) to `wanted`."""
        if held == wanted:
            return []
        ways: list[list[Step]] = []
        deltas: list[Step] = []
        at = wanted
        while True:
            try:
                manifest = self.manifest(at)
            except WeightsError:
                if ways:
                    break  # the way that was found does without it
                raise
            if manifest.snapshot is not None:
                ways.append([Step("snapshot", manifest), *deltas])
            if manifest.base is None or manifest.delta is None or (ways and held is None):
                break
            deltas = [Step("delta", manifest), *deltas]
            if manifest.base == held:
                ways.append(deltas)
                break
            at = manifest.base
        if not ways:
            raise WeightsError(f"Nothing leads to version {wanted}.", "Publish a snapshot.")
        return min(ways, key=lambda steps: sum(step.object.size for step in steps))

    def fetch(self, state: State, held: int | None, wanted: int) -> Staged:
        """Stage the shortest way; when that is broken or was removed meanwhile, a snapshot's.

        So a version that is kept can always be had, whatever became of the one that is held."""
        steps = self.chain(held, wanted)
        try:
            return self.stage(state, steps)
        except WeightsError:
            if steps[0].kind == "snapshot":
                raise
            return self.stage(state, self.chain(None, wanted))

    def stage(self, state: State, steps: Sequence[Step]) -> Staged:
        """Bring copies of what changes to the last step's version, and verify every tensor.

        `state` is only read, so that generation goes on. An empty one can take a snapshot."""
        staged = Staged(state)
        for step in steps:
            _check_names(state, step.manifest)
            if step.manifest.headers() != steps[-1].manifest.headers():
                raise WeightsError(f"The {step} is of another model than what follows.", _AGAIN)
            with self._carrier.open(step.object.key) as blob:
                if blob.size != step.object.size:
                    raise WeightsError(
                        f"The {step} has {blob.size} bytes instead of {step.object.size}.", _AGAIN
                    )
                for name, entry in step.manifest.tensors.items():
                    extent = entry.snapshot if step.kind == "snapshot" else entry.delta
                    if extent is not None:
                        encoded = delta.decode(blob.read(*extent))
                        _check_against(encoded, name, entry, step)
                        staged.take(encoded)
        if steps:
            staged.finish(steps[-1].manifest)
        return staged

    def apply_chain(self, state: State, steps: Sequence[Step]) -> None:
        """Stage, verify, and only then change `state`; on an error it is as it was."""
        self.stage(state, steps).install()


@dataclass(slots=True)
class Staged:
    """New weights, verified and not yet served."""

    state: State
    tensors: State = field(default_factory=dict)
    """The new version of each tensor that changed."""
    _places: dict[str, list[Tensor] | None] = field(default_factory=dict)
    """Which elements changed; None when all may have."""
    _few: dict[str, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)
    """Positions and bits, of tensors in which so few changed that writing those is faster."""

    def take(self, encoded: Encoded) -> None:
        name = encoded.header.name
        before = self.tensors.get(name, self.state.get(name))
        if before is None:
            if encoded.header.places != "whole":
                raise WeightsError(f"There is no {name} that a change could apply to.", _AGAIN)
            before = delta.empty(encoded.header)
        if name not in self.tensors:
            self.tensors[name] = torch.empty_like(before, memory_format=torch.contiguous_format)
        written = delta.apply(encoded, before, self.tensors[name])
        places = self._places.setdefault(name, [])
        if written is None or places is None:
            self._places[name] = None
        else:
            places.append(written)

    def finish(self, manifest: Manifest) -> None:
        """See that what no step changed is of this version too, and prepare `install`."""
        for name, entry in manifest.tensors.items():
            if name not in self.tensors and name not in self.state:
                raise WeightsError(
                    f"{name} of version {manifest.version} is in none of its objects.", _AGAIN
                )
            if name not in self.tensors and digest(self.state[name]) != entry.digest:
                raise WeightsError(
                    f"{name} does not match its checksum in version {manifest.version}: "
                    "it was not of the version it was said to be.",
                    _AGAIN,
                )
        for name, places in self._places.items():
            tensor = self.tensors[name]
            if places is not None and sum(map(len, places)) <= _FEW * tensor.numel():
                self._few[name] = [(some, delta.elements(tensor, some)) for some in places]

    def install(self) -> None:
        """Write what changed into the live tensors; all that a pause has to cover."""
        for name, tensor in self.tensors.items():
            live = self.state.get(name)
            if live is None:
                self.state[name] = tensor
            elif name in self._few and live.is_contiguous():
                for positions, bits in self._few[name]:
                    delta.write_elements(live, positions, bits)
            else:
                live.detach().copy_(tensor)


class DeltaPublisher(DeltaReader):
    """Publishes versions; holds a copy of the last one, on the device of its tensors.

    One publisher at a time writes to a carrier. A new one begins with a snapshot."""

    def __init__(
        self,
        carrier: Carrier,
        *,
        snapshot_every: int = 8,
        keep_recent: int = 4,
        max_off_policy_steps: int = 1,
    ) -> None:
        check_retention(keep_recent, max_off_policy_steps)
        if snapshot_every < 1:
            raise UsageError("snapshot_every is less than 1.", "Set it to 1 or more.")
        super().__init__(carrier)
        self._snapshot_every = snapshot_every
        self._keep_recent = keep_recent
        self._held: State = {}
        self._last: Manifest | None = None
        self._since_snapshot = 0
        carrier.sweep()
        self._published = {version: self.manifest(version) for version in self.versions()}
        self._remove_orphans()

    def publish(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> Offer:
        """Write a version; every tensor of the model must come, and none may change meanwhile."""
        check_next(version, self.latest())
        try:
            manifest = self._write(version, tensors)
            self._carrier.put(_manifest_key(version), manifest.to_bytes())
        except BaseException:
            # What is held may be half of a version that nobody will see: begin anew.
            self._held, self._last = {}, None
            for kind in ("delta", "snapshot"):
                self._carrier.delete(_object_key(version, kind))
            raise
        self._last = self._published[version] = manifest
        self._since_snapshot = 0 if manifest.snapshot else self._since_snapshot + 1
        self._forget_old()
        root = str(self._carrier.root.resolve())
        return Offer("delta", version, manifest.identity, manifest.nbytes, {"root": root})

    def _write(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> Manifest:
        entries: dict[str, Entry] = {}
        changes = snapshot = None
        if self._last is None:
            self._hold(tensors)
        else:
            changes = self._put(version, "delta", self._changes(version, tensors, entries))
        if self._last is None or self._since_snapshot + 1 >= self._snapshot_every:
            snapshot = self._put(version, "snapshot", self._whole(version, entries))
        base = self._last.version if self._last else None
        return Manifest(1, version, base, entries, changes, snapshot)

    def _put(self, version: int, kind: Kind, parts: Iterator[Buffer]) -> Object:
        key = _object_key(version, kind)
        return Object(key, self._carrier.put(key, parts))

    def _hold(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            if name in self._held:
                raise UsageError(f"{name} came twice.", "Publish each name once.")
            self._held[name] = tensor.detach().clone(memory_format=torch.contiguous_format)
        if not self._held:
            raise UsageError("There are no tensors to publish.")

    def _changes(
        self, version: int, tensors: Iterable[tuple[str, Tensor]], entries: dict[str, Entry]
    ) -> Iterator[Buffer]:
        """Encode tensors as they come, fill in their `entries`, and hold them from now on."""
        assert self._last is not None
        base, at = self._last, 0
        for some in _together(tensors):
            given = []
            for name, tensor in some:
                held, last = self._held.get(name), base.tensors.get(name)
                if held is None or last is None or name in entries:
                    raise UsageError(
                        f"{name} came twice, or was not part of version {base.version}.",
                        "Publish the same tensors every time; another model needs its own "
                        "publisher.",
                    )
                given.append((name, held, tensor, last.digest))
                entries[name] = msgspec.structs.replace(last, delta=None, snapshot=None)
            changed = []
            for encoded in delta.encode_all(given, version=version, base=base.version):
                header = encoded.header
                if header.places == "none":
                    continue
                parts = encoded.parts()
                size = sum(len(part) for part in parts)
                entries[header.name] = Entry(header.dtype, header.shape, header.digest, (at, size))
                yield from parts
                at += size
                changed.append(header.name)
            new = dict(some)
            copy_all([(self._held[name], new[name].detach()) for name in changed])
        missing = sorted(self._held.keys() - entries.keys())
        if missing:
            raise UsageError(
                f"Tensors did not come: {', '.join(missing[:5])}.",
                "Publish all of them every time; what did not change costs nothing.",
            )

    def _whole(self, version: int, entries: dict[str, Entry]) -> Iterator[Buffer]:
        at = 0
        for some in _together(self._held.items()):
            for encoded in delta.encode_all([(n, None, h, None) for n, h in some], version=version):
                parts = encoded.parts()
                size = sum(len(part) for part in parts)
                header = encoded.header
                entry = entries.get(header.name)
                entry = entry or Entry(header.dtype, header.shape, header.digest)
                entries[header.name] = msgspec.structs.replace(entry, snapshot=(at, size))
                yield from parts
                at += size

    def _forget_old(self) -> None:
        """Remove what no kept version needs: each needs what leads to it from a snapshot."""
        needed: set[int] = set()
        for version in sorted(self._published)[-self._keep_recent :]:
            at: int | None = version
            while at is not None and at in self._published:
                needed.add(at)
                manifest = self._published[at]
                at = manifest.base if manifest.snapshot is None else None
        for version in sorted(self._published.keys() - needed):
            manifest = self._published.pop(version)
            self._carrier.delete(_manifest_key(version))  # first, so that nobody sets out for it
            for each in manifest.objects:
                self._carrier.delete(each.key)

    def _remove_orphans(self) -> None:
        known = {each.key for manifest in self._published.values() for each in manifest.objects}
        for key in self._carrier.keys(_OBJECTS):
            if key not in known and leftovers.gone(key, self._carrier.idle_seconds(key)):
                self._carrier.delete(key)


def _together(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """A GPU is asked for many at a time; a CPU takes each while it is in its cache."""
    some: list[tuple[str, Tensor]] = []
    nbytes = 0
    for name, tensor in tensors:
        if some and (nbytes >= _TOGETHER or tensor.device != some[0][1].device):
            yield some
            some, nbytes = [], 0
        some.append((name, tensor))
        nbytes += tensor.nbytes if tensor.is_cuda else _TOGETHER
    if some:
        yield some


def _manifest_key(version: int) -> str:
    return f"{_MANIFESTS}{version:015d}.json"


def _object_key(version: int, kind: str) -> str:
    """With the publisher's mark, so that its orphans can be told from a living one's."""
    return f"{_OBJECTS}{version:015d}.{kind}.{leftovers.mark()}"


def _check_entry(name: str, one: Entry) -> None:
    """Refuse a tensor of an unknown kind, and one whose change would be longer than it is."""
    try:
        nbytes = math.prod(check_shape(one.shape)) * ELEMENT_BYTES[one.dtype]
    except (ValueError, KeyError) as error:
        raise WeightsError(f"{name} is said to be {one.dtype}{list(one.shape)}.", _AGAIN) from error
    for extent in (one.delta, one.snapshot):
        if extent is not None and extent[1] > delta.MOST_OVERHEAD + nbytes:
            raise WeightsError(
                f"A change of {name} is said to have {extent[1]} bytes, the tensor {nbytes}.",
                _AGAIN,
            )


def _check_names(state: State, manifest: Manifest) -> None:
    odd = sorted(state.keys() ^ manifest.tensors.keys()) if state else []
    if odd:
        raise WeightsError(
            f"Version {manifest.version} and what is held differ in {', '.join(odd[:5])}.",
            "They are different models.",
        )


def _check_against(encoded: Encoded, name: str, entry: Entry, step: Step) -> None:
    """A change must be the one that the manifest announces."""
    header = encoded.header
    base = None if header.places == "whole" else step.manifest.base
    said = (name, entry.dtype, entry.shape, entry.digest, step.manifest.version, base)
    found = (header.name, header.dtype, header.shape, header.digest, header.version, header.base)
    if said != found:
        raise WeightsError(f"The {step} has another tensor where {name} should be.", _AGAIN)


class DeltaReceiver:
    """Inside a worker: holds the tensors of the version it took last, and brings them to the next.

    What changed is applied to copies; what is held changes only when all of it has been taken."""

    def __init__(self) -> None:
        self._held: tuple[str, int] | None = None
        self._state: State = {}

    def headers(self, offer: Offer) -> dict[str, TensorHeader]:
        return self._manifest(offer)[1].headers()

    def tensors(self, offer: Offer) -> Iterator[tuple[str, Tensor]]:
        reader, manifest = self._manifest(offer)
        root = str(offer.where["root"])
        held = self._held[1] if self._held is not None and self._held[0] == root else None
        staged = reader.fetch(self._state if held is not None else {}, held, offer.version)
        for name in manifest.tensors:
            yield name, staged.tensors[name] if name in staged.tensors else self._state[name]
        self._held = None  # until all of it is in place
        staged.install()
        self._state, self._held = staged.state, (root, offer.version)

    def _manifest(self, offer: Offer) -> tuple[DeltaReader, Manifest]:
        try:
            root = Path(str(offer.where["root"]))
            is_there = root.is_dir()
        except (KeyError, OSError) as error:
            raise WeightsError(
                "An offer of deltas does not say where they are.", "Publish the version again."
            ) from error
        if not is_there:
            raise WeightsError(f"There are no published versions at {root}.", "Is it mounted here?")
        reader = DeltaReader(Store(root))
        manifest = reader.manifest(offer.version)
        if manifest.identity != offer.identity:
            raise WeightsError(f"Version {offer.version} at {root} is not the one that is offered.")
        return reader, manifest
