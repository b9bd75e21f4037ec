"""Adapters, sleep and wake of a real Dynamo worker, through `DynamoAdmin`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import rollway
from rollway.api import Stack
from rollway.errors import AdminError, RequestFailed, RolloutError
from rollway.fleet.admin import DynamoAdmin
from rollway.http import Http
from rollway.rollout.sampling import Sampling
from rollway.rollout.wire import Completion, DynamoAssembly, completion_request
from tests.stack.policies import Policy, write_adapter
from tests.stack.stacks import VLLM_ARGS

TOLERANCE = 1e-4
PROMPT = list(range(30, 90))
SAMPLING = Sampling(max_tokens=8, ignore_eos=True)


@pytest.fixture
async def stack(base_model: Path) -> AsyncIterator[Stack]:
    args = {**VLLM_ARGS, "enable-lora": True, "max-lora-rank": 8}
    model = {
        "path": str(base_model),
        "name": "tiny",
        "args": args,
        "env": {"DYN_LORA_ENABLED": "true"},
    }
    async with rollway.up({"name": "lora", "models": [model]}) as running:
        yield running


async def ask(stack: Stack, http: Http, model: str) -> Completion:
    body = completion_request(model, PROMPT, SAMPLING)
    assembly = DynamoAssembly(SAMPLING, len(PROMPT))
    for _ in range(50):
        try:
            answer = await http.post(f"{stack.frontend_url}/v1/completions", body, timeout=60.0)
            break
        except RequestFailed as error:  # the frontend has not heard of the adapter yet
            if error.status not in (404, 503):
                raise
            await asyncio.sleep(0.1)
    assembly.add(answer)
    return assembly.finish()


async def test_adapters_and_sleep(stack: Stack, policies: list[Policy], tmp_path: Path) -> None:
    """One stack for both, since its start is most of the time."""
    async with Http() as http:
        admin = DynamoAdmin(http, secret=stack.weights_secret)
        (worker,) = await stack.fleet.workers()
        for seed in (1, 2):  # the second under the same name, which Dynamo would ignore
            adapted = write_adapter(tmp_path / f"adapter-{seed}", policies[0], seed)
            await admin.load_lora(worker, "style", tmp_path / f"adapter-{seed}")
            done = await ask(stack, http, "style")
            assert adapted.distance(PROMPT, done.token_ids, done.logprobs or []) < TOLERANCE
            assert policies[0].distance(PROMPT, done.token_ids, done.logprobs or []) > 0.01
        assert set(await admin.models(stack.frontend_url)) == {"tiny", "style"}
        await admin.unload_lora(worker, "style")
        with pytest.raises(AdminError, match="refused `unload_lora`"):
            await admin.unload_lora(worker, "style")

        await admin.sleep(worker)
        with pytest.raises(RolloutError):
            await stack.rollouts(patience=1.0).generate(PROMPT, SAMPLING)
        await admin.wake(worker)
        (rollout,) = await stack.rollouts(patience=30.0).generate(PROMPT, SAMPLING)
        distance = policies[0].distance(PROMPT, rollout.token_ids, rollout.logprobs or [])
        assert rollout.weight_version == 0 and distance < TOLERANCE
