"""Weights through shared memory: one copy out of the trainer's memory, on one machine.

    rank 0 ── publish: copy, sum ──► slot in /dev/shm ─┐                             ┌─ one copy,
    rank 1 ── publish: copy, sum ──► slot in /dev/shm ─┼─ join_offers ─► worker reads┤  then sums
    …                                                  ┘                             └─ compared

Every rank of a trainer publishes what it owns, and nothing is gathered. A slot lists the boxes of
Hugging Face tensors that it contains: those of a rank that holds everything are whole tensors
(`rollway.weights.sources` finds the others for FSDP2, tensor parallel and Megatron models). So a
reader needs no trainer installed and copies every element once.

`adopt` moves a model's own parameters into a slot, so that publishing copies nothing at all. The
publisher removes a slot's list of tensors before it overwrites the bytes, and a reader checks the
list again after it has read: it never receives a mixture of two versions.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec
import torch
from torch import Tensor

from rollway.errors import UsageError, WeightsError
from rollway.weights import leftovers
from rollway.weights.checkpoint import TensorHeader
from rollway.weights.device_copies import HostCopier, Pinning
from rollway.weights.digest.checksums import finish_word_sums, start_word_sum, word_sum, word_sums
from rollway.weights.layout import ELEMENT_BYTES, Box, check_covered
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
    set_sums,
    view_entry,
    write_tensor_list,
)
from rollway.weights.untrusted import is_file_name

if TYPE_CHECKING:
    from rollway.weights.sources import HeldTensor

PREFIX = leftovers.WEIGHTS
_ALIGNMENT = 256
_GROWTH = 16 << 20


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
        return self._publish_copies(version, tensors, boxes, nbytes)

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
        on_gpu: dict[str, Tensor] = {}
        """The sums of tensors on a GPU, which computes them."""
        device: torch.device | None = None
        end = 0
        for name, tensor in tensors:
            if name in entries:
                raise UsageError(f"{name} came twice.", "Publish each name once.")
            entries[name] = make_entry(name, tensor, end, boxes=boxes.get(name, ()))
            end += align(tensor.nbytes, _ALIGNMENT)
            view = view_entry(self._grow(slot, end), entries[name])
            self._copier.copy(view, tensor.detach(), is_pinned=slot.is_pinned())
            if tensor.is_cuda:
                device, on_gpu[name] = tensor.device, start_word_sum(tensor)
        self._copier.finish()
        # Never below its old size: a reader that is late may still look at the old bytes.
        slot.trim(max(end, before))
        if device is not None:
            slot.pin(device)
        self._last_nbytes = end
        on_cpu = [name for name in entries if name not in on_gpu]
        copies = [view_entry(slot.grow(end), entries[name]) for name in on_cpu]
        sums = dict(zip(on_cpu, word_sums(copies), strict=True))
        sums |= zip(on_gpu, finish_word_sums(list(on_gpu.values())), strict=True)
        return _announce(slot, version, list(entries.values()), [sums[n] for n in entries], end)

    def _grow(self, slot: _Slot, nbytes: int) -> Tensor:
        """Enlarge the memory, and by more than necessary: each time, all of it is mapped again."""
        memory = slot.grow(0)
        if memory.numel() >= nbytes:
            return memory
        self._copier.finish()  # copies into the old mapping
        return slot.grow(nbytes + max(_GROWTH, nbytes // 8))


def _announce(
    slot: _Slot, version: int, entries: Sequence[Entry], sums: Sequence[int], nbytes: int
) -> Offer:
    """Write the list of tensors, which makes the version readable."""
    manifest = Manifest(version, nbytes, set_sums(entries, sums))
    write_tensor_list(slot.manifest, manifest)
    slot.version = version
    size = sum(entry.nbytes for entry in entries)
    ranks = [RankSlot(slot.path.name, manifest.identity)]
    return Offer("shm", version, manifest.identity, size, {"ranks": msgspec.to_builtins(ranks)})


class _Map(NamedTuple):
    """The bytes of a slot, mapped for reading. They are unpinned when nobody refers to them."""

    inode: int
    memory: Tensor
    pinning: Pinning | None


class ShmReader(Reader):
    """Reads whole tensors of one publisher, or the shards of many.

    It keeps files mapped, so that the next version in the same slot costs no page faults. In a
    process that uses a GPU, it also pins them: the GPU then reads at the speed of the bus."""

    def __init__(self, directory: Path = SHM) -> None:
        self._directory = directory
        self._maps: dict[str, _Map] = {}
        """By slot."""

    def headers(self, offer: Offer) -> dict[str, TensorHeader]:
        return {
            name: TensorHeader(parts[0].entry.dtype, _find_shape(parts), "")
            for name, parts in group_by_tensor(self._read_manifests(offer)).items()
        }

    def sums(self, offer: Offer) -> Mapping[str, int]:
        """Return the sums of whole tensors: parts have some, which do not add up to a tensor's."""
        entries = [e for manifest in self._read_manifests(offer) for e in manifest.entries]
        sums = {entry.name: entry.word_sum for entry in entries if not entry.boxes}
        return {name: total for name, total in sums.items() if total is not None}

    def tensors(
        self, offer: Offer, summed: Callable[[str], bool] = never
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor, in place if one slot has it whole, and check it when the caller
        requests the next one.

        The publisher may overwrite the memory at any time. So the check comes after the caller has
        copied the tensor: if it passes, the copy is what was published."""
        manifests = self._read_manifests(offer)
        views = [
            self._view(self._find_slot(rank), manifest)
            for rank, manifest in zip(_read_ranks(offer), manifests, strict=True)
        ]
        tensors = group_by_tensor(manifests)
        unread = Counter((p.rank, p.entry.name) for parts in tensors.values() for p in parts)
        for name, parts in tensors.items():
            yield name, assemble(parts, views)
            if summed(name):  # the caller compares the sum itself
                continue
            for part in parts:
                unread[part.rank, part.entry.name] -= 1
                # A slot's tensor has one sum for all that is in it: compared after the last of it.
                if not unread[part.rank, part.entry.name]:
                    _check_unchanged(views[part.rank][part.entry.name], part.entry, offer)
        if self._read_manifests(offer) != manifests:
            raise WeightsError(f"Version {offer.version} was overwritten while it was read.")

    def close(self) -> None:
        self._maps = {}

    def _read_manifests(self, offer: Offer) -> list[Manifest]:
        """Read the lists of tensors of all slots that the offer names."""
        manifests = []
        for rank in _read_ranks(offer):
            slot = self._find_slot(rank)
            raw = read_tensor_list(slot.with_name(f"{slot.name}.json"), offer)
            of_rank = msgspec.structs.replace(offer, identity=rank.identity)
            manifests.append(read_manifest(raw, of_rank))
        return manifests

    def _view(self, slot: Path, manifest: Manifest) -> dict[str, Tensor]:
        """View all tensors in place; the caller must check them after it has read them."""
        memory = self._map(slot, manifest.nbytes)
        return {entry.name: view_entry(memory, entry) for entry in manifest.entries}

    def _find_slot(self, rank: RankSlot) -> Path:
        if not is_file_name(rank.slot, PREFIX):
            raise WeightsError(f"{rank.slot!a} is no slot of shared memory.")
        return self._directory / rank.slot

    def _map(self, path: Path, nbytes: int) -> Tensor:
        with open_shared_file(path) as (handle, status):
            if status.st_size < max(nbytes, 1):
                raise WeightsError(f"{path} does not hold {nbytes} bytes.")
            known = self._maps.get(path.name)
            is_same = known is not None and known.inode == status.st_ino
            if known is not None and is_same and known.memory.numel() >= nbytes:
                return known.memory
            # Drop the maps of removed files: a publisher that closed frees its memory.
            self._maps = {
                name: kept
                for name, kept in self._maps.items()
                if name != path.name and (self._directory / name).exists()
            }
            memory = map_for_reading(handle, status.st_size)
            self._maps[path.name] = _Map(status.st_ino, memory, _start_pinning(memory))
        return memory


def _start_pinning(memory: Tensor) -> Pinning | None:
    """Pin the memory in the background, if this process uses a GPU."""
    if not torch.cuda.is_initialized():
        return None
    device = torch.device("cuda", torch.cuda.current_device())
    return Pinning(memory, device, read_only=True)


class RankSlot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The slot that one rank published, and the identity of what is in it."""

    slot: Annotated[str, msgspec.Meta(max_length=255)]
    identity: Annotated[str, msgspec.Meta(min_length=8, max_length=128)]


_RankSlots = Annotated[list[RankSlot], msgspec.Meta(min_length=1, max_length=1 << 16)]


def join_offers(offers: Sequence[Offer]) -> Offer:
    """Join the offers of all ranks of a trainer into one, for one refit.

    Args:
        offers: what each rank's shm publisher returned, in the order of the ranks.

    Raises:
        UsageError: the ranks offer different versions.

    Returns:
        One offer for `Stack.refit`.

    Example:
        stack.refit(step, rollway.join_offers(offers))
    """
    versions = {offer.version for offer in offers}
    if len(versions) != 1:
        raise UsageError(
            f"Ranks offer different versions: {sorted(versions)}.", "Publish one on all of them."
        )
    ranks = [rank for offer in offers for rank in _read_ranks(offer)]
    identity = hashlib.sha256("".join(rank.identity for rank in ranks).encode()).hexdigest()[:32]
    where = {"ranks": msgspec.to_builtins(ranks)}
    return Offer("shm", versions.pop(), identity, sum(offer.nbytes for offer in offers), where)


def _read_ranks(offer: Offer) -> list[RankSlot]:
    try:
        return msgspec.convert(offer.where.get("ranks"), _RankSlots)
    except msgspec.ValidationError as error:
        raise WeightsError(
            f"This is no offer of a trainer's ranks: {error}.", "Publish the version again."
        ) from error


def _check_unchanged(view: Tensor, entry: Entry, offer: Offer) -> None:
    if word_sum(view) != entry.word_sum:
        raise WeightsError(
            f"{entry.name} of version {offer.version} changed while it was read.",
            "Publish the version again, and change nothing before the refit has ended.",
        )


class _Part(NamedTuple):
    """A box of a Hugging Face tensor, inside a shard of a rank."""

    rank: int
    entry: Entry
    placed: PlacedBox

    def cut_from(self, views: Sequence[dict[str, Tensor]]) -> Tensor:
        sizes = zip(self.placed.at, self.placed.extent, strict=True)
        box = views[self.rank][self.entry.name][tuple(slice(a, a + n) for a, n in sizes)]
        return box.t() if self.placed.transposed else box


def group_by_tensor(manifests: Sequence[Manifest]) -> dict[str, list[_Part]]:
    """Return the parts of each Hugging Face tensor; raise unless they cover it exactly once."""
    parts_by_name: dict[str, list[_Part]] = {}
    for rank, manifest in enumerate(manifests):
        for entry in manifest.entries:
            for placed in entry.placed:
                parts_by_name.setdefault(placed.name, []).append(_Part(rank, entry, placed))
    published = sum(entry.nbytes for manifest in manifests for entry in manifest.entries)
    for name, parts in parts_by_name.items():
        if len({(len(part.placed.stop), part.entry.dtype) for part in parts}) > 1:
            raise WeightsError(f"Ranks do not agree on the shape or dtype of {name}.")
        shape = _find_shape(parts)
        boxes = [Box(part.placed.start, part.placed.stop) for part in parts]
        try:
            check_covered(name, shape, [box for box in boxes if box.elements])
        except UsageError as error:
            raise WeightsError(error.message, error.hint) from error
        # Boxes that all refer to the same bytes could describe a tensor of any size.
        nbytes = math.prod(shape) * ELEMENT_BYTES[parts[0].entry.dtype]
        if nbytes > published:
            raise WeightsError(
                f"{name} would have {nbytes} bytes, and all ranks published {published}.",
                "Publish the version again.",
            )
    return parts_by_name


def _find_shape(parts: Sequence[_Part]) -> tuple[int, ...]:
    """Return the smallest shape that contains all parts; a worker compares it with its own."""
    return tuple(max(column) for column in zip(*(part.placed.stop for part in parts), strict=True))


def assemble(parts: Sequence[_Part], views: Sequence[dict[str, Tensor]]) -> Tensor:
    """Return the whole tensor: in place, if it is contiguous in one shard."""
    if len(parts) == 1:
        return parts[0].cut_from(views).contiguous()
    dtype = views[parts[0].rank][parts[0].entry.name].dtype
    whole = torch.empty(_find_shape(parts), dtype=dtype)
    for part in parts:
        box = zip(part.placed.start, part.placed.stop, strict=True)
        whole[tuple(slice(a, b) for a, b in box)] = part.cut_from(views)
    return whole
