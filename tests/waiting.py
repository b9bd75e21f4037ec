"""Wait for a condition, instead of sleeping and hoping. No other test module polls."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar, overload

T = TypeVar("T")


def wait_until(
    condition: Callable[[], T], seconds: float = 60.0, *, every: float = 0.02, what: str = ""
) -> T:
    """Return the condition's first true value; fail with its last value after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what or 'the condition'}: still {value!r}"
        time.sleep(every)
    return value


@overload
async def wait_until_async(
    condition: Callable[[], Awaitable[T]],
    seconds: float = ...,
    *,
    every: float = ...,
    what: str = ...,
) -> T: ...
@overload
async def wait_until_async(
    condition: Callable[[], T], seconds: float = ..., *, every: float = ..., what: str = ...
) -> T: ...
async def wait_until_async(
    condition: Callable[[], object],
    seconds: float = 60.0,
    *,
    every: float = 0.02,
    what: str = "",
) -> object:
    """Do the same without blocking the event loop; the condition may be a coroutine function."""
    deadline = time.monotonic() + seconds
    while not (value := await _evaluate(condition)):
        assert time.monotonic() < deadline, f"{what or 'the condition'}: still {value!r}"
        await asyncio.sleep(every)
    return value


def has_become(condition: Callable[[], bool], seconds: float, *, every: float = 0.2) -> bool:
    """Return whether the condition came true within `seconds`."""
    deadline = time.monotonic() + seconds
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(every)
    return value


def stays(condition: Callable[[], bool], seconds: float, *, every: float = 0.01) -> bool:
    """Return whether the condition is true all the time for `seconds`.

    That something does not happen can only be watched for a while: a correct program never fails
    such a test, and a wrong one fails it as soon as the event falls into that time.
    """
    deadline = time.monotonic() + seconds
    while condition():
        if time.monotonic() >= deadline:
            return True
        time.sleep(every)
    return False


async def stays_async(
    condition: Callable[[], object], seconds: float, *, every: float = 0.01
) -> bool:
    """Do the same without blocking the event loop; the condition may be a coroutine function."""
    deadline = time.monotonic() + seconds
    while await _evaluate(condition):
        if time.monotonic() >= deadline:
            return True
        await asyncio.sleep(every)
    return False


async def settle() -> None:
    """Run all tasks as far as they get without time passing; for stand-ins without timers."""
    for _ in range(50):
        await asyncio.sleep(0)


async def _evaluate(condition: Callable[[], object]) -> object:
    value = condition()
    return await value if inspect.isawaitable(value) else value
