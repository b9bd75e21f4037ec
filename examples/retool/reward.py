"""The score of a solution, which depends on the answer in its last box and on calls of the tool.

For `reward.custom_reward_function`: `path=pkg://examples.retool.reward`,
`name=compute_score`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollway.errors import UsageError

MAX_WRONG_SCORE = -0.6
"""The best score of a wrong answer."""
SCORE_PER_CALL = 0.1
"""What each call of the tool adds to a wrong answer's score, so that the policy tries calls."""
TURNS_WITHOUT_CALL = 2
"""The user's and the model's; every call adds two."""


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any],
    **kwargs: Any,
) -> dict[str, Any]:
    """Score one response for verl: 1 if the answer is right, otherwise from -1 to -0.6."""
    from verl.utils.reward_score import math_dapo

    result: dict[str, Any] = math_dapo.compute_score(
        solution_str, ground_truth, strict_box_verify=True
    )
    if result["score"] < 0:
        calls = (_read_turns(extra_info) - TURNS_WITHOUT_CALL) / 2
        result["score"] = min(MAX_WRONG_SCORE, result["score"] + calls * SCORE_PER_CALL)
    if result["pred"] is None:  # verl gathers predictions in one column, which needs one type
        result["pred"] = ""
    return result


def _read_turns(extra_info: Mapping[str, Any]) -> int:
    count = extra_info.get("num_turns")
    if count is None:
        raise UsageError(
            "verl did not report how many turns a rollout had.",
            "Set reward.reward_manager.name=naive, which does, and use the tool agent loop.",
        )
    return int(count)
