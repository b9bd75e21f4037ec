"""RayJobs, RayClusters and Deployments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from rollway.errors import SpecError
from rollway.kubernetes.manifests import explain_no_suspend, make_rayjob, render_all, write_yaml
from rollway.kubernetes.objects import KEY_LABEL, RUN_LABEL
from rollway.kubernetes.spec import NetworkingSpec
from tests.unit.kubernetes.objects import BETA, CLUSTER, IMAGE, make_infra


@pytest.fixture
def manifest(tmp_path: Path) -> str:
    path = tmp_path / "policy.yaml"
    path.write_text(BETA)
    return str(path)


def get_containers(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [group["template"]["spec"]["containers"][0] for group in groups]


def read_env(container: dict[str, Any]) -> dict[str, Any]:
    return {e["name"]: e.get("value", e.get("valueFrom")) for e in container.get("env", [])}


def test_a_run_is_a_rayjob_with_a_cluster_of_its_own(manifest: str) -> None:
    infra = make_infra(dynamo={"policy": {"manifest": manifest}}, labels={"team": "a"})
    rendered = render_all(infra)
    job = rendered.jobs["training"]
    assert (job["metadata"]["name"], job["metadata"]["namespace"]) == ("math", "rl")
    labels = {"team": "a", RUN_LABEL: "math", KEY_LABEL: "kuberay.training"}
    assert labels.items() <= job["metadata"]["labels"].items()
    spec = job["spec"]
    assert spec["submissionMode"] == "HTTPMode"
    assert spec["shutdownAfterJobFinishes"] is True
    assert "suspend" not in spec
    assert "runtimeEnvYAML" not in spec
    for container in get_containers(spec["rayClusterSpec"]):
        assert container["image"] == IMAGE
        assert read_env(container) == {}
    assert not rendered.clusters
    assert rendered.names == {"dynamo.policy": "policy"}


@pytest.mark.parametrize(
    "fields",
    [
        {"launch": {"shutdown": False}},
        {"launch": {"overrides": {"shutdownAfterJobFinishes": False}}},
        {"kuberay": {"training": {"existing": "shared", "spec": None}}},
        {"scheduler": {"kind": "kueue", "queue": "q"}},
    ],
)
def test_what_cannot_be_suspended_is_known_before(fields: dict[str, Any]) -> None:
    infra = make_infra(**fields)
    assert explain_no_suspend(infra)
    assert make_rayjob(infra, {})


def test_an_existing_cluster_is_selected_and_not_made() -> None:
    infra = make_infra(kuberay={"training": {"existing": "shared", "spec": None}})
    rendered = render_all(infra)
    job = rendered.jobs["training"]["spec"]
    assert job["clusterSelector"] == {"ray.io/cluster": "shared"}
    assert job["shutdownAfterJobFinishes"] is False
    assert not {"rayClusterSpec", "ttlSecondsAfterFinished"} & job.keys()
    assert not rendered.clusters


def test_a_long_lived_cluster_is_a_raycluster() -> None:
    rendered = render_all(make_infra(launch={"mode": "raycluster"}))
    assert not rendered.jobs
    assert rendered.clusters["training"]["kind"] == "RayCluster"


def test_other_roles_have_clusters_of_their_own() -> None:
    rendered = render_all(make_infra(kuberay={"gym": {"spec": CLUSTER}}))
    assert rendered.clusters["gym"]["metadata"]["name"] == "math-gym"
    container = rendered.clusters["gym"]["spec"]["headGroupSpec"]["template"]["spec"]
    assert "env" not in container["containers"][0]


def test_secrets_stay_out_of_the_runtime_environment() -> None:
    env = {"A": "1", "TOKEN": {"secret": "hf", "key": "token"}}
    spec = render_all(make_infra(launch={"env": env})).jobs["training"]["spec"]
    assert yaml.safe_load(spec["runtimeEnvYAML"]) == {"env_vars": {"A": "1"}}
    token = {"secretKeyRef": {"name": "hf", "key": "token"}}
    for container in get_containers(spec["rayClusterSpec"]):
        assert read_env(container) == {"A": "1", "TOKEN": token}


def test_what_a_pod_says_wins() -> None:
    infra = make_infra(
        imagePullSecrets=["pull"],
        serviceAccount="trainer",
        placement={"nodeSelector": {"a": "1", "b": "1"}, "exclude_nodes": ["bad"]},
        hf_cache={"existingClaim": "hf", "mountPath": "/hf"},
        networking={"gloo_interface": "eth0", "nccl": {"DEBUG": "INFO"}},
    )
    head = infra.kuberay["training"].spec["headGroupSpec"]["template"]["spec"]
    head |= {"nodeSelector": {"b": "2"}, "imagePullSecrets": [{"name": "own"}]}
    head["serviceAccountName"] = "own"
    head["containers"][0] |= {"image": "own:1", "env": [{"name": "HF_HOME", "value": "/own"}]}
    pod = render_all(infra).jobs["training"]["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]
    spec = pod["spec"]
    assert spec["nodeSelector"] == {"a": "1", "b": "2"}
    assert spec["imagePullSecrets"] == [{"name": "own"}]
    assert spec["serviceAccountName"] == "own"
    assert spec["containers"][0]["image"] == "own:1"
    env = read_env(spec["containers"][0])
    assert env == {"HF_HOME": "/own", "GLOO_SOCKET_IFNAME": "eth0", "NCCL_DEBUG": "INFO"}
    assert spec["volumes"] == [{"name": "hf-cache", "persistentVolumeClaim": {"claimName": "hf"}}]
    terms = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    rule = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["bad"]}
    assert terms == {"nodeSelectorTerms": [{"matchExpressions": [rule]}]}


def test_an_excluded_node_is_excluded_in_every_alternative() -> None:
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    zone = {"key": "zone", "operator": "In", "values": ["a"]}
    terms = [{"matchExpressions": [zone]}, {"matchFields": []}]
    affinity = {"nodeAffinity": {required: {"nodeSelectorTerms": terms}}}
    infra = make_infra(placement={"exclude_nodes": ["bad"], "affinity": affinity})
    spec = render_all(infra).jobs["training"]["spec"]["rayClusterSpec"]["headGroupSpec"]
    ours = spec["template"]["spec"]["affinity"]["nodeAffinity"][required]["nodeSelectorTerms"]
    assert [len(term["matchExpressions"]) for term in ours] == [2, 1]


def test_what_yaml_names_twice_is_changed_once() -> None:
    text = """
    headGroupSpec: {template: &pod {spec: {containers: [{name: ray}]}}}
    workerGroupSpecs: [{groupName: a, template: *pod}]
    """
    infra = make_infra(kuberay={"training": {"spec": yaml.safe_load(text)}})
    infra = infra.model_copy(update={"networking": NetworkingSpec(env={"A": "1"})})
    cluster = render_all(infra).jobs["training"]["spec"]["rayClusterSpec"]
    for container in get_containers(cluster):
        assert container["env"] == [{"name": "A", "value": "1"}]


def test_only_pods_with_gpus_claim_devices() -> None:
    domain = {"template": "nvlink", "name": "channel"}
    infra = make_infra(networking={"roce": {"template": "roce-8"}, "compute_domain": domain})
    group = infra.kuberay["training"].spec["workerGroupSpecs"][0]["template"]["spec"]
    group["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": 8}}
    cluster = render_all(infra).jobs["training"]["spec"]["rayClusterSpec"]
    assert "resourceClaims" not in cluster["headGroupSpec"]["template"]["spec"]
    pod = cluster["workerGroupSpecs"][0]["template"]["spec"]
    assert pod["resourceClaims"] == [
        {"name": "roce", "resourceClaimTemplateName": "roce-8"},
        {"name": "channel", "resourceClaimTemplateName": "nvlink"},
    ]
    assert pod["containers"][0]["resources"]["claims"] == [{"name": "roce"}, {"name": "channel"}]


def test_queues_reach_what_schedulers_read() -> None:
    job = render_all(make_infra(scheduler={"kind": "kai", "queue": "q"})).jobs["training"]
    assert job["metadata"]["labels"]["kai.scheduler/queue"] == "q"
    pod = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]
    assert pod["spec"]["schedulerName"] == "kai-scheduler"
    assert pod["metadata"]["labels"]["kai.scheduler/queue"] == "q"
    job = render_all(make_infra(scheduler={"kind": "kueue", "queue": "q"})).jobs["training"]
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "q"


def test_a_deployment_has_a_service_if_it_has_ports() -> None:
    pod = {"containers": [{"name": "gym", "image": "gym:1"}]}
    part = {"spec": {"replicas": 1, "template": {"spec": pod}}, "ports": {"http": 8080}}
    rendered = render_all(make_infra(deployments={"gym_a": part}))
    deployment, service = rendered.deployments["gym_a"], rendered.services["gym_a"]
    assert deployment["metadata"]["name"] == service["metadata"]["name"] == "math-gym-a"
    selector = service["spec"]["selector"]
    assert selector == deployment["spec"]["selector"]["matchLabels"]
    assert selector.items() <= deployment["spec"]["template"]["metadata"]["labels"].items()
    assert rendered.names == {"deployments.gym_a": "math-gym-a"}


def test_the_code_directory_is_where_the_driver_starts() -> None:
    infra = make_infra(launch={"code": {"source": "volume", "path": "/code/it's"}})
    entrypoint = render_all(infra).jobs["training"]["spec"]["entrypoint"]
    assert entrypoint == "cd '/code/it'\"'\"'s' || exit 1\npython train.py"


def test_kuberay_cannot_upload() -> None:
    code = {"source": "upload", "path": "."}
    with pytest.raises(SpecError, match="does not go with"):
        render_all(make_infra(launch={"code": code}))
    assert render_all(make_infra(launch={"code": code, "mode": "raycluster"})).clusters


def test_pods_need_an_image() -> None:
    with pytest.raises(SpecError, match=r"kuberay.training.spec.headGroupSpec. names no image"):
        render_all(make_infra(image=""))


def test_a_name_that_is_too_long_is_refused() -> None:
    infra = make_infra()
    infra.kuberay["training"].name = "j" * 48
    with pytest.raises(SpecError, match="at most 47"):
        render_all(infra)


def test_two_graphs_are_named_by_their_keys(tmp_path: Path, manifest: str) -> None:
    parts = {"a": {"manifest": manifest, "name": "a"}, "b": {"manifest": manifest, "name": "b"}}
    entrypoint = "train ${dynamo.a} ${dynamo.b}"
    rendered = render_all(make_infra(dynamo=parts, launch={"entrypoint": entrypoint}))
    job = rendered.jobs["training"]["spec"]
    assert job["entrypoint"] == "train a b"
    assert "runtimeEnvYAML" not in job
    assert not rendered.warnings
    rendered = render_all(make_infra(dynamo=parts))
    assert "does not name ${dynamo.a}, ${dynamo.b}" in rendered.warnings[0]


def test_two_graphs_of_one_name_are_refused(manifest: str) -> None:
    parts = {"a": {"manifest": manifest}, "b": {"manifest": manifest}}
    with pytest.raises(SpecError, match=r"`dynamo.a` and `dynamo.b` both"):
        render_all(make_infra(dynamo=parts))


def test_what_hides_a_status_is_a_warning() -> None:
    rendered = render_all(make_infra(launch={"entrypoint": "python train.py | tee log"}))
    assert "`launch.entrypoint` hides" in rendered.warnings[0]


def test_yaml_is_read_back(manifest: str) -> None:
    objects = render_all(make_infra(dynamo={"policy": {"manifest": manifest}})).objects
    assert list(yaml.safe_load_all(write_yaml(objects))) == objects
