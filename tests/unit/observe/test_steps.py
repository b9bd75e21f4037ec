"""The trainer's steps and the counts of rollouts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rollway.observe import end_step, note_mismatch, step, steps
from rollway.observe.read import Run
from rollway.observe.record import Recorder
from rollway.observe.steps import Step
from rollway.observe.tally import RolloutTally


def read(directory: Path, kind: str) -> list[dict[str, Any]]:
    return [entry for entry in Run(directory).read() if entry["kind"] == kind]


def test_parts_of_a_step_are_counted_once() -> None:
    current = Step(1)
    for name, seconds in (("generate", 2.0), ("train", 3.0), ("publish", 4.0), ("paused", 1.0)):
        current.add(name, seconds)
    assert current.divide(12.0) == {
        "generate": 2.0, "train": 3.0, "publish": 3.0, "wait": 3.0, "paused": 1.0
    }  # fmt: skip
    assert Step(1).divide(5.0) == {"paused": 0.0}  # no part was named, which is no wait
    joined = Step(2)  # a worker joined, and its refit paused it while the others generated
    for name, seconds in (("generate", 8.0), ("publish", 1.0), ("paused", 3.0)):
        joined.add(name, seconds)
    assert joined.divide(9.0) == {"generate": 8.0, "publish": 0.0, "wait": 0.0, "paused": 1.0}


def test_a_step_is_recorded_also_if_it_fails_and_nothing_without_a_stack(tmp_path: Path) -> None:
    with step(1):
        note_mismatch(1, 0.5)
    recorder = Recorder(tmp_path, "driver")
    steps.register(recorder)
    try:
        with pytest.raises(ValueError), step(2) as current, current.part("train"):
            raise ValueError
        note_mismatch(2, 0.25, tokens=3)
    finally:
        steps.unregister(recorder)
    with step(3):
        pass
    recorder.close()
    (entry,) = read(tmp_path, "trainer")
    assert entry["step"] == 2 and "train" in entry["parts"]
    (mismatch,) = read(tmp_path, "mismatch")
    assert (mismatch["version"], mismatch["k3"], mismatch["tokens"]) == (2, 0.25, 3)


def test_a_mismatch_that_rounding_made_negative_is_zero(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, "driver")
    steps.register(recorder)
    note_mismatch(1, -3e-9, k1=1e-4, max=0.01)
    steps.unregister(recorder)
    recorder.close()
    (mismatch,) = read(tmp_path, "mismatch")
    assert (mismatch["k3"], mismatch["k1"], mismatch["max"]) == (0.0, 1e-4, 0.01)


async def test_counts_are_recorded_by_a_timer_and_nothing_is_while_nothing_happens(
    tmp_path: Path,
) -> None:
    recorder = Recorder(tmp_path, "driver")
    tally = RolloutTally(recorder, seconds=0.01)
    tally.flush()
    for number in range(3):
        tally.add_rollout(0.5 + number, 10, 4, 7, [(1, 5), (2, 2)], is_continued=number == 0)
    tally.add_retry("status 503")
    tally.add_cut()
    tally.add_not_believed()
    await asyncio.sleep(0.05)  # the timer's time and more
    tally.add_first_token(0.2)
    tally.flush()
    tally.flush()
    recorder.close()
    first, second = read(tmp_path, "rollouts")
    assert (first["count"], first["tokens"], first["prompt_tokens"]) == (3, 21, 30)
    assert first["versions"] == {"1": 15, "2": 6} and first["retries"] == {"status 503": 1}
    assert (first["cut"], first["continued"], first["not_believed"]) == (1, 1, 1)
    assert first["latency"] == {"p50": 1.5, "p95": 2.5, "p99": 2.5}
    assert second["count"] == 0 and second["first_token"]["p50"] == 0.2


async def test_many_rollouts_are_counted_to_the_last(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, "driver")
    tally = RolloutTally(recorder, seconds=3600.0)
    for number in range(5000):
        tokens = 1 + number % 7
        versions = [(number // 1000, tokens)] if number % 10 else [(None, 1), (7, tokens - 1)]
        tally.add_rollout(0.5, 100, 40, tokens, versions, number % 10 == 0)
    tally.flush()
    recorder.close()
    (entry,) = read(tmp_path, "rollouts")
    tokens = sum(1 + number % 7 for number in range(5000))
    assert (entry["count"], entry["tokens"], entry["continued"]) == (5000, tokens, 500)
    assert (entry["prompt_tokens"], entry["cached_tokens"]) == (500_000, 200_000)
    assert entry["versions"]["None"] == 500 and sum(entry["versions"].values()) == tokens
    sampled = entry["histograms"]["sampled"]
    assert {int(bits): count for bits, count in sampled.items()} == {1: 715, 2: 1429, 3: 2856}


async def test_steps_are_known_by_refits_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As integrations tell them: 3 s of rollouts, two at once, 4 s of nothing, 2 s of a refit that
    pauses for 0.5 s."""
    clock = [100.0]
    monkeypatch.setattr(steps.time, "monotonic", lambda: clock[0])
    recorder = Recorder(tmp_path, "driver")
    tally = RolloutTally(recorder, seconds=3600.0)
    steps.register(recorder, tally)
    try:
        end_step(1, publish=2.0)  # when it began is not known
        for clock[0] in (102.0, 103.0):
            tally.add_rollout(2.0, 1, 0, 1, [(1, 1)])
        clock[0] = 109.0
        steps.note_paused(0.5)
        end_step(2, publish=2.0)
        with step(3):
            end_step(3, publish=1.0)  # the block knows better
    finally:
        steps.unregister(recorder)
    recorder.close()
    first, second = read(tmp_path, "trainer")
    assert first["step"] == 2 and first["seconds"] == 9.0
    assert first["parts"] == {"publish": 1.5, "generate": 3.0, "train": 4.0, "paused": 0.5}
    assert second["step"] == 3 and second["parts"] == {"paused": 0.0}


def test_a_trainer_that_begins_again_has_no_step_between_its_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that joined between the first two refits was paused for 5 s, and the trainer was
    not."""
    clock = [100.0]
    monkeypatch.setattr(steps.time, "monotonic", lambda: clock[0])
    recorder = Recorder(tmp_path, "driver")
    steps.register(recorder)
    try:
        for number, clock[0] in ((0, 110.0), (1, 120.0), (0, 200.0), (1, 203.0)):
            steps.note_paused(5.0)
            end_step(number, publish=4.0)
    finally:
        steps.unregister(recorder)
    recorder.close()
    first, second = read(tmp_path, "trainer")
    assert (first["step"], first["seconds"]) == (1, 10.0)
    assert first["parts"] == {"publish": 0.0, "generate": 0.0, "train": 6.0, "paused": 4.0}
    assert (second["step"], second["seconds"]) == (1, 3.0)
    assert second["parts"] == {"publish": 0.0, "generate": 0.0, "train": 0.0, "paused": 3.0}
