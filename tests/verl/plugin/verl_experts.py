"""Run by verl's interpreter: routed experts from an engine's JSON to what verl trains with.

The engine is a stand-in that cuts answers as aborts do; its JSON goes through Rollway's code, its
outputs through verl's own client and verl's own conversion. Every row says its position and the
step it was computed in, so a row that is lost, doubled or moved shows.
"""

from __future__ import annotations

import asyncio
from random import Random
from types import SimpleNamespace

import numpy as np
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient
from verl.workers.rollout.replica import TokenOutput

from rollway.errors import RolloutError
from rollway.integrations.verl.generation import make_output
from rollway.rollout.completion import Completion
from rollway.rollout.experts import RoutedExperts
from rollway.rollout.sampling import Sampling
from rollway.rollout.trajectory import Trajectory

LAYERS, TOP_K = 2, 3
_sleep = asyncio.sleep


class Engine:
    """Answers as many tokens as its plan says, each time under the next step."""

    def __init__(self, plan: list[int], dtype: str, extra_row: bool, start: int = 0) -> None:
        self.plan, self.dtype, self.extra_row, self.start = plan, dtype, extra_row, start
        self.step = 0
        self.generate = self.acquire_server = self
        self.require_acquire_fields = self.require_release_fields = _Nothing()
        self.release_server = _Nothing()

    async def remote(self, request_id, prompt_ids=None, sampling_params=None, **_):
        if prompt_ids is None:
            return "server", self
        count, *self.plan = self.plan
        trajectory = Trajectory(prompt_ids, Sampling(max_tokens=99, routed_experts=True))
        tokens = list(range(count))
        experts = self.experts(len(prompt_ids) + count)
        reason = "aborted" if self.plan else "stop"
        completion = Completion(tokens, [-0.5] * count, reason, 1, 0, experts.as_json())
        trajectory.add(completion, self.step)
        output = TokenOutput(**make_output(trajectory.rollout(reason, self.step), lambda v: v))
        self.step += 1
        return output

    def experts(self, tokens: int) -> RoutedExperts:
        rows = [row(place, self.step) for place in range(tokens - (not self.extra_row))]
        ids = np.array(rows[self.start :], dtype=self.dtype).reshape(-1, LAYERS, TOP_K)
        return RoutedExperts(ids, self.start)


class _Nothing:
    async def _nothing(self):
        return []

    def remote(self, **_):
        return asyncio.ensure_future(self._nothing())


def row(place: int, step: int) -> list[list[int]]:
    # The experts of a token differ: a row that names one twice was not captured.
    return [[place, 100 + step, 200 + layer] for layer in range(LAYERS)]


async def request(engine: Engine, prompt: list[int], most: int) -> TokenOutput:
    rollout = SimpleNamespace(name="dynamo", response_length=most, full_determinism=False)
    config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout))
    client = FullyAsyncLLMServerClient(config, engine)
    return await client.generate("t", prompt_ids=prompt, sampling_params={})


async def check(random: Random) -> None:
    prompt = [5] * random.randint(1, 12)
    plan = [random.choice([0, 0, 1, 2, 7]) for _ in range(random.randint(0, 4))]
    plan.append(random.randint(1, 9))
    engine = Engine(list(plan), random.choice(["uint8", "uint16", "int32"]), random.random() < 0.5)
    output = await request(engine, prompt, most=99)
    expected, total = [], len(prompt) + sum(plan)
    done = len(prompt)
    for step, count in enumerate(plan):
        if count:
            done += count
            expected += [row(place, step) for place in range(len(expected), done - 1)]
    assert output.routed_experts.tolist() == expected, (prompt, plan)
    sample = AgentLoopOutput(
        prompt_ids=prompt,
        response_ids=output.token_ids,
        response_mask=[1] * len(output.token_ids),
        routed_experts=output.routed_experts,
        metrics=AgentLoopMetrics(),
    ).as_dict()["routed_experts"]
    assert tuple(sample.shape) == (total, LAYERS, TOP_K)
    assert sample[:-1].tolist() == expected and not sample[-1].any()


async def check_late_start() -> None:
    try:
        await request(Engine([4], "uint8", extra_row=False, start=2), [5, 5, 5], most=99)
    except RolloutError as error:
        assert "Routed experts cover positions 2 to 6 of 7 tokens" in error.message
    else:
        raise AssertionError("rows that begin late were accepted")


async def main() -> None:
    asyncio.sleep = lambda _: _sleep(0)  # verl's client waits a second after an abort
    for seed in range(300):
        await check(Random(seed))
    await check_late_start()
    print("300 answers")


asyncio.run(main())
