"""A worker that did not answer is dead, dying, followed by a successor, or only slow."""

from __future__ import annotations

from typing import Any

import pytest

from rollway.fleet import membership
from rollway.fleet.discovery import StaticList, Worker
from rollway.fleet.membership import Membership


def worker(instance: int, url: str = "http://127.0.0.1:9") -> Worker:
    return Worker(instance, "tiny", url)


async def died(monkeypatch: pytest.MonkeyPatch, probes: list[bool], listed: list[Worker]) -> bool:
    """Return the verdict on worker 1; `probes` says whether its address is empty, look by look."""

    async def is_dead(_: Worker) -> bool:
        return probes.pop(0) if len(probes) > 1 else probes[0]

    async def discover(*_: Any) -> list[Worker]:
        return listed

    monkeypatch.setattr(membership, "is_dead", is_dead)
    monkeypatch.setattr(membership, "discover", discover)
    monkeypatch.setattr(membership, "DYING_SECONDS", (0.0, 0.0, 0.0))
    http: Any = None
    return await Membership(http, StaticList(())).has_died(worker(1))


async def test_a_worker_whose_address_is_empty_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await died(monkeypatch, [True], [worker(1)])


async def test_a_worker_that_takes_a_moment_to_exit_is_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert await died(monkeypatch, [False, False, True], [worker(1)])


async def test_a_worker_whose_successor_listens_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await died(monkeypatch, [False], [worker(2)])


async def test_a_worker_that_is_listed_and_listens_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not await died(monkeypatch, [False], [worker(1), worker(2, "http://127.0.0.1:10")])
    assert not await died(monkeypatch, [False], [worker(2, "http://127.0.0.1:10")])
