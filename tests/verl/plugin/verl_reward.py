"""verl's reward function for rollway.demo's counting task."""

from __future__ import annotations


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    right = sum(a == b for a, b in zip(solution_str, ground_truth, strict=False))
    return right / len(ground_truth)
