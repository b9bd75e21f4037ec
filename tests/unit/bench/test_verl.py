"""The pure parts of `rollway bench verl`: its prompts, its figures and its table."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from rollway.bench.verl import (
    ARMS,
    BATCHES,
    LOADS,
    LONGEST_PROMPT,
    QUESTION_TOKENS,
    ROLLOUTS,
    SYSTEM_TOKENS,
    ArmFigures,
    Batch,
    BatchFigures,
    Load,
    VerlReport,
    list_runs,
    measure_arms,
    measure_hit_rate,
    measure_togetherness,
    split_turns,
)
from rollway.bench.verl_table import BEGIN, END, format_markdown, replace_table
from rollway.errors import UsageError
from rollway.integrations.verl.requests import RequestLog, RequestRecord


def record(
    group: str, trajectory: str, worker: int, cached: int, prompt: int = 100
) -> RequestRecord:
    return RequestRecord(group, trajectory, worker, prompt, cached, output_tokens=10, seconds=0.1)


TWO_GROUPS = [
    record("a", "a0", 1, cached=0),
    record("a", "a1", 1, cached=90),
    record("b", "b0", 2, cached=30),
    record("a", "a1", 3, cached=60, prompt=200),
    record("b", "b0", 2, cached=180, prompt=200),
    record("a", "a1", 1, cached=240, prompt=300),
]


def test_hit_rates_count_tokens_not_requests() -> None:
    assert measure_hit_rate(TWO_GROUPS) == pytest.approx(600 / 1000)
    first, later = split_turns(TWO_GROUPS)
    assert [turn.trajectory for turn in first] == ["a0", "a1", "b0"]
    assert measure_hit_rate(first) == pytest.approx(120 / 300)
    assert measure_hit_rate(later) == pytest.approx(480 / 700)


def test_togetherness_counts_the_worker_most_used_by_a_group() -> None:
    assert measure_togetherness(TWO_GROUPS) == pytest.approx((3 + 2) / 6)


def test_time_is_per_sampled_token() -> None:
    figures = BatchFigures.compute(TWO_GROUPS, seconds=0.12)
    assert figures.ms_per_token == pytest.approx(120 / 60)
    assert figures.requests == 6


def test_arms_are_compared_with_no_affinity_under_the_same_load() -> None:
    base = BatchFigures.compute(TWO_GROUPS, seconds=1.0)
    rows = [
        ArmFigures(arm, load, tuple(dataclasses.replace(base, ms_per_token=ms) for ms in times))
        for arm, load, times in (
            ("group", "fits", (1.0, 2.0)),
            ("off", "fits", (2.0, 4.0)),
            ("off", "scarce", (9.0, 9.0)),
        )
    ]
    report = VerlReport(rows)
    assert report.time_ratio(rows[0]) == pytest.approx(0.5)
    assert rows[0].spread("ms_per_token") == (1.0, 2.0)
    assert VerlReport(rows[:1]).time_ratio(rows[0]) is None
    assert "| 8 prompts, fits | group | 0.600 (0.600 to 0.600) |" in format_markdown(report)


def test_every_arm_gets_the_same_batches_in_turn() -> None:
    warm_up, *rest = list_runs(ARMS)
    assert warm_up[0].name not in {arm.name for arm in ARMS}
    for arm in ARMS:
        batches = [batch for run_arm, batch in rest if run_arm == arm]
        assert batches == [Batch(load, n) for n in range(BATCHES) for load in LOADS]
    names = [arm.name for arm, _ in rest]
    size = len(ARMS)
    assert names[:size] == names[2 * size : 3 * size][::-1]  # the second round is backward


def test_prompts_share_the_system_prompt_and_rollouts_all() -> None:
    load = Load("fits", 2)
    texts = ["".join(m["content"] for m in rollout) for rollout in Batch(load, 0).messages()]
    assert len(texts) == 2 * ROLLOUTS and len(set(texts)) == 2
    first, last = texts[0], texts[-1]
    assert first[:SYSTEM_TOKENS] == last[:SYSTEM_TOKENS]
    assert first[SYSTEM_TOKENS : SYSTEM_TOKENS + 32] != last[SYSTEM_TOKENS : SYSTEM_TOKENS + 32]
    assert SYSTEM_TOKENS + QUESTION_TOKENS < len(first) <= LONGEST_PROMPT
    again = Batch(load, 1).messages()
    assert "".join(m["content"] for m in again[0]) not in texts


def test_existing_results_are_not_measured_again(tmp_path: Path) -> None:
    log = tmp_path / "answers.jsonl"
    request_log = RequestLog(log)
    for request in TWO_GROUPS:
        request_log.add(request)
    results = tmp_path / "kv" / "results"
    results.mkdir(parents=True)
    for arm, batch in list_runs(ARMS[:1]):
        (results / f"{arm.name}-{batch.name}.jsonl").write_text(log.read_text())
        (results / f"{arm.name}-{batch.name}.seconds").write_text("0.12")
    rows = measure_arms("kv", ARMS[:1], Path("no-python"), Path("no-model"), tmp_path / "kv")
    assert [(row.arm, row.load) for row in rows] == [("group", load.name) for load in LOADS]
    assert rows[0].batches == (BatchFigures.compute(TWO_GROUPS, 0.12),) * BATCHES


def test_the_table_replaces_the_one_before() -> None:
    text = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert replace_table(text, "new") == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter\n"
    with pytest.raises(UsageError, match="no place"):
        replace_table("nothing", "new")
