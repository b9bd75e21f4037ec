"""Waiting for a condition, instead of sleeping and hoping."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(
    condition: Callable[[], T], seconds: float = 60.0, *, every: float = 0.05, what: str = ""
) -> T:
    """Return the condition's first true value; fail with its last value after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what or 'the condition'}: still {value!r}"
        time.sleep(every)
    return value


async def wait_until_async(
    condition: Callable[[], Awaitable[T]],
    seconds: float = 60.0,
    *,
    every: float = 0.05,
    what: str = "",
) -> T:
    """Return the first true value that the coroutine function gives."""
    deadline = time.monotonic() + seconds
    while not (value := await condition()):
        assert time.monotonic() < deadline, f"{what or 'the condition'}: still {value!r}"
        await asyncio.sleep(every)
    return value


def has_become(condition: Callable[[], bool], seconds: float, *, every: float = 0.2) -> bool:
    """Return whether the condition came true within `seconds`."""
    deadline = time.monotonic() + seconds
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(every)
    return value
