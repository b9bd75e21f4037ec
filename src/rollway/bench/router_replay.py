"""The same traffic in Dynamo's offline replay: its own router over simulated engines, in virtual
time, so that neither this machine nor its load has a say in the figures.

The replay knows no session affinity. For Rollway's preset the groups are dealt out to the workers
in turn, and each worker replays its own: what affinity does as long as no worker is full. It does
not credit generated tokens as cached either, so turns after the first hit less than live.
"""

from __future__ import annotations

import itertools
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rollway.bench.router_traffic import Tally, Traffic
from rollway.errors import UsageError

BLOCK = 64
DRAWS = 5
"""Makespans hang on the longest rollouts, and the KV router breaks ties by chance: each figure is
the mean over so many traffics."""
_EVENT_LAG_MS = 5.0
_ENGINE = {"backend": "vllm", "block_size": BLOCK, "num_gpu_blocks": 1024, "max_num_seqs": 64}

Row = dict[str, Any]


def replay(groups: int, workers: int, routing: str) -> Tally:
    """Sums over the draws, but for the makespan, which is their mean."""
    total = Tally()
    for seed in range(DRAWS):
        drawn = _replay(Traffic(groups, block=BLOCK, seed=seed), workers, routing)
        makespan = total.makespan_seconds + drawn.makespan_seconds / DRAWS
        total.add(drawn)
        total.makespan_seconds = makespan
    return total


def _replay(traffic: Traffic, workers: int, routing: str) -> Tally:
    if routing == "rollway":
        return _pinned(traffic, workers)
    return _run(rows(traffic), workers, kv=routing == "kv")


def rows(traffic: Traffic, groups: Iterable[int] | None = None) -> Iterator[Row]:
    """The trace (Mooncake's format), of some of the groups. A block's number stands for its tokens
    and all before them, so a prefix is shared where numbers are."""
    chosen = set(range(traffic.groups) if groups is None else groups)
    fresh = itertools.count(_first_fresh(traffic))
    for group, member in traffic.members():
        blocks = prompt_blocks(traffic, group)
        for number, turn in enumerate(traffic.plan(group, member)):
            start = {"delay": 1000 * turn.wait_seconds} if number else {"timestamp": 0}
            if group in chosen:
                yield {
                    "session_id": f"{group}/{member}",
                    "input_length": len(blocks) * traffic.block,
                    "output_length": turn.output,
                    "hash_ids": list(blocks),
                    **start,
                }
            blocks += itertools.islice(fresh, traffic.blocks_added(turn))


def prompt_blocks(traffic: Traffic, group: int) -> list[int]:
    own = traffic.prompt_blocks - traffic.system_blocks
    first = traffic.system_blocks + group * own
    return [*range(traffic.system_blocks), *range(first, first + own)]


def _first_fresh(traffic: Traffic) -> int:
    return prompt_blocks(traffic, traffic.groups)[-1] + 1


def _pinned(traffic: Traffic, workers: int) -> Tally:
    total = Tally()
    for worker in range(min(workers, traffic.groups)):
        total.add(_run(rows(traffic, range(worker, traffic.groups, workers)), 1, kv=False))
    return total


def _run(trace: Iterable[Row], workers: int, *, kv: bool) -> Tally:
    os.environ.setdefault("DYN_LOG", "error")  # else a line for every request
    try:
        from dynamo.llm import KvRouterConfig
        from dynamo.replay import run_trace_replay
    except ImportError as error:
        raise UsageError(
            f"Dynamo's replay is not installed ({error}).", "pip install 'rollway[cpu]'."
        ) from error
    options: dict[str, Any] = {"router_mode": "round_robin"}
    if kv:
        options = {
            "router_mode": "kv_router",
            "router_config": KvRouterConfig(),
            "kv_event_lag_ms": _EVENT_LAG_MS,
        }
    with tempfile.TemporaryDirectory(prefix="rollway-replay-") as scratch:
        path = Path(scratch, "trace.jsonl")
        path.write_text("".join(f"{json.dumps(row)}\n" for row in trace))
        report = run_trace_replay(
            str(path),
            num_workers=workers,
            trace_block_size=BLOCK,
            extra_engine_args={"engine": _ENGINE},
            **options,
        )
    return tally(report.summary)


def tally(summary: Any) -> Tally:
    """The replay's own summary, in the terms of a live run."""
    prompt, requests = int(summary["total_input_tokens"]), int(summary["num_requests"])
    return Tally(
        requests=requests,
        prompt_tokens=prompt,
        cached_tokens=prompt - int(summary["committed_prefill_tokens"]),
        ttft_seconds=requests * float(summary["mean_ttft_ms"]) / 1000,
        makespan_seconds=float(summary["duration_ms"]) / 1000,
    )
