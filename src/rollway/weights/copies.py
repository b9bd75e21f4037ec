"""Copy many tensors, prepared once and repeated for every version.

A GPU copies a megabyte faster than Python can request the next copy. So small tensors that are
contiguous at both ends are copied many at a time, as words of eight bytes. Large tensors are
copied one by one, which already runs at the speed of memory. On a CPU every copy is a plain one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rollway.weights.digest.checksums import Checksum, prepare_checksums, uses_triton

if TYPE_CHECKING:
    from rollway.weights.digest.gpu import DigestKernel

_LARGE = 16 << 20  # From this many bytes on, the cost of one more request does not matter
_WORD = torch.int64


@dataclass(slots=True)
class Copies:
    """Prepared copies between tensors whose addresses must not change."""

    _single: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    _targets: list[Tensor] = field(default_factory=list)
    _sources: list[Tensor] = field(default_factory=list)

    def add(self, target: Tensor, source: Tensor) -> None:
        """Add a copy of `source` to `target`, which has the same shape and dtype."""
        target, source = target.detach(), source.detach()
        if target.device.type == "cpu" or source.device != target.device:
            self._single.append((target, source))
            return
        target, source = view_as_words(target, source)
        contiguous = target.is_contiguous() and source.is_contiguous()
        if not contiguous or target.nbytes >= _LARGE or target.dtype != _WORD:
            self._single.append((target, source))
        else:
            self._targets.append(target.view(-1))
            self._sources.append(source.view(-1))

    def run(self) -> None:
        """Enqueue all copies on the device's current stream."""
        for target, source in self._single:
            target.copy_(source, non_blocking=True)
        if self._targets:
            torch._foreach_copy_(self._targets, self._sources)


def copy_all(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Copy the second tensor of each pair over the first, once."""
    copies = Copies()
    for target, source in pairs:
        copies.add(target, source)
    copies.run()


class SummedCopies:
    """Prepared copies that also give a digest of every copied tensor.

    With Triton one kernel copies and digests in a single pass over the bytes."""

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Prepare copies from (target, source) pairs, all on one device."""
        self.size = len(pairs)
        self._kernel: DigestKernel | None = None
        fused: list[int] = []
        if pairs and uses_triton(pairs[0][0].device):
            from rollway.weights.digest.gpu import DigestKernel

            fused = [i for i, pair in enumerate(pairs) if all(map(_is_aligned_run, pair))]
            if fused:
                targets, sources = zip(*(pairs[i] for i in fused), strict=True)
                self._kernel = DigestKernel(sources, targets)
        self._fused = fused
        self._others = {i: pairs[i] for i in sorted(set(range(len(pairs))) - set(fused))}

    @property
    def keeps_tensors(self) -> bool:
        """Whether sources stay in memory for as long as this object does."""
        return bool(self._others)

    def start(self) -> Callable[[], list[str]]:
        """Enqueue copies and digests on the current stream; return a function that waits for the
        digests, in the order of the pairs."""
        wait = self.start_checksums()
        return lambda: [checksum.digest for checksum in wait()]

    def start_checksums(self) -> Callable[[], list[Checksum]]:
        """Do the same as `start`, with word sums beside the digests."""
        wait_for_fused = self._kernel.start() if self._kernel is not None else list
        copy_all(list(self._others.values()))
        targets = [target for target, _ in self._others.values()]
        wait_for_others = prepare_checksums(targets)() if targets else list

        def wait() -> list[Checksum]:
            results = dict(zip(self._fused, wait_for_fused(), strict=True))
            results |= zip(self._others, wait_for_others(), strict=True)
            return [results[i] for i in range(self.size)]

        return wait


def _is_aligned_run(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.data_ptr() % 8


def view_as_words(target: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    """Return both tensors viewed as words of eight bytes, or as they are if that is impossible."""
    if target.dtype == source.dtype and _has_whole_words(target) and _has_whole_words(source):
        return target.view(_WORD), source.view(_WORD)
    return target, source


def _has_whole_words(tensor: Tensor) -> bool:
    """Return whether every row consists of whole, aligned words of eight bytes."""
    if tensor.dim() == 0 or tensor.stride(-1) != 1:
        return False
    per_word = 8 // tensor.element_size()
    steps = (tensor.shape[-1], tensor.storage_offset(), *tensor.stride()[:-1])
    return all(step % per_word == 0 for step in steps)
