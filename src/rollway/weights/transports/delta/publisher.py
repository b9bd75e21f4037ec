"""Publish versions to a store: deltas, now and then a snapshot, and the manifest last."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import msgspec
import torch
from torch import Tensor

from rollway.errors import UsageError
from rollway.weights import leftovers
from rollway.weights.copies import copy_all
from rollway.weights.device_copies import stream_to_host
from rollway.weights.digest.checksums import word_sums
from rollway.weights.offer import Offer
from rollway.weights.transports.base import NamedTensor, Publisher, Source, named_tensors
from rollway.weights.transports.delta.format import Encoded, encode_all
from rollway.weights.transports.delta.manifest import (
    OBJECTS,
    Entry,
    Kind,
    Manifest,
    Object,
    manifest_key,
    object_key,
)
from rollway.weights.transports.delta.reader import DeltaVersions
from rollway.weights.transports.delta.store import Buffer, Store
from rollway.weights.transports.versions import check_next, check_retention

_BATCH_BYTES = 1 << 30
"""Bytes that a GPU encodes together."""


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
    ) -> None:
        """Write to `carrier`, a snapshot every `snapshot_every` versions.

        The newest `keep_recent` versions stay readable. `hold_on_cpu` keeps the copy of the last
        version in CPU memory, for trainers whose GPU has no space for it. `temporary` removes the
        store when the publisher closes or its process ends, however it ends."""
        check_retention(keep_recent, max_off_policy_steps)
        if snapshot_every < 1:
            raise UsageError("snapshot_every is less than 1.", "Set it to 1 or more.")
        self.versions = DeltaVersions(carrier)
        self._store = carrier
        self._snapshot_every = snapshot_every
        self._keep_recent = keep_recent
        self._hold_on_cpu = hold_on_cpu
        self._guard = leftovers.Guard(carrier.root) if temporary else None
        self._held: dict[str, Tensor] = {}
        self._last: Manifest | None = None
        self._since_snapshot = 0
        carrier.sweep()
        self._published = {
            version: self.versions.read_manifest(version)
            for version in self.versions.list_versions()
        }
        self._remove_orphans()

    def publish(self, version: int, tensors: Source | None = None) -> Offer:
        """Write a version; pass every tensor of the model, and change none meanwhile."""
        check_next(version, max(self.versions.list_versions(), default=None))
        if tensors is None:
            raise UsageError("There are no tensors to publish.", "Pass them to `publish`.")
        named = named_tensors(tensors)
        if self._hold_on_cpu:
            named = stream_to_host(named)
        try:
            manifest = self._write(version, named)
            # Last: a version exists for readers once its manifest does.
            self._store.put(manifest_key(version), manifest.to_bytes())
        except BaseException:
            # The held tensors may be half of a version that nobody will see: drop them, so that
            # the next version is a snapshot.
            self._held, self._last = {}, None
            for kind in ("delta", "snapshot"):
                self._store.delete(object_key(version, kind))
            raise
        self._last = self._published[version] = manifest
        self._since_snapshot = 0 if manifest.snapshot else self._since_snapshot + 1
        self._remove_old()
        root = str(self._store.root.resolve())
        return Offer("delta", version, manifest.identity, manifest.nbytes, {"root": root})

    def close(self) -> None:
        """Free the copy of the last version, and remove a temporary store."""
        self._held, self._last = {}, None
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
        return Manifest(1, version, base, entries, delta, snapshot)

    def _put(self, version: int, kind: Kind, parts: Iterator[Buffer]) -> Object:
        key = object_key(version, kind)
        return Object(key, self._store.put(key, parts))

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
        assert self._last is not None
        base, at = self._last, 0
        for batch in _split_batches(tensors):
            changes = []
            for name, tensor in batch:
                held, last = self._held.get(name), base.tensors.get(name)
                if held is None or last is None or name in entries:
                    raise UsageError(
                        f"{name} came twice, or was not part of version {base.version}.",
                        "Publish the same tensors every time; another model needs its own "
                        "publisher.",
                    )
                changes.append((name, held, tensor, last.digest))
                entries[name] = msgspec.structs.replace(last, delta=None, snapshot=None)
            changed = []
            with _use_one_thread(batch[0][1].device):
                encoded_changes = encode_all(changes, version=version, base=base.version)
            for encoded in encoded_changes:
                header = encoded.header
                if header.places == "none":
                    continue
                parts, size = _measure(encoded)
                entries[header.name] = Entry(header.dtype, header.shape, header.digest, (at, size))
                yield from parts
                at += size
                changed.append(header.name)
            new = dict(batch)
            copy_all([(self._held[name], new[name].detach()) for name in changed])
            self._set_sums(changed, entries)
        missing = sorted(self._held.keys() - entries.keys())
        if missing:
            raise UsageError(
                f"Tensors are missing: {', '.join(missing[:5])}.",
                "Publish all of them every time; unchanged tensors cost nothing.",
            )

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
def _use_one_thread(device: torch.device) -> Iterator[None]:
    """Keep torch from dividing small operations among threads on a CPU.

    They wait for each other after each operation: on two busy cores, encoding 1% of 537 MB took
    12 s with two threads, and 0.5 s with one."""
    before = torch.get_num_threads()
    if device.type != "cpu" or before == 1:
        yield
        return
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
