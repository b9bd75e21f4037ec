"""What TensorBoard and wandb wrote, read back: names, steps, and the values of the recorder."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from rollway.observe.metrics import LENGTHS, TRAINER_NAMES
from rollway.observe.read import Run
from rollway.observe.record import Recorder
from rollway.observe.run_state import RunState
from rollway.observe.sinks import (
    Feed,
    TensorBoard,
    Wandb,
    list_edges,
    list_tags,
    make_trainer_values,
)
from tests.observe.make_run import write_run
from tests.observe.names import NAMES
from tests.observe.read_sinks import Points, read_tensorboard, read_wandb


def compute_points(directory: Path) -> Points:
    """Return what the recorder has at the end of every step."""
    series, points = RunState(), Points()
    for entry in Run(directory).read():
        series.add(entry)
        if entry["kind"] == "trainer":
            for tag, value in list_tags(series.values).items():
                points.setdefault(tag, []).append((entry["step"], value))
    return points


def assert_equal(points: Points, expected: Points, tolerance: float) -> None:
    assert set(points) == set(expected)
    for tag, pairs in expected.items():
        assert [step for step, _ in points[tag]] == [step for step, _ in pairs], tag
        values = [value for _, value in points[tag]]
        assert values == pytest.approx([value for _, value in pairs], rel=tolerance), tag


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    write_run(tmp_path / "run", workers=2, seconds=60)
    return tmp_path / "run"


def test_tensorboard_reads_back_every_name_step_and_value(run_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    pytest.importorskip("torch")
    with Feed(run_dir, [TensorBoard(tmp_path / "tb")]):
        pass
    # Its files have floats of 32 bits.
    assert_equal(read_tensorboard(tmp_path / "tb"), compute_points(run_dir), 1e-6)


def test_wandb_offline_has_one_row_per_step_and_the_same_summary(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    with Feed(run_dir, [Wandb("rl", tmp_path)], trainer_names=True):
        pass
    points, summary = read_wandb(tmp_path)
    expected = compute_points(run_dir)
    assert_equal({tag: points[tag] for tag in expected}, expected, 1e-9)
    for tag, pairs in expected.items():  # history and summary agree
        assert summary[tag] == pytest.approx(pairs[-1][1], rel=1e-9)
    steps = [step for step, _ in expected["rollway_step"]]
    for name in TRAINER_NAMES:
        assert [step for step, _ in points[f"generation_metrics/average_{name}"]] == steps


def test_every_tag_is_a_name_of_the_table(run_dir: Path) -> None:
    names = set(NAMES)
    assert {tag.partition("/")[0] for tag in compute_points(run_dir)} <= names


def test_a_name_is_not_made_for_every_version(tmp_path: Path) -> None:
    """A day has thousands of versions; a tool that has a plot for each is of no use."""
    values = {"rollway_mismatch_k3": {f"version={n}": float(n) for n in (9, 10, 8)}}
    assert list_tags(values) == {"rollway_mismatch_k3": 10.0}
    assert list_tags({"rollway_mismatch_k3": {"version=None": 1.0}}) == {}


# --- the names of trainers -----------------------------------------------------------------------


def sample(running: float, tokens: float, worker: str = "a") -> dict[str, Any]:
    values = {"vllm:num_requests_running": {f"worker={worker}": running},
              "vllm:generation_tokens_total": {f"worker={worker}": tokens}}  # fmt: skip
    return {"kind": "sample", "t": 1.0, "values": values}


def test_the_four_names_are_always_there() -> None:
    values, lengths = make_trainer_values(RunState().take_stretch())
    assert len(TRAINER_NAMES) == 4 and lengths == {}
    for name in TRAINER_NAMES:
        assert math.isnan(values[f"generation_metrics/average_{name}"][""])
        assert values[f"generation_metrics/per_worker_{name}"] == {}


def test_a_step_has_what_was_sampled_before_its_refit() -> None:
    state = RunState()
    report = {"version": 1, "workers": {}}
    refit = {"kind": "refit", "t": 2.0, "began": 1.0, "outcome": "ok", "report": report}
    for entry in (sample(2, 10), sample(4, 30), sample(9, 70, "b"), refit, sample(100, 1000)):
        state.add(entry)
    values, _ = make_trainer_values(state.take_stretch())
    running = values["generation_metrics/per_worker_inflight_batch_sizes"]
    assert running == {"worker=a": 3.0, "worker=b": 9.0}
    assert values["generation_metrics/average_inflight_batch_sizes"] == {"": 6.0}
    tokens = values["generation_metrics/per_worker_generation_tokens"]
    assert tokens == {"worker=a": 30.0, "worker=b": 70.0}
    # What came after the refit belongs to the next step.
    state.add({**refit, "t": 3.0})
    values, _ = make_trainer_values(state.take_stretch())
    assert values["generation_metrics/average_inflight_batch_sizes"] == {"": 100.0}
    values, _ = make_trainer_values(state.take_stretch())
    assert math.isnan(values["generation_metrics/average_inflight_batch_sizes"][""])


def test_lengths_are_recorded_and_read_back_as_histograms(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    pytest.importorskip("torch")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    recorder = Recorder(tmp_path / "run", "driver")
    counts = {"prompt": {7: 3, 9: 1}, "sampled": {1: 4}}
    recorder.write("rollouts", seconds=1.0, count=4, tokens=4, histograms=counts)
    recorder.write("trainer", step=1, seconds=1.0, parts={})
    recorder.close()
    with Feed(tmp_path / "run", [TensorBoard(tmp_path / "tb")], trainer_names=True):
        pass
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    (event,) = events.Histograms(LENGTHS["prompt"])
    assert (event.step, event.histogram_value.num) == (1, 4)
    # Three of 64 to 127 tokens, one of 256 to 511. torch puts an empty bucket at each end.
    pairs = zip(event.histogram_value.bucket_limit, event.histogram_value.bucket, strict=True)
    assert {limit: count for limit, count in pairs if count} == {128: 3, 512: 1}


def test_edges_of_a_histogram_are_powers_of_two() -> None:
    assert list_edges({3: 5, 5: 1}) == ([5, 0, 1], [4, 8, 16, 32])
    assert list_edges({0: 2, 1: 3}) == ([2, 3], [0, 1, 2])
