"""Publish versions to a directory: what changed, and now and then all tensors."""

from __future__ import annotations

import contextlib
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, Literal, cast, get_args

import msgspec
import numpy as np
import torch
import zstandard
from numpy.typing import NDArray
from torch import Tensor

from rollway.errors import UsageError
from rollway.weights import leftovers
from rollway.weights.device_copies import copy_to_host, explain_exhaustion
from rollway.weights.digest.checksums import count_threads, describe, dtype_name, word_sums
from rollway.weights.offer import Offer
from rollway.weights.transports.base import (
    NamedTensor,
    Publisher,
    Source,
    check_next,
    check_retention,
    inspect_source,
)
from rollway.weights.transports.delta.packing import (
    WORD,
    Chunk,
    PackedTensor,
    split_in_chunks,
    start_packing,
)
from rollway.weights.transports.delta.versions import (
    DELTA,
    MANIFEST,
    SNAPSHOT,
    Change,
    DeltaEntry,
    DeltaManifest,
    DeltaVersions,
)

Compression = Literal["zstd", "none"]
_LEVEL = 1  # steps are mostly noise: higher levels of zstd cost time and gain nothing
_AHEAD = 2
"""Chunks that are compressed and written while others are compared."""


class DeltaPublisher(Publisher):
    """Publishes versions as deltas, and holds a copy of the last one to compare with.

    One publisher at a time writes to a directory. A new publisher begins with a snapshot."""

    transport = "delta"

    def __init__(
        self,
        root: Path,
        *,
        snapshot_every: int = 8,
        keep_recent: int = 4,
        max_off_policy_steps: int = 1,
        hold_on_cpu: bool = False,
        temporary: bool = False,
        compression: Compression = "zstd",
    ) -> None:
        """Write to `root`, a snapshot every `snapshot_every` versions.

        The newest `keep_recent` versions stay readable. `hold_on_cpu` keeps the copy of the last
        version in CPU memory, for trainers whose GPU has no space for it. A `temporary` root is
        removed when the publisher closes or its process ends, however it ends. `compression` is
        "zstd" or "none"."""
        check_retention(keep_recent, max_off_policy_steps)
        if snapshot_every < 1:
            raise UsageError("snapshot_every is less than 1.", "Set it to 1 or more.")
        if compression not in get_args(Compression):
            raise UsageError(f"There is no compression {compression}.", 'Use "zstd" or "none".')
        self.versions = DeltaVersions(root)
        self._snapshot_every, self._keep_recent = snapshot_every, keep_recent
        self._hold_on_cpu, self._compression = hold_on_cpu, compression
        self._durable = not temporary  # a power loss ends the publisher, and its directory with it
        self._guard = leftovers.Guard(root) if temporary else None
        self._chunks: list[Chunk] = []
        """The last version; none before the first, and after a failure."""
        self._last: DeltaManifest | None = None
        self._since_snapshot = 0
        self.versions.sweep()
        self._published = {
            version: self.versions.read_manifest(version)
            for version in self.versions.list_versions()
        }

    def _publish(self, version: int, tensors: Source | None = None) -> Offer:
        """Write a version; pass every tensor of the model, and change none meanwhile."""
        check_next(version, max(self.versions.list_versions(), default=None))
        pairs = inspect_source(tensors).pairs()
        if self._hold_on_cpu:
            pairs = ((name, *copy_to_host([tensor.detach()])) for name, tensor in pairs)
        try:
            with (
                explain_exhaustion(
                    "a copy of the last version, with which a delta is compared",
                    "Pass hold_on_cpu=True, which keeps it in CPU memory, or leave more free.",
                ),
                self.versions.write(version, durable=self._durable) as directory,
            ):
                manifest = self._write(directory, version, pairs)
        except BaseException:
            # What is held may be half of a version that nobody will see: the next one is a
            # snapshot.
            self._chunks, self._last = [], None
            raise
        self._last = self._published[version] = manifest
        self._since_snapshot = 0 if manifest.has_snapshot else self._since_snapshot + 1
        self._remove_old()
        where = {"root": str(self.versions.root.resolve())}
        return Offer("delta", version, manifest.identity, manifest.nbytes, where)

    def _close(self) -> None:
        """Free the copy of the last version, and remove a temporary root."""
        self._chunks, self._last = [], None
        if self._guard is not None:
            self._guard.close()

    def _write(
        self, directory: Path, version: int, tensors: Iterable[NamedTensor]
    ) -> DeltaManifest:
        last = self._last
        if last is None:
            entries = self._hold(tensors)
        else:
            entries = self._write_delta(directory / DELTA, last, tensors)
        has_snapshot = last is None or self._since_snapshot + 1 >= self._snapshot_every
        if has_snapshot:
            entries = self._write_snapshot(directory / SNAPSHOT, entries)
        base = last.as_base() if last is not None else None
        manifest = DeltaManifest(version, entries, base, has_snapshot)
        with (directory / MANIFEST).open("xb") as file:
            file.write(msgspec.json.encode(manifest))
            self._sync(file)
        return manifest

    def _hold(self, tensors: Iterable[NamedTensor]) -> dict[str, DeltaEntry]:
        """Copy the tensors of the first version, and return their entries."""
        clones: dict[str, Tensor] = {}
        entries: dict[str, DeltaEntry] = {}
        for name, tensor in tensors:
            if name in clones:
                raise UsageError(f"{name} came twice.", "Publish each name once.")
            entries[name] = DeltaEntry(dtype_name(tensor), tuple(tensor.shape), 0)
            clones[name] = tensor.detach().clone(memory_format=torch.contiguous_format)
        for names in list(split_in_chunks(clones)):
            chunk = Chunk({name: clones[name] for name in names})
            for number, name in enumerate(names):
                chunk.put(number, clones.pop(name))
            views = [chunk.view(number) for number in range(len(names))]
            for name, total in zip(names, word_sums(views), strict=True):
                entries[name] = msgspec.structs.replace(entries[name], sum=total)
            self._chunks.append(chunk)
        return entries

    def _write_delta(
        self, path: Path, last: DeltaManifest, tensors: Iterable[NamedTensor]
    ) -> dict[str, DeltaEntry]:
        """Write what changed since the last version, and return the entries."""
        entries = {
            name: msgspec.structs.replace(entry, change=None, snapshot=None)
            for name, entry in last.tensors.items()
        }
        waiting: deque[Future[list[tuple[str, int, Change]]]] = deque()

        def note_written() -> None:
            for name, added, change in waiting.popleft().result():
                total = (entries[name].sum + added) % (1 << 64)
                entries[name] = msgspec.structs.replace(entries[name], sum=total, change=change)

        with _use_one_thread(), path.open("xb") as file, ThreadPoolExecutor(1) as writer:
            for wait in self._pack(last, tensors):
                waiting.append(writer.submit(self._write_changes, file, wait))
                if len(waiting) > _AHEAD:
                    note_written()
            while waiting:
                note_written()
        # Not synced: a power loss ends the trainer too, and the next publisher begins with a
        # snapshot. A reader refuses a delta that the disk never got, by its sums.
        return entries

    def _pack(
        self, last: DeltaManifest, tensors: Iterable[NamedTensor]
    ) -> Iterator[Callable[[], list[PackedTensor]]]:
        """Copy tensors as they come, and start to pack a chunk when it is complete."""
        places = {
            name: (number, index)
            for number, chunk in enumerate(self._chunks)
            for index, name in enumerate(chunk.names)
        }
        missing = Counter(number for number, _ in places.values())
        filling: dict[int, Chunk] = {}
        free: Tensor | None = None
        """Memory of a chunk that is packed."""
        for name, tensor in tensors:
            if name not in places:
                raise UsageError(
                    f"{name} came twice, or was not part of version {last.version}.",
                    "Publish the same tensors every time; another model needs its own publisher.",
                )
            number, index = places.pop(name)
            if number not in filling:
                filling[number], free = self._chunks[number].make_empty(free), None
            held = self._chunks[number].view(index)
            if (tensor.dtype, tensor.shape) != (held.dtype, held.shape):
                raise UsageError(
                    f"{name} was {describe(held)} and is {describe(tensor)}; only values may "
                    "change.",
                    "Publish a tensor of another kind under a new name.",
                )
            filling[number].put(index, tensor)
            missing[number] -= 1
            if not missing[number]:
                new = filling.pop(number)
                yield start_packing(self._chunks[number], new)
                free = new.words
        if places:
            raise UsageError(
                f"Tensors are missing: {', '.join(sorted(places)[:5])}.",
                "Publish all of them every time; unchanged tensors cost nothing.",
            )

    def _write_changes(
        self, file: BinaryIO, wait: Callable[[], list[PackedTensor]]
    ) -> list[tuple[str, int, Change]]:
        """Write what changed in a chunk; return names, what is added to sums, and places."""
        packed = wait()
        written = []
        data = self._compress(packed)
        sums = word_sums([torch.from_numpy(part) for part in data])
        for tensor, part, total in zip(packed, data, sums, strict=True):
            place = file.tell(), len(part), total, len(tensor.data)
            written.append((tensor.name, tensor.added, Change(*place, tensor.count, tensor.planes)))
            file.write(part.data)
            file.write(bytes(-len(part) % WORD))
        return written

    def _compress(self, packed: Sequence[PackedTensor]) -> list[NDArray[np.uint8]]:
        """Return the bytes of changes, compressed where that makes them shorter."""
        data = [tensor.data for tensor in packed]
        numbers = [i for i, tensor in enumerate(packed) if tensor.planes]
        if self._compression == "none" or not numbers:
            return data
        compressor = zstandard.ZstdCompressor(level=_LEVEL)
        # Threads of zstd's own do not need the interpreter.
        frames = compressor.multi_compress_to_buffer(
            [data[i].data for i in numbers], threads=count_threads()
        )
        for i, number in enumerate(numbers):
            frame = np.frombuffer(cast("bytes", frames[i]), np.uint8).copy()
            if len(frame) < len(data[number]):
                data[number] = frame
        return data

    def _write_snapshot(
        self, path: Path, entries: Mapping[str, DeltaEntry]
    ) -> dict[str, DeltaEntry]:
        """Write all tensors, and return the entries with their places."""
        placed = dict(entries)
        with path.open("xb") as file:
            for chunk in self._chunks:
                for name, start in zip(chunk.names, chunk.starts, strict=False):
                    place = file.tell() + WORD * start
                    placed[name] = msgspec.structs.replace(placed[name], snapshot=place)
                (words,) = copy_to_host([chunk.words])
                file.write(words.numpy().data)
            self._sync(file)
        return placed

    def _sync(self, file: BinaryIO) -> None:
        if self._durable:
            file.flush()
            os.fsync(file.fileno())

    def _remove_old(self) -> None:
        """Remove what no kept version needs: each needs the deltas since its snapshot."""
        needed: set[int] = set()
        for version in sorted(self._published)[-self._keep_recent :]:
            manifest = self._published[version]
            needed.add(version)
            while not manifest.has_snapshot and manifest.base is not None:
                manifest = self._published[manifest.base.version]
                needed.add(manifest.version)
        for version in sorted(self._published.keys() - needed):
            del self._published[version]
            self.versions.remove(version)


@contextlib.contextmanager
def _use_one_thread() -> Iterator[None]:
    """Keep torch from dividing operations on a CPU among threads, which wait for each other.

    On two busy cores, a delta of 537 MB took 1.6 to 4.5 s with two threads, 0.6 s with one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
