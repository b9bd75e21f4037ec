"""Read YAML files and `--set` overrides, and say what is wrong with them in the user's words."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from rollway.errors import SpecError, UsageError


class SpecPart(BaseModel):
    """A part of a spec: unknown fields and numbers that are not finite are refused."""

    model_config = ConfigDict(
        extra="forbid", validate_default=True, coerce_numbers_to_str=True, allow_inf_nan=False
    )


class _Loader(yaml.SafeLoader):
    """Refuses a key that is twice in one mapping, of which PyYAML would keep the last."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        keys: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in keys:
                    problem = f"the key {key.value[:60]!r} is there twice in one mapping"
                    raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
                keys.add(key.value)
        return node


def read_yaml(text: str, what: str) -> Any:
    """Parse a YAML text; raise SpecError, which names the source as `what`."""
    documents = read_documents(text, what)
    if len(documents) > 1:
        raise SpecError(f"{what} has {len(documents)} YAML documents.", "Keep one.")
    return documents[0] if documents else None


def read_documents(text: str, what: str) -> list[Any]:
    """Parse all documents of a YAML text; raise SpecError as `read_yaml`."""
    try:
        # Copied: what an alias names must not change in one place with another.
        return [copy_plain(document) for document in yaml.load_all(text, Loader=_Loader)]
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())[:300]
        raise SpecError(
            f"{what} is not valid YAML: {reason}.", "Correct the line it names."
        ) from error
    except RecursionError as error:
        raise SpecError(f"{what} is too deep, or contains itself.", "Write it flatter.") from error
    except (ValueError, KeyError, AttributeError, TypeError, OverflowError) as error:
        # PyYAML raises these for `!!bool x`, `!!timestamp x`, 2001-99-99 and very long integers.
        reason = " ".join(str(error).split())[:100]
        raise SpecError(
            f"{what} is not valid YAML: a value does not fit its type ({reason}).",
            "Put it in quotes if it is text.",
        ) from error


def read_yaml_file(path: Path) -> dict[str, Any]:
    """Read a stack file, which must be a mapping of fields."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"There is no file {path}.", "Check the path of the stack file.") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"{path} cannot be read: {reason}.", "Check the file.") from error
    data = read_yaml(text, str(path))
    if not isinstance(data, dict):
        kind = "is empty" if data is None else f"holds a {type(data).__name__}"
        raise SpecError(
            f"{path} {kind}, not a mapping of fields.",
            "Start it with `models:`, see docs/stack.md.",
        )
    return data


def apply_override(data: dict[str, Any], override: str) -> None:
    """Apply `models.0.replicas=4`: a path through mappings and lists, and a YAML value."""
    path, separator, text = override.partition("=")
    shown = f"`--set {override if override.isprintable() else ascii(override)}`"[:200]
    if not separator or not path:
        raise UsageError(
            f"{shown} is not of the form a.b=value.", "For example: --set router.mode=kv"
        )
    value = read_yaml(text, shown) if text else None
    keys = path.split(".")
    target: Any = data
    for key in keys[:-1]:
        target = _get_child(target, key, shown)
    if isinstance(target, list):
        target[_parse_index(target, keys[-1], shown)] = value
    else:
        target[keys[-1]] = value


def _get_child(target: Any, key: str, shown: str) -> Any:
    if isinstance(target, list):
        child = target[_parse_index(target, key, shown)]
    else:
        child = target.setdefault(key, {})
        if child is None:
            child = target[key] = {}
    if not isinstance(child, (dict, list)):
        raise UsageError(
            f"{shown}: `{key[:60]}` holds a value, so it has no fields.", "Set it as a whole."
        )
    return child


def _parse_index(items: list[Any], key: str, shown: str) -> int:
    if not (key.isdecimal() and len(key) < 10) or int(key) >= len(items):
        raise UsageError(
            f"{shown}: `{key[:60]}` is no position in a list of {len(items)}.",
            f"Use 0 to {len(items) - 1}." if items else "The list is empty.",
        )
    return int(key)


def copy_plain(value: Any) -> Any:
    """Copy plain data, and what a YAML alias names once for each place, so that a change in one
    place is none in another."""
    if isinstance(value, Mapping):
        return {key: copy_plain(item) for key, item in value.items()}
    return [copy_plain(item) for item in value] if isinstance(value, list) else value


def drop_null(value: Any) -> Any:
    """Copy plain data without fields that are null, which many formats take for absent."""
    if isinstance(value, Mapping):
        return {key: drop_null(item) for key, item in value.items() if item is not None}
    return [drop_null(item) for item in value] if isinstance(value, list) else value


# --- errors of validation ------------------------------------------------------------------------


_MAX_SHOWN = 5


def describe_error(error: ValidationError, model: type[BaseModel], whole: str = "the stack") -> str:
    """Describe what is wrong with data for `model`, one sentence per field. `whole` names what an
    error without a field is about."""
    details = error.errors()
    sentences = [_describe_detail(dict(detail), model, whole) for detail in details[:_MAX_SHOWN]]
    if len(details) > _MAX_SHOWN:
        sentences.append(f"There are {len(details) - _MAX_SHOWN} more.")
    return " ".join(sentences)


def _describe_detail(detail: dict[str, Any], model: type[BaseModel], whole: str) -> str:
    path = ".".join(str(part) for part in detail["loc"]) or whole
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
    steps = iter(location[:-1])
    for step in steps:
        if isinstance(step, str) and step in model.model_fields:
            annotation = model.model_fields[step].annotation
            if typing.get_origin(annotation) is dict:
                next(steps, None)  # a key that the user chose
            model = _get_part(annotation) or model
    close = difflib.get_close_matches(str(location[-1]), list(model.model_fields), n=1, cutoff=0.5)
    if close:
        return f" Did you mean `{close[0]}`?"
    return f" Known here: {', '.join(sorted(model.model_fields))}."


def _get_part(annotation: Any) -> type[BaseModel] | None:
    """Return the model in the type of a field; None if it has none."""
    for candidate in (annotation, *typing.get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None
