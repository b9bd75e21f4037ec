"""Specs with prefill and decode apart: what is refused, and the command lines of both roles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollway.errors import PortInUse, SpecError, StartError
from rollway.model_spec import find_role, name_component
from rollway.spec import load_spec
from rollway.stack import machine_check, preset
from rollway.stack import plan as stack_plan
from rollway.stack.locks import Lease
from rollway.stack.plan import ProcessPlan, StackPlan, plan_stack

HAS_NIXL = preset.has_nixl  # the fixture below replaces it
APART: dict[str, Any] = {"serving": "disaggregated", "prefill": {}, "decode": {}}


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without GPUs and RDMA, whose Python has NIXL."""
    monkeypatch.setattr(preset, "list_gpus", list)
    monkeypatch.setattr(preset, "has_rdma", lambda: False)
    monkeypatch.setattr(preset, "has_nixl", lambda _: True)


@pytest.fixture
def plan_for(tmp_path: Path) -> Any:
    lease = Lease()

    def build(*models: dict[str, Any], **fields: Any) -> StackPlan:
        spec = load_spec({"models": [{"path": "org/model", **m} for m in models], **fields})
        return plan_stack(spec, run_id="0123456789abcdef", run_dir=tmp_path, log_dir=tmp_path,
                          ports=lease)  # fmt: skip

    yield build
    lease.release()


def option(worker: ProcessPlan, name: str) -> Any:
    value = worker.argv[worker.argv.index(f"--{name}") + 1]
    return json.loads(value) if value.startswith("{") else value


@pytest.mark.parametrize(
    ("fields", "phrase"),
    [
        ({"decode": {}}, "need `serving: disaggregated`"),
        ({"serving": "disaggregated", "decode": {}}, "has no `prefill` workers"),
        ({"serving": "disaggregated", "prefill": {}}, "has no `decode` workers"),
        ({"serving": "disaggregated"}, "has no `prefill` workers"),
        ({**APART, "replicas": 2}, "give `prefill.replicas` and `decode.replicas`"),
        ({**APART, "args": {"disaggregation-mode": "agg"}}, "contradicts"),
        ({**APART, "decode": {"args": {"disaggregation_mode": "agg"}}}, "contradicts"),
        ({**APART, "prefill": {"replicas": 0}}, "models.0.prefill.replicas"),
        ({**APART, "prefill": {"tensor_parallel": 2, "args": {"tp": 4}}}, "keep one of them"),
        ({"serving": "both"}, "'aggregated' or 'disaggregated'"),
    ],
)
def test_what_cannot_be_served_is_refused(fields: dict[str, Any], phrase: str) -> None:
    with pytest.raises(SpecError) as refusal:
        load_spec({"models": [{"path": "org/model", **fields}]})
    assert phrase in str(refusal.value)


def test_names_of_a_role_and_of_a_model_do_not_collide() -> None:
    models = [{"path": "org/m", "name": "m", **APART}, {"path": "org/m", "name": "m-prefill"}]
    with pytest.raises(SpecError, match="choose names with different"):
        load_spec({"models": models})


def test_a_spec_survives_the_way_to_the_supervisor() -> None:
    spec = load_spec({"models": [{"path": "org/model", **APART}]})
    assert type(spec).model_validate_json(spec.model_dump_json()) == spec


def test_each_role_has_its_own_workers_options_and_component(plan_for: Any) -> None:
    model = {"name": "m", **APART, "args": {"max-model-len": 64}, "env": {"A": "m", "B": "m"}}
    model["prefill"] = {"replicas": 2, "args": {"tensor-parallel-size": 2}, "env": {"A": "p"}}
    model["decode"] = {"replicas": 1, "args": {"max-model-len": 128}}
    workers = plan_for(model).by_role("worker")
    assert [w.name for w in workers] == ["m-prefill-0", "m-prefill-1", "m-decode-0"]
    assert [w.worker_role for w in workers] == ["prefill", "prefill", "decode"]
    assert [option(w, "disaggregation-mode") for w in workers] == ["prefill", "prefill", "decode"]
    assert [option(w, "tensor-parallel-size") for w in workers] == ["2", "2", "1"]
    assert [option(w, "max-model-len") for w in workers] == ["64", "64", "128"]
    assert [w.env["A"] for w in workers] == ["p", "p", "m"]
    endpoints = [option(w, "endpoint").split(".")[-2] for w in workers]
    assert endpoints == ["m_prefill", "m_prefill", "m_decode"]
    assert [find_role(endpoint) for endpoint in endpoints] == ["prefill", "prefill", "decode"]


