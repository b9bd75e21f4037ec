"""How a refit waits for workers that take weights beside their work."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from typing import Any

import pytest

from rollway.errors import AdminError, UsageError
from rollway.fleet import updates
from rollway.fleet.admin import NoSuchMethod
from rollway.fleet.discovery import Worker
from rollway.fleet.updates import Offered, stage
from rollway.weights.offer import Offer, read_offer

OFFER = Offer("shm", 3, "a" * 32, 10, {"slot": "x"})
WORKER = Worker(7, "m", "http://w", world_size=2)


class Admin:
    """A worker of two ranks, as far as staging is concerned."""

    def __init__(self, *answers: str | None, knocks: int = 2) -> None:
        self.answers = list(answers)
        self.knocks = knocks
        self.calls: list[str] = []
        self.offer: Offer | None = None

    async def call(self, worker: Worker, method: str, arguments: Mapping[str, Any]) -> None:
        self.calls.append(method)
        if method == "rollway_stage":
            self.offer = read_offer(arguments["offer"], "secret")
            for _ in range(self.knocks):
                with socket.socket(socket.AF_UNIX) as line:
                    line.setblocking(False)
                    await asyncio.get_running_loop().sock_connect(line, f"\0{arguments['tell']}")
            return
        answer = self.answers.pop(0)
        if answer is not None:
            raise AdminError(answer)


async def test_a_worker_that_knocks_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates, "ASK_SECONDS", 3600.0)  # only a knock is heard before that
    admin = Admin(None)
    await asyncio.wait_for(stage(admin, WORKER, OFFER, "secret"), 30)  # type: ignore[arg-type]
    assert admin.calls == ["rollway_stage", "rollway_staged"]
    assert admin.offer is not None and admin.offer.identity == OFFER.identity


@pytest.mark.parametrize("knocks", [0, 1])
async def test_one_that_cannot_knock_is_asked_now_and_then(knocks: int) -> None:
    admin = Admin("refused: still staging version 3.", None, knocks=knocks)
    await stage(admin, WORKER, OFFER, "secret")  # type: ignore[arg-type]
    assert admin.calls == ["rollway_stage", "rollway_staged", "rollway_staged"]


async def test_what_a_worker_refuses_is_a_mistake_of_the_caller() -> None:
    admin = Admin("worker 7 refused: w of version 3 changed while it was read.")
    with pytest.raises(UsageError, match="changed while it was read"):
        await Offered(OFFER, "secret").preflight(admin, WORKER)  # type: ignore[arg-type]


async def test_one_that_never_has_them_is_given_up() -> None:
    admin = Admin(*["still staging"] * 9)
    with pytest.raises(UsageError, match="has not got the weights within 0 s"):
        await stage(admin, WORKER, OFFER, "secret", seconds=0.0)  # type: ignore[arg-type]


async def test_one_without_our_methods_is_named() -> None:
    class Foreign(Admin):
        async def call(self, worker: Worker, method: str, arguments: Mapping[str, Any]) -> None:
            raise NoSuchMethod("It has none.")

    with pytest.raises(UsageError, match="cannot stage weights: It has none"):
        await Offered(OFFER, "secret").preflight(Foreign(), WORKER)  # type: ignore[arg-type]
