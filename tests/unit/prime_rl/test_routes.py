"""The server's own routes over HTTP, with the client of June 2026 on the other side.

The fleet is a stand-in that counts refits; `tests/stack/test_prime_rl_june.py` has real workers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rollway.aio import Stack
from rollway.errors import AdminError
from rollway.fleet.discovery import Worker
from rollway.fleet.fleet import Fleet
from rollway.gateway.access import Access
from rollway.integrations.prime_rl.client import ClientConfig
from rollway.integrations.prime_rl.directories import BroadcastRules
from rollway.integrations.prime_rl.engine_metrics import EngineMetrics
from rollway.integrations.prime_rl.lora import AdapterAliases
from rollway.integrations.prime_rl.memory import Memory
from rollway.integrations.prime_rl.per_worker import WorkerParts, make_key
from rollway.integrations.prime_rl.pools import StaticPool
from rollway.integrations.prime_rl.routes import PrimeRl
from rollway.integrations.prime_rl.updates import WeightUpdates
from tests.security.gateway_service import Service, read_error, serve_gateway
from tests.unit.prime_rl.fakes import FakeFleet, FakeHttp, write_weights
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
        cast(Stack, SimpleNamespace(fleet_of=lambda _: fleet)),
        "m",
        2048,
        WeightUpdates(known, rules, memory),
        AdapterAliases(known, rules, memory, cast(Any, None)),
        EngineMetrics(cast(Any, FakeHttp()), known),
        parts=WorkerParts(known, seconds=0.5),
    )
    options: dict[str, Any] = {"extension": extension, "access": access or Access()}
    async with serve_gateway(directory, **options) as service:
        extension.gateway = service.gateway
        yield service, extension


@pytest.fixture
async def fleet() -> ListedFleet:
    return ListedFleet()


async def test_calls_to_every_worker_are_one_refit(tmp_path: Path, fleet: ListedFleet) -> None:
    steps = [write_weights(tmp_path / f"step_{n}", value=n) for n in range(3)]
    for step in steps:
        (step / "STABLE").touch()
    async with serving(tmp_path, fleet) as (service, extension):
        config = ClientConfig(
            backend="dynamo", base_url=[f"{service.url}/v1"], rl_base_url=[service.url]
        )
        pool = StaticPool(config, "m")
        try:
            await pool.wait_for_ready(10.0)
            keys = [f"{service.url}/workers/{make_key(worker)}" for worker in WORKERS]
            assert [client.url for client in pool.admin_clients] == keys
            for number, step in enumerate(steps):
                await pool.update_weights(step, step=number)
                assert len(fleet.refits) == number + 1 and extension.updates.is_open
            with pytest.raises(AdminError, match="2 of 2 servers failed"):
                await pool.update_weights(tmp_path / "step_9", step=9)
            assert len(fleet.refits) == 3 and not extension.updates.is_open
            await pool.update_weights(steps[0], step=0)  # a resumed run
            assert extension.updates.is_open and fleet.versions.current == 4
        finally:
            await pool.stop()


async def test_each_worker_has_its_health_and_its_series(
    tmp_path: Path, fleet: ListedFleet
) -> None:
    async with serving(tmp_path, fleet) as (service, _):
        for worker in WORKERS:
            path = f"/workers/{make_key(worker)}"
            assert await service.get(f"{path}/health") == (200, {"status": "ok"})
            status, page = await service.get(f"{path}/metrics")
            engines = {
                line for line in page.decode().splitlines() if "num_requests_running{" in line
            }
            assert status == 200 and len(engines) == 1
        assert (await service.get("/workers/other/health"))[0] == 404
        status, answer = await service.post("/workers/other/engine/pause_generation", {})
        assert status == 404 and "--per-worker" in read_error(answer)["message"]
        path = f"/workers/{make_key(WORKERS[0])}/engine"
        assert (await service.post(f"{path}/sleep", {}))[0] == 404


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
        call = f"/workers/{make_key(WORKERS[0])}/engine/pause_generation"
        for token, status in (("wrong", 401), ("agent", 403), ("operator", 200)):
            headers = {"authorization": f"Bearer {token}"}
            assert (await service.post(PATH, body, headers=headers))[0] == status
            assert (await service.post(call, b"{}", headers=headers))[0] == status
