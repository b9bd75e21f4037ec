"""The comparison of the benchmark fails if the two stacks do not answer alike."""

from __future__ import annotations

import pytest

from rollway.bench.disaggregated import compare
from rollway.errors import RolloutError
from rollway.rollout.completion import Completion


def answer(tokens: list[int], logprobs: list[float]) -> Completion:
    return Completion(tokens, logprobs, "length", 1, 0)


def test_the_largest_difference_is_returned() -> None:
    whole, apart = [answer([1, 2], [-1.0, -2.0])], [answer([1, 2], [-1.0, -2.000004])]
    assert compare(whole, apart) == pytest.approx(4e-6)


@pytest.mark.parametrize(
    ("tokens", "logprobs", "phrase"),
    [([1, 3], [-1.0, -2.0], "tokens"), ([1, 2], [-1, -2.1], "differ")],
)
def test_other_answers_are_an_error(tokens: list[int], logprobs: list[float], phrase: str) -> None:
    with pytest.raises(RolloutError, match=phrase):
        compare([answer([1, 2], [-1.0, -2.0])], [answer(tokens, logprobs)])
