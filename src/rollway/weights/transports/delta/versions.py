"""Versions in a directory that trainer and engines see: their tensors, and where the bytes are.

    root/v7/  manifest.json   the tensors of version 7, with their sums
              delta           how they differ from those of version 6
              snapshot        all of them, every few versions

The directory of a version appears at once, with all its files. Nothing here locks or appends,
because both fail on network file systems. Nothing is mapped: if a publisher removes a version that
is read over NFS, the reader gets a `WeightsError`, not a SIGBUS.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
from torch import Tensor

from rollway.errors import WeightsError
from rollway.weights import leftovers
from rollway.weights.checkpoint import TensorHeader, sync
from rollway.weights.device_copies import allocate_pinned
from rollway.weights.digest.checksums import map_in_threads
from rollway.weights.layout import ELEMENT_BYTES
from rollway.weights.offer import MAX_MANIFEST_BYTES, Count, Dims, Text
from rollway.weights.untrusted import check_shape, open_plain, read_plain, reason

MANIFEST, DELTA, SNAPSHOT = "manifest.json", "delta", "snapshot"
Sum = Annotated[int, msgspec.Meta(ge=0)]
_PIECE_BYTES = 16 << 20
"""What one thread reads."""
_NAME = re.compile(r"v(\d{1,15})")


class Change(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a version's delta has what changed in a tensor, and how it is packed.

    Packed are a gap for each changed element, and then `planes` bytes of the step from its old
    bits; or all bytes of the tensor, as they are, if `planes` is 0."""

    offset: Count
    nbytes: Count
    sum: Sum
    """The word sum of these bytes: that of the tensor does not show that a step was misplaced."""
    plain_bytes: Count
    """How many they are when they are decompressed by zstd; as many if they were not compressed."""
    count: Annotated[int, msgspec.Meta(gt=0, le=1 << 53)]
    """How many elements changed."""
    planes: Annotated[int, msgspec.Meta(ge=0, le=8)]

    @property
    def is_whole(self) -> bool:
        return self.planes == 0

    @property
    def is_compressed(self) -> bool:
        return self.nbytes < self.plain_bytes


class DeltaEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor of a version; without a `change` it is as in the version before."""

    dtype: Annotated[str, msgspec.Meta(max_length=32)]
    shape: Dims
    sum: Sum
    """The sum of its words, by which a worker verifies its parameters."""
    change: Change | None = None
    snapshot: Count | None = None
    """Where it begins in the snapshot."""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        return self.elements * self.element_bytes


class Base(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The version that a delta starts from."""

    version: Count
    identity: str


class DeltaManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a version consists of."""

    version: Count
    tensors: dict[Text, DeltaEntry]
    base: Base | None = None
    has_snapshot: bool = False

    @property
    def identity(self) -> str:
        """The identity of the weights alone: it does not depend on how they are stored."""
        facts = [(name, e.dtype, e.shape, e.sum) for name, e in self.tensors.items()]
        return hashlib.sha256(msgspec.json.encode(facts)).hexdigest()[:32]

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.tensors.values())

    def count_changed(self) -> int:
        """Return how many elements changed since the version before."""
        return sum(e.change.count for e in self.tensors.values() if e.change is not None)

    def as_base(self) -> Base:
        return Base(self.version, self.identity)

    def headers(self) -> dict[str, TensorHeader]:
        return {name: TensorHeader(e.dtype, e.shape, "") for name, e in self.tensors.items()}


def make_read_error(message: str) -> WeightsError:
    """Return an error of a version that cannot be read."""
    return WeightsError(message, "Publish the version again, or wait for the next snapshot.")


class DeltaVersions:
    """The versions below a directory."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def list_versions(self) -> list[int]:
        """Return the versions that can be read now, oldest first."""
        names = (_NAME.fullmatch(path.name) for path in self.root.glob("v*"))
        return sorted(int(name[1]) for name in names if name)

    def path(self, version: int) -> Path:
        return self.root / f"v{version}"

    def read_manifest(self, version: int, identity: str = "") -> DeltaManifest:
        """Return the manifest of a version, which must have this identity if one is given."""
        path = self.path(version) / MANIFEST
        try:
            manifest = msgspec.json.decode(read_plain(path, MAX_MANIFEST_BYTES), type=DeltaManifest)
            for entry in manifest.tensors.values():
                check_shape(entry.shape)
                ELEMENT_BYTES[entry.dtype]
        except FileNotFoundError as error:
            raise make_read_error(f"Version {version} is not in {self.root}.") from error
        except OSError as error:
            raise WeightsError(f"{path} cannot be read: {reason(error)}.") from error
        except (msgspec.DecodeError, ValueError, KeyError, RecursionError) as error:
            raise make_read_error(f"The manifest of version {version} is damaged.") from error
        if manifest.version != version or identity not in ("", manifest.identity):
            raise make_read_error(f"{self.path(version)} has another version than expected.")
        return manifest

    def find_deltas(self, served: DeltaManifest, wanted: DeltaManifest) -> list[DeltaManifest]:
        """Return the versions whose deltas lead from one version to another."""
        steps: list[DeltaManifest] = []
        start, at = served.as_base(), wanted
        while at.as_base() != start:
            steps.append(at)
            if at.base == start:
                break
            if at.base is None or at.base.version <= start.version:
                raise make_read_error(f"No deltas lead from there to version {wanted.version}.")
            at = self._read_base(at, at.base)
        return steps[::-1]

    def find_snapshot(self, wanted: DeltaManifest) -> list[DeltaManifest]:
        """Return the newest version with a snapshot, and those whose deltas lead to `wanted`."""
        chain = [wanted]
        while not chain[-1].has_snapshot:
            if chain[-1].base is None:
                raise make_read_error(f"No snapshot leads to version {wanted.version}.")
            chain.append(self._read_base(chain[-1], chain[-1].base))
        return chain[::-1]

    def _read_base(self, manifest: DeltaManifest, base: Base) -> DeltaManifest:
        if base.version >= manifest.version:  # else a chain could run in circles
            raise make_read_error(f"Version {manifest.version} claims to follow {base.version}.")
        return self.read_manifest(base.version, base.identity)

    @contextlib.contextmanager
    def write(self, version: int, *, durable: bool) -> Iterator[Path]:
        """Yield an empty directory, which becomes the version's when the block ends.

        Without `durable`, nothing waits for the disk."""
        scratch = self.root / leftovers.scratch_name(f"v{version}")
        try:
            scratch.mkdir(parents=True)
            yield scratch
            if durable:
                sync(scratch)
            scratch.rename(self.path(version))
            if durable:
                sync(self.root)
        except OSError as error:
            raise WeightsError(
                f"Version {version} cannot be written to {self.root}: {error.strerror}.",
                "Free some space, or keep fewer versions.",
            ) from error
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def remove(self, version: int) -> None:
        # Renamed first, so that no reader finds half of it.
        trash = self.root / leftovers.scratch_name(f"v{version}", leftovers.TRASH)
        with contextlib.suppress(OSError):
            self.path(version).rename(trash)
        shutil.rmtree(trash, ignore_errors=True)

    def sweep(self) -> None:
        """Remove what dead publishers were writing or removing."""
        for path in self.root.glob(".v*"):
            with contextlib.suppress(OSError):
                newest = max(file.stat().st_mtime for file in (path, *path.iterdir()))
                if leftovers.is_abandoned(path.name, time.time() - newest):
                    shutil.rmtree(path, ignore_errors=True)


class StoredBytes:
    """A file of a version, open for reading."""

    def __init__(self, path: Path, handle: int) -> None:
        self._path, self._handle = path, handle

    def read(self, start: int, end: int) -> Tensor:
        """Return the bytes from `start` to `end`, or raise; threads read large pieces."""
        size = os.fstat(self._handle).st_size
        if end > size:  # before memory is allocated for it
            raise make_read_error(f"{self._path} is cut short: it has {size} bytes.")
        memory = allocate_pinned(end - start)
        view = memoryview(memory.numpy())

        def read_piece(at: int) -> None:
            piece, place = view[at : at + _PIECE_BYTES], start + at
            while len(piece):
                count = os.preadv(self._handle, [piece], place)
                if count == 0:
                    raise make_read_error(f"{self._path} became shorter while it was read.")
                piece, place = piece[count:], place + count

        map_in_threads(read_piece, range(0, len(view), _PIECE_BYTES))
        return memory


@contextlib.contextmanager
def open_stored(path: Path) -> Iterator[StoredBytes]:
    """Open a file of a version."""
    try:
        with open_plain(path) as handle:
            yield StoredBytes(path, handle)
    except OSError as error:
        raise WeightsError(
            f"{path} cannot be read: {reason(error)}.",
            "It may have been removed; refit to a newer version.",
        ) from error
