"""Measure vLLM's own offline `LLM.generate`, in a process of its own: the bar for rollouts.

    parent                                         python -m benchmarks.offline
      {"model", "args"}                      ─►    starts the engine
                             {"seconds"}     ◄─
      {"prompts", "tokens"}                  ─►    LLM.generate, as often as it is asked
                   {"seconds", "tokens"}     ◄─

The engine gets the arguments and the environment of the worker that it is compared with. It returns
log-probs as rollouts do, and makes no text from the tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks import round_floats
from benchmarks.children import list_processes, read_cpu_seconds
from benchmarks.gpu_load import read_metric
from chaos import make_environment
from rollway.aio import Stack
from rollway.errors import RollwayError
from rollway.spec import StackSpec
from rollway.stack.preset import get_worker_defaults, merge_args

if TYPE_CHECKING:
    from benchmarks.gpu_engine import GpuEngineBench

_MARK = "rollway-offline:"
_LONGEST_LINE = 1 << 22
_WARM_UP_TOKENS = 32
_END_SECONDS = 30.0


class OfflineEngine:
    """vLLM's offline engine in a child process, which waits for orders."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._log: list[str] = []
        """The last lines of the engine, for the message of a failure."""

    async def generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> float:
        """Sample as many tokens for each prompt; return the tokens per second."""
        figures = await self.ask(
            {"prompts": [list(prompt) for prompt in prompts], "tokens": tokens}
        )
        return float(figures["tokens"] / figures["seconds"])

    async def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        """Send an order, and return the answer to it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(ConnectionError):  # its output says why it has ended
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            await self._process.stdin.drain()
        while line := (await self._process.stdout.readline()).decode(errors="replace"):
            if line.startswith(_MARK):
                figures: dict[str, Any] = json.loads(line.removeprefix(_MARK))
                return figures
            self._log = [*self._log[-30:], line]
        raise RollwayError(f"vLLM's offline engine failed: {''.join(self._log)[-1500:]}")


@asynccontextmanager
async def start_offline(spec: StackSpec) -> AsyncIterator[tuple[OfflineEngine, float]]:
    """Start an offline engine like the spec's worker; yield it with the seconds of its start."""
    model = spec.models[0]
    defaults = get_worker_defaults(spec, model)
    args = merge_args(defaults.args, model.args)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", __name__,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT, env=make_environment(**{**defaults.env, **model.env}),
        start_new_session=True, limit=_LONGEST_LINE,
    )  # fmt: skip
    try:
        engine = OfflineEngine(process)
        names = {name.replace("-", "_"): value for name, value in args.items()}
        ready = await engine.ask({"model": str(model.path), "args": names})
        yield engine, float(ready["seconds"])
    finally:
        await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    """End an offline engine: by itself if it can, because a killed one leaves semaphores."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_END_SECONDS):
            await process.stdout.read()
            await process.wait()
    # The engine runs in a child of that process, which outlives a kill of its parent.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


async def measure_offline(
    spec: StackSpec, prompts: Sequence[Sequence[int]], tokens: int, repeat: int
) -> dict[str, Any]:
    """Return the tokens per second of each of several rounds, and the seconds of the start."""
    rates = []
    async with start_offline(spec) as (engine, seconds):
        for index in range(repeat + 1):
            # Other prompts in every round, as in the rounds of rollouts: no round finds them
            # cached. The first round warms up.
            turn = [[1 + index, *prompt[1:]] for prompt in prompts]
            length = tokens if index else min(tokens, _WARM_UP_TOKENS)
            rates.append(await engine.generate(turn, length))
    return {"start_seconds": seconds, "tokens_per_second": rates[1:]}


# --- by turns -------------------------------------------------------------------------------------


async def measure_by_turns(bench: GpuEngineBench) -> dict[str, Any]:
    """Sample the same prompts through the stack and by `LLM.generate`, in turn, each first in every
    second round. Both engines stay on the device; the one that does not generate is idle."""
    options, rows = bench.options, []
    bench.say("by-turns: starting the offline engine beside the stack")
    async with start_offline(bench.spec) as (engine, seconds):
        bench.say(f"by-turns: the offline engine is ready after {seconds:.1f} s")
        for index in range(options.repeat + 1):
            length = options.tokens if index else min(options.tokens, _WARM_UP_TOKENS)
            prompts = bench.next_prompts()
            row: dict[str, Any] = {}
            for arm in ("rollouts", "offline")[:: -1 if index % 2 else 1]:
                if arm == "offline":
                    row[arm] = await engine.generate(prompts, length)
                    continue
                before, waited = _read_cpu(bench.stack.name), await _read_waits(bench.stack)
                row[arm] = await bench.sample(prompts, length)
                after, waits = _read_cpu(bench.stack.name), await _read_waits(bench.stack)
                sampled = len(prompts) * length
                row["seconds"] = sampled / row[arm]
                row["cpu_us_per_token"] = {
                    name: 1e6 * (after[name] - before.get(name, 0.0)) / sampled for name in after
                }
                row["seconds_in_engine"] = {
                    name: (waits[name] - waited.get(name, 0.0)) / len(prompts) for name in waits
                }
            row["ratio"] = row["rollouts"] / row["offline"]
            rows.append(row)
            bench.say(f"by-turns: {json.dumps(round_floats(row, '.4g'))}, {length} tokens each")
            # The first round warms up. The others are kept also if the run is interrupted.
            bench.figures["by-turns"] = {"offline_start_seconds": seconds, "rounds": rows[1:]}
    return {"ratio": median(row["ratio"] for row in rows[1:]), **bench.figures["by-turns"]}


_WAITS = {
    "queue": "vllm:request_queue_time_seconds_sum",
    "first_token": "vllm:time_to_first_token_seconds_sum",
    "all": "vllm:e2e_request_latency_seconds_sum",
}
"""What the engine counts from the arrival of a request: until it runs, until its first token, until
its last. The rest of a round is the way to the engine and back."""


async def _read_waits(stack: Stack) -> dict[str, float]:
    """Return the seconds that all requests so far have spent in the engine."""
    (worker,) = await stack.fleet.workers()
    values = {name: await read_metric(stack, worker, metric) for name, metric in _WAITS.items()}
    return {name: value for name, value in values.items() if value is not None}


def _read_cpu(stack: str) -> dict[str, float]:
    """Return the CPU time of this process and of the stack's, by what they do."""
    totals = {"client": sum(os.times()[:2])}
    for process, (pid, *children) in list_processes(stack):
        totals[process.name] = read_cpu_seconds(pid)
        if children:
            totals[f"{process.name}, engine"] = sum(map(read_cpu_seconds, children))
    return totals


# --- the child ------------------------------------------------------------------------------------


def _run() -> None:
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    order = json.loads(sys.stdin.readline())
    began = time.perf_counter()
    engine = LLM(model=order["model"], **order["args"])
    _answer({"seconds": time.perf_counter() - began})
    for line in sys.stdin:
        order = json.loads(line)
        prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in order["prompts"]]
        sampling = SamplingParams(
            temperature=1.0,
            max_tokens=order["tokens"],
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
        )
        began = time.perf_counter()
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - began
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        _answer({"seconds": seconds, "tokens": tokens})


def _answer(figures: dict[str, Any]) -> None:
    print(f"\n{_MARK}{json.dumps(figures)}", flush=True)


if __name__ == "__main__":
    _run()
