"""docs/kubernetes.md names every field of the infra file, every example and every shipped file."""

from __future__ import annotations

import re
import typing
from pathlib import Path

import pytest
from pydantic import BaseModel

from rollway.kubernetes.spec import Infra

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "kubernetes.md").read_text()


def list_fields(model: type[BaseModel]) -> set[str]:
    """Return the names of all fields of a model and of the models in it."""
    names = set(model.model_fields)
    for field in model.model_fields.values():
        pending = [field.annotation]
        while pending:
            candidate = pending.pop()
            pending += typing.get_args(candidate)
            if isinstance(candidate, type) and issubclass(candidate, BaseModel):
                names |= list_fields(candidate)
    return names


@pytest.mark.parametrize("name", sorted(list_fields(Infra)))
def test_every_field_is_explained(name: str) -> None:
    quoted = " ".join(re.findall(r"`([^`\n]+)`", PAGE))
    assert re.search(rf"\b{re.escape(name)}\b", quoted)


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "kubernetes").glob("*.yaml")))
def test_every_example_is_named(path: Path) -> None:
    assert f"`{path.name}`" in PAGE


def test_every_path_that_the_page_names_is_there() -> None:
    paths = re.findall(r"\b((?:examples|deploy|tests)/[\w./-]+)", PAGE)
    assert len(paths) > 10
    for path in paths:
        assert (ROOT / path.rstrip(".")).exists(), path
