"""Many tensors together give the same bytes as each alone: copies, digests and changes.

On a GPU, both the Triton kernels and torch are tested. On a CPU, torch is, and the kernels too with
`TRITON_INTERPRET=1` where Triton is installed.
"""

from __future__ import annotations

import os
import random
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from rollway.weights import copies
from rollway.weights.copies import SummedCopies
from rollway.weights.digest import changes, checksums
from rollway.weights.digest.checksums import (
    DTYPES,
    Checksum,
    digest,
    digests,
    integers,
    raw_bytes,
    word_sum,
)
from rollway.weights.transports.delta import format as delta
from rollway.weights.transports.delta import packing
from tests.tensors import noise
from tests.unit.weights.deltas import apply

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
INTERPRETED = not GPU and os.environ.get("TRITON_INTERPRET") == "1"
by_each = pytest.mark.parametrize(
    "triton",
    [
        False,
        pytest.param(
            True, marks=pytest.mark.skipif(not GPU and not INTERPRETED, reason="needs a GPU")
        ),
    ],
)
SHAPES = [(), (0,), (3, 0), (1,), (3,), (7, 5), (64, 33), (2047,), (8191,), (5, 8193), (100_003,)]
SEEDS = range(24 if GPU else 3)
SHARES = [0.0, 0.0001, 0.01, 0.2, 0.45, 0.55, 1.0]


@pytest.fixture
def way(monkeypatch: pytest.MonkeyPatch, triton: bool) -> str:
    """Make Triton available, or not."""
    if triton and GPU:
        torch.cuda.init()
        checksums.warm_up()
        assert checksums.uses_triton(torch.device("cuda"))
    for module in (checksums, changes, copies):
        monkeypatch.setattr(module, "uses_triton", lambda device: triton and device.type == DEVICE)
    return "triton" if triton else "torch"


def stepped(old: Tensor, share: float, draw: random.Random) -> Tensor:
    """A copy in which about that share of the elements has other bits."""
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    chosen = torch.rand(old.numel(), generator=generator) < share
    raw = raw_bytes(old).clone().view(-1, old.element_size())
    raw[chosen] ^= 1
    return raw.view(-1).view(old.dtype).view(old.shape)


def shifted(tensor: Tensor, draw: random.Random) -> Tensor:
    """On the device, beginning inside a word, or not in one run, or as it was."""
    kind = draw.randrange(4)
    if kind == 0:
        wider = torch.empty(tensor.numel() + 9, dtype=tensor.dtype, device=DEVICE)
        some = wider[1 : 1 + tensor.numel()].view(tensor.shape)
        return some.copy_(tensor)
    if kind == 1 and tensor.dim() == 2:
        return tensor.t().contiguous().to(DEVICE).t()
    return tensor.to(DEVICE)


