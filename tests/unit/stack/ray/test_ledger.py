"""The lock of refits follows the life of its holder; no Ray is needed to show it."""

from __future__ import annotations

import asyncio
from typing import Any

from rollway.stack.ray.head import Ledger
from tests.waiting import settle


class Process:
    """Stands for a process: Ray ends `wait` with an error when the process dies."""

    def __init__(self) -> None:
        self.death = asyncio.Event()
        self.wait = self
        self.remote = self._wait

    async def _wait(self) -> None:
        await self.death.wait()
        raise RuntimeError("the actor died")


def ask(ledger: Ledger, token: str, process: Any) -> asyncio.Task[bool]:
    return asyncio.create_task(ledger.lock("refit/m", token, process))


async def test_a_lock_has_one_holder_at_a_time() -> None:
    ledger, process = Ledger(), Process()
    assert await ask(ledger, "a", process)
    second = ask(ledger, "b", process)
    await settle()
    assert not second.done()
    await ledger.unlock("a")
    assert await second


async def test_a_killed_holder_releases_its_lock() -> None:
    ledger, killed = Ledger(), Process()
    assert await ask(ledger, "a", killed)
    second = ask(ledger, "b", Process())
    killed.death.set()
    assert await second


async def test_who_dies_or_gives_up_while_waiting_does_not_get_the_lock() -> None:
    ledger, killed = Ledger(), Process()
    assert await ask(ledger, "a", Process())
    dead, cancelled, living = (
        ask(ledger, "dead", killed), ask(ledger, "gone", Process()), ask(ledger, "b", Process())
    )  # fmt: skip
    await settle()
    killed.death.set()
    await ledger.unlock("gone")
    await settle()
    await ledger.unlock("a")
    assert [await dead, await cancelled, await living] == [False, False, True]


async def test_versions_are_kept_by_model() -> None:
    ledger = Ledger()
    assert await ledger.get("m") is None
    await ledger.claim("m", 1, "x")
    await ledger.claim("m", 3, "y")
    await ledger.put("m", 3, "/c")
    assert await ledger.get("m") == (3, "/c") and await ledger.get("n") is None
    assert await ledger.claims("m") == {1: "x", 3: "y"}


async def test_a_call_that_is_repeated_waits_for_nobody() -> None:
    """Ray breaks a call off when the network does, and the caller repeats it."""
    ledger, process = Ledger(), Process()
    assert await ask(ledger, "a", process) and await ask(ledger, "a", process)
