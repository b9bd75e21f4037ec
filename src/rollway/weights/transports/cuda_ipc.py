"""Weights on one GPU, from one process to another: the reader copies out of the trainer's memory.

    trainer ── publish: copy into buckets, digest ──► device memory   (`adopt`: its own storages)
                 │ list of tensors: /dev/shm/rollway-ipc-…/<slot>.json   ▲ opened once
    offer ───────┴─ IPC handles of the buckets ─────────────────────────┤
    worker  ◄── one copy on the device; digests compared after the copies ┘

An offer exists only when its copies are done: publishing waits for their digests. Handles are
opened once, since later versions lie in the same buckets. CPU tensors go the same way through
shared memory, so that everything but the handles works alike where there is no GPU.
"""

from __future__ import annotations

import os
import shutil
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from torch import Tensor

from rollway.errors import UsageError, WeightsError
from rollway.weights import owner
from rollway.weights.bits import DTYPES, digests, dtype_name
from rollway.weights.checkpoint import TensorHeader
from rollway.weights.copies import copy_all
from rollway.weights.offer import Count, Entry, Manifest, Offer, read_manifest
from rollway.weights.transports.device_memory import (
    Handle,
    device_name,
    export,
    local_device,
    opened,
    room,
)

SHM = Path("/dev/shm")
BUCKET_BYTES = 1 << 30
_PREFIX = "rollway-ipc-"
_ALIGNED = 512
_MOST_MANIFEST_BYTES = 1 << 30
_COMPARED = 2 << 30
"""Bytes whose digests are compared together; a GPU that is asked more often waits."""


