"""Compile the kernels of `gpu`, and compare their results with those of torch."""

from __future__ import annotations

import torch

from rollway.weights.digest import checksums
from rollway.weights.digest.gpu import STEP, DigestKernel, TritonComparison


def check() -> None:
    """Raise unless the kernels run on this machine and give the same results as torch."""
    words = torch.arange(-STEP, 5 * STEP + 7, dtype=torch.int64) * 0x9E3779B97F4A7
    raw = words.view(torch.uint8)[:-3]
    source = raw.cuda()
    copy = torch.zeros_like(source)
    right = [_checksum(raw)]
    # Both forms of the kernel: the one that is not compiled here would be at the first publish.
    for targets in ([copy], None):
        if DigestKernel([source], targets).start()() != right:
            raise RuntimeError("the kernel's sums are wrong")
    if not torch.equal(copy, source):
        raise RuntimeError("the kernel's copies are wrong")
    old = torch.zeros(9 * STEP + 3, dtype=torch.int16, device="cuda")
    new = old.clone()
    places = torch.tensor([0, 7, 4 * STEP, 9 * STEP + 2], device="cuda")
    new[places] = -1
    comparison = TritonComparison([(old, old), (old, new)], with_checksums=True)
    positions, before, after = comparison.gather(0, 2)
    is_right = (
        comparison.counts == [0, 4]
        and comparison.checksums == [_checksum(old.cpu()), _checksum(new.cpu())]
        and torch.equal(positions, places)
        and torch.equal(before, old[places])
        and torch.equal(after, new[places])
    )
    if not is_right:
        raise RuntimeError("the kernels find other changes than torch does")


def _checksum(tensor: torch.Tensor) -> checksums.Checksum:
    return checksums.Checksum(checksums.digest(tensor), checksums.word_sum(tensor))
