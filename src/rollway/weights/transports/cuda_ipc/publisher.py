"""Publish versions in device memory that other processes open by CUDA IPC."""

from __future__ import annotations

import logging
import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from torch import Tensor

from rollway.errors import UsageError, WeightsError
from rollway.weights import leftovers
from rollway.weights.device_copies import explain_exhaustion
from rollway.weights.digest.checksums import Checksum, prepare_checksums
from rollway.weights.offer import Count, Entry, Manifest, Offer
from rollway.weights.transports.base import Publisher, Source, inspect_source
from rollway.weights.transports.cuda_ipc.device_memory import (
    Handle,
    Segment,
    Signature,
    Slot,
    device_name,
    export_segment,
    find_device,
    list_segments,
    sign,
)
from rollway.weights.transports.entries import (
    SHM,
    Parameters,
    make_entry,
    name_parameters,
    prepare_directory,
    set_checksums,
    view_entries,
    write_tensor_list,
)

log = logging.getLogger(__name__)

BUCKET_BYTES = 1 << 30
PREFIX = leftovers.IPC
_MAX_REASON = 4096


class IpcLocation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The part of an offer that names the device, the buckets and the file that lists tensors."""

    device: Annotated[str, msgspec.Meta(max_length=64)]
    """A GPU's UUID, or `cpu`."""
    directory: Annotated[str, msgspec.Meta(max_length=255)]
    slot: Count
    buckets: Annotated[list[Handle], msgspec.Meta(max_length=1 << 16)]
    copied_bytes: Count = 0
    """How much of the version the publisher copied; the rest is the trainer's own memory."""
    why_copied: Annotated[str, msgspec.Meta(max_length=_MAX_REASON)] = ""
    keep_open: bool = True
    """Whether readers keep the memory open for the next version."""


@dataclass(slots=True)
class _Adopted:
    """Parameters that are published from their own memory when none are passed."""

    slot: Slot
    parameters: dict[str, Tensor]
    addresses: list[int]
    placed: InPlace

    def check_unmoved(self) -> None:
        """Raise `UsageError` if a parameter is somewhere else by now."""
        for (name, parameter), address in zip(self.parameters.items(), self.addresses, strict=True):
            if parameter.data_ptr() != address:
                raise UsageError(
                    f"{name} has moved in memory since it was adopted.",
                    "Adopt the parameters again, or pass them to `publish`.",
                )


