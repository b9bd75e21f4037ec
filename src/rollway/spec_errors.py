"""Turns validation errors of a spec into sentences that name the field, with a suggestion."""

from __future__ import annotations

import difflib
import typing
from typing import Any

from pydantic import BaseModel, ValidationError

_MAX_SHOWN = 5


def describe_error(error: ValidationError, model: type[BaseModel]) -> str:
    """Describe what is wrong with data for `model`, one sentence per field."""
    details = error.errors()
    sentences = [_describe_detail(dict(detail), model) for detail in details[:_MAX_SHOWN]]
    if len(details) > _MAX_SHOWN:
        sentences.append(f"There are {len(details) - _MAX_SHOWN} more.")
    return " ".join(sentences)


def _describe_detail(detail: dict[str, Any], model: type[BaseModel]) -> str:
    path = ".".join(str(part) for part in detail["loc"]) or "the stack"
    if detail["type"] == "extra_forbidden":
        return f"`{path}`: there is no such field.{_suggest(detail['loc'], model)}"
    message = str(detail["msg"]).removeprefix("Value error, ")
    value = detail.get("input")
    # `join` holds the secret, which no message may show.
    can_show = (
        isinstance(value, (str, int, float, bool, type(None))) and "join" not in detail["loc"]
    )
    shown = f" (got {repr(value)[:100]})" if can_show else ""
    return f"`{path}`: {message}{shown}."


def _suggest(location: tuple[int | str, ...], model: type[BaseModel]) -> str:
    for step in location[:-1]:
        if isinstance(step, str):
            model = _get_part(model, step)
    close = difflib.get_close_matches(str(location[-1]), list(model.model_fields), n=1, cutoff=0.5)
    if close:
        return f" Did you mean `{close[0]}`?"
    return f" Known here: {', '.join(sorted(model.model_fields))}."


def _get_part(model: type[BaseModel], field: str) -> type[BaseModel]:
    annotation = model.model_fields[field].annotation
    for candidate in (annotation, *typing.get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return model