class Where(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of an offer: the device, the buckets in order, and the file with the list of tensors."""

    device: Annotated[str, msgspec.Meta(max_length=64)]
    """A GPU's UUID, or `cpu`."""
    directory: Annotated[str, msgspec.Meta(max_length=128)]
    slot: Count
    buckets: Annotated[list[Handle], msgspec.Meta(max_length=1 << 16)]


@dataclass(slots=True)
class _Slot:
    """Memory for one version. An entry's offset counts through all buckets as if they were one."""

    number: int
    version: int = -1
    buckets: list[Tensor] = field(default_factory=list)
    """As bytes."""
    handles: list[Handle] = field(default_factory=list)


@dataclass(slots=True)
class _Adopted:
    """Parameters that are published from where they are."""

    slot: _Slot
    entries: list[Entry]
    named: Mapping[str, Tensor]
    places: list[int]

    def views(self) -> list[Tensor]:
        for (name, parameter), place in zip(self.named.items(), self.places, strict=True):
            if parameter.data_ptr() != place:
                raise UsageError(
                    f"{name} is not where it was when it was adopted.",
                    "Adopt the module again, or publish its tensors by name.",
                )
        return [parameter.detach() for parameter in self.named.values()]


class CudaIpcPublisher:
    """Publishes versions to readers on this machine; the newest `keep` stay readable, and take as
    much memory of the device each. What a reader still has open goes back when it lets go."""

    def __init__(
        self, keep: int = 1, bucket_bytes: int = BUCKET_BYTES, directory: Path = SHM
    ) -> None:
        if keep < 1 or bucket_bytes < 1:
            raise UsageError(f"{keep} versions in buckets of {bucket_bytes} bytes keep nothing.")
        if not directory.is_dir():
            raise UsageError(f"There is no shared memory at {directory}.", "Publish to files.")
        remove_abandoned(directory)
        self._directory = directory / f"{_PREFIX}{owner.mark()}-{os.urandom(4).hex()}"
        self._directory.mkdir(mode=0o700)
        self._bucket_bytes = bucket_bytes
        self._slots = [_Slot(number) for number in range(keep)]
        self._adopted: _Adopted | None = None

    def publish(self, version: int, tensors: Iterable[tuple[str, Tensor]] = ()) -> Offer:
        """Put a version where workers can read it; without tensors, those that were adopted."""
        given = {name: tensor.detach() for name, tensor in tensors}
        if not given and self._adopted is None:
            raise UsageError("There are no tensors to publish.")
        if not given:
            assert self._adopted is not None
            slot, entries, views = self._adopted.slot, self._adopted.entries, self._adopted.views()
            self._take_away(slot)
        else:
            slot = min(self._slots, key=_age)
            self._take_away(slot)  # before its bytes change: whoever reads it now learns of it
            entries, views = self._pack(slot, given)
        found = digests(views)  # these are there when the copies before them are
        entries = [
            msgspec.structs.replace(one, digest=each)
            for one, each in zip(entries, found, strict=True)
        ]
        return self._offer(slot, version, entries, views[0].device)

    def adopt(self, module: torch.nn.Module) -> None:
        """Publish a module's parameters from where they are, without a copy (on a CPU, where they
        are not in shared memory, they are moved there first). They must not change while a refit
        reads them: it would be noticed, and refused."""
        named = dict(module.named_parameters())
        if not named:
            raise UsageError("This module has no parameters to publish.")
        _one_device(named)
        slot = _Slot(len(self._slots))
        if next(iter(named.values())).device.type == "cpu":
            entries, views = self._pack(slot, {name: p.detach() for name, p in named.items()})
            for parameter, view in zip(named.values(), views, strict=True):
                parameter.data = view
        else:
            entries = _in_place(slot, named)
            slot.handles = [export(bucket) for bucket in slot.buckets]
        places = [parameter.data_ptr() for parameter in named.values()]
        self._adopted = _Adopted(slot, entries, named, places)

    def retire(self, version: int) -> None:
        """No reader can begin with this version any more; its memory is kept for the next."""
        for slot in self._all_slots():
            if slot.version == version:
                self._take_away(slot)

    def close(self) -> None:
        """Take everything away."""
        shutil.rmtree(self._directory, ignore_errors=True)
        for slot in self._all_slots():
            slot.buckets, slot.handles = [], []
        self._adopted = None
        if torch.cuda.is_initialized():
            torch.cuda.ipc_collect()

    def __enter__(self) -> CudaIpcPublisher:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _all_slots(self) -> list[_Slot]:
        return [*self._slots, *([self._adopted.slot] if self._adopted else [])]

    def _take_away(self, slot: _Slot) -> None:
        self._manifest(slot).unlink(missing_ok=True)
        slot.version = -1

    def _manifest(self, slot: _Slot) -> Path:
        return self._directory / f"{slot.number}.json"

    def _pack(self, slot: _Slot, given: dict[str, Tensor]) -> tuple[list[Entry], list[Tensor]]:
        """Copy tensors into the slot's buckets, which are made where they do not fit."""
        device = _one_device(given)
        entries, sizes = _laid_out(given, self._bucket_bytes)
        held = [bucket.numel() for bucket in slot.buckets]
        if held != sizes or slot.buckets[0].device != device:
            for one in slot.handles:
                if one.file:
                    (self._directory / one.file).unlink(missing_ok=True)
            slot.buckets, slot.handles = [], []  # before the new ones: there may be room for one
            for number, size in enumerate(sizes):
                path = self._directory / f"{slot.number}.{number}.{os.urandom(4).hex()}"
                slot.buckets.append(room(size, device, path))
                slot.handles.append(export(slot.buckets[-1], path))
        views = _views(entries, slot.buckets)
        copy_all(list(zip(views, given.values(), strict=True)))
        return entries, views

    def _offer(
        self, slot: _Slot, version: int, entries: list[Entry], device: torch.device
    ) -> Offer:
        manifest = Manifest(version, sum(b.numel() for b in slot.buckets), entries)
        path = self._manifest(slot)
        scratch = path.with_suffix(".partial")
        scratch.unlink(missing_ok=True)
        handle = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(manifest.encode())
        scratch.replace(path)
        slot.version = version
        where = Where(device_name(device), self._directory.name, slot.number, slot.handles)
        size = sum(one.nbytes for one in entries)
        as_json: dict[str, Any] = msgspec.to_builtins(where)
        return Offer("cuda_ipc", version, manifest.identity, size, as_json)


class CudaIpcReader:
    """Reads offers in place; what was opened stays open for the versions that come."""

    def __init__(self, directory: Path = SHM) -> None:
        self._directory = directory
        self._publisher = ""
        self._open: dict[int, dict[Handle, Tensor]] = {}
        """By slot: one whose buckets were made anew does not keep the old ones."""

    def headers(self, offer: Offer) -> dict[str, TensorHeader]:
        return self.manifest(offer).headers()

    def manifest(self, offer: Offer) -> Manifest:
        return read_manifest(self._look(offer, _where(offer)), offer)

    def tensors(self, offer: Offer) -> Iterator[tuple[str, Tensor]]:
        """Each tensor, as a view of the trainer's memory. Digests are compared when a few
        gigabytes were taken, and at the end: by then the copies are done, and what was copied is
        what was published, or this raises. Copy on the stream that is current here."""
        where = _where(offer)
        manifest = read_manifest(self._look(offer, where), offer)
        buckets = self._buckets(where, manifest)
        at_once = _COMPARED if buckets[0].device.type == "cuda" else 0
        taken: list[tuple[Entry, Tensor]] = []
        nbytes = 0
        for one, view in zip(manifest.entries, _views(manifest.entries, buckets), strict=True):
            yield one.name, view
            taken.append((one, view))
            nbytes += one.nbytes
            if nbytes >= at_once:
                _compare(taken, offer)
                taken, nbytes = [], 0
        _compare(taken, offer)
        if read_manifest(self._look(offer, where), offer) != manifest:
            raise WeightsError(f"Version {offer.version} was written over while it was read.")

    def close(self) -> None:
        """Let go of the trainer's memory."""
        self._open = {}

    def _look(self, offer: Offer, where: Where) -> bytes:
        name = where.directory
        if Path(name).name != name or not name.startswith(_PREFIX):
            raise WeightsError(f"`{name}` is no directory of a publisher.")
        try:
            if owner.gone(name, 0.0):
                raise FileNotFoundError(name)  # what it held may be anybody's by now
            handle = os.open(
                self._directory / name / f"{where.slot}.json", os.O_RDONLY | os.O_NOFOLLOW
            )
            with os.fdopen(handle, "rb") as file:
                raw = file.read(_MOST_MANIFEST_BYTES + 1)
        except FileNotFoundError as error:
            self.close()
            raise WeightsError(
                f"Version {offer.version} is not in the trainer's memory any more.",
                "Its publisher has ended, or has published others since.",
            ) from error
        except OSError as error:
            raise WeightsError(
                f"The list of tensors of version {offer.version} cannot be read: {error.strerror}.",
                "Run trainer and workers as one user, and let their containers share /dev/shm.",
            ) from error
        if len(raw) > _MOST_MANIFEST_BYTES:
            raise WeightsError(f"The list of tensors of version {offer.version} is too long.")
        return raw

    def _buckets(self, where: Where, manifest: Manifest) -> list[Tensor]:
        if sum(one.nbytes for one in where.buckets) != manifest.nbytes:
            raise WeightsError("The buckets of an offer are not as long as what lies in them.")
        device = local_device(where.device)
        if self._publisher != where.directory:
            self.close()  # one that went away takes its memory with it
            self._publisher = where.directory
        known = self._open.pop(where.slot, {})
        found = {
            one: known[one]
            if one in known
            else opened(one, device, self._directory / self._publisher)
            for one in where.buckets
        }
        self._open[where.slot] = found
        return [found[one] for one in where.buckets]


def remove_abandoned(directory: Path = SHM) -> None:
    """Remove what publishers that died have left."""
    for path in directory.glob(f"{_PREFIX}*"):
        if owner.gone(path.name, 0.0):
            shutil.rmtree(path, ignore_errors=True)


def _where(offer: Offer) -> Where:
    try:
        where = msgspec.convert(offer.where, Where)
    except msgspec.ValidationError as error:
        raise WeightsError(f"This is no offer by CUDA IPC: {error}.") from error
    if not where.buckets:
        raise WeightsError("An offer by CUDA IPC names no memory.")
    return where


def _compare(taken: Sequence[tuple[Entry, Tensor]], offer: Offer) -> None:
    found = digests([view for _, view in taken])
    for (one, _), each in zip(taken, found, strict=True):
        if each != one.digest:
            raise WeightsError(
                f"{one.name} of version {offer.version} changed while it was read.",
                "Publish the version again, and change nothing before the refit has ended.",
            )


def _laid_out(tensors: Mapping[str, Tensor], most: int) -> tuple[list[Entry], list[int]]:
    """Where each tensor goes, and how long the buckets are: one that is longer has its own."""
    entries: list[Entry] = []
    sizes: list[int] = [0]
    start = 0
    for name, tensor in tensors.items():
        nbytes = tensor.numel() * tensor.element_size()
        if sizes[-1] and sizes[-1] + nbytes > most:
            start += sizes[-1]
            sizes.append(0)
        shape = tuple(tensor.shape)
        entries.append(Entry(name, dtype_name(tensor), shape, start + sizes[-1], nbytes))
        sizes[-1] += -(-nbytes // _ALIGNED) * _ALIGNED
    sizes[-1] = max(sizes[-1], _ALIGNED)
    return entries, sizes


def _in_place(slot: _Slot, named: Mapping[str, Tensor]) -> list[Entry]:
    """Make the storages of tensors the slot's buckets; several tensors may lie in one."""
    starts: dict[int, int] = {}
    end, entries = 0, []
    for name, tensor in named.items():
        storage = tensor.untyped_storage()
        if not tensor.is_contiguous() or not storage.nbytes():
            raise UsageError(f"{name} does not lie in one run.", "Publish it by name instead.")
        if storage.data_ptr() not in starts:
            starts[storage.data_ptr()] = end
            end += storage.nbytes()
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            slot.buckets.append(whole.set_(storage))
        size = tensor.element_size()
        at = starts[storage.data_ptr()] + tensor.storage_offset() * size
        shape = tuple(tensor.shape)
        entries.append(Entry(name, dtype_name(tensor), shape, at, tensor.numel() * size))
    return entries


def _views(entries: Sequence[Entry], buckets: Sequence[Tensor]) -> list[Tensor]:
    starts = [0, *accumulate(bucket.numel() for bucket in buckets)][:-1]
    views = []
    for one in entries:
        number = bisect_right(starts, one.offset) - 1
        at = one.offset - starts[number]
        part = buckets[number][at : at + one.nbytes]
        if part.numel() != one.nbytes or at % max(1, DTYPES[one.dtype].itemsize):
            raise WeightsError(f"{one.name} does not lie in one bucket.")
        views.append(part.view(DTYPES[one.dtype]).view(one.shape))
    return views


def _one_device(tensors: Mapping[str, Tensor]) -> torch.device:
    devices = {tensor.device for tensor in tensors.values()}
    if len(devices) > 1 or next(iter(devices)).type not in ("cpu", "cuda"):
        raise UsageError(
            f"These tensors are on {', '.join(sorted(map(str, devices)))}.",
            "Use a publisher for each GPU.",
        )
    return devices.pop()


def _age(slot: _Slot) -> int:
    return slot.version
