"""What Prometheus and Grafana get: names of the table, labels of targets, and refusals."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from rollway.errors import PortInUse, RequestFailed
from rollway.http import Http
from rollway.observe.dash.view import RunSource
from rollway.observe.exporter import Exporter, make_config, write_token
from rollway.observe.metrics_endpoint import KEPT_VERSIONS, keep_newest_versions
from rollway.observe.read import Run
from rollway.observe.record import Recorder
from rollway.stack.prometheus import Group, list_groups, write_groups
from rollway.stack.state import ProcessState, StackState
from tests.conftest import Cli
from tests.observe.deployed import (
    list_expressions,
    list_names,
    list_unknown_names,
    read_dashboard,
    read_objects,
    read_rules,
)
from tests.unit.kubernetes.schemas import list_faults

TOKEN = "x" * 20


async def list_nothing() -> list[Group]:
    return []


def make_exporter(directory: Path) -> Exporter:
    """Return the exporter of a run of one entry."""
    recorder = Recorder(directory / "run", "driver")
    recorder.write("trainer", step=7, seconds=2.0, parts={})
    recorder.close()
    return Exporter("s", RunSource("s", Run(directory / "run")), list_nothing, directory)


async def test_the_page_is_announced_while_it_is_served(tmp_path: Path) -> None:
    async with make_exporter(tmp_path).serve("127.0.0.1", 0, "") as url, Http() as http:
        assert "rollway_step 7" in await http.get_text(url, timeout=5)
        (group,) = json.loads((tmp_path / "pages" / "s.json").read_text())
        assert f"http://{group['targets'][0]}/metrics" == url
        assert group["labels"] == {"stack": "s"}
        assert json.loads((tmp_path / "targets" / "s.json").read_text()) == []
        with pytest.raises(RequestFailed, match="403"):
            await http.get_text(url, timeout=5, headers={"Host": "evil.example"})
    assert not list(tmp_path.rglob("*.json"))


async def test_a_port_that_is_taken_is_said(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortInUse, match=f"port {port} of 127.0.0.1"):
            async with make_exporter(tmp_path).serve("127.0.0.1", port, ""):
                pass
    assert not list(tmp_path.rglob("*.json"))


async def test_a_page_with_a_token_asks_for_it(tmp_path: Path) -> None:
    async with make_exporter(tmp_path).serve("127.0.0.1", 0, TOKEN) as url, Http() as http:
        with pytest.raises(RequestFailed, match="401"):
            await http.get_text(url, timeout=5)
        headers = {"Authorization": f"Bearer {TOKEN}"}
        assert "rollway_step 7" in await http.get_text(url, timeout=5, headers=headers)
    path = write_token(tmp_path, TOKEN)
    assert path.read_text() == TOKEN and not path.stat().st_mode & 0o007


def test_every_name_in_deploy_observe_is_a_metric_of_the_table() -> None:
    expressions = [*list_expressions(read_dashboard()), *list_expressions(read_rules())]
    assert len(expressions) > 50
    for expression in expressions:
        assert list_names(expression), expression
        assert list_unknown_names(expression) == [], expression
    assert list_unknown_names('rate(rollway_guessed{stack="s"}[5m])') == ["rollway_guessed"]


def test_panels_do_not_overlap_and_say_what_they_show() -> None:
    panels = read_dashboard()["panels"]
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert all(panel["description"] for panel in panels if panel["type"] != "row")
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_targets_have_the_labels_of_the_table() -> None:
    worker: dict[str, Any] = {"role": "worker", "log": "", "model": "tiny", "state": "ready"}
    processes = [
        ProcessState("frontend", "frontend", ""),
        ProcessState(name="p-0", admin_url="http://127.0.0.1:9001", worker_role="prefill",
                     **worker),
        ProcessState(name="d-0", admin_url="http://127.0.0.1:9002", worker_role="decode",
                     **{**worker, "state": "restarting"}),
        ProcessState(name="d-0-rank1", admin_url="http://127.0.0.1:9003", node_rank=1, **worker),
    ]  # fmt: skip
    state = StackState("s", "0" * 16, 1, 1, "/run", "/logs", processes=processes)
    state.frontend = "http://127.0.0.1:8000"
    assert list_groups(state) == [
        {"targets": ["127.0.0.1:8000"], "labels": {"stack": "s", "process": "frontend"}},
        {"targets": ["127.0.0.1:9001"],
         "labels": {"stack": "s", "worker": "p-0", "role": "prefill"}},
        {"targets": ["127.0.0.1:9002"],  # it does not answer, which Prometheus shall see
         "labels": {"stack": "s", "worker": "d-0", "role": "decode"}},
    ]  # fmt: skip


def test_others_can_read_the_lists_and_never_half_of_one(tmp_path: Path) -> None:
    path = write_groups(tmp_path / "targets" / "s.json", [])
    assert json.loads(path.read_text()) == []
    assert path.stat().st_mode & 0o044
    assert [entry.name for entry in path.parent.iterdir()] == ["s.json"]


def test_only_the_own_page_gets_the_token() -> None:
    own, stack = make_config(2.0, has_token=True)["scrape_configs"]
    assert own["authorization"] == {"credentials_file": "token"}
    assert "authorization" not in stack


def test_the_page_has_the_newest_versions_only() -> None:
    values = {
        "rollway_version_tokens_total": {f"version={n}": 1.0 for n in range(100)},
        "rollway_mismatch_k3": {"version=None": 0.5, "version=9": 0.1, "version=10": 0.2},
        "rollway_step": {"": 3.0},
    }
    kept = keep_newest_versions(values)
    newest = range(100 - KEPT_VERSIONS, 100)
    assert kept["rollway_version_tokens_total"] == {f"version={n}": 1.0 for n in newest}
    assert kept["rollway_mismatch_k3"] == values["rollway_mismatch_k3"]
    assert kept["rollway_step"] == {"": 3.0}


def test_the_objects_of_prometheus_operator_are_what_its_crds_say() -> None:
    objects = read_objects()
    assert {each["kind"] for each in objects} == {"PodMonitor", "PrometheusRule"}
    assert [fault for each in objects for fault in list_faults(each)] == []
    assert objects[-1]["spec"] == read_rules()  # the same rules in two formats
    objects[0]["spec"]["podMetricsEndpoints"][0]["interval"] = "often"
    assert list_faults(objects[0])  # the check can fail


def test_the_command_refuses_what_cannot_be(cli: Cli) -> None:
    for arguments, text in (
        (("prometheus", "nobody"), "No stack named `nobody` is running"),
        (("prometheus", "--seconds", "0"), "cannot scrape every 0 s"),
        (("prometheus", "x", "--follow", "--host", "0.0.0.0"), "without a token"),
        (("prometheus", "dgd://a/b"), "podmonitors"),
    ):
        done = cli("observe", "export", *arguments, "--out", "out")
        assert done.returncode in (1, 2) and text in done.stderr, done.stderr
    # The name may also follow an option, as in docs/observe.md.
    done = cli("observe", "export", "prometheus", "--out", "out", "nobody", "--follow")
    assert "No stack named `nobody` is running" in done.stderr, done.stderr
