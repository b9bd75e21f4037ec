"""Rows of every source map to the same row of verl, wherever they were loaded from."""

from __future__ import annotations

import pytest

from examples.retool.datasets import SUFFIX, map_row, recognise
from rollway.errors import UsageError
from tests.unit.verl.retool_rows import PROBLEM, ROWS


def test_every_source_maps_to_the_same_row() -> None:
    mapped = {source: map_row(row, 7, source) for source, row in ROWS.items()}
    for source, row in mapped.items():
        assert row == {
            "data_source": source,
            "prompt": [{"role": "user", "content": PROBLEM + SUFFIX}],
            "ability": "MATH",
            "reward_model": {"ground_truth": "4"},
            "extra_info": {"index": 7},
            "agent_name": "tool_agent",
        }


def test_mapping_a_row_again_changes_nothing() -> None:
    for source, row in ROWS.items():
        once = map_row(row, 3, source)
        assert map_row(once, 3, source) == once


def test_messages_before_the_problem_are_kept() -> None:
    row = {**ROWS["math_dapo"], "prompt": [{"role": "system", "content": "Think."}]}
    row["prompt"] += [{"role": "user", "content": PROBLEM}]
    prompt = map_row(row, 0, "math_dapo")["prompt"]
    assert [m["content"] for m in prompt] == ["Think.", PROBLEM + SUFFIX]


def test_a_row_without_answer_is_refused() -> None:
    with pytest.raises(UsageError, match="its columns are problem, solution"):
        map_row({"problem": PROBLEM, "solution": "…"}, 0, "aime_2025")
    with pytest.raises(UsageError, match="no problem or no answer"):
        map_row({"prompt": [], "reward_model": {"ground_truth": "4"}}, 0, "math_dapo")


@pytest.mark.parametrize(
    ("entry", "source"),
    [
        ("BytedTsinghua-SIA/DAPO-Math-17k", "math_dapo"),
        ("yentinglin/aime_2025", "aime_2025"),
        ("Maxwell-Jia/AIME_2024", "aime_2024"),
        ("/data/sets/aime_2025", "aime_2025"),
        ("/data/sets/AIME-2024/data/train-00000-of-00001.parquet", "aime_2024"),
        ("/data/aime25.parquet", "aime_2025"),
        ("aime25.parquet", "aime_2025"),
        ("~/aime_2024-00000-of-00001.parquet", "aime_2024"),
        ("/data/aime_2024/aime_2025.jsonl", "aime_2025"),
        ("hub/datasets--BytedTsinghua-SIA--DAPO-Math-17k/snapshots/0f/x.parquet", "math_dapo"),
    ],
)
def test_a_source_is_recognised_by_name_and_by_path(entry: str, source: str) -> None:
    assert recognise(entry) == (source, entry)


def test_a_bare_name_is_loaded_from_the_hub() -> None:
    assert recognise("aime_2025") == ("aime_2025", "yentinglin/aime_2025")


def test_a_source_can_be_named_before_an_unknown_path() -> None:
    assert recognise("aime_2025:/data/val.parquet") == ("aime_2025", "/data/val.parquet")
    with pytest.raises(UsageError, match=r"aime_2025:/data/val\.parquet"):
        recognise("/data/val.parquet")
