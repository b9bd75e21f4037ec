"""Copies out of a publisher's buckets into a reader's tensors, prepared once for many versions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor

from rollway.errors import WeightsError
from rollway.weights.copies import SummedCopies
from rollway.weights.digest.bits import describe
from rollway.weights.offer import Entry
from rollway.weights.transports.buckets import views
from rollway.weights.transports.device_memory import Handle

_SUMMED = 512 << 20
"""Bytes that one kernel copies; the host hashes their sums while the next does its part."""


class Taking:
    """From where to where all tensors of a version go, some hundred megabytes at a time."""

    def __init__(
        self,
        handles: Sequence[Handle],
        buckets: Sequence[Tensor],
        entries: Sequence[Entry],
        targets: Mapping[str, Tensor],
    ) -> None:
        self._handles = handles
        self._kinds = _kinds(entries)
        self._names = [one.name for one in entries]
        pairs = list(zip(_wanted(entries, targets), views(entries, buckets), strict=True))
        for name, (target, source) in zip(self._names, pairs, strict=True):
            mine, theirs = ((t.dtype, t.shape, t.device) for t in (target, source))
            if mine != theirs:
                raise WeightsError(
                    f"{name} is {describe(source)}, and what it should go to {describe(target)}."
                )
        self._copies = [SummedCopies(some) for some in _cut(pairs)]
        self._places = _places(target for target, _ in pairs)

    @property
    def sizes(self) -> list[int]:
        """How many tensors are copied at a time."""
        return [some.size for some in self._copies]

    @property
    def keeps_tensors(self) -> bool:
        return any(some.keeps_tensors for some in self._copies)

    def fits(self, handles: Sequence[Handle], targets: Mapping[str, Tensor]) -> bool:
        """Whether it is from these buckets to these tensors."""
        if self._handles != handles or not targets.keys() >= set(self._names):
            return False
        return self._places == _places(targets[name] for name in self._names)

    def is_of(self, entries: Sequence[Entry]) -> bool:
        """Whether tensors lie in the buckets as they did."""
        return self._kinds == _kinds(entries)

    def start(self) -> list[Callable[[], list[str]]]:
        """Begin; each answer waits for some, and has the digests of what was copied."""
        return [some.start() for some in self._copies]


def _wanted(entries: Sequence[Entry], targets: Mapping[str, Tensor]) -> list[Tensor]:
    missing = [one.name for one in entries if one.name not in targets]
    if missing:
        raise WeightsError(f"There is nothing that {', '.join(missing[:5])} could be copied into.")
    return [targets[one.name].detach() for one in entries]


def _cut(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[list[tuple[Tensor, Tensor]]]:
    some: list[list[tuple[Tensor, Tensor]]] = []
    nbytes = _SUMMED
    for pair in pairs:
        if nbytes >= _SUMMED:
            some.append([])
            nbytes = 0
        some[-1].append(pair)
        nbytes += pair[0].nbytes
    return some


def _kinds(entries: Sequence[Entry]) -> list[tuple[str, str, tuple[int, ...], int]]:
    return [(one.name, one.dtype, one.shape, one.offset) for one in entries]


def _places(tensors: Iterable[Tensor]) -> list[tuple[int, int, bool]]:
    return [(each.data_ptr(), each.nbytes, each.is_contiguous()) for each in tensors]
