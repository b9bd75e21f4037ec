"""Many copies, prepared once and made again and again.

A GPU copies a megabyte sooner than Python asks for the next one. So what lies in one run on both
sides is copied many tensors at a time, and as words of eight bytes; what is large goes by itself,
which is as fast as memory allows. On a CPU each copy is made as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rollway.weights.digest.bits import by_triton, started_digests

if TYPE_CHECKING:
    from rollway.weights.digest.gpu import Summing

_LARGE = 16 << 20
"""From this many bytes on, a copy of its own costs nothing."""
_WORD = torch.int64


@dataclass(slots=True)
class Copies:
    """What goes where; addresses must stay what they are."""

    _single: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    _targets: list[Tensor] = field(default_factory=list)
    _sources: list[Tensor] = field(default_factory=list)

    def add(self, target: Tensor, source: Tensor) -> None:
        """`source` will be copied over `target`, which has its shape and dtype."""
        target, source = target.detach(), source.detach()
        if target.device.type == "cpu" or source.device != target.device:
            self._single.append((target, source))
            return
        target, source = _wider(target, source)
        run = target.is_contiguous() and source.is_contiguous()
        if not run or target.nbytes >= _LARGE or target.dtype != _WORD:
            self._single.append((target, source))
        else:
            self._targets.append(target.view(-1))
            self._sources.append(source.view(-1))

    def run(self) -> None:
        """Copy everything, in the order of the device's current stream."""
        for target, source in self._single:
            target.copy_(source, non_blocking=True)
        if self._targets:
            torch._foreach_copy_(self._targets, self._sources)


def copy_all(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Copy the second of each pair over the first, once."""
    copies = Copies()
    for target, source in pairs:
        copies.add(target, source)
    copies.run()


class SummedCopies:
    """Copies whose digests are made of what was copied: on the way, where one kernel does both."""

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Each pair is a target and its source; all are on one device."""
        self.size = len(pairs)
        self._runs: Summing | None = None
        together: list[int] = []
        if pairs and by_triton(pairs[0][0].device):
            from rollway.weights.digest.gpu import Summing

            together = [i for i, pair in enumerate(pairs) if all(map(_is_run, pair))]
            if together:
                targets, sources = zip(*(pairs[i] for i in together), strict=True)
                self._runs = Summing(sources, targets)
        self._together = together
        apart = set(range(len(pairs))) - set(together)
        self._apart = {i: pairs[i] for i in sorted(apart)}

    @property
    def keeps_tensors(self) -> bool:
        """Whether sources stay in memory for as long as this does."""
        return bool(self._apart)

    def start(self) -> Callable[[], list[str]]:
        """Begin, in the order of the device's current stream; the answer waits for the end."""
        runs = self._runs.start() if self._runs is not None else list
        copy_all(list(self._apart.values()))
        apart = [target for target, _ in self._apart.values()]
        rest = started_digests(apart) if apart else list

        def digests() -> list[str]:
            found = [""] * self.size
            for places, made in ((self._together, runs()), (self._apart, rest())):
                for i, each in zip(places, made, strict=True):
                    found[i] = each
            return found

        return digests


def _is_run(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.data_ptr() % 8


def _wider(target: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    """Both as words of eight bytes, where both can be seen so."""
    if target.dtype == source.dtype and _fits(target) and _fits(source):
        return target.view(_WORD), source.view(_WORD)
    return target, source


def _fits(tensor: Tensor) -> bool:
    """Whether its rows are whole words that begin where words do."""
    if tensor.dim() == 0 or tensor.stride(-1) != 1:
        return False
    each = 8 // tensor.element_size()
    steps = (tensor.shape[-1], tensor.storage_offset(), *tensor.stride()[:-1])
    return all(step % each == 0 for step in steps)
