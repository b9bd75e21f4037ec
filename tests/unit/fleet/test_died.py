"""A worker that did not answer is dead, dying, followed by a successor, or only slow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rollway.fleet import workers
from rollway.fleet.workers import Membership, StaticList, Worker
from rollway.http import Http


def worker(instance: int, url: str = "http://127.0.0.1:9") -> Worker:
    return Worker(instance, "tiny", url)


async def died(monkeypatch: pytest.MonkeyPatch, probes: list[bool], listed: list[Worker]) -> bool:
    """Return the verdict on worker 1; `probes` says whether its address is empty, look by look."""

    async def is_dead(_: Worker) -> bool:
        return probes.pop(0) if len(probes) > 1 else probes[0]

    async def discover(*_: Any) -> list[Worker]:
        return listed

    monkeypatch.setattr(workers, "is_dead", is_dead)
    monkeypatch.setattr(workers, "discover", discover)
    monkeypatch.setattr(workers, "DYING_SECONDS", (0.0, 0.0, 0.0))
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
    silent = replace(worker(1), error="DeadlineExceeded")  # a dead worker is listed for a while
    assert await died(monkeypatch, [False], [silent, worker(2)])
    assert not await died(monkeypatch, [False], [silent, replace(worker(2), error="it hangs")])


async def test_a_worker_that_is_listed_and_listens_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not await died(monkeypatch, [False], [worker(1), worker(2, "http://127.0.0.1:10")])
    assert not await died(monkeypatch, [False], [worker(2, "http://127.0.0.1:10")])


@pytest.mark.parametrize("is_starting", [True, False])
async def test_a_worker_whose_successor_is_not_listed_yet_is_dead(
    monkeypatch: pytest.MonkeyPatch, is_starting: bool
) -> None:
    """A successor listens while it loads its model, and has no routes before it is ready."""

    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def discover(*_: Any) -> list[Worker]:
        return []

    monkeypatch.setattr(workers, "discover", discover)
    monkeypatch.setattr(workers, "DYING_SECONDS", (0.0, 0.0))
    app = web.Application()
    if not is_starting:
        app.router.add_get("/engine/liveness_probe", answer)
    async with TestServer(app) as server, Http() as http:
        url = str(server.make_url("/")).rstrip("/")
        lost = Worker(1, "tiny", url, frozenset({"liveness_probe"}))
        assert await Membership(http, StaticList(())).has_died(lost) is is_starting