class CudaIpcPublisher(Publisher):
    """Publishes versions to readers on this machine; the newest `keep` stay readable.

    Each takes as much memory of the device as the model. With `in_place`, or after `adopt`,
    tensors are published from their own memory instead: parameters, and all tensors that are passed
    in a collection rather than by an iterator. Only what has no memory that can be shared is copied
    (`IpcLocation.copied_bytes`). There is one version then: the trainer must not change its tensors
    until the refit has returned. A change is noticed, and the refit fails.

    Memory that a reader has open is freed only when the reader closes it. Readers keep it open for
    the next version, unless `keep_open` is False: for a trainer that frees or offloads its
    parameters between refits."""

    transport = "cuda_ipc"

    def __init__(
        self,
        keep: int = 1,
        bucket_bytes: int = BUCKET_BYTES,
        directory: Path = SHM,
        *,
        in_place: bool = False,
        keep_open: bool = True,
    ) -> None:
        if keep < 1 or bucket_bytes < 1:
            raise UsageError(
                f"{keep} versions in buckets of {bucket_bytes} bytes keep nothing.",
                "Both must be 1 or more.",
            )
        prepare_directory(directory, PREFIX)
        self._directory = directory / f"{PREFIX}{leftovers.writer_mark()}-{os.urandom(4).hex()}"
        self._directory.mkdir(mode=0o700)
        self._guard = leftovers.Guard(self._directory)
        self._in_place, self._keep_open = in_place, keep_open
        slots = [Slot(number, self._directory, bucket_bytes) for number in range(keep + 3)]
        # The last three are for versions in place: adopted or passed, and what must be copied.
        *self._slots, self._adopted_slot, self._own_slot, self._rest = slots
        self._adopted: _Adopted | None = None
        self._placed: InPlace | None = None
        """Where the parameters of the last version in place are."""

    def _publish(self, version: int, tensors: Source | None = None) -> Offer:
        """Publish a version; no more than one bucket's tensors are held at a time."""
        if tensors is None and self._adopted is not None:
            return self._publish_adopted(version, self._adopted)
        source = inspect_source(tensors)
        if self._in_place:
            return self._publish_in_place(version, source.pairs(), source.is_stream)
        slot = min(self._slots, key=lambda slot: slot.version)
        self._withdraw(slot)  # before its bytes change: a reader of it then notices
        pairs = ((n, _secure(tensor, source.is_stream)) for n, tensor in source.pairs())
        try:
            with explain_exhaustion(
                f"version {version}, which cuda_ipc copies",
                "Pass in_place=True, which publishes parameters from their own memory, or use shm.",
            ):
                entries = slot.copy(pairs)
        except WeightsError:
            slot.release()  # half a version: the trainer needs its memory
            raise
        return self._announce(slot, version, entries, [])

    def adopt(self, tensors: Parameters) -> None:
        """Publish these parameters (`model.named_parameters()`) from their own memory.

        On a CPU, they are first moved into shared memory. They must not change while a refit reads
        them: readers notice, and reject the version."""
        parameters = name_parameters(tensors)
        if not parameters:
            raise UsageError("There are no parameters to adopt.", "Pass `named_parameters()`.")
        find_device(parameters.values())
        placed = self._find(parameters, parameters, self._adopted_slot)
        addresses = [parameter.data_ptr() for parameter in parameters.values()]
        self._adopted = _Adopted(self._adopted_slot, parameters, addresses, placed)

    def wait(self, version: int, seconds: float | None = None) -> None:
        """Return at once: readers have the version when the refit has ended."""
        if not self._keep_open:
            self._placed = None  # it refers to the parameters, which the trainer frees next

    def _close(self) -> None:
        """Remove all versions."""
        self._guard.close()
        for slot in (*self._slots, self._adopted_slot, self._own_slot, self._rest):
            slot.release()
        self._adopted = self._placed = None
        if torch.cuda.is_initialized():
            torch.cuda.ipc_collect()

    def _publish_adopted(self, version: int, adopted: _Adopted) -> Offer:
        adopted.check_unmoved()
        self._withdraw(adopted.slot)
        refused = ((n, adopted.parameters[n].detach()) for n in adopted.placed.refused)
        copied = self._rest.copy(refused)
        return self._announce_in_place(adopted.slot, version, copied, adopted.placed, 0)

    def _publish_in_place(
        self, version: int, tensors: Iterator[tuple[str, Tensor]], is_stream: bool
    ) -> Offer:
        """Publish tensors from their own memory, and copies of what cannot be published so.

        Of a stream, only parameters are: another tensor may be one that the trainer gathered for
        this call, and the next one may get its memory."""
        self._withdraw(self._own_slot)
        parameters: dict[str, Tensor] = {}
        others = 0

        def list_others() -> Iterator[tuple[str, Tensor]]:
            nonlocal others
            for name, tensor in tensors:
                if name in parameters:
                    raise UsageError(f"{name} came twice.", "Publish each name once.")
                if is_stream and not isinstance(tensor, torch.nn.Parameter):
                    others += 1
                    yield name, _secure(tensor, is_stream)
                else:
                    parameters[name] = tensor
            self._placed = self._place(parameters)
            for name in self._placed.refused:
                yield name, parameters[name].detach()

        copied = self._rest.copy(list_others())
        assert self._placed is not None
        return self._announce_in_place(self._own_slot, version, copied, self._placed, others)

    def _place(self, parameters: dict[str, Tensor]) -> InPlace:
        """Find where parameters are; this is done again only if one of them has moved."""
        known = self._placed
        if known is not None and known.signature == sign(parameters):
            return known
        movable = {n: p for n, p in parameters.items() if isinstance(p, torch.nn.Parameter)}
        return self._find(parameters, movable, self._own_slot)

    def _find(
        self, parameters: dict[str, Tensor], movable: dict[str, Tensor], slot: Slot
    ) -> InPlace:
        """Find where parameters on a GPU are; move those in CPU memory that may be moved."""
        if parameters and find_device(parameters.values()).type != "cpu":
            placed = find_in_place({name: p.detach() for name, p in parameters.items()})
        else:
            placed = _move(parameters, movable, slot)
        if placed.refused:
            reasons = placed.describe_refused()
            log.warning("some tensors cannot be published in place and are copied: %s", reasons)
        return placed

    def _withdraw(self, slot: Slot) -> None:
        """Remove the list of tensors: no reader accepts the bytes from now on."""
        self._manifest_path(slot).unlink(missing_ok=True)
        slot.version = -1

    def _manifest_path(self, slot: Slot) -> Path:
        return self._directory / f"{slot.number}.json"

    def _announce_in_place(
        self, slot: Slot, version: int, copied: list[Entry], placed: InPlace, others: int
    ) -> Offer:
        if placed.tensors.keys() & {entry.name for entry in copied}:
            raise UsageError("A tensor came twice.", "Publish each name once.")
        entries = copied + placed.list_entries(self._rest.nbytes)
        reasons = [f"{others} tensors: no parameters, from an iterator"] if others else []
        reasons += [placed.describe_refused()] if placed.refused else []
        return self._announce(slot, version, entries, copied, placed, "; ".join(reasons))

    def _announce(
        self,
        slot: Slot,
        version: int,
        entries: list[Entry],
        copied: list[Entry],
        placed: InPlace | None = None,
        why_copied: str = "",
    ) -> Offer:
        """Write the list of tensors, which makes the version readable."""
        if placed is None:
            copied, handles, memory = entries, list(slot.handles), slot.buckets
        else:
            handles = [*self._rest.handles, *placed.handles]
            memory = [*self._rest.buckets, *placed.tensors.values()]
        manifest = Manifest(version, sum(handle.nbytes for handle in handles), entries)
        write_tensor_list(self._manifest_path(slot), manifest)
        slot.version = version
        location = IpcLocation(
            device=device_name(find_device(memory)),
            directory=self._directory.name,
            slot=slot.number,
            buckets=handles,
            copied_bytes=sum(entry.nbytes for entry in copied),
            why_copied=why_copied[:_MAX_REASON],
            keep_open=self._keep_open,
        )
        where: dict[str, Any] = msgspec.to_builtins(location)
        size = sum(entry.nbytes for entry in entries)
        return Offer("cuda_ipc", version, manifest.identity, size, where)


