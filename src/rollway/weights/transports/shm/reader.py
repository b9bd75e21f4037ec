"""Read versions from shared memory, in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import torch
from torch import Tensor

from rollway.errors import WeightsError
from rollway.weights.checkpoint import TensorHeader
from rollway.weights.device_copies import Pinning
from rollway.weights.offer import Manifest, Offer, read_manifest
from rollway.weights.transports.base import Reader, never
from rollway.weights.transports.entries import view_entry
from rollway.weights.transports.shared_memory import (
    SHM,
    map_for_reading,
    open_shared_file,
    read_tensor_list,
)
from rollway.weights.transports.shm.publisher import PREFIX
from rollway.weights.transports.shm.shards import ShardReader, check_unchanged
from rollway.weights.untrusted import is_file_name


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
