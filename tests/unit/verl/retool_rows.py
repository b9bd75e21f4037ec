"""Shared by the tests of unit/verl."""

from __future__ import annotations

from typing import Any

PROBLEM, ANSWER = "How many primes are below 10?", 4


ROWS: dict[str, dict[str, Any]] = {
    "math_dapo": {
        "data_source": "math_dapo",
        "prompt": [{"content": PROBLEM, "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": "4", "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": "9a9b6eb4"},
    },
    "aime_2024": {"ID": "2024-I-1", "Problem": PROBLEM, "Solution": "…", "Answer": ANSWER},
    "aime_2025": {"problem": PROBLEM, "answer": "4", "solution": "…", "id": "0", "year": 2025},
}
