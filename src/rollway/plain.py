"""Read plain data from outside with bounds on its size, its depth and its characters.

PyYAML's safe loader runs no code, but it recurses once per level, follows an anchor into itself,
and expands merge keys without a bound. So the stream of events is counted first, and values are
constructed only if the count is within the bounds.
"""

from __future__ import annotations

import difflib
import math
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from rollway.errors import SpecError, UsageError

DEEPEST = 64
_LARGEST_FILE = 256 << 10  # bytes
MAX_VALUES = 100_000
_FLATTEN = "Write it flatter."
_INTEGER_BITS = 64
_KEY = 1000
# Line ends, other control characters, and those that change the direction of text.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
_NO_TEXT = re.compile("[\x00\ud800-\udfff]")


class SpecPart(BaseModel):
    """A part of a spec: unknown fields and numbers that are not finite are refused."""

    model_config = ConfigDict(
        extra="forbid", validate_default=True, coerce_numbers_to_str=True, allow_inf_nan=False
    )


def read_yaml(text: str, what: str) -> Any:
    """Parse a YAML text; raise SpecError, which names the source as `what`."""
    try:
        _Counter(what).count(text)
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())[:300]
        raise SpecError(
            f"{what} is not valid YAML: {reason}.", "Correct the line it names."
        ) from error
    except (ValueError, KeyError, AttributeError, TypeError, OverflowError) as error:
        # PyYAML raises these for `!!bool x`, `!!timestamp x`, 2001-99-99 and very long integers.
        reason = " ".join(str(error).split())[:100]
        raise SpecError(
            f"{what} is not valid YAML: a value does not fit its type ({reason}).",
            "Put it in quotes if it is text.",
        ) from error


@dataclass(slots=True)
class _Collection:
    """A mapping or a list that is being counted."""

    anchor: str | None
    start: int
    keys: set[str] | None
    """The keys of a mapping; None for a list."""
    is_at_key: bool = True


class _Counter:
    """Counts the values of a YAML text after every alias is replaced by its anchor's value."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._sizes: dict[str, int] = {}  # by anchor
        self._open: list[_Collection] = []
        self._values = 0

    def count(self, text: str) -> None:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent)):
                ended = self._open.pop()
                if ended.anchor:
                    self._sizes[ended.anchor] = self._values - ended.start
            elif isinstance(event, yaml.AliasEvent):
                self._add(self._find_size(event.anchor or ""))
            elif isinstance(event, yaml.ScalarEvent):
                self._add(1, key=event.value)
                if event.anchor:
                    self._sizes[event.anchor] = 1
            elif isinstance(event, (yaml.MappingStartEvent, yaml.SequenceStartEvent)):
                self._add(1)
                if len(self._open) == DEEPEST:
                    raise SpecError(f"{self._what} has more than {DEEPEST} levels.", _FLATTEN)
                keys: set[str] | None = set() if isinstance(event, yaml.MappingStartEvent) else None
                self._open.append(_Collection(event.anchor, self._values - 1, keys))

    def _find_size(self, anchor: str) -> int:
        if any(collection.anchor == anchor for collection in self._open):
            raise SpecError(f"{self._what} holds `{anchor}`, which contains itself.", _FLATTEN)
        return self._sizes.get(anchor, 1)

    def _add(self, values: int, key: str | None = None) -> None:
        """Count a node that begins. In a mapping every second node is a key."""
        if self._open and (keys := self._open[-1].keys) is not None:
            if self._open[-1].is_at_key and key is not None:
                if key in keys:
                    raise SpecError(
                        f"{self._what} has the key {key[:60]!r} twice in one mapping.", "Keep one."
                    )
                keys.add(key)
            self._open[-1].is_at_key = not self._open[-1].is_at_key
        self._values += values
        if self._values > MAX_VALUES:
            raise SpecError(f"{self._what} unfolds to more than {MAX_VALUES} values.", _FLATTEN)


def read_yaml_file(path: Path) -> dict[str, Any]:
    """Read a stack file, which must be a mapping of fields."""
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST_FILE + 1)
        text = content.decode()
    except FileNotFoundError:
        raise UsageError(f"There is no file {path}.", "Check the path of the stack file.") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"{path} cannot be read: {reason}.", "Check the file.") from error
    if len(content) > _LARGEST_FILE:
        raise SpecError(
            f"{path} has more than {_LARGEST_FILE >> 10} KiB, far more than a stack file needs.",
            "Is it the right file?",
        )
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
    if len(override) > _LARGEST_FILE:
        raise UsageError(f"{shown} has more than {_LARGEST_FILE >> 10} KiB.", "Use a stack file.")
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


def check_plain(data: Any, what: str, free_text: tuple[str, ...] = ("",)) -> None:
    """Raise SpecError for data that is too deep, endless or unprintable.

    Text must be printable, except below the keys in `free_text`, where it may have line ends. The
    check does not recurse, so data that contains itself cannot exhaust the stack."""
    pending: list[tuple[Any, str, int, bool]] = [(data, "", 0, "" in free_text)]
    values = 0
    while pending:
        item, path, depth, free = pending.pop()
        values += 1
        if values > MAX_VALUES:
            raise SpecError(f"{what} unfolds to more than {MAX_VALUES} values.", _FLATTEN)
        if isinstance(item, (Mapping, list, tuple)):
            if depth == DEEPEST:
                raise SpecError(
                    f"{what} has more than {DEEPEST} levels, or contains itself.", _FLATTEN
                )
            if isinstance(item, Mapping):
                for key, value in item.items():
                    name = _check_key(key, path or what)
                    below = f"{path}.{name}" if path else name
                    pending.append((value, below, depth + 1, free or name in free_text))
            else:
                pending.extend((e, f"{path}.{i}", depth + 1, free) for i, e in enumerate(item))
        elif isinstance(item, (str, PurePath)):
            _check_text(str(item), path, free)
        elif isinstance(item, (int, float)):
            _check_number(item, path)


def _check_key(key: Any, where: str) -> str:
    text = str(key)[:_KEY]
    if _CONTROL.search(text) or _NO_TEXT.search(text) or (isinstance(key, str) and len(key) > _KEY):
        raise SpecError(f"`{where}`: {text!r} cannot be the name of a field.", "Correct the name.")
    return text


def _check_text(text: str, path: str, free: bool) -> None:
    if _NO_TEXT.search(text):
        problem = "holds a NUL or half of a character"
    elif not free and _CONTROL.search(text):
        problem = "holds a line end or another control character"
    else:
        return
    shown = "" if path.rpartition(".")[2] == "secret" else f": {text[:60]!r}"
    raise SpecError(f"`{path}` {problem}{shown}.", "Remove it.")


def _check_number(number: float, path: str) -> None:
    if isinstance(number, float) and not math.isfinite(number):
        raise SpecError(f"`{path}` is not a finite number.", "Give a number.")
    if isinstance(number, int) and number.bit_length() >= _INTEGER_BITS:
        raise SpecError(f"`{path}` is a whole number of more than 64 bits.", "Give a smaller one.")


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
