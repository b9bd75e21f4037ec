"""The versions in a store: their manifests, and the chains of objects between them.

A manifest lists the tensors of a version, and the objects that hold their bytes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

import msgspec
from torch import Tensor

from rollway.errors import WeightsError
from rollway.weights import leftovers
from rollway.weights.checkpoint import TensorHeader
from rollway.weights.device_copies import allocate_pinned
from rollway.weights.layout import ELEMENT_BYTES
from rollway.weights.offer import MAX_MANIFEST_BYTES, Count, Text
from rollway.weights.transports.delta.format import (
    MAX_OVERHEAD,
    Digest,
    Encoded,
    decode,
    needs_snapshot,
)
from rollway.weights.transports.delta.packing import count_threads
from rollway.weights.transports.delta.store import Blob, Store
from rollway.weights.untrusted import check_shape

_RUN_BYTES = 256 << 20
"""What is read together."""
_PIECE_BYTES = 16 << 20
"""What one thread reads of it."""
Item = TypeVar("Item")
Result = TypeVar("Result")
MANIFESTS, OBJECTS = "manifests/", "objects/"

Extent = tuple[Count, Count]
"""The offset in an object, and the number of bytes."""
Kind = Literal["delta", "snapshot"]


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor of a version; without a `delta` extent it did not change."""

    dtype: Annotated[str, msgspec.Meta(max_length=32)]
    shape: Annotated[tuple[Count, ...], msgspec.Meta(max_length=16)]
    digest: Digest
    delta: Extent | None = None
    snapshot: Extent | None = None
    sum: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """The sum of the tensor's words, by which a worker verifies its parameters; None in versions
    of older publishers."""


