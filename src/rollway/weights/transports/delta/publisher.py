"""Publish versions to a store: deltas, now and then a snapshot, and the manifest last."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import get_args

import msgspec
import torch
from torch import Tensor

from rollway.errors import UsageError
from rollway.weights import leftovers
from rollway.weights.copies import copy_all
from rollway.weights.device_copies import explain_exhaustion, stream_to_host
from rollway.weights.digest.changes import RunningSums, is_mostly_changed
from rollway.weights.digest.checksums import integers, word_sums
from rollway.weights.offer import Offer
from rollway.weights.transports.base import (
    NamedTensor,
    Publisher,
    Source,
    check_next,
    check_retention,
    named_tensors,
)
from rollway.weights.transports.delta.format import (
    Change,
    Encoded,
    check_same_kind,
    encode_all,
    encode_changes,
    start_encoding,
)
from rollway.weights.transports.delta.packing import Compression, open_pool
from rollway.weights.transports.delta.store import Buffer, Store
from rollway.weights.transports.delta.versions import (
    OBJECTS,
    DeltaVersions,
    Entry,
    Kind,
    Manifest,
    Object,
    manifest_key,
    object_key,
)

_BATCH_BYTES = 2 << 30
"""Bytes that a GPU encodes together."""
_AHEAD, _AHEAD_ON_HOST = 2, 64
"""Batches of a GPU, and tensors of a CPU, that are compressed while others are compared."""


class DeltaPublisher(Publisher):
    """Publishes versions as deltas, and holds a copy of the last one to compare with.

    One publisher at a time writes to a store. A new publisher begins with a snapshot."""

    transport = "delta"

    def __init__(
        self,
        carrier: Store,
        *,
        snapshot_every: int = 8,
        keep_recent: int = 4,
        max_off_policy_steps: int = 1,
        hold_on_cpu: bool = False,
        temporary: bool = False,
        compression: Compression = "zstd",
    ) -> None:
        """Write to `carrier`, a snapshot every `snapshot_every` versions.

        The newest `keep_recent` versions stay readable. `hold_on_cpu` keeps the copy of the last
        version in CPU memory, for trainers whose GPU has no space for it. `temporary` removes the
        store when the publisher closes or its process ends, however it ends. `compression` is
        "zstd" or "none"."""
        check_retention(keep_recent, max_off_policy_steps)
        if snapshot_every < 1:
            raise UsageError("snapshot_every is less than 1.", "Set it to 1 or more.")
        self.versions = DeltaVersions(carrier)
        self._store = carrier
        self._snapshot_every = snapshot_every
        self._keep_recent = keep_recent
        self._hold_on_cpu = hold_on_cpu
        if compression not in get_args(Compression):
            raise UsageError(f"There is no compression {compression}.", 'Use "zstd" or "none".')
        self._compression: Compression = compression
        self._durable = not temporary  # a power loss ends the publisher, and its store with it
        self._guard = leftovers.Guard(carrier.root) if temporary else None
        self._held: dict[str, Tensor] = {}
        self._running: dict[str, RunningSums] = {}
        """The checksums of the held tensors in CPU memory."""
        self._last: Manifest | None = None
        self._since_snapshot = 0
        carrier.sweep()
        self._published = {
            version: self.versions.read_manifest(version)
            for version in self.versions.list_versions()
        }
        self._remove_orphans()

    def _publish(self, version: int, tensors: Source | None = None) -> Offer:
        """Write a version; pass every tensor of the model, and change none meanwhile."""
        check_next(version, max(self.versions.list_versions(), default=None))
        if tensors is None:
            raise UsageError("There are no tensors to publish.", "Pass them to `publish`.")
        named = named_tensors(tensors)
        if self._hold_on_cpu:
            named = stream_to_host(named)
        try:
            with explain_exhaustion(
                "a copy of the last version, with which a delta is compared",
                "Pass hold_on_cpu=True, which keeps it in CPU memory, or leave more memory free.",
            ):
                manifest = self._write(version, named)
            # Last: a version exists for readers once its manifest does.
            self._store.put(manifest_key(version), manifest.to_bytes(), durable=self._durable)
        except BaseException:
            # The held tensors may be half of a version that nobody will see: drop them, so that
            # the next version is a snapshot.
            self._held, self._running, self._last = {}, {}, None
            for kind in ("delta", "snapshot"):
                self._store.delete(object_key(version, kind))
            raise
        self._last = self._published[version] = manifest
        self._since_snapshot = 0 if manifest.snapshot else self._since_snapshot + 1
        self._remove_old()
        root = str(self._store.root.resolve())
        return Offer("delta", version, manifest.identity, manifest.nbytes, {"root": root})

    def _close(self) -> None:
        """Free the copy of the last version, and remove a temporary store."""
        self._held, self._running, self._last = {}, {}, None
        if self._guard is not None:
            self._guard.close()
            self._guard = None

    def _write(self, version: int, tensors: Iterable[NamedTensor]) -> Manifest:
        entries: dict[str, Entry] = {}
        delta = snapshot = None
        if self._last is None:
            self._hold(tensors)
        else:
            delta = self._put(version, "delta", self._encode_changes(version, tensors, entries))
        if self._last is None or self._since_snapshot + 1 >= self._snapshot_every:
            snapshot = self._put(version, "snapshot", self._encode_snapshot(version, entries))
        base = self._last.version if self._last else None
        return Manifest(2, version, base, entries, delta, snapshot)

    def _put(self, version: int, kind: Kind, parts: Iterator[Buffer]) -> Object:
        key = object_key(version, kind)
        # A power loss ends the trainer too, and the next publisher begins with a snapshot. A reader
        # that meets a delta which the disk never got refuses it by its size and its digests.
        durable = self._durable and kind == "snapshot"
        return Object(key, self._store.put(key, parts, durable=durable))

    def _hold(self, tensors: Iterable[NamedTensor]) -> None:
        for name, tensor in tensors:
            if name in self._held:
                raise UsageError(f"{name} came twice.", "Publish each name once.")
            self._held[name] = tensor.detach().clone(memory_format=torch.contiguous_format)
        if not self._held:
            raise UsageError("There are no tensors to publish.")

    def _encode_changes(
        self, version: int, tensors: Iterable[NamedTensor], entries: dict[str, Entry]
    ) -> Iterator[Buffer]:
        """Encode tensors as they arrive, fill in `entries`, and update the held copies."""
        at = 0
        for encoded in self._encode_in_order(version, tensors, entries):
            header = encoded.header
            if header.places == "none":
                continue
            parts, size = _measure(encoded)
            entries[header.name] = Entry(
                header.dtype, header.shape, header.digest, (at, size), sum=encoded.word_sum
            )
            yield from parts
            at += size
        self._set_sums([name for name, entry in entries.items() if entry.sum is None], entries)
        missing = sorted(self._held.keys() - entries.keys())
        if missing:
            raise UsageError(
                f"Tensors are missing: {', '.join(missing[:5])}.",
                "Publish all of them every time; unchanged tensors cost nothing.",
            )

    def _encode_in_order(
        self, version: int, tensors: Iterable[NamedTensor], entries: dict[str, Entry]
    ) -> Iterator[Encoded]:
        """Yield all changes. While threads compress those of a batch, the next is compared."""
        pending: deque[Callable[[], list[Encoded]]] = deque()
        with _use_one_thread(), open_pool() as pool:
            for batch in _split_batches(tensors):
                self._note_names(batch, entries)
                if batch[0][1].device.type == "cpu":
                    pending.append(self._start_on_host(version, *batch[0], pool))
                else:
                    pending.append(self._start_on_device(version, batch, pool))
                while len(pending) > (_AHEAD if batch[0][1].is_cuda else _AHEAD_ON_HOST):
                    yield from pending.popleft()()
            while pending:
                yield from pending.popleft()()

    def _note_names(self, batch: Sequence[NamedTensor], entries: dict[str, Entry]) -> None:
        """Add the entries of unchanged tensors; changed ones are replaced later."""
        assert self._last is not None
        for name, _ in batch:
            last = self._last.tensors.get(name)
            if name not in self._held or last is None or name in entries:
                raise UsageError(
                    f"{name} came twice, or was not part of version {self._last.version}.",
                    "Publish the same tensors every time; another model needs its own publisher.",
                )
            entries[name] = msgspec.structs.replace(last, delta=None, snapshot=None)

    def _start_on_device(
        self, version: int, batch: Sequence[NamedTensor], pool: ThreadPoolExecutor
    ) -> Callable[[], list[Encoded]]:
        """Compare a batch, and update the held copies on the device."""
        assert self._last is not None
        known = self._last.tensors
        changes: list[Change] = [(n, self._held[n], t, known[n].digest) for n, t in batch]
        finish = start_encoding(changes, pool, version, self._last.version, self._compression)
        copy_all([(self._held[name], tensor.detach()) for name, tensor in batch])
        return lambda: finish(self._held)

    def _start_on_host(
        self, version: int, name: str, tensor: Tensor, pool: ThreadPoolExecutor
    ) -> Callable[[], list[Encoded]]:
        """Compare a tensor, and update the held copy where it changed."""
        assert self._last is not None
        held, before = self._held[name], self._last.tensors[name].digest
        check_same_kind(name, held, tensor)
        old, new = integers(held), integers(tensor)
        if is_mostly_changed(old, new):
            change: Change = (name, held, tensor, before)
            encoded = encode_all(
                [change], version=version, base=self._last.version, compression=self._compression
            )
            held.copy_(tensor.detach())
            self._running.pop(name, None)
            return lambda: encoded
        if name not in self._running:
            self._running[name] = RunningSums.of(held)
        sums = self._running[name]
        changes = sums.advance(old, new, pool)
        checksum = sums.checksum
        future = pool.submit(
            encode_changes, name, held, changes, checksum,
            version=version, base=self._last.version, before=before,
            compression=self._compression,
        )  # fmt: skip
        return lambda: [future.result()]

    def _encode_snapshot(self, version: int, entries: dict[str, Entry]) -> Iterator[Buffer]:
        at = 0
        for batch in _split_batches(self._held.items()):
            whole = [(name, None, held, None) for name, held in batch]
            for encoded in encode_all(whole, version=version):
                parts, size = _measure(encoded)
                header = encoded.header
                entry = entries.get(header.name)
                entry = entry or Entry(header.dtype, header.shape, header.digest)
                entries[header.name] = msgspec.structs.replace(entry, snapshot=(at, size))
                yield from parts
                at += size
            self._set_sums([name for name, _ in batch if entries[name].sum is None], entries)

    def _set_sums(self, names: Sequence[str], entries: dict[str, Entry]) -> None:
        """Sum the held tensors; an unchanged one has its sum from the version before."""
        sums = word_sums([self._held[name] for name in names])
        for name, total in zip(names, sums, strict=True):
            entries[name] = msgspec.structs.replace(entries[name], sum=total)

    def _remove_old(self) -> None:
        """Remove what no kept version needs: each needs the chain from its snapshot."""
        needed: set[int] = set()
        for version in sorted(self._published)[-self._keep_recent :]:
            at: int | None = version
            while at is not None and at in self._published:
                needed.add(at)
                manifest = self._published[at]
                at = manifest.base if manifest.snapshot is None else None
        for version in sorted(self._published.keys() - needed):
            manifest = self._published.pop(version)
            self._store.delete(manifest_key(version))  # first, so that no reader starts on it
            for item in manifest.objects:
                self._store.delete(item.key)

    def _remove_orphans(self) -> None:
        """Remove objects without a manifest whose publisher is dead."""
        known = {item.key for manifest in self._published.values() for item in manifest.objects}
        for key in self._store.keys(OBJECTS):
            if key not in known and leftovers.is_abandoned(key, self._store.idle_seconds(key)):
                self._store.delete(key)


@contextlib.contextmanager
def _use_one_thread() -> Iterator[None]:
    """Keep torch from dividing small operations on a CPU among threads.

    They wait for each other after each operation: on two busy cores, encoding 1% of 537 MB took
    12 s with two threads, and 0.5 s with one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _measure(encoded: Encoded) -> tuple[list[Buffer], int]:
    parts = encoded.parts()
    return parts, sum(len(part) for part in parts)


def _split_batches(tensors: Iterable[NamedTensor]) -> Iterator[list[NamedTensor]]:
    """Yield batches for a GPU, and single tensors for a CPU, which encodes from its cache."""
    batch: list[NamedTensor] = []
    nbytes = 0
    for name, tensor in tensors:
        if batch and (nbytes >= _BATCH_BYTES or tensor.device != batch[0][1].device):
            yield batch
            batch, nbytes = [], 0
        batch.append((name, tensor))
        nbytes += tensor.nbytes if tensor.is_cuda else _BATCH_BYTES
    if batch:
        yield batch
