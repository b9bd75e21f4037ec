"""A reward function that asks a reward model: verl's way for models that answer in words."""

from __future__ import annotations

import aiohttp

from rollway.demo.task import INSTRUCTION


async def compute_score(
    data_source, solution_str, ground_truth, extra_info, reward_router_address, **_
):
    question = f"{INSTRUCTION}{extra_info['index'] % 10}"
    body = {
        "model": "judge",
        "messages": [{"role": "user", "content": question}],
        "max_tokens": len(ground_truth),
        "temperature": 0.0,
    }
    url = f"http://{reward_router_address}/v1/chat/completions"
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as answer:
        said = (await answer.json())["choices"][0]["message"]["content"]
    print(f"the judge says: {said!r}", flush=True)
    return sum(a == b for a, b in zip(solution_str, said, strict=False)) / len(ground_truth)
