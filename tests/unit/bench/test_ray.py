"""The planning part of `rollway bench ray`."""

from __future__ import annotations

import pytest

from rollway.bench.ray import bench_planning, format_figures, make_cluster, make_stack
from rollway.cli import main
from rollway.stack.ray.placement import plan_placement


def test_a_large_stack_is_placed_whole() -> None:
    figures = bench_planning()
    assert (figures["replicas"], figures["nodes"]) == (1000, 1000)
    assert figures["replicas_over_nodes"] == 50, "only those of 16 ranks, which no node can hold"
    assert "1000 replicas" in format_figures({"planning": figures})


def test_nodes_without_the_label_stay_free() -> None:
    cluster = make_cluster(100)
    others = {node.id for node in cluster if node.labels}
    plan = plan_placement(make_stack(40), cluster)
    assert others and not others & {rank.node for r in plan.replicas for rank in r.ranks}


def test_an_unknown_part_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "ray", "--only", "plan"]) == 2
    assert "There is no part `plan`. Parts: planning" in capsys.readouterr().err


def test_launching_needs_a_stack_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "ray", "--only", "launching"]) == 2
    assert "No stack is named. Give a stack file" in capsys.readouterr().err


def test_launching_is_printed_against_one_supervisor() -> None:
    local = {"ready_seconds": 2.0, "refit_ratio": 1.1}
    figures = {
        "workers": 4, "nodes": 2, "local": local, "ray": {"ready_seconds": 3.0, "refit_ratio": 1.2},
        "ready_seconds_ratio": 1.5,
    }  # fmt: skip
    text = format_figures({"launching": figures})
    assert "4 workers, 2 raylets" in text
    assert "ready_seconds: 2.0 under one supervisor, 3.0 (1.5 of it)" in text
    assert "refit_ratio: 1.1 under one supervisor, 1.2\n" in f"{text}\n"
