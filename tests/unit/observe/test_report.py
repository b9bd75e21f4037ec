"""`rollway report`: what it finds, and that its file stands alone."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollway.cli.dash import print_report
from rollway.observe.dash.open_run import open_directory
from rollway.observe.dash.verdicts import Finding, find_all
from rollway.observe.dash.view import Watch
from rollway.observe.report import compare, list_figures, write_report
from rollway.observe.run_state import RunState
from tests.observe.make_run import MadeRun, Writer, make_header, write_run

BEGAN = 1.7e9


def read_state(directory: Path) -> RunState:
    watch = Watch(open_directory(directory))
    watch.load()
    return watch.view.state


class Begun:
    """A run with two workers on version 0, to which a test adds what it is about."""

    def __init__(self, directory: Path, workers: int = 2) -> None:
        self.directory = directory
        self.run, self.writer = MadeRun(workers), Writer(directory)
        self.writer.write_all(self.run.start(BEGAN))

    def add(self, kind: str, after: float, **fields: Any) -> None:
        self.writer.write("driver", {"kind": kind, "t": BEGAN + after, **fields})

    def add_rollouts(self, after: float, **fields: Any) -> None:
        usual = {"seconds": 2.0, "count": 10, "tokens": 1000, "prompt_tokens": 10_000,
                 "cached_tokens": 8_000, "versions": {"0": 1000}}  # fmt: skip
        self.add("rollouts", after, **usual | fields)

    def find(self) -> list[Finding]:
        return find_all(read_state(self.directory))


def describe(findings: list[Finding]) -> list[tuple[str, str, str]]:
    return [(each.kind, each.level, each.metric) for each in findings]


# --- findings ------------------------------------------------------------------------------------


def test_a_good_run_has_no_finding(tmp_path: Path) -> None:
    run = Begun(tmp_path)
    for number in range(1, 6):
        run.writer.write_all(run.run.refit(BEGAN + 10 * number, number))
        run.add_rollouts(10 * number + 5, versions={str(number): 1000})
        run.add("mismatch", 10 * number + 6, version=number, k3=1e-4)
    assert run.find() == []


def test_a_failed_refit_and_the_worker_kept_out_are_found(tmp_path: Path) -> None:
    run = Begun(tmp_path)
    run.writer.write_all(run.run.refit(BEGAN + 10, 1, fails=True))
    run.writer.write_all(run.run.refit(BEGAN + 70, 2))
    failed, stale, prevented = run.find()
    assert describe([failed]) == [("failed", "bad", "rollway_refits_total")]
    assert failed.text == "1 of 2 refits did not end well."
    assert failed.details == ["failed, once: Not every worker is on version 1."]
    assert describe([stale]) == [("stale", "bad", "rollway_version_spread")]
    assert "the longest 59.7 s" in stale.text and "1 worker behind" in stale.text
    assert describe([prevented]) == [("prevented", "warn", "rollway_refits_total")]
    assert "tiny-0 (in doubt): The parameters differ" in prevented.details[0]


def test_deaths_are_found_and_loops_are_worse(tmp_path: Path) -> None:
    run = Begun(tmp_path)
    run.writer.write_all(run.run.kill(BEGAN + 10))
    (finding,) = run.find()
    assert describe([finding]) == [("failed", "warn", "rollway_restarts_total")]
    for number in range(3):
        run.writer.write_all(run.run.kill(BEGAN + 20 + 10 * number))
    (finding,) = run.find()
    assert finding.level == "bad" and "again and again" in finding.text
    assert finding.details == ["tiny-1: 4 times"]


def test_a_slow_refit_and_a_slow_worker_are_found(tmp_path: Path) -> None:
    run = Begun(tmp_path, workers=4)
    for number in range(1, 9):
        pairs = list(run.run.refit(BEGAN + 10 * number, number))
        report = next(entry["report"] for _, entry in pairs if entry["kind"] == "refit")
        report["seconds"] = 0.8 if number < 8 else 5.0
        report["workers"][2]["preflight_seconds"] = 3.0
        run.writer.write_all(iter(pairs))
    slow_refit, slow_worker = run.find()
    assert describe([slow_refit]) == [("slow", "warn", "rollway_refit_seconds")]
    assert "version 8: 5 s, most of it in preflight" in slow_refit.details[0]
    assert describe([slow_worker]) == [("slow", "warn", "rollway_refit_phase_seconds")]
    assert slow_worker.details == ["tiny-2 on 10.0.0.1: slow in 100% of the refits"]


@pytest.mark.parametrize(
    ("k3", "level"), [(1e-4, None), (2e-3, "warn"), (0.5, "bad")], ids=["fine", "some", "wrong"]
)
def test_a_mismatch_is_found_from_the_threshold_of_the_page_on(
    tmp_path: Path, k3: float, level: str | None
) -> None:
    run = Begun(tmp_path)
    run.add("mismatch", 5, version=0, k3=k3)
    assert [each.level for each in run.find()] == ([level] if level else [])


def test_tokens_of_a_version_that_nobody_had_are_found(tmp_path: Path) -> None:
    run = Begun(tmp_path)
    run.add_rollouts(5, versions={"0": 500, "77": 500})
    run.add("event", 60, event="note")  # until then, a list of workers may still come
    (finding,) = run.find()
    assert describe([finding]) == [("failed", "bad", "rollway_version_tokens_total")]
    assert finding.text.startswith("500 tokens")


def test_tokens_of_the_base_are_no_finding(tmp_path: Path) -> None:
    """A driver lists versions from the first refit on; before it, workers sample the base."""
    writer = Writer(tmp_path)
    writer.write("driver", make_header(BEGAN, "driver", 1))
    rollouts = {"seconds": 1.0, "count": 1, "tokens": 9, "versions": {"0": 9}}
    writer.write("driver", {"kind": "rollouts", "t": BEGAN + 1, **rollouts})
    workers = [{"name": "", "instance": "1", "state": "ready", "version": 1}]
    writer.write("driver", {"kind": "workers", "t": BEGAN + 2, "workers": workers})
    assert find_all(read_state(tmp_path)) == []


def test_what_was_prevented_is_counted(tmp_path: Path) -> None:
    run = Begun(tmp_path)
    run.add_rollouts(5, not_believed=1, cut=3, continued=2, retries={"worker gone": 4})
    run.add("forks", 6, reason="edited", count=2)
    assert describe(run.find()) == [
        ("prevented", "info", "rollway_answers_not_believed_total"),
        ("prevented", "info", "rollway_rollouts_cut_total"),
        ("prevented", "info", "rollway_retries_total"),
        ("prevented", "info", "rollway_forks_total"),
    ]


def test_cold_caches_full_caches_and_waits_are_found(tmp_path: Path) -> None:
    run = Begun(tmp_path)
    run.add_rollouts(5, cached_tokens=100)
    run.add("trainer", 9, step=1, seconds=10.0, parts={"wait": 6.0, "paused": 2.0})
    values = {
        "vllm:kv_cache_usage_perc": {"worker=tiny-0": 0.99, "worker=tiny-1": 0.4},
        "vllm:num_requests_running": {"worker=tiny-0": 1},
        "vllm:num_requests_waiting": {"worker=tiny-0": 30},
    }
    run.writer.write("sampler", {"kind": "sample", "t": BEGAN + 6, "values": values})
    assert describe(run.find()) == [
        ("slow", "bad", "rollway_step_part_seconds"),
        ("slow", "bad", "rollway_cached_share"),
        ("slow", "warn", "rollway_step_part_seconds"),
        ("slow", "warn", "vllm:kv_cache_usage_perc"),
        ("slow", "warn", "vllm:num_requests_waiting"),
    ]


def test_hits_and_throughput_that_fall_are_found(tmp_path: Path) -> None:
    run = Begun(tmp_path)
    for number in range(40):
        is_late = number >= 20
        run.add_rollouts(
            4 + 2 * number, tokens=100 if is_late else 1000, cached_tokens=4000 if is_late else 9000
        )
    assert describe(run.find()) == [
        ("slow", "warn", "rollway_cached_share"),
        ("slow", "warn", "rollway_tokens_per_second"),
    ]


@pytest.mark.parametrize("every", [2, 12], ids=["busy", "idle"])
def test_throughput_is_that_of_the_time_also_of_idle_time(tmp_path: Path, every: int) -> None:
    """The entries alone have one rate: the second half of an idle run has few of them."""
    run = Begun(tmp_path)
    for number in range(30):
        run.add_rollouts(4 + 2 * number)
    for number in range(6):
        run.add_rollouts(64 + every * number)
    expected = [("slow", "warn", "rollway_tokens_per_second")] if every == 12 else []
    assert describe(run.find()) == expected


def test_a_stack_that_stays_up_after_the_training_has_not_slowed_down(tmp_path: Path) -> None:
    run = Begun(tmp_path)
    for number in range(40):
        run.add_rollouts(4 + 2 * number)
    run.add("event", 5_000, event="note")
    assert run.find() == []


def test_few_steps_are_no_fall_of_the_throughput(tmp_path: Path) -> None:
    """Of three equal steps, the first half of the run has two phases of generation."""
    run = Begun(tmp_path)
    for step in range(3):
        for second in range(4, 52, 2):
            run.add_rollouts(100 * step + second)
        run.add("trainer", 100 * (step + 1), step=step, seconds=100.0, parts={"generate": 50.0})
    assert run.find() == []


def test_few_prompts_are_no_fall_of_the_hits(tmp_path: Path) -> None:
    run = Begun(tmp_path)
    for number in range(20):
        cached = 40 if number < 10 else 20
        run.add_rollouts(4 + 2 * number, prompt_tokens=50, cached_tokens=cached)
    assert run.find() == []


def test_a_wrong_version_is_found_however_many_follow(tmp_path: Path) -> None:
    run = Begun(tmp_path)
    for version in range(1, 300):
        k3 = 0.5 if version == 3 else 1e-5
        run.add("mismatch", 5 + version, version=version, k3=k3, max=k3)
    (finding,) = run.find()
    assert describe([finding]) == [("failed", "bad", "rollway_mismatch_k3")]
    assert "on 1 of 299 versions" in finding.text and finding.details == ["version 3: 0.5"]
    figures = {each.label: each.value for each in list_figures(read_state(tmp_path))}
    assert figures["largest mismatch k3 of a version"] == 0.5
    assert figures["largest difference of a log-prob"] == 0.5


def test_lines_that_were_dropped_are_found_also_after_a_restart(tmp_path: Path) -> None:
    run = Begun(tmp_path)
    for after, dropped in ((5, 7.0), (9, 0.0)):
        values = {"rollway_record_dropped_total": {"process=supervisor": dropped}}
        run.writer.write("sampler", {"kind": "sample", "t": BEGAN + after, "values": values})
    (finding,) = run.find()
    assert finding.text.startswith("7 lines") and finding.metric == "rollway_record_dropped_total"


# --- figures and comparison ----------------------------------------------------------------------


def test_figures_are_those_of_the_record(tmp_path: Path) -> None:
    run = Begun(tmp_path)
    run.writer.write_all(run.run.refit(BEGAN + 10, 1))
    for number in range(5):
        run.add_rollouts(20 + 2 * number, latency={"p50": 1.0, "p95": 2.0 + number, "p99": 9.0})
    state = read_state(tmp_path)
    figures = {figure.label: figure.value for figure in list_figures(state)}
    assert figures["rollouts"] == 50 and figures["tokens"] == 5000
    assert figures["prompt tokens from a cache"] == pytest.approx(0.8)
    assert figures["time of a rollout, p95, median of the intervals"] == 4.0


def test_figures_and_findings_of_a_long_run_cover_all_of_it(tmp_path: Path) -> None:
    run, lines = Begun(tmp_path), 6_000
    for number in range(lines):
        is_late = number > 0.8 * lines
        run.add_rollouts(2 * number, latency={"p50": 9.0 if is_late else 1.0, "p95": 9.0})
        values = {"vllm:num_requests_running": {"worker=tiny-0": 1},
                  "vllm:num_requests_waiting": {"worker=tiny-0": 0 if is_late else 30}}  # fmt: skip
        run.writer.write("sampler", {"kind": "sample", "t": BEGAN + 2 * number, "values": values})
    state = read_state(tmp_path)
    figures = {figure.label: figure.value for figure in list_figures(state)}
    assert figures["time of a rollout, p50, median of the intervals"] == 1.0
    (finding,) = find_all(state)
    assert finding.metric == "vllm:num_requests_waiting" and "(24 in the mean)" in finding.text


def test_a_share_of_nothing_is_a_figure(tmp_path: Path) -> None:
    run = Begun(tmp_path)
    run.add_rollouts(5, cached_tokens=0)
    figures = {figure.label: figure.text for figure in list_figures(read_state(tmp_path))}
    assert figures["prompt tokens from a cache"] == "0%"


def test_parts_of_a_step_have_the_names_that_scripts_know(tmp_path: Path) -> None:
    run = Begun(tmp_path)
    parts = {"generate": 4.0, "train": 3.0, "publish": 2.0, "wait": 1.0, "paused": 0.0, "own": 0.0}
    run.add("trainer", 9, step=1, seconds=10.0, parts=parts)
    figures = {figure.label: figure.text for figure in list_figures(read_state(tmp_path))}
    assert {label: text for label, text in figures.items() if label.startswith("of it ")} == {
        "of it generating": "40%", "of it training": "30%", "of it publishing": "20%",
        "of it waiting": "10%", "of it paused": "0%", "of it own": "0%",
    }  # fmt: skip


def test_two_runs_are_compared_in_both_directions(tmp_path: Path) -> None:
    for name, cached in (("a", 8_000), ("b", 4_000)):
        run = Begun(tmp_path / name)
        run.add_rollouts(5, cached_tokens=cached)
    first, second = (read_state(tmp_path / name) for name in "ab")
    (worse,) = (d for d in compare(first, second) if d["verdict"] != "same")
    assert worse["label"] == "prompt tokens from a cache"
    assert worse["verdict"] == "worse" and worse["ratio"] == pytest.approx(0.5)
    (better,) = (d for d in compare(second, first) if d["verdict"] != "same")
    assert better["verdict"] == "better" and better["ratio"] == pytest.approx(2.0)
    assert {d["verdict"] for d in compare(first, first)} == {"same"}


# --- the file ------------------------------------------------------------------------------------


def test_the_file_stands_alone(tmp_path: Path) -> None:
    write_run(tmp_path / "a", workers=4, seconds=300)
    write_run(tmp_path / "b", workers=2, seconds=100)
    out = tmp_path / "sub" / "report.html"
    write_report([tmp_path / "a", tmp_path / "b"], out)
    text = out.read_text()
    assert not re.findall(r"<(?:link|img|iframe)|<script[^>]* src|@import|url\(", text)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    script = re.search(r"<script>(.*?)</script>", text, re.DOTALL)
    assert policy and script and "default-src 'none'" in policy[1] and "unsafe" not in policy[1]
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy[1]
    assert not re.search(r"^(import|export)\b", script[1], re.MULTILINE)


def test_text_from_outside_is_data_of_the_page(tmp_path: Path) -> None:
    markup = "<img src=x onerror=alert(1)></title></script><script>alert(2)</script><!--"
    writer = Writer(tmp_path)
    writer.write("driver", {**make_header(BEGAN, "driver", 1), "stack": markup, "run": markup})
    worker = {"name": markup, "instance": markup, "state": markup, "node": markup, "role": markup}
    writer.write("driver", {"kind": "workers", "t": BEGAN, "workers": [worker]})
    writer.write("driver", {"kind": "event", "t": BEGAN, "event": f"fault {markup}",
                            "worker": markup, "detail": markup})  # fmt: skip
    write_report([tmp_path], tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert "alert(2)" in text and "<script>alert" not in text and "<img" not in text
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text)
    assert json.loads(data)["runs"][0]["stack"] == markup


def test_an_empty_and_a_torn_run_are_told_as_such(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "driver-1-a.jsonl").write_text("")
    report = write_report([tmp_path], tmp_path / "report.html")
    assert report["runs"][0]["text"] == "Nothing was recorded."
    print_report({**report, "file": "report.html"})
    assert "Nothing failed" not in capsys.readouterr().out
    header = make_header(BEGAN, "driver", 1)
    lines = [json.dumps(header), "torn", json.dumps({"kind": "later", "t": BEGAN})]
    (tmp_path / "driver-1-a.jsonl").write_text("\n".join([*lines, '{"kind": "ev']))
    report = write_report([tmp_path], tmp_path / "report.html")
    notes = " ".join(report["runs"][0]["notes"])
    assert "1 damaged" in notes and "1 unknown kind" in notes


def test_memory_does_not_grow_with_the_length_of_a_run(tmp_path: Path) -> None:
    script = (
        "import sys, resource; from pathlib import Path\n"
        "from rollway.observe.report import write_report\n"
        "write_report([Path(sys.argv[1])], Path(sys.argv[1]) / 'report.html')\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    peaks = []
    for name, seconds in (("short", 600.0), ("long", 4800.0)):
        write_run(tmp_path / name, workers=8, seconds=seconds)
        command = [sys.executable, "-c", script, str(tmp_path / name)]
        answer = subprocess.run(command, capture_output=True, text=True, check=True)
        peaks.append(int(answer.stdout))
    assert peaks[1] < 1.2 * peaks[0] + 10_000
