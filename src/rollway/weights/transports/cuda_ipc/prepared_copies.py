"""Copies from a publisher's buckets into a reader's tensors, prepared once for many versions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor

from rollway.errors import WeightsError
from rollway.weights.copies import SummedCopies
from rollway.weights.digest.checksums import describe
from rollway.weights.offer import Entry
from rollway.weights.transports.cuda_ipc.device_memory import Handle
from rollway.weights.transports.entries import view_entries

_BATCH_BYTES = 512 << 20
"""Bytes per kernel; the CPU hashes the sums of one batch while the GPU copies the next."""


class PreparedCopies:
    """The copies of all tensors of a version, in batches of some hundred megabytes."""

    def __init__(
        self,
        handles: Sequence[Handle],
        buckets: Sequence[Tensor],
        entries: Sequence[Entry],
        targets: Mapping[str, Tensor],
    ) -> None:
        missing = [entry.name for entry in entries if entry.name not in targets]
        if missing:
            raise WeightsError(f"There is no tensor to copy {', '.join(missing[:5])} into.")
        self._handles = handles
        self._layout = _describe_layout(entries)
        self._names = [entry.name for entry in entries]
        batches: list[list[tuple[Tensor, Tensor]]] = []
        batch_bytes = _BATCH_BYTES
        for entry, source in zip(entries, view_entries(entries, buckets), strict=True):
            target = targets[entry.name].detach()
            if (target.dtype, target.shape, target.device) != (
                source.dtype,
                source.shape,
                source.device,
            ):
                raise WeightsError(
                    f"{entry.name} is {describe(source)}, but its target is {describe(target)}."
                )
            if batch_bytes >= _BATCH_BYTES:
                batches.append([])
                batch_bytes = 0
            batches[-1].append((target, source))
            batch_bytes += target.nbytes
        self._copies = [SummedCopies(batch) for batch in batches]
        self._addresses = _list_addresses(targets[name] for name in self._names)

    @property
    def sizes(self) -> list[int]:
        """The number of tensors in each batch."""
        return [batch.size for batch in self._copies]

    @property
    def keeps_tensors(self) -> bool:
        """Whether the publisher's tensors stay open as long as this object exists."""
        return any(batch.keeps_tensors for batch in self._copies)

    def fits(self, handles: Sequence[Handle], targets: Mapping[str, Tensor]) -> bool:
        """Tell whether these copies are from these buckets to these tensors."""
        if self._handles != handles or not targets.keys() >= set(self._names):
            return False
        return self._addresses == _list_addresses(targets[name] for name in self._names)

    def matches(self, entries: Sequence[Entry]) -> bool:
        """Tell whether the tensors are at the same places in the buckets."""
        return self._layout == _describe_layout(entries)

    def start(self) -> list[Callable[[], list[str]]]:
        """Start all batches; each returned function waits for one and returns its digests."""
        return [batch.start() for batch in self._copies]


def _describe_layout(entries: Sequence[Entry]) -> list[tuple[str, str, tuple[int, ...], int]]:
    return [(entry.name, entry.dtype, entry.shape, entry.offset) for entry in entries]


def _list_addresses(tensors: Iterable[Tensor]) -> list[tuple[int, int, bool]]:
    return [(tensor.data_ptr(), tensor.nbytes, tensor.is_contiguous()) for tensor in tensors]
