"""The score of a solution: right or wrong in a strict box, and milder for one that used the tool.

For `reward.custom_reward_function`: `path=pkg://rollway.integrations.verl.retool.reward`,
`name=compute_score`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollway.errors import UsageError

MILDEST = -0.6
"""A wrong answer never costs less than this."""
PER_CALL = 0.1
"""What each call of the tool takes off the cost of a wrong answer, so that calls are tried."""
TURNS_WITHOUT_CALL = 2
"""The user's and the model's; every call adds two."""


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any],
    **kwargs: Any,
) -> dict[str, Any]:
    """What verl calls for each response; 1 if the answer is right, else from -1 to -0.6."""
    from verl.utils.reward_score import math_dapo

    result: dict[str, Any] = math_dapo.compute_score(
        solution_str, ground_truth, strict_box_verify=True
    )
    if result["score"] < 0:
        result["score"] = wrong_score(result["score"], turns(extra_info))
    if result["pred"] is None:  # verl gathers these in one column, which wants one type
        result["pred"] = ""
    return result


def wrong_score(score: float, num_turns: int) -> float:
    calls = (num_turns - TURNS_WITHOUT_CALL) / 2
    return min(MILDEST, score + calls * PER_CALL)


def turns(extra_info: Mapping[str, Any]) -> int:
    count = extra_info.get("num_turns")
    if count is None:
        raise UsageError(
            "verl did not say how many turns a rollout had.",
            "Set reward.reward_manager.name=naive, which does, and use the tool agent loop.",
        )
    return int(count)
