"""What the docs name must exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_promise_of_the_security_page_names_a_test_that_exists() -> None:
    page = (ROOT / "docs" / "security.md").read_text()
    sources = {path.name: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    everything = "\n".join(sources.values())
    for name in re.findall(r"`(?:test_\w+\.py::)?(test_\w+)`", page):
        assert f"def {name}(" in everything, name
    for name in re.findall(r"`(test_\w+\.py)", page):
        assert name in sources, name