def _secure(tensor: Tensor, is_stream: bool) -> Tensor:
    """Return a tensor that keeps its values until its bucket is full.

    A tensor of a stream is copied first, in the order of the device's work: the trainer may gather
    the next one into the same memory. That takes up to a bucket more memory for a short time."""
    is_stable = not is_stream or isinstance(tensor, torch.nn.Parameter)
    return tensor.detach() if is_stable else tensor.detach().clone()


def _move(parameters: dict[str, Tensor], movable: dict[str, Tensor], slot: Slot) -> InPlace:
    """Move parameters in CPU memory into files, since other processes can open only those."""
    # New files: parameters that were moved before stay where they are.
    slot.release()
    entries = slot.copy((name, parameter.detach()) for name, parameter in movable.items())
    for parameter, view in zip(movable.values(), view_entries(entries, slot.buckets), strict=True):
        parameter.data = view
    moved = {name: parameter.detach() for name, parameter in movable.items()}
    refused = dict.fromkeys(
        (n for n in parameters if n not in movable), "in CPU memory, and no parameter"
    )
    return InPlace(moved, entries, list(slot.handles), refused, sign(parameters))


_WORD = 8


@dataclass(slots=True)
class InPlace:
    """Tensors that are published from their own memory, and those that cannot be.

        tensors ──► allocations of torch's allocator ──► one IPC handle for each
        a, b, c     [ a │ b │ … ] [ c ]                  a tensor is an offset in one of them

    Many small tensors share one allocation, and a reader opens each allocation once. Memory of
    torch's expandable segments, and of allocators that map memory themselves (vLLM's cumem), has no
    such handle. Those tensors are refused here, with the reason, and the publisher copies them.
    """

    tensors: dict[str, Tensor]
    entries: list[Entry]
    """Offsets count through the memory of all handles."""
    handles: list[Handle]
    refused: dict[str, str] = field(default_factory=dict)
    """The reason for each tensor that must be copied."""
    signature: Signature = field(default_factory=list)
    """Of all tensors, also of those that were refused."""
    _start_checksums: Callable[[], Callable[[], list[Checksum]]] = field(init=False)

    def __post_init__(self) -> None:
        self._start_checksums = prepare_checksums(list(self.tensors.values()))

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def list_entries(self, start: int) -> list[Entry]:
        """Compute the checksums; return the entries, with `start` added to their offsets."""
        if not self.entries:
            return []
        summed = set_checksums(self.entries, self._start_checksums()())
        return [msgspec.structs.replace(e, offset=e.offset + start) for e in summed]

    def describe_refused(self) -> str:
        """Return how many tensors are copied and why, most frequent reason first; or nothing."""
        counts = Counter(self.refused.values()).most_common()
        return "; ".join(f"{count} tensors: {reason}" for reason, count in counts)


