"""The demo as a user runs it, its control, and the promise that nothing is left behind."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rollway.observe.metrics import TRAINER_NAMES
from rollway.observe.read import Run, list_runs
from rollway.observe.run_state import RunState
from rollway.observe.sinks import Feed, TensorBoard, Wandb, list_tags
from rollway.stack.state import StackDir, StackState, home
from tests.conftest import Cli, Footprint
from tests.observe.read_sinks import read_tensorboard, read_wandb
from tests.waiting import wait_until

pytestmark = pytest.mark.stack


def run_demo(cli: Cli, *arguments: str) -> dict[str, Any]:
    result = cli("demo", "--json", *arguments, timeout=900.0)
    assert result.returncode == 0, result.stderr
    report: dict[str, Any] = json.loads(result.stdout)
    return report


@pytest.mark.parametrize(
    ("transport", "weights_by", "steps"),
    [
        ("checkpoint", "checkpoint", 20),  # it has learnt the task after twelve
        pytest.param("checkpoint", "checkpoint", 30, marks=pytest.mark.soak),
        # On a GPU this is the default; on a CPU parameters move to shared memory instead.
        pytest.param("cuda_ipc", "cuda_ipc, in place", 30, marks=pytest.mark.soak),
    ],
)
def test_the_demo_learns(
    cli: Cli, tmp_path: Path, footprint: Footprint, transport: str, weights_by: str, steps: int
) -> None:
    report = run_demo(cli, "--transport", transport, "--steps", str(steps), "--out", "run")
    assert len(report["steps"]) == steps
    assert {step["weights_by"] for step in report["steps"]} == {weights_by}
    assert report["reward_last"] >= 0.8
    assert report["reward_last"] >= 3 * report["reward_first"]
    assert report["mismatch_kl_max"] < 1e-3
    assert all(step["mismatch_kl"] < 1e-3 for step in report["steps"])
    assert [s["weight_version"] for s in report["steps"]] == list(range(len(report["steps"])))
    assert set(report["weight_versions"].values()) == {len(report["steps"])}
    assert len(report["weight_versions"]) == report["workers"] == 2
    assert all(step["prefix_hit_rate"] > 0.5 for step in report["steps"])
    assert 0 < report["pause_seconds_median"] <= report["refit_seconds_median"]
    assert report["versions"]["ai-dynamo"]
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "report.json", "report.html", "reward.png", "logs",
    }  # fmt: skip
    assert json.loads((tmp_path / "run" / "report.json").read_text()) == report
    page = (tmp_path / "run" / "report.html").read_text()
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    refits = json.loads(data)["shown"][0]["refits"]
    assert len(refits) == steps
    assert "no worker of this run had" not in page  # the base is a version of its own
    assert footprint.new() == {}


@pytest.mark.parametrize("steps", [12, pytest.param(30, marks=pytest.mark.soak)])
def test_without_refit_it_does_not_learn(cli: Cli, footprint: Footprint, steps: int) -> None:
    """The control: the trainer trains, the workers keep the base weights."""
    # The engines all keep the base weights, so the control needs one of them.
    report = run_demo(cli, "--no-refit", "--workers", "1", "--steps", str(steps), "--out", "run")
    assert report["reward_last"] < 0.8
    assert report["reward_last"] < 3 * report["reward_first"]
    assert {step["weight_version"] for step in report["steps"]} == {0}
    assert report["mismatch_kl_max"] > 1e-3  # trainer and engine drift apart, and it shows
    assert footprint.new() == {}


def test_sinks_of_a_demo_read_back_what_was_recorded(
    cli: Cli, tmp_path: Path, footprint: Footprint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names, steps and last values, by TensorBoard's reader and by wandb's messages."""
    for module in ("tensorboard", "wandb"):
        pytest.importorskip(module)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    before = set(list_runs(home() / "runs"))
    run_demo(cli, "--workers", "1", "--steps", "4", "--out", "run")
    (directory,) = set(list_runs(home() / "runs")) - before
    sinks = [TensorBoard(tmp_path / "tb"), Wandb("demo", tmp_path)]
    with Feed(directory, sinks, trainer_names=True):
        pass
    series, steps = RunState(), []
    for entry in Run(directory).read():
        series.add(entry)
        if entry["kind"] == "trainer":
            steps.append(entry["step"])
            recorded = list_tags(series.values)
    assert steps == [1, 2, 3, 4]
    drawn, (logged, summary) = read_tensorboard(tmp_path / "tb"), read_wandb(tmp_path)
    for tag, value in recorded.items():
        assert drawn[tag][-1] == (4, pytest.approx(value, rel=1e-6)), tag
        assert logged[tag][-1] == (4, pytest.approx(value)), tag
        assert summary[tag] == pytest.approx(value), tag
    for name in ("rollway_refit_seconds/outcome=ok", "rollway_mismatch_k3", "rollway_step_seconds"):
        assert [step for step, _ in drawn[name]] == [step for step, _ in logged[name]] == steps
    for name in TRAINER_NAMES:
        tag = f"generation_metrics/average_{name}"
        assert len(drawn[tag]) == len(logged[tag]) == 4
    assert footprint.new() == {}


