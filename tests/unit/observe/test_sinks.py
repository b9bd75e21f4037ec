"""What sinks are given, and what one that fails costs. test_sinks_read.py has the real tools."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollway.errors import UsageError
from rollway.observe.read import Run
from rollway.observe.record import Recorder
from rollway.observe.run_state import RunState
from rollway.observe.sinks import Feed, PrometheusFile, render_page
from tests.observe.names import NAMES
from tests.waiting import wait_until

REPORT = {
    "version": 3,
    "seconds": 2.0,
    "paused_seconds": 0.5,
    "workers": [{"instance_id": "1", "state": "serving", "preflight_seconds": 1.0}],
}
ROLLOUTS = {
    "seconds": 2.0,
    "count": 4,
    "tokens": 100,
    "prompt_tokens": 50,
    "cached_tokens": 25,
    "latency": {"p50": 1.0, "p95": 2.0, "p99": 2.0},
    "retries": {"status 503": 2},
    "not_believed": 1,
    "versions": {"3": 100},
}


def write_run(directory: Path) -> None:
    recorder = Recorder(directory, "driver")
    row = {"instance": "1", "state": "ready", "restarts": 1}
    workers = [
        {**row, "name": "a", "version": 3, "role": "prefill"},
        {**row, "name": "b", "version": 1, "role": "decode"},
    ]
    recorder.write("workers", workers=workers)
    recorder.write("refit", began=1.7e9, report=REPORT, outcome="ok", transport="shm", bytes=10)
    recorder.write("rollouts", **ROLLOUTS)
    recorder.write("rollouts", **ROLLOUTS)
    recorder.write("mismatch", version=3, k3=1e-4)
    recorder.write("sample", values={"vllm:num_requests_running": {"worker=a": 2}})
    recorder.write("adapters", versions={"old": 1})
    recorder.write("adapters", versions={"math": 2})
    recorder.write("forks", reason="edited", count=2)
    recorder.write("gateway", sessions=3, turns=9)
    recorder.write("trainer", step=7, seconds=5.0, parts={"train": 4.0, "paused": 1.0})
    recorder.close()


def read_values(directory: Path) -> dict[str, dict[str, float]]:
    series = RunState()
    for entry in Run(directory).read():
        series.add(entry)
    return series.values


def test_every_value_has_a_name_of_the_table(tmp_path: Path) -> None:
    write_run(tmp_path)
    values = read_values(tmp_path)
    assert set(values) <= set(NAMES)
    assert values["rollway_version_spread"] == {"": 2.0}
    assert values["rollway_adapters"] == {"adapter=math": 2}
    assert values["rollway_tokens_total"] == {"": 200}
    assert values["rollway_tokens_per_second"] == {"": 50.0}
    assert values["rollway_cached_share"] == {"": 0.5}
    assert values["rollway_retries_total"] == {"cause=status 503": 4}
    assert values["rollway_answers_not_believed_total"] == {"": 2}
    assert values["rollway_refit_transfer_seconds"] == {"transport=shm": 1.0}
    assert values["rollway_mismatch_k3"] == {"version=3": 1e-4}
    assert values["rollway_step_part_seconds"] == {"part=train": 4.0, "part=paused": 1.0}


def test_the_page_is_what_prometheus_reads(tmp_path: Path) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    write_run(tmp_path)
    values = {**read_values(tmp_path), "rollway_restarts_total": {'worker=a"\\b\n': 1.0}}
    page = render_page([({"stack": "policy"}, values)])
    families = list(parser.text_string_to_metric_families(page))
    samples = [sample for family in families for sample in family.samples]
    assert all(sample.labels["stack"] == "policy" for sample in samples)
    spread = [sample for sample in samples if sample.name == "rollway_version_spread"]
    assert spread[0].value == 2.0
    (restarts,) = [sample for sample in samples if sample.name == "rollway_restarts_total"]
    assert restarts.labels["worker"] == 'a"\\b\n'


class Broken:
    name = "a broken tool"

    def update(self, values: object) -> None:
        raise RuntimeError("no room")

    def end_step(self, step: int, values: object, lengths: object) -> None:
        raise RuntimeError("no room")

    def close(self) -> None:
        raise RuntimeError("no room")


def test_a_sink_that_fails_is_named_once_and_the_others_go_on(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    recorder = Recorder(tmp_path / "run", "driver")
    page = tmp_path / "metrics.prom"
    feed = Feed(tmp_path / "run", [Broken(), PrometheusFile(page)], recorder)
    wait_until(page.exists)
    assert "rollway_step 7" in page.read_text()
    recorder.event("more")
    feed.close()
    recorder.close()
    events = [entry for entry in Run(tmp_path / "run").read() if entry["kind"] == "event"]
    (failure,) = [e for e in events if e["event"] == "sink failed"]
    assert failure["detail"] == "a broken tool gets no more metrics: RuntimeError: no room"
    assert not page.exists()


def test_a_feed_refuses_the_record_of_another_rollway(tmp_path: Path) -> None:
    header = {"kind": "header", "schema": 1, "t": 1.7e9, "process": "driver"}
    (tmp_path / "driver-1-a.jsonl").write_text(json.dumps(header) + "\n")
    with pytest.raises(UsageError, match="its schema is 1"):
        Feed(tmp_path, [])
