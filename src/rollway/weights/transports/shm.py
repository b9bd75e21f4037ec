"""Weights through shared memory: one copy out of the trainer's memory, on one machine.

    trainer ── publish: copy, sum ──► /dev/shm/rollway-weights-…   (slots, used in turn)
                                          │ mapped once, read in place
    worker  ◄── one copy, straight into its own parameters; sums compared after the copy

`adopt` moves a model's own parameters into a slot, so that publishing copies nothing at all. The
publisher removes a slot's list of tensors before it overwrites the bytes, and a reader checks the
list again after it has read: it never receives a mixture of two versions.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated

import msgspec
import torch
from torch import Tensor

from rollway.errors import UsageError, WeightsError
from rollway.weights import leftovers
from rollway.weights.checkpoint import TensorHeader
from rollway.weights.device_copies import HostCopier, Pinning
from rollway.weights.digest.checksums import (
    finish_word_sums,
    start_word_sum,
    word_sum,
    word_sums,
)
from rollway.weights.offer import Entry, Manifest, Offer, PlacedBox, list_boxes, read_manifest
from rollway.weights.transports.base import Publisher, Reader, Source, inspect_source, never
from rollway.weights.transports.entries import (
    SHM,
    Parameters,
    align,
    lay_out,
    make_entry,
    map_for_reading,
    map_for_writing,
    name_parameters,
    open_shared_file,
    prepare_directory,
    read_tensor_list,
    set_digests,
    view_entry,
    write_tensor_list,
)
from rollway.weights.transports.shm_shards import (
    ShardReader,
    check_unchanged,
    join_offers,
)
from rollway.weights.untrusted import is_file_name

if TYPE_CHECKING:
    from rollway.weights.sources import HeldTensor

__all__ = ["ShmPublisher", "ShmReader", "join_offers"]

PREFIX = leftovers.WEIGHTS
_ALIGNMENT = 256
_GROWTH = 16 << 20
_SUM_THREADS = 4
"""Together they are faster than the one thread that copies."""


@dataclass(slots=True)
class _Slot:
    """The memory of one version, and the file beside it that lists its tensors."""

    path: Path
    version: int = -1
    memory: Tensor | None = None
    """All of it, as bytes."""
    pinning: Pinning | None = None
    """Set once a version came from a GPU: the next one is copied straight into the memory."""

    @property
    def manifest(self) -> Path:
        return self.path.with_name(f"{self.path.name}.json")

    @property
    def paths(self) -> tuple[Path, Path, Path]:
        return self.path, self.manifest, self.manifest.with_suffix(".partial")

    def grow(self, nbytes: int) -> Tensor:
        """Return the memory, enlarged if necessary; its contents stay."""
        if self.memory is None or self.memory.numel() < nbytes:
            old = 0 if self.memory is None else self.memory.numel()
            self.unpin()
            self.memory = None
            self.memory = map_for_writing(self.path, nbytes, old_nbytes=old)
        return self.memory

    def trim(self, nbytes: int) -> None:
        """Give back what was allocated beyond `nbytes`."""
        if self.memory is not None and 0 < nbytes < self.memory.numel():
            self.unpin()
            self.memory = self.memory[:nbytes]
            os.truncate(self.path, nbytes)

    def is_pinned(self) -> bool:
        return self.pinning is not None and self.pinning.is_pinned()

    def pin(self, device: torch.device) -> None:
        """Start to pin the memory, for the next version that comes from this GPU."""
        if self.pinning is None and self.memory is not None:
            self.pinning = Pinning(self.memory, device)

    def unpin(self) -> None:
        if self.pinning is not None:
            self.pinning.release()
            self.pinning = None

    def withdraw(self) -> None:
        """Remove the list of tensors: no reader accepts the bytes from now on."""
        self.manifest.unlink(missing_ok=True)
        self.version = -1

    def remove(self) -> None:
        for path in self.paths:
            path.unlink(missing_ok=True)
        self.unpin()
        self.memory, self.version = None, -1


class ShmPublisher(Publisher):
    """Publishes versions to readers on this machine; the newest `keep` stay readable.

    A rank that holds shards publishes them the same way (`from_module`, `from_megatron`). Collect
    the offers of all ranks in one process, and refit with `join_offers(offers)`.

    Example:
        with ShmPublisher() as publisher:
            stack.refit(1, publisher.publish(1, model.named_parameters()))
    """

    transport = "shm"

    def __init__(self, keep: int = 2, directory: Path = SHM) -> None:
        if keep < 1:
            raise UsageError(f"At least one version must be kept, not {keep}.")
        prepare_directory(directory, PREFIX)
        name = f"{PREFIX}{leftovers.writer_mark()}-{os.urandom(4).hex()}"
        slots = [_Slot(directory / f"{name}-{number}") for number in range(keep + 1)]
        # Adopted parameters have a slot that no published copy ever overwrites.
        self._adopted_slot, *self._slots = slots
        self._adopted: dict[str, Tensor] = {}
        self._copier = HostCopier()
        self._last_nbytes = 0
        """The size of the last version; mostly, the next one is as large."""
        self._guard = leftovers.Guard(*(path for slot in slots for path in slot.paths))

    def _publish(self, version: int, tensors: Source | None = None) -> Offer:
        if tensors is None and self._adopted:
            return self._publish_adopted(version)
        source = inspect_source(tensors)
        if source.shards:
            return self._publish_shards(version, source.shards)
        if source.is_stream:
            return self._publish_copies(version, source.tensors)
        pairs = list(source.tensors)
        nbytes = sum(align(tensor.nbytes, _ALIGNMENT) for _, tensor in pairs)
        return self._publish_copies(version, pairs, nbytes=nbytes)

    def adopt(self, tensors: Parameters) -> None:
        """Move parameters (`model.named_parameters()`) into shared memory, and publish them there.

        They must not change while a refit reads them: readers notice, and reject the version."""
        parameters = name_parameters(tensors)
        if any(parameter.device.type != "cpu" for parameter in parameters.values()):
            raise UsageError("Only parameters in CPU memory can be adopted.", "Use cuda_ipc.")
        entries, nbytes = lay_out(parameters, _ALIGNMENT)
        # A new file: parameters that were adopted before stay where they are.
        self._adopted_slot.remove()
        memory = self._adopted_slot.grow(nbytes)
        for entry, parameter in zip(entries, parameters.values(), strict=True):
            view = view_entry(memory, entry)
            view.copy_(parameter.detach())
            parameter.data = view
        self._adopted = {name: parameter.data for name, parameter in parameters.items()}

    def _close(self) -> None:
        """Remove all versions; readers keep the memory that they have mapped."""
        self._copier.close()
        for slot in (self._adopted_slot, *self._slots):
            slot.remove()
        self._guard.close()
        self._adopted = {}

    def _publish_adopted(self, version: int) -> Offer:
        slot = self._adopted_slot
        slot.withdraw()
        entries, nbytes = lay_out(self._adopted, _ALIGNMENT)
        sums = word_sums([view_entry(slot.grow(nbytes), entry) for entry in entries])
        return _announce(slot, version, entries, sums, nbytes)

    def _publish_shards(self, version: int, items: Sequence[HeldTensor]) -> Offer:
        """Publish what this rank owns; each shard lists the boxes of the model in it."""
        # A shard may consist of padding only; then it has no pieces.
        owned = [item for item in items if item.owned_here and item.pieces]
        boxes = {item.shard.name: list_boxes(item.pieces) for item in owned}
        tensors = [(item.shard.name, item.tensor) for item in owned]
        nbytes = sum(align(item.tensor.nbytes, _ALIGNMENT) for item in owned)
        return join_offers([self._publish_copies(version, tensors, boxes, nbytes)])

    def _publish_copies(
        self,
        version: int,
        tensors: Iterable[tuple[str, Tensor]],
        boxes: Mapping[str, Sequence[PlacedBox]] = MappingProxyType({}),
        nbytes: int = 0,
    ) -> Offer:
        """Copy tensors into the oldest slot as they come, and sum each while the next is copied.

        `nbytes` is the size of all of them, if it is known."""
        slot = min(self._slots, key=lambda slot: slot.version)
        # Before its bytes change: a reader in the middle of it then notices.
        slot.withdraw()
        before = slot.grow(nbytes or self._last_nbytes).numel()
        entries: dict[str, Entry] = {}
        sums = _Sums()
        end = 0
        with contextlib.closing(sums):
            for name, tensor in tensors:
                if name in entries:
                    raise UsageError(f"{name} came twice.", "Publish each name once.")
                entries[name] = make_entry(name, tensor, end, boxes=boxes.get(name, ()))
                end += align(tensor.nbytes, _ALIGNMENT)
                view = view_entry(self._grow(slot, end), entries[name])
                self._copier.copy(view, tensor.detach(), is_pinned=slot.is_pinned())
                sums.add(tensor.detach(), view)
            self._copier.finish()
            # Never below its old size: a reader that is late may still look at the old bytes.
            slot.trim(max(end, before))
            if sums.device is not None:
                slot.pin(sums.device)
            self._last_nbytes = end
            return _announce(slot, version, list(entries.values()), sums.totals(), end)

    def _grow(self, slot: _Slot, nbytes: int) -> Tensor:
        """Enlarge the memory, and by more than necessary: each time, all of it is mapped again."""
        memory = slot.grow(0)
        if memory.numel() >= nbytes:
            return memory
        self._copier.finish()  # copies into the old mapping
        return slot.grow(nbytes + max(_GROWTH, nbytes // 8))


class _Sums:
    """Sums tensors: those of a GPU there, those of a CPU in threads, after they were copied."""

    def __init__(self) -> None:
        self.device: torch.device | None = None
        """The GPU that tensors came from."""
        self._threads = ThreadPoolExecutor(_SUM_THREADS)
        self._on_cpu: dict[int, Future[int]] = {}
        self._on_gpu: dict[int, Tensor] = {}

    def add(self, source: Tensor, copy: Tensor) -> None:
        number = len(self._on_cpu) + len(self._on_gpu)
        if source.is_cuda:
            self.device = source.device
            self._on_gpu[number] = start_word_sum(source)
        else:
            self._on_cpu[number] = self._threads.submit(word_sum, copy)

    def totals(self) -> list[int]:
        sums = {number: total.result() for number, total in self._on_cpu.items()}
        sums |= zip(self._on_gpu, finish_word_sums(list(self._on_gpu.values())), strict=True)
        return [sums[number] for number in sorted(sums)]

    def close(self) -> None:
        self._threads.shutdown()


def _announce(
    slot: _Slot, version: int, entries: Sequence[Entry], sums: Sequence[int], nbytes: int
) -> Offer:
    """Write the list of tensors, which makes the version readable."""
    manifest = Manifest(version, nbytes, set_digests(entries, [f"{total:016x}" for total in sums]))
    write_tensor_list(slot.manifest, manifest)
    slot.version = version
    size = sum(entry.nbytes for entry in entries)
    return Offer("shm", version, manifest.identity, size, {"slot": slot.path.name})


class ShmLocation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The part of an offer that names the slot's file in /dev/shm."""

    slot: Annotated[str, msgspec.Meta(max_length=255)]


