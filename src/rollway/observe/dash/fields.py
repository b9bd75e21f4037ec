"""Read fields of entries that anybody may have written: the value, or None if it is not one.

A record may be torn, of another version, or hostile. The page is then without that figure; it never
shows a wrong one, and never fails.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

_LARGEST = 2**53
"""Readers of JSON that use doubles round integers from here on."""
_LONGEST_TEXT = 2_000
_SHORT_TEXT = 64
_MOST_ITEMS = 4_096
_UNSHOWN = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Control characters, and those that reorder the text around them."""


def get_number(value: object) -> float | None:
    """Return a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, int) and abs(value) >= _LARGEST:
        return None
    return float(value) if math.isfinite(value) and abs(value) < 1e15 else None


def get_amount(value: object) -> float | None:
    """Return a number that is not negative."""
    number = get_number(value)
    return number if number is not None and number >= 0 else None


def get_amounts(value: object) -> dict[str, float]:
    """Return the numbers of an object that are not negative, by their keys."""
    if not isinstance(value, Mapping) or len(value) > _MOST_ITEMS:
        return {}
    amounts = {}
    for key, item in value.items():
        # A day's record has ten million numbers in its samples; nearly all of them are these.
        if type(item) is float and 0.0 <= item < 1e15 and type(key) is str:
            amounts[key] = item
        elif isinstance(key, str) and (amount := get_amount(item)) is not None:
            amounts[key] = amount
    return amounts


def get_count(value: object) -> int:
    """Return how many, or 0."""
    return int(get_amount(value) or 0)


def get_time(value: object) -> float | None:
    """Return a time of this century, in seconds since 1970: any other would stretch every plot."""
    number = get_number(value)
    return number if number is not None and 946_684_800 <= number < 4_102_444_800 else None


def get_version(value: object) -> int | None:
    """Return a weight version: an integer, also one that JSON has as the key of an object."""
    if isinstance(value, str) and re.fullmatch(r"\d{1,15}", value):
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value < _LARGEST else None


def get_text(value: object, longest: int = _LONGEST_TEXT) -> str:
    """Return text without characters that change how other text is shown; numbers as text."""
    # A day's record has a million entries, and the same few thousand short texts in them.
    if type(value) is str and len(value) <= min(longest, _SHORT_TEXT):
        return _clean_short(value)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return ""
    if isinstance(value, int) and abs(value) >= 2**64:
        return ""  # turning a huge integer into text is slow
    text = str(value)
    text = text if len(text) <= longest else text[: longest - 1] + "…"
    return _UNSHOWN.sub("\N{REPLACEMENT CHARACTER}", text)


@lru_cache(maxsize=8192)
def _clean_short(text: str) -> str:
    return _UNSHOWN.sub("\N{REPLACEMENT CHARACTER}", text)


def get_mapping(value: object) -> Mapping[str, Any]:
    """Return an object with text as keys, and not too many of them."""
    if not isinstance(value, Mapping) or len(value) > _MOST_ITEMS:
        return {}
    return {key: item for key, item in value.items() if isinstance(key, str)}


def get_list(value: object) -> list[Any]:
    return value[:_MOST_ITEMS] if isinstance(value, list) else []


@lru_cache(maxsize=8192)
def parse_labels(key: str) -> Mapping[str, str]:
    """Return the labels of a sampled value: `worker=tiny-0,role=prefill`."""
    pairs = (part.partition("=") for part in get_text(key, 500).split(",") if part)
    return {name: value for name, _, value in pairs}
