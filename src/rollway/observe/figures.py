"""Figures as people read them, in the terminal and in reports; the page has the same in dom.js."""

from __future__ import annotations

import time

NONE = "–"
_LARGE = ((1e9, " G"), (1e6, " M"), (1e4, " k"))


def format_number(value: float | None) -> str:
    """Format a number: 0.25, 12.3 k, 4.1e-05."""
    if value is None:
        return NONE
    size = abs(value)
    for least, unit in _LARGE:
        if size >= least:
            return _trim(value / (1e3 if unit == " k" else least)) + unit
    if size and size < 1e-3:
        return f"{value:.1e}"
    return _trim(value)


def _trim(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 999.5 else f"{value:.3g}"  # also what rounds to 1000


def format_share(value: float | None) -> str:
    return NONE if value is None else f"{value:.0%}"


def format_seconds(value: float | None) -> str:
    """Format a duration: 12 ms, 3.5 s, 4.0 min, 2.1 h."""
    if value is None:
        return NONE
    if value == 0:
        return "0 s"
    for most, factor, unit in ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms"), (120.0, 1.0, "s")):
        if value < most:
            return f"{_trim(value * factor)} {unit}"
    return f"{value / 60:.1f} min" if value < 7200 else f"{value / 3600:.1f} h"


def format_bytes(value: float | None) -> str:
    return (
        NONE if value is None else f"{format_number(value).rstrip()}{'' if value >= 1e4 else ' '}B"
    )


def format_clock(t: float | None) -> str:
    """Format a time of day where the reader is."""
    return NONE if t is None else time.strftime("%H:%M:%S", time.localtime(t))


def format_utc(t: float | None) -> str:
    return NONE if t is None else time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(t))


def count(number: int, noun: str) -> str:
    """Format how many: 1 worker, 1,024 workers."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
