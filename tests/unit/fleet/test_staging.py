"""How a refit waits for workers that stage weights while they generate."""

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
    """The staging methods of a worker with two ranks; `answers` are those of `rollway_staged`."""

    def __init__(self, *answers: str | None, notifications: int = 2) -> None:
        self.answers = list(answers)
        self.notifications = notifications
        self.calls: list[str] = []
        self.offer: Offer | None = None

    async def call(self, worker: Worker, method: str, arguments: Mapping[str, Any]) -> None:
        self.calls.append(method)
        if method == "rollway_stage":
            self.offer = read_offer(arguments["offer"], "secret")
            for _ in range(self.notifications):
                with socket.socket(socket.AF_UNIX) as client:
                    client.setblocking(False)
                    await asyncio.get_running_loop().sock_connect(client, f"\0{arguments['tell']}")
            return
        answer = self.answers.pop(0)
        if answer is not None:
            raise AdminError(answer)


async def test_a_worker_that_notifies_is_polled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # Only a notification ends the wait before an hour.
    monkeypatch.setattr(updates, "ASK_SECONDS", 3600.0)
    admin = Admin(None)
    await asyncio.wait_for(stage(admin, WORKER, OFFER, "secret"), 30)  # type: ignore[arg-type]
    assert admin.calls == ["rollway_stage", "rollway_staged"]
    assert admin.offer is not None and admin.offer.identity == OFFER.identity


@pytest.mark.parametrize("notifications", [0, 1])
async def test_a_worker_that_cannot_notify_is_polled_repeatedly(notifications: int) -> None:
    admin = Admin("refused: still staging version 3.", None, notifications=notifications)
    await stage(admin, WORKER, OFFER, "secret")  # type: ignore[arg-type]
    assert admin.calls == ["rollway_stage", "rollway_staged", "rollway_staged"]


async def test_a_refusal_is_a_usage_error() -> None:
    admin = Admin("worker 7 refused: w of version 3 changed while it was read.")
    with pytest.raises(UsageError, match="changed while it was read"):
        await Offered(OFFER, "secret").preflight(admin, WORKER)  # type: ignore[arg-type]


async def test_staging_has_a_time_limit() -> None:
    admin = Admin(*["still staging"] * 9)
    with pytest.raises(UsageError, match="has not got the weights within 0 s"):
        await stage(admin, WORKER, OFFER, "secret", seconds=0.0)  # type: ignore[arg-type]


async def test_the_error_names_a_worker_that_cannot_stage() -> None:
    class Foreign(Admin):
        async def call(self, worker: Worker, method: str, arguments: Mapping[str, Any]) -> None:
            raise NoSuchMethod("It has none.")

    with pytest.raises(UsageError, match="cannot stage weights: It has none"):
        await Offered(OFFER, "secret").preflight(Foreign(), WORKER)  # type: ignore[arg-type]


async def test_an_offer_is_discarded_by_its_identity() -> None:
    calls = []

    class Recording(Admin):
        async def call(self, worker: Worker, method: str, arguments: Mapping[str, Any]) -> None:
            calls.append((method, arguments))

    await Offered(OFFER, "secret").discard(Recording(), WORKER)  # type: ignore[arg-type]
    assert calls == [("rollway_unstage", {"identity": OFFER.identity})]
