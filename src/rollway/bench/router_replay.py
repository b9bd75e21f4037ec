"""The same traffic in Dynamo's offline replay: Dynamo's router over simulated engines.

Time is virtual, so neither the machine nor its load affects the figures. The replay has no session
affinity. For Rollway's preset, groups are dealt to the workers in turn and each worker replays its
groups alone: affinity does the same as long as no worker is full. The replay does not count
generated tokens as cached either, so later turns hit less than live.
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
"""Each figure is the mean over this many random traffics: a makespan depends on the few longest
rollouts, and the KV router breaks ties at random."""
_EVENT_LAG_MS = 5.0
_ENGINE = {"backend": "vllm", "block_size": BLOCK, "num_gpu_blocks": 1024, "max_num_seqs": 64}

Row = dict[str, Any]


def replay(groups: int, workers: int, routing: str) -> Tally:
    """Sum over the draws; the makespan is their mean."""
    total = Tally()
    for seed in range(DRAWS):
        tally = _replay(Traffic(groups, block=BLOCK, seed=seed), workers, routing)
        makespan = total.makespan_seconds + tally.makespan_seconds / DRAWS
        total.add(tally)
        total.makespan_seconds = makespan
    return total


def _replay(traffic: Traffic, workers: int, routing: str) -> Tally:
    if routing != "rollway":
        return _run(make_trace(traffic), workers, kv=routing == "kv")
    total = Tally()
    for worker in range(min(workers, traffic.groups)):
        groups = range(worker, traffic.groups, workers)
        total.add(_run(make_trace(traffic, groups), 1, kv=False))
    return total


def make_trace(traffic: Traffic, groups: Iterable[int] | None = None) -> Iterator[Row]:
    """Yield the trace of these groups, or of all, in Mooncake's format.

    The number of a block identifies its tokens and all tokens before them, so rollouts share a
    prefix if they share numbers."""
    chosen = set(range(traffic.groups) if groups is None else groups)
    # Groups that are left out still use up numbers: parts of a trace add up to the whole.
    unused = itertools.count(list_prompt_blocks(traffic, traffic.groups)[-1] + 1)
    for group, member in traffic.list_members():
        blocks = list_prompt_blocks(traffic, group)
        for number, turn in enumerate(traffic.plan_turns(group, member)):
            start = {"delay": 1000 * turn.wait_seconds} if number else {"timestamp": 0}
            if group in chosen:
                yield {
                    "session_id": f"{group}/{member}",
                    "input_length": len(blocks) * traffic.block,
                    "output_length": turn.output,
                    "hash_ids": list(blocks),
                    **start,
                }
            blocks += itertools.islice(unused, traffic.count_added_blocks(turn))


def list_prompt_blocks(traffic: Traffic, group: int) -> list[int]:
    own = traffic.prompt_blocks - traffic.system_blocks
    first = traffic.system_blocks + group * own
    return [*range(traffic.system_blocks), *range(first, first + own)]


def _run(trace: Iterable[Row], workers: int, *, kv: bool) -> Tally:
    os.environ.setdefault("DYN_LOG", "error")  # otherwise Dynamo logs every request
    try:
        from dynamo.llm import KvRouterConfig
        from dynamo.replay import run_trace_replay
    except ImportError as error:
        raise UsageError(
            f"Dynamo's replay is not installed ({error}).", "Run: pip install 'rollway[cpu]'."
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
    return read_summary(report.summary)


def read_summary(summary: Any) -> Tally:
    """Convert the replay's summary to the figures of a live run."""
    prompt, requests = int(summary["total_input_tokens"]), int(summary["num_requests"])
    return Tally(
        requests=requests,
        prompt_tokens=prompt,
        cached_tokens=prompt - int(summary["committed_prefill_tokens"]),
        ttft_seconds=requests * float(summary["mean_ttft_ms"]) / 1000,
        makespan_seconds=float(summary["duration_ms"]) / 1000,
    )
