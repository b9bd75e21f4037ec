"""Copies as words of eight bytes give the same bytes, and a GPU gives the same as a CPU."""

from __future__ import annotations

import pytest
import torch

from rollway.weights.copies import copy_all, view_as_words
from rollway.weights.digest.checksums import DTYPES, digest, digests, raw_bytes
from rollway.weights.transports.delta import format as delta
from tests.tensors import noise
from tests.unit.weights.deltas import apply

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
SLICES = [
    (slice(None), slice(None)),
    (slice(4, 20), slice(None)),
    (slice(None), slice(8, 24)),
    (slice(None), slice(1, 3)),
    (slice(3, 4), slice(0, 40)),
    (slice(0, 0), slice(None)),
]


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_views_as_words_have_the_same_bytes(dtype: str) -> None:
    whole = noise((64, 40), DTYPES[dtype])
    for where in SLICES:
        for source in (whole[where], whole[where].t()):
            target = torch.zeros(source.shape, dtype=source.dtype)
            wide_target, wide_source = view_as_words(target, source)
            wide_target.copy_(wide_source)
            assert torch.equal(raw_bytes(target), raw_bytes(source))
    assert view_as_words(whole, whole.clone())[0].dtype == torch.int64


@on_gpu
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_a_gpu_copies_the_same(dtype: str) -> None:
    whole = noise((4096, 40), DTYPES[dtype]).cuda()
    sources = [whole[where] for where in SLICES] + [whole.t(), noise((3,), DTYPES[dtype]).cuda()]
    pairs = [(torch.zeros(s.shape, dtype=s.dtype, device="cuda"), s) for s in sources]
    copy_all(pairs)
    assert all(torch.equal(raw_bytes(t).cpu(), raw_bytes(s).cpu()) for t, s in pairs)


@on_gpu
def test_a_gpu_finds_the_same_digests() -> None:
    sizes = (0, 1, 7, 8, 9, (1 << 20) - 8, 1 << 20, (1 << 20) + 8, (3 << 20) + 5)
    tensors = [noise((size,), torch.uint8) for size in sizes]
    tensors += [
        tensors[-1][3:],
        noise((30, 50), torch.float32).t(),
        noise((9,), torch.bfloat16)[1:],
    ]
    assert digests([t.cuda() for t in tensors]) == [digest(t) for t in tensors]
    on_device = tensors[-1].cuda()
    assert digests([on_device[1:], on_device]) == [digest(tensors[-1][1:]), digest(tensors[-1])]


@on_gpu
@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.3, 1.0])
def test_a_gpu_packs_the_same_change(share: float) -> None:
    old = noise((1000, 1001), torch.bfloat16)
    chosen = torch.rand(old.shape, generator=torch.Generator().manual_seed(1)) < share
    new = (old.view(torch.int16) + chosen.to(torch.int16)).view(old.dtype)
    here = delta.encode("w", old, new).to_bytes()
    assert delta.encode("w", old.cuda(), new.cuda()).to_bytes() == here
    assert torch.equal(raw_bytes(apply(delta.decode(here), old)), raw_bytes(new))