class Object(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The key and the size of an object in the store."""

    key: Annotated[str, msgspec.Meta(max_length=512)]
    size: Count


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A version: its tensors, and the objects from which it can be built."""

    format: Literal[1, 2]
    """Changes of format 2 may lack upper bytes of values, and need not be compressed."""
    version: Count
    base: Count | None
    """The version that the delta starts from."""
    tensors: dict[Text, Entry]
    delta: Object | None = None
    snapshot: Object | None = None
    digest: str = ""
    """The digest of all other fields."""

    @property
    def identity(self) -> str:
        """The identity of the weights alone: it does not depend on the objects that hold them."""
        facts = [
            (name, entry.dtype, entry.shape, entry.digest) for name, entry in self.tensors.items()
        ]
        return hashlib.sha256(msgspec.json.encode(facts)).hexdigest()[:32]

    @property
    def digests(self) -> dict[str, Digest]:
        return {name: entry.digest for name, entry in self.tensors.items()}

    @property
    def nbytes(self) -> int:
        return sum(
            math.prod(entry.shape) * ELEMENT_BYTES.get(entry.dtype, 0)
            for entry in self.tensors.values()
        )

    def headers(self) -> dict[str, TensorHeader]:
        return {
            name: TensorHeader(entry.dtype, tuple(entry.shape), "")
            for name, entry in self.tensors.items()
        }

    @property
    def objects(self) -> list[Object]:
        return [item for item in (self.delta, self.snapshot) if item is not None]

    def to_bytes(self) -> bytes:
        return msgspec.json.encode(msgspec.structs.replace(self, digest=self._compute_digest()))

    def check(self, version: int) -> None:
        """Raise unless this is an intact manifest of `version`."""
        if self.digest != self._compute_digest() or self.version != version:
            raise needs_snapshot(f"The manifest of version {version} is damaged.")
        if self.base is not None and self.base >= version:  # else a chain could run in circles
            raise needs_snapshot(
                f"Version {version} claims to follow version {self.base}, which is no older."
            )
        for name, entry in self.tensors.items():
            _check_entry(name, entry)

    def _compute_digest(self) -> str:
        rest = msgspec.json.encode(msgspec.structs.replace(self, digest=""))
        return hashlib.blake2b(rest, digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class Step:
    """One object to apply: a snapshot, or a delta to the version before."""

    kind: Kind
    manifest: Manifest

    @property
    def object(self) -> Object:
        item = self.manifest.snapshot if self.kind == "snapshot" else self.manifest.delta
        assert item is not None
        return item

    def extent(self, name: str) -> Extent | None:
        """Return where the change of a tensor is in the object; None if it did not change."""
        entry = self.manifest.tensors[name]
        return entry.snapshot if self.kind == "snapshot" else entry.delta

    def locate(self, name: str) -> Extent:
        """Return the same of a tensor that changed."""
        extent = self.extent(name)
        assert extent is not None
        return extent

    def list_tensors(self) -> list[str]:
        """Return the tensors that the object has."""
        return [name for name in self.manifest.tensors if self.extent(name) is not None]

    def __str__(self) -> str:
        base = "" if self.kind == "snapshot" else f"{self.manifest.base}->"
        return f"{self.kind} {base}{self.manifest.version}"


def manifest_key(version: int) -> str:
    return f"{MANIFESTS}{version:015d}.json"


def object_key(version: int, kind: Kind) -> str:
    """Return a key that carries this process's mark, so that orphans show whether it lives."""
    return f"{OBJECTS}{version:015d}.{kind}.{leftovers.writer_mark()}"


def _check_entry(name: str, entry: Entry) -> None:
    """Raise for an unknown kind of tensor, and for a change that is longer than its tensor."""
    try:
        nbytes = math.prod(check_shape(entry.shape)) * ELEMENT_BYTES[entry.dtype]
    except (ValueError, KeyError) as error:
        raise needs_snapshot(f"{name} is said to be {entry.dtype}{list(entry.shape)}.") from error
    for extent in (entry.delta, entry.snapshot):
        if extent is not None and extent[1] > MAX_OVERHEAD + nbytes:
            raise needs_snapshot(
                f"A change of {name} is said to have {extent[1]} bytes, the tensor {nbytes}."
            )


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

    def read_runs(
        self, names: Mapping[str, object], step: Step, last: Manifest
    ) -> Iterator[tuple[Tensor, list[Encoded]]]:
        """Yield the changes of a step, in the memory that many of them were read into at once."""
        with self._open(names, step, last) as blob:
            for start, size, run_names in _split_runs(step):
                if start + size > blob.size:  # before memory is allocated for it
                    raise needs_snapshot(f"The {step} is cut short.")
                run = allocate_pinned(size)
                view = memoryview(run.numpy())
                pieces = [
                    (start + at, view[at : at + _PIECE_BYTES])
                    for at in range(0, size, _PIECE_BYTES)
                ]
                map_in_order(lambda piece: blob.read_into(*piece), pieces, threads=count_threads())
                changes = []
                for name in run_names:
                    at, length = step.locate(name)
                    encoded = decode(view[at - start : at - start + length])
                    changes.append(_check_announced(encoded, name, step))
                yield run, changes

    @contextmanager
    def _open(self, names: Mapping[str, object], step: Step, last: Manifest) -> Iterator[Blob]:
        """Open the object of a step."""
        _check_names(names, step.manifest)
        if step.manifest.headers() != last.headers():
            raise needs_snapshot(f"The {step} is of another model than the steps after it.")
        with self._store.open(step.object.key) as blob:
            if blob.size != step.object.size:
                raise needs_snapshot(
                    f"The {step} has {blob.size} bytes instead of {step.object.size}."
                )
            yield blob


def map_in_order(
    work: Callable[[Item], Result], items: Sequence[Item], *, threads: int
) -> list[Result]:
    """Call `work` with each item, in threads if there are several; raise its first error."""
    threads = min(threads, len(items))
    if threads <= 1:
        return list(map(work, items))
    with ThreadPoolExecutor(threads) as pool:
        try:
            return list(pool.map(work, items))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _split_runs(step: Step) -> Iterator[tuple[int, int, list[str]]]:
    """Yield where changes lie without a gap: the first byte, the number of bytes, the tensors."""
    start = end = 0
    names: list[str] = []
    for name in sorted(step.list_tensors(), key=step.locate):
        at, size = step.locate(name)
        if names and (at != end or end + size - start > _RUN_BYTES):
            yield start, end - start, names
            names = []
        if not names:
            start = at
        names.append(name)
        end = at + size
    if names:
        yield start, end - start, names


def _check_names(state: Mapping[str, object], manifest: Manifest) -> None:
    different = sorted(state.keys() ^ manifest.tensors.keys()) if state else []
    if different:
        raise WeightsError(
            f"Version {manifest.version} and the held one differ in {', '.join(different[:5])}.",
            "They are different models.",
        )


def _check_announced(encoded: Encoded, name: str, step: Step) -> Encoded:
    """Raise unless a change is the one that the manifest announces."""
    header, entry = encoded.header, step.manifest.tensors[name]
    base = None if header.places == "whole" else step.manifest.base
    expected = (name, entry.dtype, entry.shape, entry.digest, step.manifest.version, base)
    actual = (header.name, header.dtype, header.shape, header.digest, header.version, header.base)
    if expected != actual:
        raise needs_snapshot(f"The {step} has another tensor where {name} should be.")
    return encoded
