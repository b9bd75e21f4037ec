"""`rollway bench router` without stacks: the traffic, the trace, and the conclusions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.router import Figures, RouterReport, Routing, adapt_spec, parse_counts
from benchmarks.router_traffic import (
    Tally,
    Traffic,
    list_prompt_blocks,
    make_trace,
    read_summary,
    read_ttft,
)
from rollway.errors import RolloutError, UsageError
from rollway.spec import StackSpec, load_spec


def figures(workers: int, routing: Routing, makespan: float, hits: float = 0.5) -> Figures:
    return Figures(workers, routing, hits, 0.1, makespan, 10)


def test_traffic_depends_only_on_its_seed() -> None:
    first, again, other = Traffic(2), Traffic(2), Traffic(2, seed=1)
    assert first.make_prompt(1) == again.make_prompt(1) != other.make_prompt(1)
    assert first.plan_turns(1, 3) == again.plan_turns(1, 3) != first.plan_turns(1, 4)
    assert first.plan_turns(0, 0)[0].wait_seconds == 0  # all first turns at once


def test_groups_share_only_the_system_prompt() -> None:
    traffic = Traffic(2)
    shared = traffic.system_blocks * traffic.block
    first, second = traffic.make_prompt(0), traffic.make_prompt(1)
    assert first[:shared] == second[:shared] and first[shared:] != second[shared:]
    assert len(first) == traffic.prompt_blocks * traffic.block


def test_trace_rows_share_blocks_where_prompts_share_tokens() -> None:
    traffic = Traffic(3, rollouts=2, block=64)
    trace = list(make_trace(traffic))
    assert len(trace) == traffic.requests
    firsts = [row for row in trace if "timestamp" in row]
    assert len(firsts) == 6 and all("delay" in row for row in trace if row not in firsts)
    for number, row in enumerate(firsts):
        assert row["hash_ids"] == list_prompt_blocks(traffic, number // 2)
    before: dict[str, list[int]] = {}
    for row in trace:
        old = before.get(row["session_id"], [])
        assert row["hash_ids"][: len(old)] == old and len(row["hash_ids"]) > len(old)
        assert row["input_length"] == 64 * len(row["hash_ids"])
        before[row["session_id"]] = row["hash_ids"]
    grown = [block for blocks in before.values() for block in blocks[traffic.prompt_blocks :]]
    assert len(grown) == len(set(grown)) and min(grown) > list_prompt_blocks(traffic, 2)[-1]


def test_parts_of_a_trace_add_up_to_it() -> None:
    traffic = Traffic(3, rollouts=2, block=64)
    whole = list(make_trace(traffic))
    parts = [row for start in range(2) for row in make_trace(traffic, range(start, 3, 2))]
    assert sorted(map(repr, parts)) == sorted(map(repr, whole))


def test_the_summary_of_a_replay_is_converted_to_seconds() -> None:
    summary = {
        "total_input_tokens": 1000,
        "num_requests": 4,
        "committed_prefill_tokens": 250,
        "mean_ttft_ms": 500.0,
        "duration_ms": 3000.0,
    }
    read = read_summary(summary)
    assert (read.hit_rate, read.ttft_mean_seconds, read.makespan_seconds) == (0.75, 0.5, 3.0)


def test_the_makespan_of_concurrent_runs_is_the_longest() -> None:
    total = Tally(1, 10, 5, 1.0, 2.0)
    total.add(Tally(3, 30, 5, 1.0, 1.0))
    assert total == Tally(4, 40, 10, 2.0, 2.0)
    assert (total.hit_rate, total.ttft_mean_seconds) == (0.25, 0.5)
    assert Tally().hit_rate == Tally().ttft_mean_seconds == 0.0


def test_the_conclusion_uses_the_worst_case_of_both_parts() -> None:
    report = RouterReport(
        live=[figures(4, "kv", 2.0), figures(4, "rollway", 1.0)],
        replay=[figures(32, "kv", 2.0), figures(32, "rollway", 2.5, hits=0.9)],
    )
    conclusion = report.as_json()
    assert conclusion["preset_hit_rate_at_32"] == {"live": None, "replay": 0.9}
    assert conclusion["preset_worst_ratio"] == {"ttft": 1.0, "makespan": 1.25}
    assert conclusion["preset_never_slower"] is False
    report.replay.pop()
    assert report.as_json()["preset_never_slower"] is True
    assert RouterReport().as_json()["preset_never_slower"] is None


@pytest.fixture
def spec(base_model: Path) -> StackSpec:
    model = {"path": str(base_model), "engine": "custom", "module": "m", "args": {"count": 8}}
    return load_spec({"name": "x", "models": [model]})


@pytest.mark.parametrize(
    ("workers", "replicas", "count"), [(4, 1, 4), (8, 1, 8), (16, 2, 8), (32, 4, 8)]
)
def test_workers_share_processes(spec: StackSpec, workers: int, replicas: int, count: int) -> None:
    model = adapt_spec(spec, "kv", workers).models[0]
    assert (model.replicas, model.args["count"]) == (replicas, count)


def test_routings_differ_only_in_preset_and_mode(spec: StackSpec) -> None:
    assert (adapt_spec(spec, "round_robin", 4).preset, adapt_spec(spec, "kv", 4).preset) == (
        "plain",
        "plain",
    )
    assert adapt_spec(spec, "round_robin", 4).router.mode == "round-robin"
    ours = adapt_spec(spec, "rollway", 4)
    assert (ours.preset, ours.router.mode) == ("rl", "kv")
    assert ours.models == adapt_spec(spec, "kv", 4).models


def test_a_number_of_workers_that_leaves_a_process_partly_empty_is_refused(spec: StackSpec) -> None:
    with pytest.raises(UsageError, match="12 workers"):
        adapt_spec(spec, "kv", 12)


def test_worker_counts_are_parsed() -> None:
    assert parse_counts("4, 32") == [4, 32]
    for text in ("", "4,", "four", "0", "-4"):
        with pytest.raises(UsageError):
            parse_counts(text)


@pytest.mark.parametrize("answer", [{}, {"nvext": None}, {"nvext": {"timing": {}}}, None])
def test_an_answer_without_its_timing_is_an_error(answer: Any) -> None:
    with pytest.raises(RolloutError):
        read_ttft(answer)
    assert read_ttft({"nvext": {"timing": {"ttft_ms": 250}}}) == 0.25
