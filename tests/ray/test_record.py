"""The record of a stack over two raylets, whose home is not the driver's."""

from __future__ import annotations

from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

import rollway
from rollway.observe.dash.open_run import open_source
from rollway.observe.dash.view import View
from rollway.observe.read import Run
from rollway.stack.ray import launcher
from rollway.stack.state import find_record_dir
from tests.ray.clusters import on_ray
from tests.stack.policies import Policy
from tests.waiting import wait_until

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]


def test_the_dashboard_of_a_stack_on_two_nodes_shows_all_of_it(
    two_nodes: Cluster, base_model: Path, policies: list[Policy]
) -> None:
    spec = {**on_ray(base_model, "seen-wide", 4), "observe": {"interval_seconds": 0.5}}
    with rollway.up(spec) as stack:
        running = launcher.find("seen-wide")
        assert running is not None
        directory = find_record_dir(running.state)
        running.close()
        assert directory is not None
        stack.refit(1, policies[1].path)
        with open_source("seen-wide", None) as source:
            view = View()

            def list_rows() -> list[tuple[str, int | None, bool]]:
                for entry in source.poll():
                    view.add(entry)
                rows = view.get_sections()["fleet"]
                return [(row["name"], row["version"], row["load"] is not None) for row in rows]

            wanted = [(f"tiny-{number}", 1, True) for number in range(4)]
            wait_until(lambda: sorted(list_rows()) == wanted)
    kinds = {entry["kind"] for entry in Run(directory).read()}
    assert {"event", "workers", "sample", "refit", "step"} <= kinds
