"""What is exported: names of the table, labels of targets, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollway.errors import UsageError
from rollway.observe.export.expressions import list_families, list_unknown_names
from rollway.observe.export.following import keep_newest_versions
from rollway.observe.export.grafana import list_expressions, make_dashboard
from rollway.observe.export.podmonitors import make_podmonitors, make_rule_object
from rollway.observe.export.prometheus import list_groups, make_config, write_groups
from rollway.observe.export.rules import make_rules, parse_bounds
from rollway.stack.state import ProcessState, StackState
from tests.conftest import Cli

ROOT = Path(__file__).parents[3]


def test_every_figure_of_the_dashboard_is_a_metric_of_the_table() -> None:
    expressions = list_expressions(make_dashboard())
    assert len(expressions) > 40
    for expression in expressions:
        assert list_families(expression), expression
        assert list_unknown_names(expression) == [], expression
    assert list_unknown_names('rate(rollway_guessed{stack="s"}[5m])') == ["rollway_guessed"]


def test_panels_do_not_overlap_and_say_what_they_show() -> None:
    panels = make_dashboard()["panels"]
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
    kept = keep_newest_versions(values, most=2)
    assert kept["rollway_version_tokens_total"] == {"version=98": 1.0, "version=99": 1.0}
    assert kept["rollway_mismatch_k3"] == values["rollway_mismatch_k3"]
    assert kept["rollway_step"] == {"": 3.0}


@pytest.mark.parametrize("text", ["mismatch_k3", "mismatch_k3=", "k3=1", "restarts=-1", "=1",
                                  "restarts=nan", "restarts=inf"])  # fmt: skip
def test_a_wrong_bound_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="sets no bound"):
        parse_bounds([text])


def test_the_manifests_of_the_repository_are_the_exported_ones() -> None:
    path = ROOT / "deploy" / "manifests" / "monitoring.yaml"
    assert list(yaml.safe_load_all(path.read_text())) == make_podmonitors()


def test_a_graph_can_be_named() -> None:
    frontends, workers = make_podmonitors("policy")
    for monitor in (frontends, workers):
        labels = monitor["spec"]["selector"]["matchLabels"]
        assert labels["nvidia.com/dynamo-graph-deployment-name"] == "policy"
        assert monitor["metadata"]["name"].endswith("-policy")
    assert make_rule_object(make_rules())["spec"]["groups"]


def test_the_command_writes_each_kind_and_refuses_what_cannot_be(cli: Cli, tmp_path: Path) -> None:
    for what, name in (("grafana", "rollway.json"), ("alerts", "rollway.rules.yml"),
                       ("podmonitors", "podmonitors.yaml")):  # fmt: skip
        done = cli("observe", "export", what, "--out", "out", "--json")
        assert done.returncode == 0, done.stderr
        (path,) = json.loads(done.stdout)["files"]
        assert Path(path).name == name and (tmp_path / path).stat().st_size > 0
    for arguments, text in (
        (("grafana", "--follow"), "do not change"),
        (("prometheus", "nobody"), "nobody"),
        (("prometheus", "--seconds", "0"), "cannot scrape every 0 s"),
        (("prometheus", "x", "--follow", "--host", "0.0.0.0"), "without a token"),
        (("prometheus", "dgd://a/b"), "podmonitors"),
    ):
        done = cli("observe", "export", *arguments, "--out", "out")
        assert done.returncode in (1, 2) and text in done.stderr, done.stderr
