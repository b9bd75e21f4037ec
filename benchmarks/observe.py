"""`rollway bench observe`: what recording, sampling, a dashboard and traces cost.

    mockers    rollouts at the client's limit: all of it on, against all of it off
    vllm       the same with vLLM workers

    bench ── rollouts, in turns ──► stack `off`: nothing is observed
                              └───► stack `on`: recorded, sampled every 2 s, traced
                                       │   └─ spans ─► a receiver
                                       └─ record ─► `rollway dash` ─► a page that is open

While `off` has its turn, what observes `on` is stopped by a signal, and its spans were sent before:
it must not take from `off` what it costs. A turn has a length, not a number of requests, so that it
holds two samples on every machine. A part that cannot run here says why, and the others go on.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

from benchmarks import round_floats
from benchmarks.children import list_processes, read_cpu_seconds, start_child
from benchmarks.inputs import build_demo_model, read_parts
from rollway.aio import Stack, up
from rollway.cli.output import print_progress as say
from rollway.demo.placement import choose_shared_gpu
from rollway.errors import RollwayError, UsageError, require
from rollway.observe.traces import ENDPOINTS
from rollway.rollout.client import Rollouts
from rollway.rollout.sampling import Sampling
from rollway.spec import StackSpec
from rollway.stack.preset import list_gpus
from rollway.stack.state import StackDir

PARTS = ("mockers", "vllm")
LIMITS = dict.fromkeys(("mockers", "vllm", "mockers_client", "vllm_client"), "at least 0.98")
_SHARE = 0.05
"""Of a GPU's memory for each of the workers, of two stacks, that share it."""
Figures = dict[str, Any]
INTERVAL_SECONDS = 2.0
_WARM_UP_SECONDS = 3.0
_SPAN_SECONDS = 1.0
"""How often Dynamo sends its spans; it must have sent them before the next turn."""
_PEERS = "benchmarks.observe_peers"
_DASH = ("rollway.cli", "dash", "bench-on", "--json", "--port", "0", "--no-open")


@dataclass(frozen=True, slots=True)
class TurnLoad:
    """Rollouts of one turn."""

    seconds: float
    at_once: int
    prompt_tokens: int
    max_tokens: int
    has_logprobs: bool = True


def run(options: argparse.Namespace) -> tuple[int, Figures]:
    """Measure; Ctrl-C prints what was measured until then."""
    parts = read_parts(options, PARTS)
    if min(options.rounds, options.workers, options.tokens) < 1:
        raise UsageError("That is too little to measure.", "Give at least 1.")
    code, figures = 0, dict[str, Any]()
    try:
        for part in PARTS:
            if part in parts:
                _measure_part(part, options, figures.setdefault(part, {}))
    except KeyboardInterrupt:
        figures["is_interrupted"], code = True, 130
    return code, {"limits": LIMITS, **round_floats(figures, ".4g")}


def _measure_part(part: str, options: argparse.Namespace, figures: Figures) -> None:
    """Measure a part; if it cannot run here, its figures say why."""
    try:
        model, load = _describe_mockers() if part == "mockers" else _describe_vllm(options)
        spec = {"models": [{"path": str(build_demo_model()), "name": "tiny", **model}]}
        asyncio.run(_measure_throughput(spec, load, options, figures))
    except RollwayError as error:
        figures["not_measured"] = str(error)
        say(f"{part}: not measured: {error}")


def _describe_mockers() -> tuple[dict[str, Any], TurnLoad]:
    require("cpu", "dynamo")
    # They answer as fast as they can, so that the client is the limit.
    args = {"max-model-len": 4096, "speedup-ratio": 1000.0}
    load = TurnLoad(4.0, at_once=64, prompt_tokens=128, max_tokens=16, has_logprobs=False)
    return {"engine": "mocker", "replicas": 1, "args": args}, load


def _describe_vllm(options: argparse.Namespace) -> tuple[dict[str, Any], TurnLoad]:
    require("cpu", "dynamo", "vllm")
    args: dict[str, Any] = {"dtype": "float32", "max-model-len": 2048, "max-num-seqs": 128}
    model: dict[str, Any] = {"engine": "vllm", "replicas": options.workers, "args": args}
    if gpus := list_gpus():
        # Two stacks: so many workers at once.
        model["env"] = choose_shared_gpu(gpus, 2 * options.workers)
        # Eager: four workers start one stack after the other.
        args |= {"gpu-memory-utilization": _SHARE, "enforce-eager": True}
    return model, TurnLoad(8.0, at_once=64, prompt_tokens=64, max_tokens=options.tokens)