def test_kv_goes_over_nixl_and_only_prefill_workers_publish_events(plan_for: Any) -> None:
    prefill, decode = plan_for({"name": "m", **APART}).by_role("worker")
    for worker in (prefill, decode):
        transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
        assert option(worker, "kv-transfer-config") == {**transfer, "kv_buffer_device": "cpu"}
        assert worker.env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "127.0.0.1"
        assert worker.env["VLLM_NIXL_SIDE_CHANNEL_PORT"] == str(worker.ports["kv"])
        assert (worker.env["UCX_TLS"], worker.env["UCX_NET_DEVICES"]) == ("tcp,sm,self", "lo")
        assert worker.argv.count("--kv-events-config") == 1
    assert prefill.ports["kv"] != decode.ports["kv"]
    assert option(prefill, "kv-events-config")["enable_kv_cache_events"] is True
    assert option(decode, "kv-events-config") == {"enable_kv_cache_events": False}


def test_the_users_own_options_win(plan_for: Any) -> None:
    mine = {"kv_connector": "MooncakeConnector", "kv_role": "kv_both"}
    model = {"name": "m", **APART, "args": {"kv-transfer-config": mine}, "env": {"UCX_TLS": "rc"}}
    for worker in plan_for(model, router={"mode": "round-robin"}).by_role("worker"):
        assert option(worker, "kv-transfer-config") == mine
        assert worker.argv.count("--kv-transfer-config") == 1
        assert worker.env["UCX_TLS"] == "rc"


def test_with_gpus_and_rdma_nothing_is_forced_on_ucx(
    plan_for: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preset, "list_gpus", lambda: ["0", "1", "2"])
    monkeypatch.setattr(preset, "has_rdma", lambda: True)
    model = {"name": "m", **APART, "prefill": {"tensor_parallel": 2}}
    prefill, decode = plan_for(model).by_role("worker")
    assert "UCX_TLS" not in prefill.env and "UCX_NET_DEVICES" not in decode.env
    assert "kv_buffer_device" not in option(prefill, "kv-transfer-config")
    visible = [prefill.env["CUDA_VISIBLE_DEVICES"], decode.env["CUDA_VISIBLE_DEVICES"]]
    assert visible == ["0,1", "2"]


def test_pools_of_unequal_tensor_parallel_size_share_the_gpus(
    plan_for: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preset, "list_gpus", lambda: [str(gpu) for gpu in range(6)])
    prefill, decode = {"replicas": 2, "tensor_parallel": 2}, {"replicas": 2}
    workers = plan_for({"name": "m", **APART, "prefill": prefill, "decode": decode})
    workers = workers.by_role("worker")
    visible = [worker.env["CUDA_VISIBLE_DEVICES"] for worker in workers]
    assert visible == ["0,1", "2,3", "4", "5"]
    assert [option(w, "tensor-parallel-size") for w in workers] == ["2", "2", "1", "1"]
    assert len({worker.ports["kv"] for worker in workers}) == 4


def test_data_parallel_ranks_count_up_from_the_side_channels_port() -> None:
    class Ports:
        """A lease in which the port after the first free one is taken."""

        def __init__(self) -> None:
            self.free, self.reserved = [100, 200], list[int]()

        def reserve_port(self, wanted: int, host: str, what: str) -> int:
            if wanted == 101:
                raise PortInUse("taken", "")
            self.reserved.append(wanted or self.free.pop(0))
            return self.reserved[-1]

    spec = load_spec({"models": [{"path": "org/m", **APART, "data_parallel": 3}]})
    ports: Any = Ports()
    model = spec.models[0].roles["prefill"]
    assert stack_plan.reserve_side_channel(ports, "127.0.0.1", model) == 200
    assert ports.reserved == [100, 200, 201, 202]


def test_a_python_without_nixl_is_named_before_anything_starts(
    plan_for: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preset, "has_nixl", lambda _: False)
    with pytest.raises(StartError) as refusal:
        plan_for({"name": "m", **APART}, python="/opt/engine/bin/python")
    assert "/opt/engine/bin/python has no module `nixl`" in refusal.value.message
    assert "pip install" in refusal.value.hint
    plan_for({"name": "m"})  # aggregated models need none
    plan_for({"name": "m", **APART, "engine": "mocker"})
    plan_for({"name": "m", **APART, "args": {"kv-transfer-config": {"kv_connector": "Mine"}}})


def test_another_interpreter_is_asked_for_nixl(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho False\n")
    python.chmod(0o755)
    assert not HAS_NIXL(str(python))
    assert HAS_NIXL(str(tmp_path / "nothing"))  # its start says what is wrong


@pytest.mark.parametrize(("has_nixl", "level"), [(True, "ok"), (False, "note")])
def test_the_doctor_says_whether_nixl_is_there(
    has_nixl: bool, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preset, "has_nixl", lambda: has_nixl)
    monkeypatch.setattr(machine_check, "find_installed_version", lambda _: "1.0")
    (finding,) = [f for f in machine_check.check_packages() if f.what == "nixl"]
    assert finding.level == level


@pytest.mark.parametrize(
    ("component", "role"),
    [("prefill", "prefill"), ("backend", ""), ("m_decode", "decode"), ("my-prefill", "")],
)
def test_the_role_is_known_by_the_component(component: str, role: str) -> None:
    assert find_role(component) == role
    assert name_component("my-prefill", "") == "my-prefill"