@dataclass(frozen=True, slots=True)
class _Map:
    """The bytes of a slot, mapped for reading."""

    inode: int
    memory: Tensor
    pinning: Pinning | None

    def release(self) -> None:
        """Unpin the bytes, which may be unmapped only then."""
        if self.pinning is not None:
            self.pinning.release()


class ShmReader(Reader):
    """Reads whole tensors of one publisher, or the shards of many.

    It keeps files mapped, so that the next version in the same slot costs no page faults. In a
    process that uses a GPU, it also pins them: the GPU then reads at the speed of the bus."""

    def __init__(self, directory: Path = SHM) -> None:
        self._directory = directory
        self._maps: dict[str, _Map] = {}
        """By slot."""

    def headers(self, offer: Offer) -> dict[str, TensorHeader]:
        if "ranks" in offer.where:
            return ShardReader(self, offer).headers()
        return self.manifest(offer).headers()

    def sums(self, offer: Offer) -> Mapping[str, int]:
        if "ranks" in offer.where:
            return {}  # a tensor's shards have sums, the tensor has none
        sums = {entry.name: entry.word_sum for entry in self.manifest(offer).entries}
        return {name: total for name, total in sums.items() if total is not None}

    def tensors(
        self, offer: Offer, summed: Callable[[str], bool] = never
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor in place, and check it when the caller requests the next one.

        The publisher may overwrite the memory at any time. So the check comes after the caller has
        copied the tensor: if it passes, the copy is what was published."""
        if "ranks" in offer.where:
            yield from ShardReader(self, offer).tensors()
            return
        manifest = self.manifest(offer)
        views = self.views(offer, manifest)
        for entry in manifest.entries:
            yield entry.name, views[entry.name]
            if not summed(entry.name):  # otherwise the caller compares the sum itself
                check_unchanged(views[entry.name], entry, offer)
        self.check_unreplaced(offer, manifest)

    def close(self) -> None:
        self._drop(list(self._maps))

    def _drop(self, slots: Iterable[str]) -> None:
        for slot in slots:
            self._maps.pop(slot).release()

    def manifest(self, offer: Offer) -> Manifest:
        """Read the list of tensors of the slot that the offer names."""
        slot = self._find_slot(offer)
        return read_manifest(read_tensor_list(slot.with_name(f"{slot.name}.json"), offer), offer)

    def views(self, offer: Offer, manifest: Manifest) -> dict[str, Tensor]:
        """View all tensors in place; the caller must check them after it has read them."""
        memory = self._map(self._find_slot(offer), manifest.nbytes)
        return {entry.name: view_entry(memory, entry) for entry in manifest.entries}

    def check_unreplaced(self, offer: Offer, manifest: Manifest) -> None:
        """Raise if the slot's list of tensors has changed since reading began."""
        if self.manifest(offer) != manifest:
            raise WeightsError(f"Version {offer.version} was overwritten while it was read.")

    def _find_slot(self, offer: Offer) -> Path:
        try:
            slot = msgspec.convert(offer.where, ShmLocation).slot
        except msgspec.ValidationError as error:
            raise WeightsError(
                f"This offer names no slot of shared memory: {error}.", "Publish the version again."
            ) from error
        if not is_file_name(slot, PREFIX):
            raise WeightsError(f"{slot!a} is no slot of shared memory.")
        return self._directory / slot

    def _map(self, path: Path, nbytes: int) -> Tensor:
        with open_shared_file(path) as (handle, status):
            if status.st_size < max(nbytes, 1):
                raise WeightsError(f"{path} does not hold {nbytes} bytes.")
            known = self._maps.get(path.name)
            is_same = known is not None and known.inode == status.st_ino
            if known is not None and is_same and known.memory.numel() >= nbytes:
                return known.memory
            # Drop the maps of removed files: a publisher that closed frees its memory.
            removed = [name for name in self._maps if not (self._directory / name).exists()]
            self._drop({*removed, path.name} & self._maps.keys())
            memory = map_for_reading(handle, status.st_size)
            self._maps[path.name] = _Map(status.st_ino, memory, _start_pinning(memory))
        return memory


def _start_pinning(memory: Tensor) -> Pinning | None:
    """Pin the memory in the background, if this process uses a GPU."""
    if not torch.cuda.is_initialized():
        return None
    device = torch.device("cuda", torch.cuda.current_device())
    return Pinning(memory, device, read_only=True)
