"""What a stack records: light workers and mockers behind a real frontend."""

from __future__ import annotations

import os
import signal
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

import rollway
from rollway.errors import UsageError
from rollway.observe import metrics_endpoint
from rollway.observe.read import Run
from rollway.stack.state import StackDir, StackState, find_record_dir, home
from tests.conftest import Footprint
from tests.light.spec import light
from tests.observe.names import NAMES
from tests.stack.mocker import mocker_spec
from tests.stack.policies import Policy
from tests.waiting import wait_until

OFTEN = {"interval_seconds": 0.2}


def read_state(name: str) -> StackState:
    state = StackDir(name).read()
    assert state is not None
    return state


def find_run(name: str) -> Path:
    directory = find_record_dir(read_state(name))
    assert directory is not None
    return directory


def list_entries(directory: Path, kind: str) -> list[dict[str, Any]]:
    return [entry for entry in Run(directory).read() if entry["kind"] == kind]


def count_samples(directory: Path) -> int:
    return len(list_entries(directory, "sample"))


def test_a_stack_records_its_workers_their_deaths_and_their_metrics(
    base_model: Path, footprint: Footprint
) -> None:
    spec = {**light(base_model, "seen"), "observe": OFTEN}
    with rollway.up(spec) as stack:
        directory = find_run("seen")
        wait_until(lambda: count_samples(directory) > 3)
        worker = next(p for p in read_state("seen").processes if p.role == "worker")
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)
        wait_until(lambda: read_state("seen").processes and worker_is_back(worker.name))
        stack.rollouts().generate([1, 2, 3], rollway.Sampling(max_tokens=4), n=2)
        before = count_samples(directory)
        wait_until(lambda: count_samples(directory) > before + 2)
    events = [(e["event"], e.get("worker")) for e in list_entries(directory, "event")]
    own = [event for event, name in events if name == worker.name]
    told = [event for event in own if event in ("ready", "exited", "restarting")]
    assert told == ["ready", "exited", "restarting", "ready"]
    assert ("start", None) in events and events[-1] == ("stopped", None)
    last = list_entries(directory, "workers")[-1]["workers"]
    assert {w["name"]: w["restarts"] for w in last}[worker.name] == 1
    samples = [entry["values"] for entry in list_entries(directory, "sample")]
    assert {name for values in samples for name in values} <= set(NAMES)
    assert "dynamo_frontend_inflight_requests" in samples[-1]
    keys = [set(values.get("vllm:num_requests_running", {})) for values in samples]
    assert len(keys[-1]) == 2 and any(len(names) == 1 for names in keys)  # a gap, no zero
    assert footprint.settle() == {}


def worker_is_back(name: str) -> bool:
    process = next(p for p in read_state("seen").processes if p.name == name)
    return process.restarts == 1 and process.state == "ready"


def test_a_driver_records_refits_rollouts_and_its_steps(
    base_model: Path, policies: list[Policy]
) -> None:
    with rollway.up({**light(base_model, "driven"), "observe": OFTEN}) as stack:
        directory = find_run("driven")
        rollouts, prompt = stack.rollouts(), list(range(40, 60))
        with rollway.observe.step(1) as step:
            with step.part("generate"):
                before = rollouts.generate(prompt, rollway.Sampling(max_tokens=4), n=4)
            rollway.observe.note_mismatch(0, 1e-5, tokens=16)
            with step.part("publish"):
                report = stack.refit(1, policies[1].path)
        after = rollouts.generate(prompt, rollway.Sampling(max_tokens=4), n=4)
        with pytest.raises(UsageError):
            stack.refit(1, policies[2].path)
    sampled = [rollout for group in (before, after) for rollout in group]
    entries = list_entries(directory, "rollouts")
    assert sum(entry["count"] for entry in entries) == len(sampled)
    assert sum(e["tokens"] for e in entries) == sum(len(r.token_ids) for r in sampled)
    assert sum(e["cached_tokens"] for e in entries) == sum(r.cached_tokens for r in sampled)
    versions = sum((Counter(entry["versions"]) for entry in entries), Counter[str]())
    assert versions == {"0": 16, "1": 16}
    good, refused = list_entries(directory, "refit")
    assert good["report"] == msgspec.json.decode(msgspec.json.encode(report.as_json()))
    assert good["outcome"] == "ok" and good["transport"] == "checkpoint" and good["bytes"] > 0
    assert good["t"] - good["began"] >= report.seconds
    assert refused["outcome"] == "failed" and "already names" in refused["error"]
    steps = [e for e in list_entries(directory, "step") if e["t"] <= good["t"]]
    told = {step["worker"]: [e["step"] for e in steps if e["worker"] == step["worker"]]
            for step in steps}  # fmt: skip
    assert set(told) == {str(worker.instance_id) for worker in report.workers}
    assert all(names[:3] == ["preflight", "pause", "load"] for names in told.values())
    (step_entry,) = list_entries(directory, "trainer")
    parts = step_entry["parts"]
    assert set(parts) == {"generate", "publish", "wait", "paused"}
    assert sum(parts.values()) == pytest.approx(step_entry["seconds"], rel=0.05)
    assert parts["paused"] == pytest.approx(report.paused_seconds)
    (mismatch,) = list_entries(directory, "mismatch")
    assert mismatch["version"] == 0 and mismatch["k3"] == 1e-5
    rows = [entry["workers"] for entry in list_entries(directory, "workers")]
    served = [[(w["state"], w["version"]) for w in workers] for workers in rows]
    assert [("ready", 1)] * 2 in served
    assert {worker["name"] for worker in rows[-1]} == {"tiny-0", "tiny-1"}


