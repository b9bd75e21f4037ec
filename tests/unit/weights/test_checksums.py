"""Sums in threads give the same numbers as in one, and threads end with their call."""

from __future__ import annotations

import threading

import pytest
import torch

from rollway.weights.digest.checksums import Team, raw_bytes, word_sum, word_sums

LARGE = 3_000_001  # bfloat16: 6 MB, which are neither whole pieces nor whole words


def draw(count: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(-9, 9, (count,), generator=generator).to(dtype)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_team_returns_all_results_in_order(size: int) -> None:
    with Team(size) as team:
        assert team.map(lambda number: number * number, range(100)) == [n * n for n in range(100)]
        assert team.map(lambda number: number, []) == []


def test_a_free_thread_does_the_work_of_one_that_is_held_up() -> None:
    others_done, seen = threading.Event(), []

    def work(number: int) -> None:
        seen.append(number)
        if len(seen) == 20:
            others_done.set()
        if number == 0:
            assert others_done.wait(60.0)

    with Team(2) as team:
        team.map(work, range(20))
    assert sorted(seen) == list(range(20))


def test_an_error_is_raised_after_all_threads_have_stopped() -> None:
    running: set[int] = set()

    def work(number: int) -> None:
        running.add(number)
        try:
            if number == 3:
                raise ValueError("damaged")
        finally:
            running.discard(number)

    with Team(3) as team, pytest.raises(ValueError, match="damaged"):
        team.map(work, range(50))
    assert not running


@pytest.mark.parametrize("threads", [None, 1, 3])
def test_sums_in_threads_are_those_of_one(threads: int | None) -> None:
    tensors = [draw(4 * LARGE), draw(3), draw(0), draw(LARGE, torch.float32), draw(LARGE)[3:]]
    assert word_sums(tensors, threads) == [word_sum(tensor) for tensor in tensors]


def test_a_damaged_byte_changes_the_sum() -> None:
    tensor = draw(4 * LARGE)
    (before,) = word_sums([tensor], 2)
    raw_bytes(tensor)[-1] += 1
    assert word_sums([tensor], 2) != [before]
