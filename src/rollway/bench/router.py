"""`rollway bench router`: prefix hits, time to first token and makespan, for three routings.

The same traffic goes through round robin, Dynamo's default KV router and Rollway's preset: live
through a real frontend, and in Dynamo's offline replay.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from rollway.api import Stack, up
from rollway.bench import router_replay
from rollway.bench.router_traffic import GROUPS_PER_WORKER, Sender, Tally, Traffic
from rollway.config import StackSpec, load_spec
from rollway.errors import NoWorkers, UsageError
from rollway.fleet.fleet import Fleet
from rollway.http import Http
from rollway.stack import machine

Routing = Literal["round_robin", "kv", "rollway"]
Say = Callable[[str], None]

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
"""The number of workers whose hit rate is named in the report."""


@dataclass(frozen=True, slots=True)
class Figures:
    """One routing with so many workers."""

    workers: int
    routing: Routing
    hit_rate: float
    """Prompt tokens that were cached, of all prompt tokens."""
    ttft_mean_seconds: float
    makespan_seconds: float
    requests: int

    @classmethod
    def of(cls, tally: Tally, workers: int, routing: Routing) -> Figures:
        return cls(
            workers=workers,
            routing=routing,
            hit_rate=round(tally.hit_rate, 4),
            ttft_mean_seconds=round(tally.ttft_mean_seconds, 4),
            makespan_seconds=round(tally.makespan_seconds, 4),
            requests=tally.requests,
        )


@dataclass(slots=True)
class RouterReport:
    live: list[Figures] = field(default_factory=list)
    replay: list[Figures] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        both = [self.live, self.replay]
        ratios = {
            "ttft": _worst(both, "ttft_mean_seconds"),
            "makespan": _worst(both, "makespan_seconds"),
        }
        known = [ratio for ratio in ratios.values() if ratio is not None]
        return {
            "routings": _MEANING,
            "live": [asdict(figures) for figures in self.live],
            "replay": [asdict(figures) for figures in self.replay],
            f"preset_hit_rate_at_{_AT}": {
                "live": _hit_rate_at(self.live),
                "replay": _hit_rate_at(self.replay),
            },
            "preset_worst_ratio": ratios,
            "preset_never_slower": max(known) <= 1.0 if known else None,
            "machine": _machine(),
        }


async def bench_live(
    spec: StackSpec, counts: Sequence[int], groups: int | None, say: Say
) -> list[Figures]:
    """A stack of its own for every routing: nobody finds another's cache."""
    found = []
    for workers in counts:
        for routing in ROUTINGS:
            tally = await _live(sized(spec, routing, workers), workers, groups)
            found.append(Figures.of(tally, workers, routing))
            say(_line("live", found[-1]))
    return found


def bench_replay(counts: Sequence[int], groups: int | None, say: Say) -> list[Figures]:
    found = []
    for workers in counts:
        for routing in ROUTINGS:
            tally = router_replay.replay(groups or GROUPS_PER_WORKER * workers, workers, routing)
            found.append(Figures.of(tally, workers, routing))
            say(_line("replay", found[-1]))
    return found


def sized(spec: StackSpec, routing: Routing, workers: int) -> StackSpec:
    """The stack with that routing and so many workers. Where the file says how many workers a
    process holds (`args.count`, of light workers), they share processes."""
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


async def _live(spec: StackSpec, workers: int, groups: int | None) -> Tally:
    async with up(spec) as stack, Http() as http:
        await stack.unwatch()  # nobody asks the workers anything meanwhile
        if spec.models[0].takes_refits:
            await _all_listed(stack, http, workers, spec.start_seconds)
        sender = Sender(http, stack.frontend_url, stack.models[0])
        await sender.warm_up(2 * workers)
        return await sender.send(Traffic(groups or GROUPS_PER_WORKER * workers))


async def _all_listed(stack: Stack, http: Http, workers: int, patience: float) -> None:
    """A process of many workers is ready with its first."""
    fleet = Fleet(http, stack.rl_url, secret=stack.weights_secret)
    deadline = time.monotonic() + patience
    while (listed := len(await fleet.workers())) < workers:
        if time.monotonic() > deadline:
            raise NoWorkers(
                f"{listed} of {workers} workers are listed after {patience:g} s.",
                "See the workers' logs (rollway logs), or raise `start_seconds`.",
            )
        await asyncio.sleep(0.2)


def _worst(parts: Iterable[list[Figures]], name: str) -> float | None:
    """The preset's figure against the default KV router's, where the preset does worst."""
    ratios = []
    for part in parts:
        by = {(figures.workers, figures.routing): getattr(figures, name) for figures in part}
        pairs = [(by[n, "rollway"], by.get((n, "kv"))) for n, routing in by if routing == "rollway"]
        ratios += [ours / default for ours, default in pairs if default]
    return round(max(ratios), 4) if ratios else None


def _hit_rate_at(part: list[Figures]) -> float | None:
    rates = (f.hit_rate for f in part if (f.workers, f.routing) == (_AT, "rollway"))
    return next(rates, None)


def _machine() -> dict[str, Any]:
    total, _ = machine.memory_bytes()
    return {
        "cores": machine.cores(),
        "memory_gib": round(total / 2**30, 1),
        "load_average": round(os.getloadavg()[0], 2),
        "processor": platform.machine(),
        "python": platform.python_version(),
        "ai_dynamo": _version("ai-dynamo"),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _line(part: str, figures: Figures) -> str:
    return (
        f"{part}: {figures.workers} workers, {figures.routing}: hits {figures.hit_rate:.3f}, "
        f"first token {figures.ttft_mean_seconds:.3f} s, all done {figures.makespan_seconds:.2f} s"
    )
