"""Measure vLLM's own offline `LLM.generate`, in a process of its own: the bar for rollouts.

`measure_offline` starts `python -m rollway.bench.offline`, which reads what to do as JSON from
stdin and prints one line of JSON. The engine gets the arguments and the environment of the worker
that it is compared with. It returns log-probs as rollouts do, and makes no text from the tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

from rollway.config import StackSpec
from rollway.errors import RollwayError
from rollway.stack.preset import get_worker_defaults, merge_args

_MARK = "rollway-offline:"


async def measure_offline(
    spec: StackSpec, prompts: Sequence[Sequence[int]], tokens: int, repeat: int
) -> dict[str, Any]:
    """Return the tokens per second of each of several rounds, and the seconds of the start."""
    model = spec.models[0]
    defaults = get_worker_defaults(spec, model)
    args = merge_args(defaults.args, model.args)
    order = {
        "model": str(model.path),
        "args": {name.replace("-", "_"): value for name, value in args.items()},
        "prompts": [list(prompt) for prompt in prompts],
        "tokens": tokens,
        "repeat": repeat,
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", __name__,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT, env={**os.environ, **defaults.env, **model.env},
        start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = await process.communicate(json.dumps(order).encode())
    finally:
        # The engine runs in a child of that process, which outlives a kill of its parent.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    for line in output.decode(errors="replace").splitlines():
        if line.startswith(_MARK):
            figures: dict[str, Any] = json.loads(line.removeprefix(_MARK))
            return figures
    raise RollwayError(f"vLLM's offline engine failed: {output.decode(errors='replace')[-1500:]}")


def _run(order: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    began = time.perf_counter()
    engine = LLM(model=order["model"], **order["args"])
    started = time.perf_counter() - began
    rates = []
    for index in range(order["repeat"] + 1):
        # Other prompts in every round, as in the rounds of rollouts: no round finds them cached.
        prompts = [
            TokensPrompt(prompt_token_ids=[1 + index, *prompt[1:]]) for prompt in order["prompts"]
        ]
        length = order["tokens"] if index else min(order["tokens"], 32)  # the first one warms up
        sampling = SamplingParams(
            temperature=1.0, max_tokens=length, ignore_eos=True, logprobs=0, detokenize=False
        )
        began = time.perf_counter()
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - began
        rates.append(sum(len(output.outputs[0].token_ids) for output in outputs) / seconds)
    return {"start_seconds": started, "tokens_per_second": rates[1:]}


if __name__ == "__main__":
    print(f"\n{_MARK}{json.dumps(_run(json.load(sys.stdin)))}", flush=True)