def find_in_place(tensors: Mapping[str, Tensor]) -> InPlace:
    """Find the memory of tensors on one GPU, and export it."""
    usable: dict[str, Tensor] = {}
    refused: dict[str, str] = {}
    for name, tensor in tensors.items():
        reason = _explain_unusable(tensor)
        if reason:
            refused[name] = reason
        else:
            usable[name] = tensor
    segments = list_segments(next(iter(usable.values())).device) if usable else []
    exports = _Exports(segments)
    placed: dict[str, Tensor] = {}
    entries: list[Entry] = []
    for name, tensor in usable.items():
        try:
            offset = exports.locate(tensor)
        except WeightsError as error:
            refused[name] = error.message
            continue
        placed[name] = tensor
        entries.append(make_entry(name, tensor, offset))
    return InPlace(placed, entries, exports.handles, refused, sign(tensors))


def _explain_unusable(tensor: Tensor) -> str:
    if not tensor.is_contiguous():
        return "not contiguous"
    if not tensor.nbytes:
        return "empty"
    # The kernel that sums in place reads words; it would have to copy the tensor first.
    return "not aligned to 8 bytes" if tensor.data_ptr() % _WORD else ""


class _Exports:
    """Exports each segment once, when the first tensor in it is located."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._segments = sorted(segments, key=lambda segment: segment.address)
        self._addresses = [segment.address for segment in self._segments]
        self._starts: dict[int, int] = {}
        """By the segment's address: where it begins in the memory of all handles."""
        self._errors: dict[int, WeightsError] = {}
        self._end = 0
        self.handles: list[Handle] = []

    def locate(self, tensor: Tensor) -> int:
        """Return the tensor's offset in the memory of all handles, or raise WeightsError."""
        address = int(tensor.data_ptr())
        number = bisect_right(self._addresses, address) - 1
        segment = self._segments[number] if number >= 0 else None
        if segment is None or address + tensor.nbytes > segment.address + segment.nbytes:
            raise WeightsError("not in memory of torch's allocator")
        if segment.address in self._errors:
            raise self._errors[segment.address]
        if segment.address not in self._starts:
            try:
                self.handles.append(export_segment(tensor, segment))
            except WeightsError as error:
                self._errors[segment.address] = error
                raise
            self._starts[segment.address] = self._end
            self._end += segment.nbytes
        return self._starts[segment.address] + address - segment.address
