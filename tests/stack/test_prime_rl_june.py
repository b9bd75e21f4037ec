"""The client of June 2026, by its own calls to every worker, against a server with two of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rollway.errors import AdminError
from rollway.integrations.prime_rl.client import ClientConfig
from rollway.integrations.prime_rl.pools import StaticPool
from tests.stack.policies import Policy
from tests.stack.prime_rl import PrimeServer, broadcast, light_stack, read_logprobs
from tests.stack.serving import TOLERANCE, fresh_prompt

pytestmark = pytest.mark.stack


@asynccontextmanager
async def june_pool(server: PrimeServer) -> AsyncIterator[StaticPool]:
    config = ClientConfig(
        backend="dynamo", base_url=[f"{server.url}/v1"], rl_base_url=[server.admin_url]
    )
    pool = StaticPool(config, "tiny")
    try:
        await pool.wait_for_ready(60.0)
        yield pool
    finally:
        await pool.stop()


def test_workers_that_are_called_one_by_one_change_as_one_fleet(
    base_model: Path, own_home: Path, tmp_path: Path, policies: list[Policy]
) -> None:
    async def train(server: PrimeServer, read_versions: Callable[[], Mapping[int, Any]]) -> None:
        async with june_pool(server) as pool:
            assert len(pool.admin_clients) == 2
            assert all(f"{server.url}/workers/" in client.url for client in pool.admin_clients)
            for step in (0, 1, 2):
                policy = policies[1 + step % 2]
                await pool.update_weights(broadcast(tmp_path, step, policy.path), step=step)
                assert set((await asyncio.to_thread(read_versions)).values()) == {step + 1}
                await check(server, policy)
            with pytest.raises(AdminError, match="2 of 2 servers failed"):
                await pool.update_weights(tmp_path.parent / "step_9", step=9)
            assert server.metrics()["rollway_gate_open"] == 0
            await pool.update_weights(broadcast(tmp_path, 10, policies[2].path), step=10)
            await check(server, policies[2])

    async def check(server: PrimeServer, policy: Policy) -> None:
        prompt = fresh_prompt(20)
        done = await asyncio.to_thread(server.generate, prompt)
        ids, logprobs = done["choices"][0]["token_ids"], read_logprobs(done)
        assert policy.distance(prompt, ids, logprobs) < TOLERANCE
        # What a trainer with these weights sends back is as near as that.
        trainer = [min(logprob, 0.0) for logprob in policy.logprobs(prompt, ids)]
        sample = {"trainer_logprobs": trainer, "request_id": done["request_id"]}
        status, answer = server.post("/v1/rollway/trainer_logprobs", {"samples": [sample]})
        assert status == 200 and answer["metrics"]["mismatch_kl/all/mean"] < 1e-6

    with light_stack(base_model, own_home, tmp_path) as stack:
        server = PrimeServer("prime", tmp_path, ("--per-worker",)).start()
        try:
            asyncio.run(train(server, stack.fleet.read_versions))
            assert server.metrics()["rollway_weight_updates"] == 4  # one refit for each step
        finally:
            server.end()
