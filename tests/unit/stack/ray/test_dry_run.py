"""`rollway up --on ray --dry-run`: every process with its node and its command."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollway.cli import main
from rollway.spec import load_spec
from rollway.stack import preset
from rollway.stack.ray import cluster
from rollway.stack.ray.parts import plan_processes
from rollway.stack.ray.placement import plan_placement
from tests.unit.stack.ray.stand_in import make_nodes


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preset, "list_gpus", list)


def plan(model: dict[str, Any], *gpus: float, **fields: Any) -> dict[str, dict[str, Any]]:
    spec = load_spec({"models": [{"path": "org/m", **model}], "launcher": "ray", **fields})
    nodes = make_nodes(*gpus)
    rows = plan_processes(spec, plan_placement(spec, nodes), nodes)
    return {row["process"]: row for row in rows}


def option(row: dict[str, Any], name: str) -> str:
    return str(row["argv"][row["argv"].index(f"--{name}") + 1])


def test_a_stack_on_one_node_needs_no_etcd() -> None:
    rows = plan({"replicas": 2}, 8)
    assert list(rows) == ["m-0", "m-1", "frontend"]
    assert rows["m-0"]["env"]["DYN_DISCOVERY_BACKEND"] == "file"
    assert [rows[name]["gpus"] for name in rows] == [1, 1, 0]


@pytest.mark.parametrize(
    ("gpus", "requested", "host"),
    [
        ((8,), "127.0.0.1", "127.0.0.1"),
        ((8, 8), "127.0.0.1", "10.0.0.0"),  # other nodes must reach it, wherever workers run
        ((8, 8), "0.0.0.0", "10.0.0.0"),
        ((8, 8), "10.1.1.1", "10.1.1.1"),
    ],
)
def test_processes_listen_where_those_of_a_run_would(
    gpus: tuple[int, ...], requested: str, host: str
) -> None:
    rows = plan({}, *gpus, frontend={"host": requested}, admin_host=requested)
    assert option(rows["frontend"], "http-host") == host
    assert rows["m-0"]["env"]["DYN_SYSTEM_HOST"] == host


def test_a_replica_over_two_nodes_has_one_endpoint_and_one_meeting() -> None:
    rows = plan({"tensor_parallel": 2, "data_parallel": 2, "seed": 7, "replicas": 2}, 2, 2, 2, 2)
    assert list(rows) == [
        "etcd", "frontend", "m-0", "m-0-rank1", "m-1", "m-1-rank1",
    ]  # fmt: skip
    rank0, rank1, other = rows["m-0"], rows["m-0-rank1"], rows["m-1"]
    assert (rank0["address"], rank1["address"], rank0["gpus"], rank1["gpus"]) == (
        "10.0.0.0",
        "10.0.0.1",
        2,
        2,
    )
    assert "--headless" in rank1["argv"] and "--endpoint" not in rank1["argv"]
    assert "--headless" not in rank0["argv"] and "--endpoint" in rank0["argv"]
    assert json.loads(option(rank1, "kv-events-config")) == {"enable_kv_cache_events": False}
    assert json.loads(option(rank0, "kv-events-config"))["enable_kv_cache_events"] is True
    for name in ("nnodes", "master-addr", "master-port", "data-parallel-rpc-port", "seed"):
        assert option(rank0, name) == option(rank1, name)
    assert option(rank0, "master-addr") == "10.0.0.0" and option(rank0, "nnodes") == "2"
    assert (option(rank0, "node-rank"), option(rank1, "node-rank")) == ("0", "1")
    assert (option(rank0, "seed"), option(other, "seed")) == ("7", "8")
    assert option(other, "master-port") != option(rank0, "master-port")
    assert rank1["env"]["ETCD_ENDPOINTS"].startswith("http://10.0.0.0:")
    assert rank1["env"]["VLLM_HOST_IP"] == "10.0.0.1"
    assert rank0["env"]["DYN_NAMESPACE"] == rank1["env"]["DYN_NAMESPACE"]


def test_the_interpreter_is_the_one_that_the_nodes_would_use() -> None:
    rows = plan({}, 1, runtime_env={"py_executable": "/opt/engine/bin/python"})
    assert {row["argv"][0] for row in rows.values()} == {"/opt/engine/bin/python"}


def test_a_users_kv_events_configuration_is_not_passed_to_headless_ranks() -> None:
    model = {"tensor_parallel": 2, "args": {"kv_events_config": {"own": 1}}}
    rows = plan(model, 1, 1)
    assert rows["m-0-rank1"]["argv"].count("--kv-events-config") == 1
    assert "--kv_events_config" not in rows["m-0-rank1"]["argv"]
    assert json.loads(option(rows["m-0"], "kv_events_config")) == {"own": 1}


def test_the_command_prints_the_table_or_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    @contextlib.contextmanager
    def connect(address: str | None) -> Iterator[None]:
        assert address == "10.0.0.0:6379"
        yield

    # No cluster here: tests/ray reads the nodes of a real one.
    monkeypatch.setattr(cluster, "connect", connect)
    monkeypatch.setattr(cluster, "read_nodes", lambda: make_nodes(1, 1))
    command = ["up", "--model", "org/m", "--on", "ray=10.0.0.0:6379", "--dry-run",
               "--set", "models.0.replicas=2"]  # fmt: skip
    assert main(command) == 0
    table = capsys.readouterr().out
    assert "10.0.0.1" in table and "--served-model-name" in table
    assert main([*command, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["processes"]
    assert [(r["process"], r["address"], r["gpus"]) for r in rows if r["model"]] == [
        ("m-0", "10.0.0.0", 1.0),
        ("m-1", "10.0.0.1", 1.0),
    ]
    assert main([*command, "--set", "models.0.replicas=3", "--json"]) == 2
    refusal = json.loads(capsys.readouterr().out)
    assert refusal["error"] == "PlacementError" and "room for 2" in refusal["message"]
    assert any("tried nodes x ranks" in line for line in refusal["tried"])


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        (["runtime_env.py_modules=/w"], "has `py_modules`"),
        (["models.0.engine=mocker"], "Mockers run on one node only"),
        (["discovery=etcd", "etcd_endpoints=http://127.0.0.1:2379"],
         "`etcd_endpoints` is http://127.0.0.1:2379, which each of the 2 nodes"),
        (["event_plane=nats", "nats_server=nats://localhost:4222"], "`nats_server` is nats://local"),
    ],
)  # fmt: skip
def test_the_command_refuses_what_up_would_refuse(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fields: list[str],
    cause: str,
) -> None:
    monkeypatch.setattr(cluster, "connect", lambda address: contextlib.nullcontext())
    monkeypatch.setattr(cluster, "read_nodes", lambda: make_nodes(1, 1))
    changes = [word for field in ("models.0.replicas=2", *fields) for word in ("--set", field)]
    assert main(["up", "--model", "org/m", "--on", "ray", "--dry-run", "--json", *changes]) == 2
    assert cause in json.loads(capsys.readouterr().out)["message"]
