"""Sums and digests: the same on every device and in any number of threads, and what they detect."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollway.weights.digest import checksums
from rollway.weights.digest.checksums import (
    BLOCK,
    digest,
    digests,
    raw_bytes,
    split_words,
    sum_blocks,
    word_sum,
    word_sums,
)
from tests.tensors import noise

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]

LARGE = 3_000_001  # bfloat16: 6 MB, which are neither whole pieces nor whole words


def draw(count: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(-9, 9, (count,), generator=generator).to(dtype)


@pytest.mark.parametrize("threads", [None, 1, 3])
def test_sums_in_threads_are_those_of_one(threads: int | None) -> None:
    tensors = [draw(4 * LARGE), draw(3), draw(0), draw(LARGE, torch.float32), draw(LARGE)[3:]]
    assert word_sums(tensors, threads) == [word_sum(tensor) for tensor in tensors]


def test_a_damaged_byte_changes_the_sum() -> None:
    tensor = draw(4 * LARGE)
    (before,) = word_sums([tensor], 2)
    raw_bytes(tensor)[-1] += 1
    assert word_sums([tensor], 2) != [before]


@given(st.sampled_from([torch.bfloat16, torch.float32, torch.int8]), st.data())
def test_a_digest_detects_every_change(dtype: torch.dtype, data: st.DataObject) -> None:
    tensor = noise((777,), dtype, 1)
    raw = raw_bytes(tensor)
    before = digest(tensor)
    raw[data.draw(st.integers(0, raw.numel() - 1))] ^= data.draw(st.integers(1, 255))
    assert digest(tensor) != before


def test_a_digest_detects_what_simple_sums_miss() -> None:
    tensor = noise((1 << 18,), torch.float32, 1)
    before = digest(tensor)
    signs = tensor.clone()
    signs[1] *= -1
    signs[3] *= -1  # both at the top of their words
    assert digest(signs) != before
    assert digest(tensor.flip(0)) != before
    assert digest(tensor[:-1]) != before
    assert digest(torch.zeros(8)) != digest(torch.zeros(9)) != digest(torch.zeros(0))
    swapped = tensor.view(2, -1).flip(0).contiguous()
    assert digest(swapped) != before


def test_a_digest_is_the_same_everywhere() -> None:
    """Publishers and readers may be of different releases: the value is part of the format."""
    assert digest(torch.arange(300_000, dtype=torch.int32)) == "afeb5fd0b46dd43369cceb3df9fb4758"


@pytest.mark.parametrize("device", DEVICES)
def test_digests_together_equal_digests_alone(device: str) -> None:
    sizes = (0, 1, 7, 8, 9, (1 << 20) - 8, 1 << 20, (1 << 20) + 8, (3 << 20) + 5)
    tensors = [noise((size,), torch.uint8, size) for size in sizes]
    tensors += [
        tensors[-1][3:],
        noise((30, 50), torch.float32).t(),
        noise((9,), torch.bfloat16)[1:],
        noise((), torch.float64),
    ]
    assert digests([tensor.to(device) for tensor in tensors]) == [digest(t) for t in tensors]
    assert digests([]) == []


def test_blocks_are_summed_the_same_way_on_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU sums many at a time by torch, a CPU one after the other by numpy."""
    monkeypatch.setattr(checksums, "_BLOCKS", 2)
    for words in (0, 1, BLOCK - 1, BLOCK, 3 * BLOCK, 5 * BLOCK + 7):
        tensor, _ = split_words(noise((8 * words,), torch.uint8, words))
        assert torch.equal(sum_blocks(tensor), checksums._sum_blocks_on_cpu(tensor))
