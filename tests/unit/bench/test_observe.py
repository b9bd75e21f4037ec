"""`rollway bench observe`: its arithmetic, its parts that cannot run, a run that it makes."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollway.bench import observe, observe_cost, observe_page
from rollway.bench.observe import LIMITS, PARTS, ObserveBench, format_figures
from rollway.bench.observe_cost import _BareRollouts, _Instant
from rollway.bench.observe_day import write_day
from rollway.bench.observe_traffic import compare, compare_clients
from rollway.errors import UsageError
from rollway.observe.read import Run
from rollway.rollout.client import Rollouts
from rollway.rollout.sampling import Sampling
from rollway.versions import FleetVersions


def make_bench(lines: list[str]) -> ObserveBench:
    return ObserveBench(build_model=lambda: Path("/no/model"), say=lines.append)


def test_a_ratio_is_the_median_of_the_rounds() -> None:
    rows = [{"off": 100.0, "on": 99.0}, {"off": 50.0, "on": 49.0}, {"off": 10.0, "on": 20.0}]
    figures = compare(rows)
    assert figures["ratio"] == 0.99 and figures["rounds"] == 3
    assert figures["rollouts_per_second"] == {"off": 50.0, "on": 49.0}
    assert compare(rows[:1])["middle_half"] == [0.99, 0.99]


def test_a_part_that_cannot_run_says_why_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines: list[str] = []
    bench = make_bench(lines)
    monkeypatch.setattr(observe_page, "CHROMIUM", None)
    monkeypatch.setattr(observe, "measure_report", lambda *_: None)
    bench.run(["observer", "page", "report"])
    assert "No stack of many workers" in bench.figures["observer"]["not_measured"]
    assert "no Chromium" in bench.figures["page"]["not_measured"]
    assert bench.figures["report"] == {}
    text = format_figures(bench.as_json())
    assert "page: not measured. There is no Chromium" in text


def test_every_figure_is_written_beside_its_limit() -> None:
    bench = make_bench([])
    rates = {"rollouts_per_second": {"off": 10.0, "on": 9.9}, "ratio": 0.99}
    rates |= {"middle_half": [0.98, 1.0], "rounds": 3}
    micro = {"microseconds_per_rollout": {"off": 300.0, "on": 303.0}}
    rates |= {"client": {**micro, "ratio": 0.99, "middle_half": [0.98, 1.0]}}
    bench.figures = {
        "mockers": rates,
        "vllm": rates,
        "off": {"microseconds_per_rollout": {"without": 1.0, "with": 1.0}, "ratio": 1.0},
        "observer": {"workers": {"few": 4, "all": 128}, "core": {"few": 0.1, "all": 0.2},
                     "ratio": 2.0},
        "memory": {"mib": [1.0] * 10, "ratio": 1.0},
        "page": {"click_ms": {"few": 1.0, "many": 2.0}, "click_ratio": 2.0, "load_kb": 9.0,
                 "live_kb_per_second": 3.0, "shown_seconds": {"few": 1.0, "many": 2.0},
                 "whole_seconds": {"few": 1.0, "many": 9.0}},
        "report": {"seconds": 3.0, "mb": 100.0},
    }  # fmt: skip
    assert set(bench.figures) == set(PARTS)
    rows = [row for row in format_figures(bench.as_json()).splitlines()[2:] if row]
    assert len(rows) == len(LIMITS)


async def test_the_code_without_a_line_for_observing_samples_the_same() -> None:
    clients = [
        kind(_Instant(), "http://frontend", "tiny", FleetVersions())
        for kind in (Rollouts, _BareRollouts)
    ]
    sampling = Sampling(max_tokens=16, logprobs=False)
    first, second = [await client.generate(list(range(128)), sampling) for client in clients]
    assert first == second
    with pytest.raises(UsageError):
        await clients[1].generate([1], sampling, n=0)


def test_a_made_run_is_read_in_the_order_of_time(tmp_path: Path) -> None:
    write_day(tmp_path / "run", workers=3, seconds=600.0)
    entries = list(Run(tmp_path / "run").read())
    times = [entry["t"] for entry in entries]
    assert times == sorted(times)
    kinds = {entry["kind"] for entry in entries}
    assert {"sample", "rollouts", "refit", "step", "workers", "trainer", "mismatch"} <= kinds


async def test_the_time_of_the_code_that_is_off_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(observe_cost, "_OFF_ROUNDS", 3)
    monkeypatch.setattr(observe_cost, "_HTTP_ROUNDS", 1)
    monkeypatch.setattr(observe_cost, "_OFF_ROLLOUTS", 64)
    monkeypatch.setattr(observe_cost, "_HTTP_ROLLOUTS", 64)
    figures: dict[str, float] = {}
    await observe_cost.measure_off(lambda _: None, figures)
    assert figures["rounds"] == 2 and figures["ratio"] <= 1.0


def test_a_client_that_takes_more_cpu_is_as_much_slower() -> None:
    costs = {
        "off": [{"client": 0.30, "frontend": 1.0}] * 3,
        "on": [{"client": cpu, "frontend": 9.0} for cpu in (0.30, 0.40, 0.60)],
    }
    figures = compare_clients(costs)
    assert figures["microseconds_per_rollout"] == {"off": 300.0, "on": 400.0}
    assert figures["ratio"] == 0.75 and figures["middle_half"] == [0.5, 1.0]
