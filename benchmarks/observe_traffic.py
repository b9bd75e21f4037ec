"""Measure what observing costs rollouts: two equal stacks beside each other, one of them observed.

    bench ── rollouts, in turns ──► stack `off`: nothing is observed
                              └───► stack `on`: recorded, sampled every 2 s, traced
                                       │   └─ spans ─► a receiver
                                       └─ record ─► `rollway dash` ─► a page that is open

While `off` has its turn, what observes `on` is stopped by a signal, and its spans were sent before:
it must not take from `off` what it costs. A turn has a length, not a number of requests, so that it
holds two samples on every machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import psutil

from benchmarks import Say
from chaos import make_environment
from rollway.aio import Stack, up
from rollway.errors import StartError
from rollway.rollout.client import Rollouts
from rollway.rollout.sampling import Sampling
from rollway.spec import StackSpec
from rollway.stack.state import StackDir

INTERVAL_SECONDS = 2.0
_WARM_UP_SECONDS = 3.0
_SPAN_SECONDS = 1.0
"""How often Dynamo sends its spans; it must have sent them before the next turn."""
_START_SECONDS = 240.0
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PEERS = "benchmarks.observe_peers"


@dataclass(frozen=True, slots=True)
class Load:
    """Rollouts of one turn."""

    seconds: float
    at_once: int
    prompt_tokens: int
    max_tokens: int
    has_logprobs: bool = True


async def measure_throughput(
    spec: dict[str, Any],
    load: Load,
    rounds: int,
    say: Say,
    figures: dict[str, Any],
    *,
    has_traces: bool = True,
) -> None:
    """Compare the rollouts of a stack that is observed with those of one that is not; `figures`
    is kept up to date."""
    name = spec["models"][0]["engine"]
    async with AsyncExitStack() as cleanup:
        say(f"{name}: starting two stacks")
        receiver = await cleanup.enter_async_context(start_peer("receive"))
        off_spec = StackSpec(**spec, name="bench-off", observe={"record": False})
        observe = {"interval_seconds": INTERVAL_SECONDS}
        env = {"OTEL_BSP_SCHEDULE_DELAY": str(int(1000 * _SPAN_SECONDS))}
        on_spec = StackSpec(**spec, name="bench-on", observe=observe, env=env)
        with set_endpoint(None):
            off = await cleanup.enter_async_context(up(off_spec))
        with set_endpoint(receiver.told["url"] if has_traces else None):
            on = await cleanup.enter_async_context(up(on_spec))
        dash = await cleanup.enter_async_context(start_dash("bench-on"))
        page = await cleanup.enter_async_context(start_peer("look", dash.told["url"]))
        observers = [_find_supervisor("bench-on"), dash.pid, page.pid]
        arms = {"off": _Client(off, load), "on": _Client(on, load)}
        groups = {arm: _find_processes(f"bench-{arm}") for arm in arms}
        groups["on"] |= {"dash": [dash.pid], "page": [page.pid], "receiver": [receiver.pid]}
        for client in arms.values():
            await client.run(_WARM_UP_SECONDS)
        rows: list[dict[str, float]] = []
        costs: dict[str, list[dict[str, float]]] = {arm: [] for arm in arms}
        for number in range(rounds):
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
    return {
        "microseconds_per_rollout": {arm: median(values) for arm, values in micro.items()},
        "ratio": median(ratios),
        "middle_half": find_middle_half(ratios),
    }


def compare(rows: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Return the median rate of each arm, the median of the rounds' ratios, and the middle half
    of them."""
    ratios = [row["on"] / row["off"] for row in rows]
    return {
        "rollouts_per_second": {arm: median(row[arm] for row in rows) for arm in ("off", "on")},
        "ratio": median(ratios),
        "middle_half": find_middle_half(ratios),
        "rounds": len(rows),
    }


def find_middle_half(ratios: Sequence[float]) -> list[float]:
    return quantiles(ratios, n=4)[::2] if len(ratios) > 1 else [*ratios, *ratios]


class _Client:
    """Keeps a number of rollouts in flight for some seconds."""

    def __init__(self, stack: Stack, load: Load) -> None:
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


# --- the processes around it ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Peer:
    """A process of the benchmark, and the first line that it printed."""

    pid: int
    told: dict[str, Any]


@asynccontextmanager
async def start_process(*argv: str) -> AsyncIterator[Peer]:
    """Start a process that prints a line of JSON when it is ready, and end it."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", *argv),
        env=make_environment(),
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), _START_SECONDS)
        if not line.startswith(b"{"):
            raise StartError(f"`{' '.join(argv)}` did not start.", "Its error is above.")
        yield Peer(process.pid, json.loads(line))
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), 10.0)
        except TimeoutError:
            process.kill()
            await process.wait()


def start_peer(*arguments: str) -> contextlib.AbstractAsyncContextManager[Peer]:
    return start_process(PEERS, *arguments)


def start_dash(name: str) -> contextlib.AbstractAsyncContextManager[Peer]:
    return start_process("rollway.cli", "dash", name, "--json", "--port", "0", "--no-open")


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


def _find_supervisor(name: str) -> int:
    (pid,) = _find_processes(name)["supervisor"]
    return pid


def _find_processes(name: str) -> dict[str, list[int]]:
    """Return the processes of a stack by what they are, with this one, the client's."""
    state = StackDir(name).read()
    assert state is not None
    groups = {"client": [os.getpid()], "supervisor": [state.supervisor.pid]}
    for process in state.processes:
        if process.pid is not None:
            own = [
                process.pid,
                *(child.pid for child in psutil.Process(process.pid).children(recursive=True)),
            ]
            groups.setdefault(process.role, []).extend(own)
    return groups


def _read_cpu(groups: Mapping[str, Sequence[int]]) -> dict[str, float]:
    # Of other processes the kernel tells hundredths of a second.
    own = {"client": time.process_time()}
    return {name: sum(map(read_cpu_seconds, pids)) for name, pids in groups.items()} | own


def read_cpu_seconds(pid: int) -> float:
    """Return the CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
