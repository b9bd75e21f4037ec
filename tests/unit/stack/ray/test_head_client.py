"""What a process asks of a stack on Ray; the Head is a stand-in that counts calls."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollway.errors import StackNotRunning
from rollway.stack.ray import head_client
from rollway.stack.ray.head_client import RayAccess
from tests.waiting import settle


class Counting(RayAccess):
    """Answers calls for the newest claim when the test says so."""

    def __init__(self) -> None:
        self.newest: int | None = None
        self.calls = 0
        self.is_open = asyncio.Event()

    async def call_ledger(self, method: str, *arguments: Any) -> Any:
        assert (method, arguments) == ("newest", ("tiny",))
        self.calls += 1
        newest = self.newest  # as it is when the call reaches the Head
        await self.is_open.wait()
        if newest == -1:
            raise StackNotRunning("It has ended.")
        return newest


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> Counting:
    monkeypatch.setattr(head_client, "_SHARE_SECONDS", 0.0)
    return Counting()


async def test_answers_share_calls_for_the_newest_claim(head: Counting) -> None:
    record = head.open_record("tiny")
    head.is_open.set()
    assert await asyncio.gather(*(record.newest() for _ in range(1000))) == [None] * 1000
    assert head.calls == 1


async def test_a_claim_made_before_an_answer_came_is_never_missed(head: Counting) -> None:
    """A call that is under way may have been answered before the claim, so it is not shared."""
    record = head.open_record("tiny")
    first = asyncio.create_task(record.newest())
    await settle()
    assert head.calls == 1
    head.newest = 7
    second = asyncio.create_task(record.newest())
    head.is_open.set()
    assert (await first, await second) == (None, 7)
    assert head.calls == 2


async def test_a_dead_head_fails_every_answer_that_asks_for_its_claims(head: Counting) -> None:
    record = head.open_record("tiny")
    head.newest = -1
    head.is_open.set()
    results = await asyncio.gather(*(record.newest() for _ in range(3)), return_exceptions=True)
    assert [type(result) for result in results] == [StackNotRunning] * 3
    head.newest = 3
    assert await record.newest() == 3


async def test_calls_for_the_newest_claim_have_a_least_distance(
    head: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    naps: list[float] = []

    async def sleep(seconds: float) -> None:
        naps.append(seconds)

    monkeypatch.setattr(head_client, "_SHARE_SECONDS", 100.0)
    monkeypatch.setattr(asyncio, "sleep", sleep)
    record = head.open_record("tiny")
    head.is_open.set()
    assert await record.newest() is None and await record.newest() is None
    assert naps[0] <= 0 < 99 < naps[1] <= 100
