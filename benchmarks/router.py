"""`rollway bench router`: prefix hits, time to first token and makespan, for three routings.

The same traffic goes through round robin, Dynamo's default KV router and Rollway's preset: live
through a real frontend, and in Dynamo's offline replay.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from typing import Any, Literal, get_args

import psutil

from benchmarks import Say
from benchmarks.inputs import read_spec
from benchmarks.router_traffic import GROUPS_PER_WORKER, Sender, Tally, Traffic, replay
from rollway.aio import Stack, up
from rollway.cli.output import get_spec_file, print_progress
from rollway.errors import NoWorkers, UsageError, require
from rollway.fleet.fleet import Fleet
from rollway.http import Http
from rollway.spec import StackSpec, load_spec
from rollway.stack import preset
from rollway.stack.machine_check import list_installed_versions

Routing = Literal["round_robin", "kv", "rollway"]
ROUTINGS: tuple[Routing, ...] = get_args(Routing)
_STACKS = {
    "round_robin": ["preset=plain", "router.mode=round-robin"],
    "kv": ["preset=plain", "router.mode=kv"],
    "rollway": ["preset=rl", "router.mode=kv"],
}
_MEANING = {
    "round_robin": "Dynamo's round robin, without the preset",
    "kv": "Dynamo's KV router with its defaults, without the preset",
    "rollway": "the KV router with Rollway's preset; a group is a session (replay: groups are "
    "dealt out to the workers in turn, since the replay knows no sessions)",
}
_AT = 32
"""The number of workers for which the report names the preset's hit rate."""


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one routing with a number of workers."""

    workers: int
    routing: Routing
    hit_rate: float
    """The share of the prompt tokens that were cached."""
    ttft_mean_seconds: float
    makespan_seconds: float
    requests: int


@dataclass(slots=True)
class RouterReport:
    live: list[Figures] = field(default_factory=list)
    replay: list[Figures] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        both = [self.live, self.replay]
        ratios = {
            "ttft": _find_worst_ratio(both, "ttft_mean_seconds"),
            "makespan": _find_worst_ratio(both, "makespan_seconds"),
        }
        known = [ratio for ratio in ratios.values() if ratio is not None]
        return {
            "routings": _MEANING,
            "live": [asdict(figures) for figures in self.live],
            "replay": [asdict(figures) for figures in self.replay],
            f"preset_hit_rate_at_{_AT}": {
                "live": _get_hit_rate(self.live),
                "replay": _get_hit_rate(self.replay),
            },
            "preset_worst_ratio": ratios,
            "preset_never_slower": max(known) <= 1.0 if known else None,
            "machine": _describe_machine(),
        }


def run(options: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    counts, groups = parse_counts(options.workers), options.groups
    if groups is not None and groups < 1:
        raise UsageError(f"--groups is {groups}.", "Give at least 1.")
    is_live = get_spec_file(options) is not None and not options.no_live
    if not is_live and options.no_replay:
        raise UsageError("There is nothing to measure.", "Give a stack file, or drop --no-replay.")

    def say(message: str) -> None:
        if not options.quiet:
            print_progress(message)

    report = RouterReport()
    if is_live:
        require("cpu", "torch", "transformers")
        spec = read_spec(options)
        assert spec is not None
        report.live = asyncio.run(bench_live(spec, counts, groups, say))
    if not options.no_replay:
        report.replay = bench_replay(counts, groups, say)
    return 0, report.as_json()


def parse_counts(text: str) -> list[int]:
    numbers = [number.strip() for number in text.split(",")]
    if not all(number.isdigit() and int(number) > 0 for number in numbers):
        raise UsageError(
            f"`--workers {text}` is not a list of numbers.", "Give, for example, 4,32."
        )
    return [int(number) for number in numbers]


async def bench_live(
    spec: StackSpec, counts: Sequence[int], groups: int | None, say: Say
) -> list[Figures]:
    """Measure every routing on a new stack, so that none finds a warm cache."""
    rows = []
    for workers, routing in product(counts, ROUTINGS):
        tally = await _send_live(adapt_spec(spec, routing, workers), workers, groups)
        rows.append(_make_figures(tally, workers, routing))
        say(f"live: {rows[-1]}")
    return rows


def bench_replay(counts: Sequence[int], groups: int | None, say: Say) -> list[Figures]:
    rows = []
    for workers, routing in product(counts, ROUTINGS):
        tally = replay(groups or GROUPS_PER_WORKER * workers, workers, routing)
        rows.append(_make_figures(tally, workers, routing))
        say(f"replay: {rows[-1]}")
    return rows


def adapt_spec(spec: StackSpec, routing: Routing, workers: int) -> StackSpec:
    """Return the stack with this routing and number of workers.

    Light workers share processes: `args.count` is the number of workers per process."""
    overrides = [*_STACKS[routing], f"models.0.replicas={workers}"]
    per_process = spec.models[0].args.get("count")
    if per_process is not None:
        count = min(int(per_process), workers)
        if workers % count:
            raise UsageError(
                f"{workers} workers do not fill processes of {count}.",
                f"Choose a multiple of {count}, or another models.0.args.count.",
            )
        overrides[-1] = f"models.0.replicas={workers // count}"
        overrides.append(f"models.0.args.count={count}")
    return load_spec(spec, overrides)


async def _send_live(spec: StackSpec, workers: int, groups: int | None) -> Tally:
    async with up(spec) as stack, Http() as http:
        await stack.unwatch()  # the watcher's requests to the workers would disturb the figures
        if spec.models[0].can_refit:
            await _wait_for_all(stack, http, workers, spec.start_seconds)
        sender = Sender(http, stack.frontend_url, stack.models[0])
        await sender.warm_up(2 * workers)
        return await sender.send(Traffic(groups or GROUPS_PER_WORKER * workers))


async def _wait_for_all(stack: Stack, http: Http, workers: int, seconds: float) -> None:
    """Wait for all workers: a process with many of them is ready as soon as its first is."""
    fleet = Fleet(http, stack.rl_url, secret=stack.weights_secret)
    deadline = time.monotonic() + seconds
    while (listed := len(await fleet.workers())) < workers:
        if time.monotonic() > deadline:
            raise NoWorkers(
                f"{listed} of {workers} workers are listed after {seconds:g} s.",
                "See the workers' logs (rollway logs), or raise `start_seconds`.",
            )
        await asyncio.sleep(0.2)


def _find_worst_ratio(parts: Iterable[list[Figures]], name: str) -> float | None:
    """Return the largest ratio of the preset's figure to the default KV router's."""
    ratios = []
    for part in parts:
        values = {(figures.workers, figures.routing): getattr(figures, name) for figures in part}
        for (workers, routing), value in values.items():
            default = values.get((workers, "kv"))
            if routing == "rollway" and default:
                ratios.append(value / default)
    return round(max(ratios), 4) if ratios else None


def _get_hit_rate(part: list[Figures]) -> float | None:
    rates = (row.hit_rate for row in part if (row.workers, row.routing) == (_AT, "rollway"))
    return next(rates, None)


def _describe_machine() -> dict[str, Any]:
    total = psutil.virtual_memory().total
    return {
        "cores": preset.count_cores(),
        "memory_gib": round(total / 2**30, 1),
        "load_average": round(os.getloadavg()[0], 2),
        "processor": platform.machine(),
        "python": platform.python_version(),
        "ai_dynamo": list_installed_versions().get("ai-dynamo"),
    }


def _make_figures(tally: Tally, workers: int, routing: Routing) -> Figures:
    hits, ttft = round(tally.hit_rate, 4), round(tally.ttft_mean_seconds, 4)
    return Figures(workers, routing, hits, ttft, round(tally.makespan_seconds, 4), tally.requests)