def test_off_is_one_word_and_old_runs_go(base_model: Path) -> None:
    for off in (False, "off"):
        with rollway.up(mocker_spec(base_model, observe=off)):
            assert find_record_dir(read_state("t")) is None
    assert not (home() / "runs").exists()
    directories = []
    for _ in range(3):
        with rollway.up(mocker_spec(base_model, observe={**OFTEN, "keep_runs": 2})):
            directories.append(find_run("t"))
            wait_until(lambda: count_samples(directories[-1]) > 1)
    assert [directory.exists() for directory in directories] == [False, True, True]
    with rollway.up(mocker_spec(base_model, observe=True, keep_runs=0)):
        directory = find_run("t")
        wait_until(lambda: count_samples(directory) > 0)
    assert not directory.exists()


def test_a_stack_at_an_address_is_recorded_by_who_uses_it(base_model: Path) -> None:
    """As one that Rollway did not start: its own directory does not know it."""
    sampling = rollway.Sampling(max_tokens=4)
    with rollway.up({**light(base_model, "elsewhere"), "observe": OFTEN}) as owner:
        url, own = owner.frontend_url, find_run("elsewhere")
        with rollway.attach(url, rl_url=owner.rl_url) as stack:  # known here: the same run
            stack.rollouts().generate([1, 2, 3], sampling, n=2)
        assert sum(entry["count"] for entry in list_entries(own, "rollouts")) == 2
        state = StackDir("elsewhere").path / "state.json"
        hidden = state.rename(state.with_suffix(".hidden"))
        try:
            with rollway.attach(url, rl_url=owner.rl_url, record=False) as stack:
                stack.rollouts().generate([1, 2, 3], sampling)
            assert list((home() / "runs").glob("attached-*")) == []
            with rollway.attach(url, rl_url=owner.rl_url) as stack:
                stack.rollouts().generate([1, 2, 3], sampling, n=3)
        finally:
            hidden.rename(state)
    (run,) = (home() / "runs").glob("attached-*")
    (entry,) = list_entries(run, "rollouts")
    assert entry["count"] == 3
    assert {header["stack"] for header in list_entries(run, "header")} == {url}


def test_a_trainer_serves_rollways_own_metrics(
    base_model: Path, policies: list[Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a pod, where the environment names an address; here it is loopback."""
    monkeypatch.setattr(metrics_endpoint, "_home_metrics", metrics_endpoint.HomeMetrics())
    monkeypatch.setattr(metrics_endpoint, "_server", None)
    monkeypatch.setenv(metrics_endpoint.ADDRESS, "127.0.0.1:0")
    try:
        with rollway.up({**light(base_model, "told"), "observe": OFTEN}) as stack:
            url = metrics_endpoint.serve_if_asked(home() / "runs")
            assert url is not None
            with rollway.observe.step(1):
                stack.rollouts().generate([1, 2, 3], rollway.Sampling(max_tokens=4), n=2)
                stack.refit(1, policies[1].path)
            labels = f'stack="told",run="{find_run("told").name}"'
            wanted = {
                f"rollway_step{{{labels}}}": 1.0,
                f'rollway_refits_total{{{labels},outcome="ok"}}': 1.0,
                f"rollway_rollouts_total{{{labels}}}": 2.0,
                f'rollway_weight_version{{{labels},worker="tiny-0"}}': 1.0,
                f'rollway_workers{{{labels},state="ready"}}': 2.0,
            }
            wait_until(lambda: wanted.items() <= read_page(url).items(), every=0.2)
        wait_until(lambda: not read_page(url))  # nobody records any more
    finally:
        if metrics_endpoint._server is not None:
            metrics_endpoint.close(metrics_endpoint._server)


def read_page(url: str) -> dict[str, float]:
    with urllib.request.urlopen(url, timeout=10) as answer:
        lines = str(answer.read().decode()).splitlines()
    samples = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in samples}
