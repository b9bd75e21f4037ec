"""A stack over two raylets as its users see it: Prometheus, the doctor and the dashboard, each by
the command that they type."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster
from ray.util import get_node_ip_address

import rollway
from rollway.observe.doctor import CHECKS
from rollway.stack.ray import launcher
from tests.children import run_server
from tests.conftest import Cli
from tests.observe.prometheus import Prometheus, needs_prometheus, open_prometheus
from tests.ray.clusters import on_ray
from tests.stack.policies import Policy
from tests.waiting import wait_until, wait_until_async

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]

OFTEN = {"interval_seconds": 0.5}
WORKERS = {f"tiny-{number}" for number in range(4)}
HERE = {"file limits", "disk", "shared memory", "leftovers", "packages", "listeners"}
"""Checks of the machine where a stack's processes run: left out from elsewhere."""


@contextmanager
def start(base_model: Path, name: str) -> Iterator[tuple[rollway.Stack, str]]:
    """Run four workers on two nodes; yield the stack, and what a user calls it."""
    with rollway.up({**on_ray(base_model, name, 4), "observe": OFTEN}) as stack:
        yield stack, launcher.resolve_on_cluster()


@needs_prometheus
def test_prometheus_scrapes_both_nodes_until_the_stack_ends(
    two_nodes: Cluster, base_model: Path, policies: list[Policy], tmp_path: Path
) -> None:
    targets = tmp_path / "targets" / "scraped-wide.json"

    async def watch(stack: rollway.Stack) -> None:
        async with open_prometheus(tmp_path) as prometheus:
            wanted = dict.fromkeys({*WORKERS, "frontend", "page"}, True)

            async def are_up() -> bool:
                return await prometheus.list_up() == wanted

            await wait_until_async(are_up, 60, every=0.5)
            await asyncio.to_thread(stack.refit, 1, policies[1].path)
            # Rollway's own metrics come from the records of both nodes.
            await wait_until_async(lambda: are_refitted(prometheus), 60, every=0.5)
            series = await prometheus.query('up{worker!=""}')
            assert {each["metric"]["worker"] for each in series} == WORKERS
            assert {each["metric"]["stack"] for each in series} == {"scraped-wide"}
            assert {each["metric"]["node"] for each in series} == {get_node_ip_address()}

    async def are_refitted(prometheus: Prometheus) -> bool:
        series = await prometheus.query("rollway_weight_version == 1")
        return {each["metric"]["worker"] for each in series} == WORKERS

    with ExitStack() as exporter, start(base_model, "scraped-wide") as (stack, name):
        export = ("observe", "export", "prometheus", name, "--out", str(tmp_path), "--follow")
        # Left after the stack: it has to end by itself.
        following = run_server(*export, "--seconds", "0.5", is_stopped=False)
        assert exporter.enter_context(following)["url"].endswith("/metrics")
        assert targets.is_file()
        asyncio.run(watch(stack))
    assert not targets.exists()


def test_the_doctor_finds_nothing_in_a_healthy_stack(
    two_nodes: Cluster, base_model: Path, policies: list[Policy], cli: Cli
) -> None:
    with start(base_model, "sound-wide") as (stack, name):
        stack.refit(1, policies[1].path)
        done = cli("doctor", "--stack", name, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    findings = {finding["check"]: finding for finding in result["findings"]}
    assert result["stack"] == name
    assert {check: f for check, f in findings.items() if f["level"] != "ok"}.keys() == {"record"}
    assert "on the nodes" in findings["record"]["found"]
    expected = {check for check, _ in CHECKS} - HERE - {"pools", "RDMA", "KV transfer"}
    assert findings.keys() == expected


def test_the_dashboard_shows_both_nodes_by_the_stacks_full_name(
    two_nodes: Cluster, base_model: Path, policies: list[Policy]
) -> None:
    with start(base_model, "dashed-wide") as (stack, name):
        stack.refit(1, policies[1].path)
        with run_server("dash", name) as printed:
            assert printed["shows"] == name

            def read_fleet() -> list[dict[str, Any]]:
                with urllib.request.urlopen(f"{printed['url']}api/model", timeout=30) as answer:
                    rows: list[dict[str, Any]] = json.load(answer)["sections"]["fleet"]
                return rows

            def are_shown() -> bool:
                return {row["name"] for row in read_fleet() if row["version"] == 1} == WORKERS

            wait_until(are_shown, every=0.5)
            # Both raylets are of this machine.
            assert {row["node"] for row in read_fleet()} == {get_node_ip_address()}
