"""Plain data from outside, bounded: YAML that is small, flat and finite once it is unfolded.

PyYAML's safe loader runs no code, but it recurses once per level, follows an anchor into itself,
and unfolds merge keys without a bound. So the stream of events is counted first, without building
anything; only then are values constructed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import yaml

from rollway.errors import SpecError

DEEPEST = 64
MOST_VALUES = 100_000
_FLATTEN = "Write it flatter."
_INTEGER_BITS = 64
_KEY = 1000
# Line ends, other controls, and what turns the direction of a line on a terminal.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
_NO_TEXT = re.compile("[\x00\ud800-\udfff]")


def read_yaml(text: str, what: str) -> Any:
    """Construct the value of a YAML text; SpecError names what is wrong with `what`."""
    try:
        _Counter(what).count(text)
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())[:300]
        raise SpecError(
            f"{what} is not valid YAML: {reason}.", "Mend the line it names."
        ) from error
    except (ValueError, KeyError, AttributeError, TypeError, OverflowError) as error:
        # What PyYAML raises for `!!bool x`, `!!timestamp x`, 2001-99-99, an int of 5,000 digits.
        reason = " ".join(str(error).split())[:100]
        raise SpecError(
            f"{what} is not valid YAML: a value does not fit its type ({reason}).",
            "Put it in quotes if it is text.",
        ) from error


class _Counter:
    """Counts what a text becomes once every alias is replaced by what it stands for."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._sizes: dict[str, int] = {}
        self._open: list[tuple[str | None, int, set[str] | None]] = []
        self._values = 0
        self._is_key: list[bool] = []

    def count(self, text: str) -> None:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if isinstance(event, (yaml.MappingStartEvent, yaml.SequenceStartEvent)):
                self._enter(event)
            elif isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent)):
                self._leave()
            elif isinstance(event, yaml.ScalarEvent):
                self._key(event.value)
                self._add(1)
                if event.anchor:
                    self._sizes[event.anchor] = 1
            elif isinstance(event, yaml.AliasEvent):
                self._key(None)
                self._alias(event.anchor or "")

    def _enter(self, event: yaml.CollectionStartEvent) -> None:
        self._key(None)
        self._add(1)
        if len(self._open) == DEEPEST:
            raise SpecError(f"{self._what} has more than {DEEPEST} levels.", _FLATTEN)
        keys: set[str] | None = set() if isinstance(event, yaml.MappingStartEvent) else None
        self._open.append((event.anchor, self._values, keys))
        self._is_key.append(True)

    def _leave(self) -> None:
        anchor, before, _ = self._open.pop()
        self._is_key.pop()
        if anchor:
            self._sizes[anchor] = self._values - before + 1

    def _alias(self, anchor: str) -> None:
        if any(name == anchor for name, _, _ in self._open):
            raise SpecError(f"{self._what} holds `{anchor}`, which contains itself.", _FLATTEN)
        self._add(self._sizes.get(anchor, 1))

    def _add(self, values: int) -> None:
        self._values += values
        if self._values > MOST_VALUES:
            raise SpecError(f"{self._what} unfolds to more than {MOST_VALUES} values.", _FLATTEN)

    def _key(self, text: str | None) -> None:
        """Note that a node begins; in a mapping every second one is a key."""
        if not self._open or (keys := self._open[-1][2]) is None:
            return
        if self._is_key[-1] and text is not None:
            if text in keys:
                raise SpecError(
                    f"{self._what} has the key {text[:60]!r} twice in one mapping.", "Keep one."
                )
            keys.add(text)
        self._is_key[-1] = not self._is_key[-1]


def check_plain(data: Any, what: str, free_text: tuple[str, ...] = ("",)) -> None:
    """Refuse data that is deep, endless or unprintable, before anything recurses into it.

    Text is printable, but for values below keys in `free_text`, which may have line ends."""
    pending: list[tuple[Any, str, int, bool]] = [(data, "", 0, "" in free_text)]
    values = 0
    while pending:
        item, path, depth, free = pending.pop()
        values += 1
        if values > MOST_VALUES:
            raise SpecError(f"{what} unfolds to more than {MOST_VALUES} values.", _FLATTEN)
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
