"""The manifest of a version: its tensors, and the objects that hold their bytes."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from rollway.errors import WeightsError
from rollway.weights import leftovers
from rollway.weights.checkpoint import TensorHeader
from rollway.weights.layout import ELEMENT_BYTES
from rollway.weights.offer import Count, Text
from rollway.weights.transports.delta.format import MAX_OVERHEAD, Digest
from rollway.weights.untrusted import check_shape

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

    format: Literal[1]
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

    def list_tensors(self) -> list[str]:
        """Return the tensors that the object has."""
        return [name for name in self.manifest.tensors if self.extent(name) is not None]

    def __str__(self) -> str:
        base = "" if self.kind == "snapshot" else f"{self.manifest.base}->"
        return f"{self.kind} {base}{self.manifest.version}"


def needs_snapshot(message: str) -> WeightsError:
    hint = "Start from a snapshot: hold no version, and apply the chain to the requested one."
    return WeightsError(message, hint)


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
