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
