"""docs/api.md is what the docstrings say, and the docstrings of public names are complete."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    sys.modules.pop("api_page", None)


def test_the_page_is_up_to_date() -> None:
    import api_page

    assert api_page.PAGE.read_text() == api_page.render_page(), "run scripts/api_page.py"


def test_every_public_name_has_parameters_returns_and_an_example() -> None:
    import api_page

    assert api_page.find_gaps() == []


def test_examples_have_at_most_forty_lines() -> None:
    examples = sorted((ROOT / "examples").glob("[!_]*.py"))
    assert len(examples) == 4
    for path in examples:
        assert len(path.read_text().splitlines()) <= 40, path.name


def test_sections_are_read_from_a_docstring() -> None:
    from api_page import Docstring

    doc = Docstring.parse(
        """Return a sum.

        Args:
            a: the first
                number.
            b, c: more.

        Example:
            add(1, 2)
        """
    )
    assert doc.text == "Return a sum."
    assert doc.list_entries("Args") == {"a": "the first number.", "b, c": "more."}
    assert doc.sections["Example"] == "add(1, 2)"
