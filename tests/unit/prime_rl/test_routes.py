"""The server's own routes over HTTP. The fleet is a stand-in."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rollway.aio import Stack
from rollway.fleet.fleet import Fleet
from rollway.fleet.workers import Worker
from rollway.gateway.tokens import Access
from rollway.integrations.prime_rl.directories import BroadcastRules
from rollway.integrations.prime_rl.engine_metrics import EngineMetrics
from rollway.integrations.prime_rl.lora import AdapterAliases
from rollway.integrations.prime_rl.memory import Memory
from rollway.integrations.prime_rl.routes import PrimeRl
from rollway.integrations.prime_rl.updates import WeightUpdates
from tests.security.gateway_service import Service, read_error, serve_gateway
from tests.unit.prime_rl.fakes import FakeFleet, FakeHttp
from tests.unit.prime_rl.trainer_bodies import BAD_BODIES, ENGINE, GOOD, TRAINER, reply

WORKERS = [Worker(n, "m", f"http://10.0.0.{n}:9090") for n in (1, 2)]
PATH = "/v1/rollway/trainer_logprobs"


class ListedFleet(FakeFleet):
    """The same, with two workers in its listing."""

    async def workers(self, *, fresh: bool = True) -> list[Worker]:
        return WORKERS


@asynccontextmanager
async def serving(
    directory: Path, fleet: ListedFleet, access: Access | None = None
) -> AsyncIterator[tuple[Service, PrimeRl]]:
    rules = BroadcastRules([directory], directory, marker_seconds=0.0)
    known, memory = cast(Fleet, fleet), Memory(run="r")
    extension = PrimeRl(
        cast(Stack, SimpleNamespace(fleet_of=lambda _: fleet, run_recorder=None)),
        "m",
        "/models/m",
        2048,
        WeightUpdates(known, rules, memory),
        AdapterAliases(known, rules, memory, cast(Any, None)),
        EngineMetrics(cast(Any, FakeHttp()), known),
    )
    options: dict[str, Any] = {"extension": extension, "access": access or Access()}
    async with serve_gateway(directory, **options) as service:
        extension.gateway = service.gateway
        yield service, extension


@pytest.fixture
async def fleet() -> ListedFleet:
    return ListedFleet()


async def test_mismatch_is_shown_under_prime_rls_names(tmp_path: Path, fleet: ListedFleet) -> None:
    async with serving(tmp_path, fleet) as (service, extension):
        extension.mismatches.remember(reply("r1", ENGINE))
        by_id = {"trainer_logprobs": TRAINER, "request_id": "r1", "env": "math"}
        status, answer = await service.post(PATH, {"step": 7, "samples": [GOOD, by_id]})
        assert status == 200 and answer["tokens"] == 8
        assert answer["metrics"]["mismatch_kl/math/max"] > 0
        assert await service.get(PATH) == (200, answer)
        _, page = await service.get("/metrics")
        assert b"\ntrainer_mismatch_kl " in page
        assert b'mismatch_kl{env="math",stat="std"} ' in page
        long = {"trainer_logprobs": [-1.0] * 100_000, "inference_logprobs": [-1.0] * 100_000}
        status, answer = await service.post(PATH, {"samples": [long]})  # in a thread
        assert status == 200 and answer["metrics"]["mismatch_kl/all/max"] == 0.0


async def test_bad_bodies_get_an_error_and_change_nothing(
    tmp_path: Path, fleet: ListedFleet
) -> None:
    async with serving(tmp_path, fleet) as (service, _):
        _, before = await service.post(PATH, {"step": 1, "samples": [GOOD]})
        for label, body in BAD_BODIES.items():
            status, answer = await service.post(PATH, body)
            assert status == 400, (label, answer)
            assert read_error(answer)["type"] == "invalid_request_error", label
        assert await service.get(PATH) == (200, before)


async def test_log_probs_and_calls_to_workers_need_an_operators_token(
    tmp_path: Path, fleet: ListedFleet
) -> None:
    access = Access((b"agent",), (b"operator",))
    async with serving(tmp_path, fleet, access) as (service, _):
        body = json.dumps({"samples": [GOOD]}).encode()
        call = "/pause"
        for token, status in (("wrong", 401), ("agent", 403), ("operator", 200)):
            headers = {"authorization": f"Bearer {token}"}
            assert (await service.post(PATH, body, headers=headers))[0] == status
            assert (await service.post(call, b"{}", headers=headers))[0] == status
