"""`rollway bench`: its ratios, and what it refuses before it starts anything."""

from __future__ import annotations

import json

import pytest

from benchmarks.curator import make_report
from benchmarks.k8s import name_request
from benchmarks.observe import compare
from benchmarks.prime_rl import EpisodeLoad, summarize
from benchmarks.ray import bench_planning
from rollway.cli import main
from rollway.kubernetes.objects import DGD, POD, SERVICE


def test_ratios_are_taken_within_a_round() -> None:
    """Across rounds, a machine that was faster in one of them would look like a faster arm."""
    rows = [{"off": 100.0, "on": 99.0}, {"off": 50.0, "on": 49.0}, {"off": 10.0, "on": 20.0}]
    assert compare(rows)["ratio"] == 0.99
    rounds = [
        {"backend": backend, "ready_seconds": seconds, "stop_seconds": seconds}
        for backend, seconds in (("curator", 2.0), ("rollway", 1.0))
    ]
    pairs = {"curator": [100.0, 50.0, 100.0], "rollway": [99.0, 50.0, 97.0]}
    figures = make_report(rounds, pairs)
    assert (figures["rows"], figures["ready"]) == (0.99, 0.5)


def test_the_warm_up_does_not_count() -> None:
    rates = {("64", n): {"rollway": 90.0, "dynamo": 100.0} for n in range(1, 4)}
    rates["64", 0] = {"rollway": 1.0, "dynamo": 100.0}
    assert summarize(EpisodeLoad("64", 8, 4, rounds=3), rates)["ratio"] == pytest.approx(0.9)


def test_a_large_stack_is_placed_whole_on_ray() -> None:
    figures = bench_planning()
    assert (figures["replicas"], figures["nodes"]) == (1000, 1000)


@pytest.mark.parametrize(
    ("method", "path", "name"),
    [
        ("GET", f"{POD.make_path('rl')}?labelSelector=a%2Fb", "list pods"),
        ("GET", f"{DGD.make_path('rl', 'policy')}?", "get dynamographdeployments"),
        ("POST", f"{DGD.make_path('rl')}?fieldManager=rollway", "create dynamographdeployments"),
        ("PATCH", f"{DGD.make_path('rl', 'policy')}?", "patch dynamographdeployments"),
        ("GET", f"{SERVICE.make_path('rl')}/policy:8000/proxy/v1/models", "proxy services"),
    ],
)
def test_a_request_to_a_cluster_is_counted_as_what_it_asks(
    method: str, path: str, name: str
) -> None:
    assert name_request(method, path) == name


def test_an_interrupted_run_prints_what_it_has(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(part: str, options: object, figures: dict[str, object]) -> None:
        figures["rounds"] = 3
        if part == "vllm":
            raise KeyboardInterrupt

    monkeypatch.setattr("benchmarks.observe._measure_part", measure)
    assert main(["bench", "observe", "--json"]) == 130
    printed = json.loads(capsys.readouterr().out)
    assert printed["is_interrupted"] is True and printed["mockers"] == {"rounds": 3}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fleet"], "Give a stack file: rollway bench fleet -f FILE"),
        (["ray", "--only", "plan"], "There is no part `plan`. Parts: planning"),
        (["ray", "--only", "launching"], "`launching` needs a stack file"),
        (["k8s", "--infra", "x", "--only", "plan"], "Parts: requests, many, memory, scale"),
        (["router", "--no-replay"], "There is nothing to measure"),
        (["router", "--workers", "4,x"], "is not a list of numbers"),
        (["gateway", "--requests", "1"], "too little to measure growth"),
        (["curator", "--curator-python", "/no/python"], "There is no interpreter /no/python"),
        (["prime-rl", "--prime-rl-python", "/no/python"], "There is no interpreter /no/python"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("benchmarks.__main__.require", lambda *_: None)
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err
