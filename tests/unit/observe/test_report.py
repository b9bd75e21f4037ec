"""`rollway report`: what it finds, and that it reads what anybody may have written."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollway.observe.bins import MOST_BINS, Bins
from rollway.observe.metrics import list_names
from rollway.observe.report import describe_report, leave_reports, read_summary, write_report
from rollway.observe.report.compare import compare, list_figures
from rollway.observe.report.findings import Finding, find_all
from rollway.observe.report.page import render_report
from rollway.observe.report.summary import Summary
from tests.observe.make_run import MadeRun, Writer, make_header, write_run

BEGAN = 1.7e9


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
        return find_all(read_summary(self.directory))


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
    assert "Nothing failed, nothing was slow" in render_report([read_summary(tmp_path)])


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
    assert slow_worker.details == ["tiny-2 on 10.0.0.1: slow in 8 of 8 refits"]


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
    assert find_all(read_summary(tmp_path)) == []


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


def test_hits_of_a_decode_worker_are_no_hits(tmp_path: Path) -> None:
    """What it calls external hits is KV that came from the prefill workers."""
    writer = Writer(tmp_path)
    writer.write("supervisor", make_header(BEGAN, "supervisor", 1))
    workers = [
        {"name": role, "instance": role, "state": "ready", "role": role}
        for role in ("prefill", "decode")
    ]
    writer.write("supervisor", {"kind": "workers", "t": BEGAN + 1, "workers": workers})
    keys = [f"worker={role},role={role}" for role in ("prefill", "decode")]
    values = {
        "vllm:prefix_cache_queries_total_per_second": dict.fromkeys(keys, 100.0),
        "vllm:prefix_cache_hits_total_per_second": dict.fromkeys(keys, 50.0),
    }
    writer.write("supervisor", {"kind": "sample", "t": BEGAN + 2, "values": values})
    summary = read_summary(tmp_path)
    assert summary.workers["prefill"].hits == 50.0
    assert summary.workers["decode"].queries == 0.0


# --- figures and comparison ----------------------------------------------------------------------


def test_figures_are_those_of_the_record(tmp_path: Path) -> None:
    run = Begun(tmp_path)
    run.writer.write_all(run.run.refit(BEGAN + 10, 1))
    for number in range(5):
        run.add_rollouts(20 + 2 * number, latency={"p50": 1.0, "p95": 2.0 + number, "p99": 9.0})
    summary = read_summary(tmp_path)
    figures = {figure.label: figure.value for figure in list_figures(summary)}
    assert figures["rollouts"] == 50 and figures["tokens"] == 5000
    assert figures["prompt tokens from a cache"] == pytest.approx(0.8)
    assert figures["time of a rollout, p95, median of the intervals"] == 4.0
    bins = summary.get_series("tokens")
    assert bins is not None
    assert sum(amount for _, amount in bins.list_sums()) == pytest.approx(5000)


def test_two_runs_are_compared_in_both_directions(tmp_path: Path) -> None:
    for name, cached in (("a", 8_000), ("b", 4_000)):
        run = Begun(tmp_path / name)
        run.add_rollouts(5, cached_tokens=cached)
    first, second = (read_summary(tmp_path / name) for name in "ab")
    worse = {d.label: d for d in compare(first, second) if d.verdict != "same"}
    assert list(worse) == ["prompt tokens from a cache"]
    assert worse["prompt tokens from a cache"].verdict == "worse"
    assert worse["prompt tokens from a cache"].ratio == pytest.approx(0.5)
    (better,) = (d for d in compare(second, first) if d.verdict != "same")
    assert better.verdict == "better" and better.ratio == pytest.approx(2.0)
    assert {d.verdict for d in compare(first, first)} == {"same"}


# --- the file ------------------------------------------------------------------------------------


class Markup(HTMLParser):
    """Reads a page: its tags, attributes and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.addresses: list[str] = []
        self.metrics: set[str] = set()
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        fields = dict(attrs)
        self.addresses += [fields[name] or "" for name in ("src", "href") if name in fields]
        if metric := fields.get("data-metric"):
            self.metrics.add(metric)
        if tag not in ("meta", "i", "line", "rect", "circle", "polyline", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self.open and self.open[-1] == tag:
            self.open.pop()


def test_the_file_stands_alone(tmp_path: Path) -> None:
    write_run(tmp_path / "a", workers=4, seconds=300)
    write_run(tmp_path / "b", workers=2, seconds=100)
    out = tmp_path / "sub" / "report.html"
    write_report([tmp_path / "a", tmp_path / "b"], out)
    text = out.read_text()
    page = Markup(text)
    assert "script" not in page.tags and "link" not in page.tags and "img" not in page.tags
    assert page.addresses == [] and "url(" not in text and "@import" not in text
    assert "default-src 'none'" in text
    assert page.metrics <= set(list_names())
    assert len(text) < 1_000_000


def test_text_from_outside_is_text(tmp_path: Path) -> None:
    markup = "<img src=x onerror=alert(1)></title><script>alert(2)</script>"
    writer = Writer(tmp_path)
    writer.write("driver", {**make_header(BEGAN, "driver", 1), "stack": markup, "run": markup})
    worker = {"name": markup, "instance": markup, "state": markup, "node": markup, "role": markup}
    writer.write("driver", {"kind": "workers", "t": BEGAN, "workers": [worker]})
    writer.write("driver", {"kind": "event", "t": BEGAN, "event": f"fault {markup}",
                            "worker": markup, "detail": markup})  # fmt: skip
    report = {"version": 1, "workers": [{"instance_id": markup, "state": markup, "error": markup}]}
    writer.write("driver", {"kind": "refit", "t": BEGAN + 1, "began": BEGAN, "outcome": markup,
                            "transport": markup, "error": markup, "report": report})  # fmt: skip
    writer.write("driver", {"kind": "trainer", "t": BEGAN + 2, "step": 1, "seconds": 1.0,
                            "parts": {markup: 1.0}})  # fmt: skip
    writer.write("driver", {"kind": "rollouts", "t": BEGAN + 3, "seconds": 1.0, "count": 1,
                            "tokens": 1, "retries": {markup: 1}})  # fmt: skip
    text = render_report([read_summary(tmp_path)])
    page = Markup(text)
    assert not page.tags & {"script", "img"}
    assert "&lt;script&gt;" in text and page.open == []


def test_an_empty_a_torn_and_a_newer_run_are_told_as_such(tmp_path: Path) -> None:
    (tmp_path / "driver-1-a.jsonl").write_text("")
    assert "Nothing was recorded." in render_report([read_summary(tmp_path)])
    header = {**make_header(BEGAN, "driver", 1), "schema": 99}
    lines = [json.dumps(header), "torn", json.dumps({"kind": "later", "t": BEGAN})]
    (tmp_path / "driver-1-a.jsonl").write_text("\n".join([*lines, '{"kind": "ev']))
    report = describe_report([read_summary(tmp_path)])
    notes = " ".join(report["runs"][0]["notes"])
    assert "newer Rollway" in notes and "1 damaged" in notes and "1 unknown kind" in notes


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_no_entry_that_the_reader_lets_through_breaks_a_report(data: st.DataObject) -> None:
    """Numbers of any size in every field; what is not one was refused by the reader before."""
    number = st.one_of(st.integers(-(2**70), 2**70), st.floats(allow_nan=False))
    text = st.text(max_size=5)
    t = st.floats(9e8, 4e9)
    keyed = st.dictionaries(text, number, max_size=3)
    level = st.dictionaries(st.sampled_from(["p50", "p95"]), number)
    worker = st.fixed_dictionaries(
        {"instance_id": text, "state": text},
        optional={"preflight_seconds": number, "pause_seconds": number, "error": text},
    )
    listed = st.fixed_dictionaries(
        {"name": text, "instance": st.one_of(st.none(), text), "state": st.just("ready")},
        optional={"version": st.one_of(st.none(), st.integers()), "restarts": st.integers()},
    )
    sampled = st.dictionaries(
        st.sampled_from(["vllm:kv_cache_usage_perc", "vllm:num_requests_running",
                         "vllm:prefix_cache_queries_total_per_second"]),
        st.dictionaries(st.sampled_from(["worker=a", "", "=,="]), number),
    )  # fmt: skip
    kinds = [
        {"kind": st.just("header"), "t": t, "process": text, "schema": st.just(1)},
        {"kind": st.just("event"), "t": t, "event": text, "detail": text},
        {"kind": st.just("workers"), "t": t, "workers": st.lists(listed, max_size=3)},
        {"kind": st.just("sample"), "t": t, "values": sampled},
        {"kind": st.just("mismatch"), "t": t, "version": st.integers(), "k3": number},
        {"kind": st.just("trainer"), "t": t, "step": st.integers(), "seconds": number,
         "parts": keyed},
        {"kind": st.just("rollouts"), "t": t, "seconds": number, "count": st.integers(),
         "tokens": st.integers(), "prompt_tokens": st.integers(), "latency": level,
         "versions": st.dictionaries(text, st.integers(), max_size=3)},
        {"kind": st.just("refit"), "t": t, "outcome": text, "began": t,
         "report": st.fixed_dictionaries({"version": st.integers(), "seconds": number,
                                          "workers": st.lists(worker, max_size=3)})},
    ]  # fmt: skip
    entry = st.one_of(*(st.fixed_dictionaries(fields) for fields in kinds))
    summary = Summary()
    for each in data.draw(st.lists(entry, max_size=12)):
        summary.add(each)
    summary.close()
    text_of_report = render_report([summary, summary])
    assert "nan" not in re.findall(r'(?:cx|cy|x|y|points)="[^"]*nan', text_of_report)
    json.dumps(describe_report([summary, summary]))


def test_a_bench_leaves_a_report_of_what_it_recorded_and_of_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLWAY_HOME", str(tmp_path))
    write_run(tmp_path / "runs" / "old", seconds=30)
    for path in (tmp_path / "runs" / "old").iterdir():
        os.utime(path, (1e9, 1e9))
    told: list[str] = []
    with leave_reports(told.append):
        assert not (tmp_path / "reports").exists()
        write_run(tmp_path / "runs" / "new", seconds=30)
    assert [path.name for path in (tmp_path / "reports").iterdir()] == ["new.html"]
    assert told == [f"report of new: {tmp_path / 'reports' / 'new.html'}"]
    with leave_reports(told.append):
        pass
    assert len(told) == 1


# --- bounds --------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e6)), min_size=1, max_size=300))
def test_bins_keep_the_sum_whatever_the_span(points: list[tuple[float, float]]) -> None:
    bins = Bins(0.0)
    for t, value in points:
        bins.add(t, value)
    sums = bins.list_sums()
    assert len(sums) <= MOST_BINS
    assert math.isclose(sum(value for _, value in sums), sum(v for _, v in points), abs_tol=1e-3)


@settings(max_examples=50, deadline=None)
@given(st.floats(0, 1e5), st.floats(0, 1e4), st.floats(0, 1e6))
def test_an_amount_that_is_spread_is_kept(begin: float, seconds: float, amount: float) -> None:
    bins = Bins(0.0)
    bins.spread(begin, begin + seconds, amount)
    total = sum(value for _, value in bins.list_sums())
    assert math.isclose(total, amount, rel_tol=1e-3, abs_tol=1e-3)


def test_memory_does_not_grow_with_the_length_of_a_run(tmp_path: Path) -> None:
    script = (
        "import sys, resource; from pathlib import Path\n"
        "from rollway.observe.report import read_summary\n"
        "read_summary(Path(sys.argv[1]))\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    peaks = []
    for name, seconds in (("short", 600.0), ("long", 4800.0)):
        write_run(tmp_path / name, workers=8, seconds=seconds)
        command = [sys.executable, "-c", script, str(tmp_path / name)]
        answer = subprocess.run(command, capture_output=True, text=True, check=True)
        peaks.append(int(answer.stdout))
    assert peaks[1] < 1.2 * peaks[0] + 10_000