class DemoProcess:
    """A demo in the background, to be killed."""

    def __init__(self, directory: Path, engine: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rollway.cli", "demo", "--engine", engine, "--steps", "400",
             "--workers", "1" if engine == "vllm" else "2",  # a second engine is the same again
             "--out", str(directory / "run"), "--json"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )  # fmt: skip

    def wait_for_phase(self, phase: str, seconds: float = 240.0) -> StackState:
        def in_phase() -> StackState | None:
            state = StackDir("demo").read()
            if state is not None and (phase == "starting" or _in_phase(state, phase)):
                return state
            assert self.process.poll() is None, "the demo ended by itself"
            return None

        state = wait_until(in_phase, seconds, every=0.02, what=f"a demo that is {phase}")
        assert state is not None
        return state


STATES = ("registered", "warming up", "ready")
"""States of a worker, in their order."""


def _in_phase(state: StackState, phase: str) -> bool:
    if phase == "ready":
        return state.phase == "ready"
    # A state may be shorter than the time between two looks: a later one counts as well.
    reached = STATES[STATES.index(phase) :]
    return any(process.state in reached for process in state.processes if process.role == "worker")


# Ten moments of the demo's life: before there is a stack, at each stage of its start, and at
# random times of the training loop. On mockers a run takes seconds; the stages that only vLLM has
# are killed on vLLM. Half of them are left to the soak.
SOAK = pytest.mark.soak
MOMENTS = [
    pytest.param("mocker", "none", 0.0, marks=SOAK),
    ("mocker", "none", 2.0),
    pytest.param("mocker", "starting", 0.0, marks=SOAK),
    ("mocker", "starting", 0.3),
    ("mocker", "registered", 0.0),
    pytest.param("mocker", "ready", 0.0, marks=SOAK),
    ("mocker", "ready", 1.0),
    pytest.param("vllm", "starting", 12.0, marks=SOAK),
    ("vllm", "warming up", 0.5),
    pytest.param("vllm", "ready", 6.0, marks=SOAK),
]


@pytest.mark.parametrize(("engine", "phase", "delay"), MOMENTS)
def test_killed_at_any_moment_nothing_remains(
    engine: str, phase: str, delay: float, tmp_path: Path, cli: Cli, footprint: Footprint
) -> None:
    """kill -9 of the demo and of its supervisor at once, then `rollway down`."""
    demo = DemoProcess(tmp_path, engine)
    if phase != "none":
        demo.wait_for_phase(phase)
    time.sleep(delay)  # the moment of the phase at which it is killed
    state = StackDir("demo").read()
    demo.process.kill()
    if state is not None:
        os.kill(state.supervisor_pid, signal.SIGKILL)
    demo.process.wait()
    cli("down")
    assert footprint.settle(20.0) == {}
    assert StackDir("demo").read() is None
    left = {path.name for path in (tmp_path / "run").glob("*")}
    assert left <= {"logs"}


@pytest.mark.parametrize(
    ("engine", "phase", "delay"),
    [
        ("mocker", "none", 1.0),
        ("mocker", "starting", 0.2),
        ("mocker", "ready", 0.5),
        pytest.param("vllm", "starting", 8.0, marks=SOAK),
    ],
)
def test_interrupted_at_any_moment_nothing_remains(
    engine: str, phase: str, delay: float, tmp_path: Path, footprint: Footprint
) -> None:
    """Ctrl-C: the demo itself stops what it started before it ends."""
    demo = DemoProcess(tmp_path, engine)
    if phase != "none":
        demo.wait_for_phase(phase)
    time.sleep(delay * random.uniform(0.8, 1.2))  # the moment at which it is interrupted
    os.killpg(demo.process.pid, signal.SIGINT)
    _, output = demo.process.communicate(timeout=60)
    assert footprint.new() == {}
    if phase != "none":  # before that Python itself is still importing
        assert demo.process.returncode == 130
        assert "Traceback" not in output
