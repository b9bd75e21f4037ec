"""A frontend that holds as many sessions as it can."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rollway.aio import up
from rollway.rollout.sampling import Sampling
from rollway.rollout.sender import FULL

pytestmark = [pytest.mark.stack, pytest.mark.soak, pytest.mark.timeout(900)]

CAPACITY = 65_536
AT_ONCE = 64
SHORT = Sampling(max_tokens=1, ignore_eos=True, logprobs=False)


async def test_more_groups_than_the_frontend_holds_are_answered(base_model: Path) -> None:
    """Dynamo refuses every request with a further session, until others have been idle for long."""
    model = {"path": str(base_model), "name": "tiny", "engine": "mocker"}
    model["args"] = {"speedup-ratio": 1000.0}
    async with up({"name": "sessions", "models": [model], "observe": {"record": False}}) as stack:
        rollouts = stack.rollouts(concurrency=AT_ONCE)
        groups = iter(range(CAPACITY + 1000))

        async def send() -> None:
            for number in groups:
                prompt = [10 + number % 190, 10 + number // 190 % 190, 10 + number // 36_100]
                (rollout,) = await rollouts.generate(prompt, SHORT, group=f"group-{number}")
                assert len(rollout.token_ids) == 1

        await asyncio.gather(*(send() for _ in range(AT_ONCE)))
        assert rollouts._full_until > 0, f"it never answered {FULL}: does it hold more sessions?"
