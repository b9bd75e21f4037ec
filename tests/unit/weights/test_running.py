"""Checksums that follow the changes of a tensor equal those that read all of it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollway.weights.digest import changes
from rollway.weights.digest.changes import RunningSums, find_changes
from rollway.weights.digest.checksums import BLOCK, digest, integers, word_sum

DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.float64)


def make(size: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (size * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype)


def check(old: torch.Tensor, new: torch.Tensor, pool: ThreadPoolExecutor | None = None) -> None:
    old, new = integers(old), integers(new)
    sums = RunningSums.of(old)
    assert sums.checksum == (digest(old), word_sum(old))
    held = old.clone()
    changes = sums.advance(held, new, pool)
    assert torch.equal(held, new)
    assert sums.checksum == (digest(new), word_sum(new))
    for actual, expected in zip(changes, find_changes(old, new), strict=True):
        assert actual.dtype == expected.dtype and torch.equal(actual, expected)


@given(
    st.sampled_from(DTYPES),
    st.integers(0, 40),
    st.sets(st.integers(0, 39)),
    st.integers(0, 1 << 30),
)
def test_small_tensors(dtype: torch.dtype, size: int, places: set[int], seed: int) -> None:
    """Also those with bytes that fill no word, and with slabs of two words."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(changes, "_SLAB", 2)
        patch.setattr(changes, "_PART", 4)
        old = make(size, dtype, seed)
        other, new = make(size, dtype, seed + 1), old.clone()
        for place in places:
            if place < size:
                new[place] = other[place]
        check(old, new)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.2, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_several_blocks(
    dtype: torch.dtype, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = (2 * BLOCK + BLOCK // 2) * 8 // dtype.itemsize + 1
    old = make(size, dtype, 1)
    chosen = torch.rand(size, generator=torch.Generator().manual_seed(2)) < share
    new = torch.where(chosen, make(size, dtype, 3), old)
    check(old, new)
    monkeypatch.setattr(changes, "_PART", BLOCK)
    with ThreadPoolExecutor(3) as pool:
        check(old, new, pool)


def test_sums_follow_many_versions() -> None:
    held = integers(make(70_001, torch.bfloat16, 0))
    sums = RunningSums.of(held)
    for seed in range(1, 6):
        new = held.clone()
        new[seed :: 97 * seed] += seed
        sums.advance(held, new)
        assert sums.checksum == (digest(new), word_sum(new))