async def _measure_throughput(
    spec: dict[str, Any], load: TurnLoad, options: argparse.Namespace, figures: Figures
) -> None:
    """Compare the rollouts of a stack that is observed with those of one that is not; `figures`
    is kept up to date."""
    name = spec["models"][0]["engine"]
    async with AsyncExitStack() as cleanup:
        say(f"{name}: starting two stacks")
        receiver, traces = await cleanup.enter_async_context(start_child(_PEERS, "receive"))
        off_spec = StackSpec(**spec, name="bench-off", observe={"record": False})
        observe = {"interval_seconds": INTERVAL_SECONDS}
        env = {"OTEL_BSP_SCHEDULE_DELAY": str(int(1000 * _SPAN_SECONDS))}
        on_spec = StackSpec(**spec, name="bench-on", observe=observe, env=env)
        with set_endpoint(None):
            off = await cleanup.enter_async_context(up(off_spec))
        # Until the end: OpenTelemetry's SDK reads it with the first span.
        url = None if options.no_traces else f"{traces['url']}/v1/traces"
        cleanup.enter_context(set_endpoint(url))
        on = await cleanup.enter_async_context(up(on_spec))
        dash, dashboard = await cleanup.enter_async_context(start_child(*_DASH))
        look = start_child(_PEERS, "look", dashboard["url"])
        page, _ = await cleanup.enter_async_context(look)
        arms = {"off": _Client(off, load), "on": _Client(on, load)}
        groups = {arm: _find_processes(f"bench-{arm}") for arm in arms}
        groups["on"] |= {"dash": [dash], "page": [page], "receiver": [receiver]}
        observers = [*groups["on"]["supervisor"], dash, page]
        for client in arms.values():
            await client.run(_WARM_UP_SECONDS)
        rows: list[dict[str, float]] = []
        costs: dict[str, list[dict[str, float]]] = {arm: [] for arm in arms}
        for number in range(options.rounds):
            row = {}
            for arm in ("off", "on")[:: 1 if number % 2 else -1]:
                if on.tracer is not None:  # spans of the turn before
                    await asyncio.to_thread(on.tracer.flush)
                    await asyncio.sleep(2 * _SPAN_SECONDS)
                with hold(observers if arm == "off" else ()):
                    before = _read_cpu(groups[arm])
                    row[arm] = await arms[arm].run(load.seconds)
                    after, count = _read_cpu(groups[arm]), arms[arm].count
                costs[arm].append({k: 1e3 * (after[k] - before[k]) / count for k in after})
            rows.append(row)
            figures.update(compare(rows), in_flight=load.at_once, turn_seconds=load.seconds)
            figures["traces"] = on.tracer is not None
            figures["cpu_ms_per_rollout"] = {
                arm: {name: median(cost[name] for cost in own) for name in own[0]}
                for arm, own in costs.items()
            }
            figures["client"] = compare_clients(costs)
            micro = {arm: 1e3 * costs[arm][-1]["client"] for arm in arms}
            say(
                f"{name}: {row['on']:.0f} rollouts/s, unobserved {row['off']:.0f}; the client's "
                f"CPU {micro['on']:.0f} µs per rollout, unobserved {micro['off']:.0f}"
            )


def compare_clients(costs: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    """Return the client's CPU per rollout in each arm, and how fast a client that nothing else
    limits is when observed: the median of the rounds' ratios, and the middle half of them."""
    micro = {arm: [1e3 * cost["client"] for cost in costs[arm]] for arm in ("off", "on")}
    ratios = [off / on for off, on in zip(micro["off"], micro["on"], strict=True)]
    per_rollout = {arm: median(values) for arm, values in micro.items()}
    return {"microseconds_per_rollout": per_rollout, **summarize_ratios(ratios)}


def compare(rows: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Return the median rate of each arm, the median of the rounds' ratios, and the middle half
    of them."""
    ratios = [row["on"] / row["off"] for row in rows]
    rates = {arm: median(row[arm] for row in rows) for arm in ("off", "on")}
    return {"rollouts_per_second": rates, **summarize_ratios(ratios), "rounds": len(rows)}


def summarize_ratios(ratios: Sequence[float]) -> dict[str, Any]:
    half = quantiles(ratios, n=4)[::2] if len(ratios) > 1 else [*ratios, *ratios]
    return {"ratio": median(ratios), "middle_half": half}


class _Client:
    """Keeps a number of rollouts in flight for some seconds."""

    def __init__(self, stack: Stack, load: TurnLoad) -> None:
        self._load = load
        self._rollouts: Rollouts = stack.rollouts(concurrency=load.at_once)
        self._sampling = Sampling(
            max_tokens=load.max_tokens, ignore_eos=True, logprobs=load.has_logprobs
        )
        self._numbers = itertools.count()
        self.count = 0
        """How many rollouts the last turn had."""

    async def run(self, seconds: float) -> float:
        """Return the rollouts per second."""
        until = time.monotonic() + seconds
        rest = [10 + 7 * place % 190 for place in range(self._load.prompt_tokens - 3)]

        async def send_until() -> int:
            count = 0
            while time.monotonic() < until:
                # A beginning of its own: no prompt is in a cache.
                number = next(self._numbers)
                begin = [10 + number % 190, 10 + number // 190 % 190, 10 + number // 36_100 % 190]
                await self._rollouts.generate([*begin, *rest], self._sampling)
                count += 1
            return count

        began = time.monotonic()
        self.count = sum(await asyncio.gather(*(send_until() for _ in range(self._load.at_once))))
        return self.count / (time.monotonic() - began)


@contextmanager
def set_endpoint(url: str | None) -> Iterator[None]:
    """Have stacks that start in the block send their spans there; None for nowhere."""
    before = {name: os.environ.pop(name, None) for name in ENDPOINTS}
    if url is not None:
        os.environ[ENDPOINTS[0]] = url
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextmanager
def hold(pids: Sequence[int]) -> Iterator[None]:
    """Stop processes for a while."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def _find_processes(name: str) -> dict[str, list[int]]:
    """Return the processes of a stack by what they are, with this one, the client's."""
    state = StackDir(name).read()
    assert state is not None
    groups = {"client": [os.getpid()], "supervisor": [state.supervisor.pid]}
    for process, pids in list_processes(name):
        groups.setdefault(process.role, []).extend(pids)
    return groups


def _read_cpu(groups: Mapping[str, Sequence[int]]) -> dict[str, float]:
    # Of other processes the kernel tells hundredths of a second.
    own = {"client": time.process_time()}
    return {name: sum(map(read_cpu_seconds, pids)) for name, pids in groups.items()} | own
