"""Tests wait for conditions: a sleep is simulated work, and says so."""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).parents[1]
HELPER = TESTS / "waiting.py"


def test_a_sleep_of_a_bare_number_has_its_reason_beside_it() -> None:
    unexplained = []
    for path in sorted(TESTS.rglob("*.py")):
        text = path.read_text()
        lines = text.splitlines()
        for node in ast.walk(ast.parse(text)):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "sleep"
                and node.args
                and isinstance(node.args[0], ast.Constant)
                and "#" not in lines[node.lineno - 1]
                and path != HELPER
            ):
                unexplained.append(f"{path.relative_to(TESTS)}:{node.lineno}")
    assert unexplained == [], "wait for the condition (tests/waiting.py), or name what it simulates"
