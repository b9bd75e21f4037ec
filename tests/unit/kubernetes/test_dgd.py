"""DynamoGraphDeployments from manifests: picked, overridden, completed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollway.errors import SpecError
from rollway.kubernetes.conversion import convert
from rollway.kubernetes.dgd import load_graph, read_manifest
from rollway.kubernetes.manifests import render_all
from rollway.kubernetes.objects import ALPHA as OLD
from rollway.kubernetes.objects import KEY_LABEL, RUN_LABEL
from tests.unit.kubernetes.objects import ALPHA, BETA, IMAGE, make_infra
from tests.unit.kubernetes.schemas import list_faults


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write_manifest(text: str, name: str = "policy.yaml") -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write_manifest


def load(text: Any, part: dict[str, Any], **fields: Any) -> dict[str, Any]:
    infra = make_infra(dynamo={"policy": {"manifest": text, **part}}, **fields)
    graph = load_graph(infra, "policy").graph
    assert not list_faults(graph)
    return graph


def test_the_graph_is_picked_out_of_several_documents(write: Any) -> None:
    graph = load(write(BETA), {})
    assert graph["kind"] == "DynamoGraphDeployment"
    assert graph["metadata"]["name"] == "policy"
    assert graph["metadata"]["namespace"] == "rl"


def test_labels_are_layered_and_ours_stay(write: Any) -> None:
    graph = load(
        write(BETA),
        {"labels": {"c": "part", RUN_LABEL: "forged"}, "annotations": {"n": "1"}},
        labels={"team": "infra", "c": "infra"},
        annotations={"m": "1"},
    )
    labels = graph["metadata"]["labels"]
    assert (labels["team"], labels["c"]) == ("a", "part")
    assert (labels[RUN_LABEL], labels[KEY_LABEL]) == ("math", "dynamo.policy")
    assert graph["metadata"]["annotations"] == {"m": "1", "n": "1"}


def test_a_name_is_overridden(write: Any) -> None:
    assert load(write(BETA), {"name": "other"})["metadata"]["name"] == "other"


@pytest.mark.parametrize("form", ["mapping", "list"])
def test_components_are_overridden_by_name(write: Any, form: str) -> None:
    pod = {"spec": {"containers": [{"name": "main", "env": [{"name": "A", "value": "2"}]}]}}
    part: Any = {"worker": {"replicas": 5, "podTemplate": pod}}
    if form == "list":
        part = [{"name": "worker", **part["worker"]}]
    overrides = {"components": part, "labels": {"x": "y"}}
    graph = load(write(BETA), {"overrides": overrides})
    frontend, worker = graph["spec"]["components"]
    assert graph["spec"]["labels"] == {"x": "y"}
    assert frontend["name"] == "Frontend"
    assert worker["replicas"] == 5
    container = worker["podTemplate"]["spec"]["containers"][0]
    assert container["env"] == [{"name": "A", "value": "2"}]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": "1"}}


def test_a_component_that_is_not_there_is_named(write: Any) -> None:
    overrides = {"components": {"workr": {"replicas": 1}}}
    with pytest.raises(SpecError, match=r"no component workr. Did you mean worker"):
        load(write(BETA), {"overrides": overrides})
    with pytest.raises(SpecError, match="has `components`"):
        load(write(BETA), {"overrides": {"services": {}}})


def test_the_image_is_a_default_only(write: Any) -> None:
    manifest = BETA.replace(IMAGE, "own:1.5.0")
    graph = load(write(manifest), {}, imagePullSecrets=["pull"])
    frontend, worker = (part["podTemplate"]["spec"] for part in graph["spec"]["components"])
    assert frontend["containers"][0]["image"] == "own:1.5.0"
    assert worker["containers"][0]["image"] == IMAGE
    assert worker["imagePullSecrets"] == [{"name": "pull"}]


def test_the_operators_service_account_stays(write: Any) -> None:
    graph = load(write(BETA), {}, serviceAccount="trainer")
    pods = [part["podTemplate"]["spec"] for part in graph["spec"]["components"]]
    assert not any("serviceAccountName" in pod for pod in pods)


def test_a_queue_is_an_annotation_for_the_operator(write: Any) -> None:
    graph = load(write(BETA), {}, scheduler={"kind": "kai", "queue": "rl"})
    assert graph["metadata"]["annotations"] == {"nvidia.com/kai-scheduler-queue": "rl"}
    graph = load(write(BETA), {}, scheduler={"kind": "kueue", "queue": "rl"})
    pod = graph["spec"]["components"][1]["podTemplate"]
    assert pod["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "rl"}


@pytest.mark.parametrize("version", ["v1beta1", "v1alpha1"])
@pytest.mark.parametrize("text", [ALPHA, BETA])
def test_volumes_places_and_claims_reach_pods(write: Any, text: str, version: str) -> None:
    complete = load(
        write(text),
        {},
        checkpoints={"existingClaim": "ckpt", "mountPath": "/ckpt"},
        networking={"env": {"UCX_TLS": "rc"}, "roce": {"template": "roce"}},
        placement={"exclude_nodes": ["bad"], "tolerations": [{"operator": "Exists"}]},
    )
    graph = convert(complete, version).graph
    if version == "v1beta1":
        assert graph["apiVersion"] == "nvidia.com/v1beta1"
        worker = graph["spec"]["components"][1]["podTemplate"]["spec"]
        container = worker["containers"][0]
        env, resources = container["env"], container["resources"]
    else:
        assert graph["apiVersion"] == OLD
        part = graph["spec"]["services"]["worker"]
        worker = part["extraPodSpec"]
        container, env, resources = worker["mainContainer"], part["envs"], part["resources"]
    assert container["image"] == IMAGE
    assert {"name": "UCX_TLS", "value": "rc"} in env
    assert resources["claims"] == [{"name": "roce"}]
    assert container["volumeMounts"] == [{"name": "checkpoints", "mountPath": "/ckpt"}]
    assert [volume["name"] for volume in worker["volumes"]] == ["checkpoints"]
    assert worker["tolerations"] == [{"operator": "Exists"}]
    assert "nodeAffinity" in worker["affinity"]
    claim = {"name": "roce", "resourceClaimTemplateName": "roce"}
    assert worker["resourceClaims"] == [claim]


def test_what_an_old_version_loses_is_a_warning(write: Any) -> None:
    manifest = write(ALPHA.replace("frontend}", "frontend, ingress: {enabled: true}}"))
    infra = make_infra(dynamo={"policy": {"manifest": manifest}})
    warning = "`dynamo.policy`: nvidia.com/v1beta1 has no place for spec.services.Frontend.ingress."
    assert render_all(infra).warnings == [warning]


def test_an_untagged_image_is_refused(write: Any) -> None:
    with pytest.raises(SpecError, match="no tag"):
        load(write(BETA.replace(":1.6.1", "")), {})


@pytest.mark.parametrize("tag", [":latest", ":my-tag"])
def test_an_image_without_a_version_needs_an_override(write: Any, tag: str) -> None:
    """A warning only: operators before 1.5 do not ask for it."""
    part: dict[str, Any] = {"manifest": write(BETA.replace(":1.6.1", tag))}
    warnings = render_all(make_infra(dynamo={"policy": part}, image=f"a{tag}")).warnings
    assert len(warnings) == 2
    assert "component Frontend: operators since 1.5 read Dynamo's version" in warnings[0]
    override = {"runtimeVersionOverride": "1.6.1"}
    part["overrides"] = {"components": {"Frontend": override, "worker": override}}
    assert not render_all(make_infra(dynamo={"policy": part}, image=f"a{tag}")).warnings


def test_null_is_absent_and_an_override_of_null_removes(write: Any) -> None:
    manifest = BETA.replace("replicas: 2", "replicas: 2\n      scalingAdapter: null")
    part = {"overrides": {"components": {"worker": {"replicas": None}}}}
    worker = load(write(manifest), part)["spec"]["components"][1]
    assert not {"replicas", "scalingAdapter"} & worker.keys()


def test_the_manifest_is_of_the_runs_namespace(write: Any) -> None:
    manifest = write(BETA.replace("{name: policy,", "{name: policy, namespace: other,"))
    with pytest.raises(SpecError, match="for the namespace other"):
        load(manifest, {})


BAD = {
    "no graph": ("kind: ConfigMap", "no DynamoGraphDeployment"),
    "nothing": ("", "no DynamoGraphDeployment"),
    "two graphs": (f"{BETA}---{BETA}", "2 DynamoGraphDeployments"),
    "old version": (BETA.replace("v1beta1", "v2"), "of the version nvidia.com/v2"),
    "a list of services": (ALPHA.replace("v1alpha1", "v1beta1"), "`spec.components`"),
    "no name": (BETA.replace("{name: policy, ", "{"), "metadata.name"),
    "no yaml": ("a: [", "not valid YAML"),
    "a tag": ("!!python/object:os.system {}", "not valid YAML"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_manifests_are_explained(write: Any, case: str) -> None:
    text, message = BAD[case]
    with pytest.raises(SpecError, match=message):
        read_manifest(Path(write(text)))


def test_a_name_that_is_too_long_once_suffixed_is_refused(write: Any) -> None:
    with pytest.raises(SpecError, match="Service of component Frontend"):
        load(write(BETA), {"name": "g" * 60})
