"""Stacks as DynamoGraphDeployments: pods run what `rollway up` runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollway.cli import main
from rollway.errors import SpecError
from rollway.kubernetes.conversion import convert
from rollway.kubernetes.manifests import render_all
from rollway.kubernetes.render import render_stack
from rollway.kubernetes.spec import PodsSpec, SecretRef
from rollway.spec import load_spec, parse_spec
from rollway.stack import preset
from rollway.stack.locks import Lease
from rollway.stack.plan import plan_stack
from tests.unit.kubernetes.objects import IMAGE, dump, make_infra
from tests.unit.kubernetes.schemas import list_faults

PATH = "Qwen/Qwen3-0.6B"
MODEL: dict[str, Any] = {"path": PATH, "name": "policy"}
APART: dict[str, Any] = {
    **MODEL,
    "serving": "disaggregated",
    "prefill": {"replicas": 2},
    "decode": {"replicas": 4, "tensor_parallel": 2},
}


def render(*models: dict[str, Any], pods: PodsSpec | None = None, **fields: Any) -> dict[str, Any]:
    data = {"name": "s", "models": list(models or (MODEL,)), **fields}
    spec = parse_spec(data, on_this_machine=False)
    return render_stack(spec, name="g", secret=SecretRef(name="rollway"), options=pods)


def read(graph: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the main container of each component, with its variables as a mapping."""
    containers = {}
    for part in graph["spec"]["components"]:
        container = part["podTemplate"]["spec"]["containers"][0]
        env = {e["name"]: e.get("value", e.get("valueFrom")) for e in container["env"]}
        containers[part["name"]] = {**container, "env": env, "part": part}
    return containers


def get_option(container: dict[str, Any], name: str) -> str:
    args = container["args"]
    return str(args[args.index(f"--{name}") + 1])


def test_a_worker_runs_behind_the_guard_with_the_secret_of_a_secret() -> None:
    worker = read(render())["worker"]
    guard = ["python3", "-m", "rollway.engine.pod", "rollway.engine.guard", "dynamo.vllm"]
    assert worker["command"] == guard
    assert get_option(worker, "model") == PATH
    assert get_option(worker, "worker-extension-cls") == "rollway.engine.worker.WorkerExtension"
    assert "--enable-rl" in worker["args"]
    secret = {"secretKeyRef": {"name": "rollway", "key": "weights-secret"}}
    assert worker["env"]["ROLLWAY_WEIGHTS_SECRET"] == secret
    assert worker["resources"] == {"limits": {"nvidia.com/gpu": "1"}}


def test_open_orders_have_neither_guard_nor_secret() -> None:
    worker = read(render(admin_orders="open"))["worker"]
    assert worker["command"] == ["python3", "-m", "rollway.engine.pod", "dynamo.vllm"]
    assert "ROLLWAY_WEIGHTS_SECRET" not in worker["env"]


