"""The splice rule: known results, and a property of all templates that only shorten turns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollway.rollout.template import SpliceError, find_turn_end, splice

END = 2

PREFIX = [11, 12, 13, 40, 41, 1001, 2]
REASONED = [10, 2, 31, 40, 2, 20, 2, 32, 32, 32, 32, 32, 32, 41, 2]

# verbatim, template_prefix, template_full, result
VECTORS = {
    "other tokens for the same text": (
        [11, 12, 13, 40, 41, 220, 17, 2],
        PREFIX,
        [*PREFIX, 21, 22, 40, 41],
        [11, 12, 13, 40, 41, 220, 17, 2, 21, 22, 40, 41],
    ),
    "cut by max_tokens": (
        [11, 12, 13, 40, 41, 220, 17],
        PREFIX,
        [*PREFIX, 21, 22, 40, 41],
        [11, 12, 13, 40, 41, 220, 17, 2, 21, 22, 40, 41],
    ),
    "reasoning dropped, prefix longer than the whole": (
        REASONED,
        [10, 2, 40, 2, 20, 2, 32, 32, 32, 32, 32, 32, 41, 2],
        [10, 2, 40, 2, 20, 2, 41, 2, 20, 2, 50],
        [*REASONED, 20, 2, 50],
    ),
    "reasoning dropped, prefix shorter than the whole": (
        [10, 2, 31, 31, 31, 40, 2],
        [10, 2, 31, 31, 31, 40, 2],
        [10, 2, 40, 2, 20, 2, 60, 61, 62, 63, 50],
        [10, 2, 31, 31, 31, 40, 2, 20, 2, 60, 61, 62, 63, 50],
    ),
    "no model turn yet": ([], [], [1, 2, 3], [1, 2, 3]),
}


@pytest.mark.parametrize("name", VECTORS)
def test_known_vectors(name: str) -> None:
    verbatim, prefix, full, result = VECTORS[name]
    assert splice(verbatim, prefix, full, END) == result


def test_the_positional_rule_would_lose_a_turn() -> None:
    """Splicing by position silently drops turn 20 of this vector. This is why splice() counts."""
    verbatim, prefix, full, result = VECTORS["reasoning dropped, prefix shorter than the whole"]
    by_position = max(place for place in range(len(prefix)) if full[place] == END)
    assert [*verbatim[:-1], *full[by_position:]] == [10, 2, 31, 31, 31, 40, 2, 60, 61, 62, 63, 50]
    assert result != [*verbatim[:-1], *full[by_position:]]


def test_a_template_that_drops_turns_is_refused() -> None:
    with pytest.raises(SpliceError, match=r"have 2 end-of-turn tokens, all .* have 1"):
        splice([5, 2, 6, 2], [5, 2, 6, 2], [5, 2], END)


def test_a_template_without_an_end_of_turn_is_refused() -> None:
    with pytest.raises(SpliceError, match=r"no end-of-turn token \(2\) after the assistant"):
        splice([5, 6], [5, 6], [5, 6, 2], END)


turns = st.lists(st.lists(st.integers(3, 9), max_size=5), min_size=1, max_size=6)


@given(turns, turns, turns, st.booleans(), st.data())
def test_new_tokens_follow_the_sampled_ones_unchanged(
    old: list[list[int]],
    new: list[list[int]],
    sampled: list[list[int]],
    stopped: bool,
    data: st.DataObject,
) -> None:
    """The model may sample anything, and the template may shorten earlier turns to any length."""
    shortened = [turn[: data.draw(st.integers(0, len(turn)))] for turn in old]
    verbatim = [*_end_turns(sampled)[:-1], *([END] if stopped else [7])]
    result = splice(verbatim, _end_turns(old), _end_turns([*shortened, *new]), END)
    assert result == [*verbatim, *([] if stopped else [END]), *_end_turns(new)]
    assert (
        find_turn_end(_end_turns(old), _end_turns([*shortened, *new]), END)
        == len(_end_turns(shortened)) - 1
    )


def _end_turns(turns: list[list[int]]) -> list[int]:
    return [token for turn in turns for token in (*turn, END)]
