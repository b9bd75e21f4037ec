"""A reward function that queries a generative reward model, as verl documents."""

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
        text = (await answer.json())["choices"][0]["message"]["content"]
    print(f"the judge says: {text!r}", flush=True)
    return sum(a == b for a, b in zip(solution_str, text, strict=False)) / len(ground_truth)