def test_a_worker_listens_and_is_reached_at_the_address_of_its_pod() -> None:
    worker = read(render())["worker"]
    env = worker["env"]
    assert env["POD_IP"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    assert next(iter(env)) == "POD_IP", "Kubernetes expands only what stands before"
    hosts = ["DYN_SYSTEM_HOST", "DYN_TCP_RPC_HOST", "DYN_EVENT_PLANE_HOST", "VLLM_HOST_IP"]
    assert {env[name] for name in hosts} == {"$(POD_IP)"}
    assert env["DYN_SYSTEM_PORT"] == "9090"


def test_what_only_a_pod_knows_is_left_to_it() -> None:
    worker = read(render({**MODEL, "seed": 5, "replicas": 3}))["worker"]
    assert not {"--seed", "--endpoint"} & set(worker["args"])
    assert (worker["env"]["ROLLWAY_SEED"], worker["env"]["ROLLWAY_COMPONENT"]) == ("5", "policy")
    chosen = read(render({**MODEL, "args": {"seed": 9}}))["worker"]
    assert get_option(chosen, "seed") == "9"
    assert "ROLLWAY_SEED" not in chosen["env"]


def test_nothing_of_this_machine_is_in_a_pod() -> None:
    text = json.dumps(render(MODEL, APART | {"name": "b"}))
    for word in (str(Path.home()), str(Path(preset.__file__).parents[2]), "DYN_FILE_KV", "TMPDIR"):
        assert word not in text


@pytest.mark.parametrize("model", [MODEL, {**MODEL, "engine": "mocker"}])
def test_pods_run_what_the_local_plan_runs(
    model: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(preset, "list_gpus", lambda: ["0"])
    monkeypatch.setattr(preset, "has_rdma", lambda: False)
    monkeypatch.delenv("DYN_LOG", raising=False)
    fields = {"name": "s", "models": [model], "router": {"args": {"router-temperature": 0.5}}}
    folders = {"run_dir": tmp_path, "log_dir": tmp_path}
    lease = Lease()
    plan = plan_stack(load_spec(fields), run_id="0" * 16, ports=lease, **folders)
    lease.release()
    containers = read(render(model, router=fields["router"]))
    local = {role: plan.by_role(role)[0] for role in ("worker", "frontend")}  # type: ignore[arg-type]
    frontend = containers["Frontend"]
    argv = [*frontend["command"], *frontend["args"]]
    assert drop(argv[1:], "--http-host", "--http-port") == drop(
        local["frontend"].argv[1:], "--http-host", "--http-port"
    )
    differs = ("--seed", "--endpoint", "--kv-events-config")
    expected = drop(local["worker"].argv[3:], *differs)
    assert drop(containers["worker"]["args"], *differs) == expected
    local_only = {"DYN_NAMESPACE", "DYN_DISCOVERY_BACKEND", "DYN_FILE_KV", "CUDA_VISIBLE_DEVICES"}
    own = {
        name for name in local["worker"].env if not name.startswith(("ROLLWAY", "TMPDIR", "SPT"))
    }
    assert own - local_only <= containers["worker"]["env"].keys()


def drop(argv: list[str], *options: str) -> list[str]:
    """Return arguments without some options and their values."""
    kept = list(argv)
    for option in options:
        if option in kept:
            position = kept.index(option)
            del kept[position : position + 2]
    return kept


def test_events_are_published_in_the_pod_only() -> None:
    events = json.loads(get_option(read(render())["worker"], "kv-events-config"))
    assert events["endpoint"].startswith("ipc:///tmp/")


def test_a_refit_is_no_reason_to_restart_a_worker() -> None:
    worker = read(render())["worker"]
    probe = worker["livenessProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 600
    assert worker["startupProbe"]["failureThreshold"] * 10 == 7200


def test_prefill_and_decode_are_components() -> None:
    containers = read(render(APART))
    assert [*containers] == ["Frontend", "prefill", "decode"]
    for role, gpus, replicas in (("prefill", "1", 2), ("decode", "2", 4)):
        container = containers[role]
        part = container["part"]
        assert (part["type"], part["replicas"]) == (role, replicas)
        assert container["resources"]["limits"] == {"nvidia.com/gpu": gpus}
        assert get_option(container, "disaggregation-mode") == role
        assert container["env"]["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "$(POD_IP)"
        assert container["env"]["ROLLWAY_COMPONENT"] == f"policy_{role}"
        transfer = json.loads(get_option(container, "kv-transfer-config"))
        assert "kv_buffer_device" not in transfer


def test_rdma_devices_are_for_ucx_to_choose() -> None:
    assert read(render(APART))["decode"]["env"]["UCX_TLS"] == "tcp,sm,self,cuda_copy,cuda_ipc"
    assert "UCX_TLS" not in read(render(APART, pods=PodsSpec(rdma=True)))["decode"]["env"]


def test_several_models_are_components_of_their_own() -> None:
    judge = {"path": "org/judge", "name": "Judge 7B"}
    containers = read(render(MODEL, judge, APART | {"name": "both"}))
    assert [*containers] == ["Frontend", "policy", "judge-7b", "both-prefill", "both-decode"]
    with pytest.raises(SpecError, match="called frontend"):
        render(MODEL, {"path": "org/judge", "name": "frontend"})


@pytest.mark.parametrize(
    ("sizes", "nodes", "gpus"),
    [
        ({"tensor_parallel": 8}, 1, "8"),
        ({"tensor_parallel": 16}, 2, "8"),
        ({"tensor_parallel": 8, "pipeline_parallel": 3}, 3, "8"),
        ({"tensor_parallel": 2, "pipeline_parallel": 5}, 2, "5"),
    ],
)
def test_ranks_that_need_more_than_a_node_are_multinode(
    sizes: dict[str, int], nodes: int, gpus: str
) -> None:
    worker = read(render({**MODEL, **sizes}))["worker"]
    assert worker["part"].get("multinode", {"nodeCount": 1}) == {"nodeCount": nodes}
    assert worker["resources"]["limits"] == {"nvidia.com/gpu": gpus}
    # The operator reads this in `args`, and says to each pod which rank it is.
    assert get_option(worker, "tensor-parallel-size") == str(sizes["tensor_parallel"])
    assert not {"--nnodes", "--node-rank", "--headless"} & set(worker["args"])


def test_ranks_that_do_not_divide_are_refused() -> None:
    with pytest.raises(SpecError, match="17 ranks, which do not divide"):
        render({**MODEL, "pipeline_parallel": 17})


def test_mockers_run_on_cpus_without_guard_and_probes_of_ours() -> None:
    worker = read(render({**MODEL, "engine": "mocker"}))["worker"]
    assert worker["command"] == ["python3", "-m", "rollway.engine.pod", "dynamo.mocker"]
    assert not {"resources", "livenessProbe"} & worker.keys()
    assert get_option(worker, "model-path") == PATH


def test_workers_on_cpus_get_the_cpu_profile() -> None:
    pods = PodsSpec(gpus_per_node=0, cores=4, requests={"cpu": "4"})
    worker = read(render(pods=pods))["worker"]
    assert "--enforce-eager" in worker["args"]
    assert worker["env"]["OMP_NUM_THREADS"] == "4"
    assert worker["resources"] == {"requests": {"cpu": "4"}}


def test_the_frontend_lists_rl_workers_at_a_port_of_its_own() -> None:
    frontend = read(render(frontend={"port": 9999, "env": {"A": "1"}}))["Frontend"]
    assert get_option(frontend, "http-port") == "8000"
    assert frontend["env"]["DYN_RL_PORT"] == "8001"
    assert frontend["env"]["A"] == "1"
    assert {port["containerPort"] for port in frontend["ports"]} == {8000, 8001}


def test_servers_that_run_already_are_named() -> None:
    fields = {"discovery": "etcd", "etcd_endpoints": "http://etcd:2379"}
    env = read(render(**fields))["worker"]["env"]
    assert (env["DYN_DISCOVERY_BACKEND"], env["ETCD_ENDPOINTS"]) == ("etcd", "http://etcd:2379")
    assert "DYN_DISCOVERY_BACKEND" not in read(render())["worker"]["env"]


BAD = {
    "own etcd": ({"discovery": "etcd"}, "`etcd_endpoints` is empty"),
    "own nats": ({"event_plane": "nats"}, "`nats_server` is empty"),
    "placed": ({"placed": [{"model": "policy", "replica": 0}]}, "`placed` of a stack"),
    "rank": ({"models": [{**MODEL, "args": {"node-rank": 1}}]}, "`args.node-rank`"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_pods_cannot_follow_is_refused(case: str) -> None:
    fields, message = BAD[case]
    data = {"name": "s", "models": [MODEL], **fields}
    with pytest.raises(SpecError, match=message):
        render_stack(parse_spec(data), name="g", secret=SecretRef(name="s"))


def test_a_stack_in_an_infra_file_is_named_after_the_run() -> None:
    stack = {"models": [{**MODEL, "path": "/models/not-on-this-machine"}]}
    infra = make_infra(dynamo={"policy": {"stack": stack}})
    rendered = render_all(infra)
    graph = rendered.graphs["policy"]
    assert not list_faults(graph) and not list_faults(convert(graph, "v1alpha1").graph)
    assert graph["metadata"]["name"] == "math-policy"
    assert not rendered.warnings
    container = rendered.jobs["training"]["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]
    env = {entry["name"] for entry in container["spec"]["containers"][0]["env"]}
    assert env == {"ROLLWAY_WEIGHTS_SECRET"}


def test_a_stack_file_is_rendered_without_an_infra_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "stack.yaml"
    path.write_text(dump({"name": "mine", "models": [MODEL]}))
    command = ["k8s", "render", "--stack", str(path), "--namespace", "rl"]
    assert main(command) == 2
    assert "names no image" in capsys.readouterr().err
    for name in ("mine", "other"):
        assert main([*command, "--image", IMAGE, "--name", name]) == 0
        graph = yaml.safe_load(capsys.readouterr().out)
        assert not list_faults(graph)
        assert (graph["metadata"]["name"], graph["metadata"]["namespace"]) == (name, "rl")
    assert main([*command, "--image", IMAGE]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["metadata"]["name"] == "mine"
