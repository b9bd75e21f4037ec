"""A worker that did not answer: dead, dying, followed by another, or only slow."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rollway.fleet import refit as module
from rollway.fleet.discovery import Worker
from rollway.fleet.refit import Refit


def worker(instance: int, url: str = "http://127.0.0.1:9") -> Worker:
    return Worker(instance, "tiny", url)


async def died(monkeypatch: pytest.MonkeyPatch, looks: list[bool], listed: list[Worker]) -> bool:
    """`looks` are what is found at its address, one time after the other."""

    async def is_dead(_: Worker) -> bool:
        return looks.pop(0) if len(looks) > 1 else looks[0]

    async def workers(**_: Any) -> list[Worker]:
        return listed

    monkeypatch.setattr(module, "is_dead", is_dead)
    monkeypatch.setattr(module, "_DYING_SECONDS", (0.0, 0.0, 0.0))
    asked: Any = SimpleNamespace(membership=SimpleNamespace(workers=workers))
    return await Refit._has_died(asked, worker(1))


async def test_one_whose_address_is_empty_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await died(monkeypatch, [True], [worker(1)])


async def test_one_that_takes_a_moment_to_go_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await died(monkeypatch, [False, False, True], [worker(1)])


async def test_one_whose_successor_listens_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await died(monkeypatch, [False], [worker(2)])


async def test_one_that_is_listed_and_listens_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not await died(monkeypatch, [False], [worker(1), worker(2, "http://127.0.0.1:10")])
    assert not await died(monkeypatch, [False], [worker(2, "http://127.0.0.1:10")])
