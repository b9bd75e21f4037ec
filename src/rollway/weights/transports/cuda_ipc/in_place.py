"""Publish tensors from their own memory: no second copy of the model on the device.

    tensors ──► allocations of torch's allocator ──► one IPC handle for each
    a, b, c     [ a │ b │ … ] [ c ]                  a tensor is an offset in one of them

Many small tensors share one allocation, and a reader opens each allocation once. Memory of torch's
expandable segments, and of allocators that map memory themselves (vLLM's cumem), has no such
handle. Those tensors are refused here, with the reason, and the publisher copies them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
from torch import Tensor

from rollway.errors import WeightsError
from rollway.weights.digest.checksums import Checksum, prepare_checksums
from rollway.weights.offer import Entry
from rollway.weights.transports.cuda_ipc.buckets import Signature, sign
from rollway.weights.transports.cuda_ipc.device_memory import (
    Handle,
    Segment,
    export_segment,
    list_segments,
)
from rollway.weights.transports.entries import make_entry, set_checksums

_WORD = 8


@dataclass(slots=True)
class InPlace:
    """Tensors that are published from their own memory, and those that cannot be."""

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
