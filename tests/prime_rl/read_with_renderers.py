"""Sample through the released `renderers` client, and print what it has read as JSON.

Run by the interpreter of .venv-prime-rl: read_with_renderers.py URL MODEL TOKENIZER
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from openai import AsyncOpenAI
from renderers import DefaultRendererConfig, OverlongPromptError, create_renderer
from renderers.client import generate
from transformers import AutoTokenizer

SAMPLING = {"temperature": 1.0, "top_p": 1.0, "max_tokens": 12, "top_k": -1, "min_p": 0.0}


async def converse(url: str, model: str, tokenizer: str) -> dict[str, Any]:
    """Sample two turns of one session, the second from the ids of the first."""
    renderer = create_renderer(AutoTokenizer.from_pretrained(tokenizer), DefaultRendererConfig())
    client = AsyncOpenAI(base_url=url, api_key=os.environ["VLLM_API_KEY"], max_retries=0)

    async def sample(prompt: list[int] | None, **more: Any) -> dict[str, Any]:
        return await generate(
            client=client,
            renderer=renderer,
            messages=[{"role": "user", "content": "What is 2 + 3?"}],
            model=model,
            prompt_ids=prompt,
            sampling_params={**SAMPLING, **more},
            cache_salt="1",
            extra_headers={"X-Session-ID": "trace-1"},
        )

    first = await sample(None)
    bridge = [*first["prompt_ids"], *first["completion_ids"], *first["prompt_ids"]]
    start = len(first["prompt_ids"]) + len(first["completion_ids"]) - 1
    second = await sample(bridge, routed_experts_prompt_start=start)
    try:
        await sample([5] * 100_000)
        overlong = ""
    except OverlongPromptError as error:
        overlong = str(error)
    fields = ("prompt_ids", "completion_ids", "completion_logprobs", "finish_reason")
    turns = [{name: turn[name] for name in fields} for turn in (first, second)]
    return {"turns": turns, "overlong": overlong}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(converse(*sys.argv[1:]))))