def plainly(tensor: Tensor) -> str:
    """Its digest by torch, on a CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checksums, "uses_triton", lambda device: False)
        return digest(tensor.cpu())


def model(seed: int) -> list[tuple[str, Tensor, Tensor]]:
    draw = random.Random(seed)
    tensors = []
    for dtype in draw.sample(sorted(DTYPES), 5):
        for shape in draw.sample(SHAPES, 4):
            old = noise(shape, DTYPES[dtype], draw.randrange(1 << 30))
            new = stepped(old, draw.choice(SHARES), draw)
            pair = shifted(old, draw), shifted(new, draw)
            tensors.append((f"{dtype}{len(tensors)}", *pair))
    return tensors


@by_each
@pytest.mark.parametrize("seed", SEEDS)
def test_digests_together_equal_digests_alone(seed: int, way: str) -> None:
    tensors = [new for _, _, new in model(seed)]
    large = noise(((1 << 20) + 5,), torch.uint8, seed).to(DEVICE)
    tensors += [large, large[:-5], large[8:], large[3:]]
    alone = [plainly(tensor) for tensor in tensors]
    assert digests(tensors) == alone
    assert digests([]) == []


@by_each
@pytest.mark.parametrize("seed", SEEDS)
def test_summed_copies_write_the_targets_alone(seed: int, way: str) -> None:
    """Bytes beside a target stay as they are; prepared copies work for other values."""
    draw = random.Random(seed)
    sources = [new for _, _, new in model(seed)]
    wide = [noise((s.numel() + 16,), s.dtype, draw.randrange(1 << 30)).to(DEVICE) for s in sources]
    before = [room.clone() for room in wide]
    starts = [draw.choice([0, 8, 8, 3]) for _ in sources]
    targets = [
        room[at : at + source.numel()].view(source.shape)
        for room, at, source in zip(wide, starts, sources, strict=True)
    ]
    prepared = SummedCopies(list(zip(targets, sources, strict=True)))
    for _ in range(2):
        assert prepared.start()() == [plainly(source) for source in sources]
        for room, was, at, source in zip(wide, before, starts, sources, strict=True):
            wanted = was.clone()
            wanted[at : at + source.numel()] = source.reshape(-1)
            assert torch.equal(raw_bytes(room), raw_bytes(wanted))
        for source in sources:
            source.copy_(noise(tuple(source.shape), source.dtype, draw.randrange(1 << 30)))


@by_each
@pytest.mark.parametrize("seed", SEEDS)
def test_changes_together_equal_changes_alone(seed: int, way: str) -> None:
    pairs = [(integers(old), integers(new)) for _, old, new in model(seed)]
    for size in (1, 2, 4, 8):
        some = [pair for pair in pairs if pair[0].element_size() == size]
        if not some:
            continue
        alone = [changes.find_changes(*pair) for pair in some]
        comparison = changes.compare_pairs(some, with_checksums=True)
        assert comparison.counts == [positions.numel() for positions, _, _ in alone]
        assert comparison.checksums == [
            Checksum(plainly(new), word_sum(new.cpu())) for _, new in some
        ]
        cut = len(some) // 2
        for first, end in ((0, len(some)), (0, cut + 1), (cut, len(some))):
            wanted = [torch.cat(parts) for parts in zip(*alone[first:end], strict=True)]
            for mine, theirs in zip(comparison.gather(first, end), wanted, strict=True):
                assert torch.equal(mine, theirs)


@by_each
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("compression", get_args(packing.Compression))
def test_changes_encoded_together_have_the_same_bytes(
    compression: packing.Compression, seed: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when batches are very small."""
    given: list[Any] = [(name, old, new, None) for name, old, new in model(seed)]
    alone = [
        delta.encode(n, o.cpu(), x.cpu(), version=3, base=2, compression=compression).to_bytes()
        for n, o, x, _ in given
    ]
    monkeypatch.setattr(delta, "pack", None)
    monkeypatch.setattr(delta, "_is_on_gpu", lambda pairs: True)
    for compared, gathered in ((2 << 30, 1 << 25), (1 << 18, 100), (1, 1)):
        monkeypatch.setattr(packing, "_COMPARED", compared)
        monkeypatch.setattr(packing, "_GATHERED", gathered)
        encoded = delta.encode_all(given, version=3, base=2, compression=compression)
        assert [change.to_bytes() for change in encoded] == alone
    for (_, old, new, _), change in zip(given, encoded, strict=True):
        assert torch.equal(raw_bytes(apply(change, old.cpu())), raw_bytes(new.cpu()))


@by_each
def test_empty_tensors(way: str) -> None:
    none = torch.empty(0, 3, dtype=torch.int16, device=DEVICE)
    assert digests([none, none]) == [plainly(none)] * 2
    comparison = changes.compare_pairs([(none, none)], with_checksums=True)
    assert (comparison.counts, comparison.checksums) == ([0], [Checksum(plainly(none), 0)])
    assert [part.numel() for part in comparison.gather(0, 1)] == [0, 0, 0]
    assert SummedCopies([(none.clone(), none)]).start()() == [plainly(none)]
