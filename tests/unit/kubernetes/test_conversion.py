"""DynamoGraphDeployments in both versions of the CRD: there and back, and what is lost."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from rollway.errors import SpecError
from rollway.kubernetes.conversion import convert
from rollway.kubernetes.objects import ALPHA, BETA
from tests.unit.kubernetes.objects import OLD
from tests.unit.kubernetes.schemas import list_faults

NAMES = st.from_regex(r"[a-z][a-z0-9]{0,8}", fullmatch=True)
LABELS = st.dictionaries(NAMES, NAMES, min_size=1, max_size=2)
PATHS = NAMES.map(lambda name: f"/{name}")
QUANTITIES = st.sampled_from(["1", "8", "500m", "16Gi"])
ENV = st.dictionaries(NAMES.map(str.upper), NAMES, min_size=1, max_size=3).map(
    lambda env: [{"name": name, "value": value} for name, value in env.items()]
)
PROBES = st.integers(1, 60).map(
    lambda period: {"httpGet": {"path": "/live", "port": 9090}, "periodSeconds": period}
)
EXPERIMENTAL = st.fixed_dictionaries(
    {},
    optional={
        "gpuMemoryService": st.fixed_dictionaries(
            {"mode": st.sampled_from(["IntraPod", "InterPod"])}, optional={"deviceClassName": NAMES}
        ),
        "failover": st.fixed_dictionaries(
            {"mode": st.sampled_from(["IntraPod", "InterPod"]), "numShadows": st.just(1)}
        ),
    },
).filter(bool)
RESOURCES = st.dictionaries(
    st.sampled_from(["cpu", "memory", "nvidia.com/gpu", "rdma/ib", "ephemeral-storage"]),
    QUANTITIES,
    min_size=1,
)
MAIN = st.fixed_dictionaries(
    {"name": st.just("main"), "image": NAMES.map(lambda name: f"{name}:1.6.1")},
    optional={
        "command": st.lists(NAMES, min_size=1),
        "args": st.lists(NAMES, min_size=1),
        "env": ENV,
        "envFrom": NAMES.map(lambda name: [{"secretRef": {"name": name}}]),
        "resources": st.fixed_dictionaries(
            {"limits": RESOURCES},
            optional={"requests": RESOURCES, "claims": st.just([{"name": "roce"}])},
        ),
        "livenessProbe": PROBES,
        "readinessProbe": PROBES,
        "startupProbe": PROBES,
        "ports": st.just([{"name": "listing", "containerPort": 8001}]),
        "volumeMounts": PATHS.map(lambda path: [{"name": "data", "mountPath": path}]),
        "securityContext": st.just({"capabilities": {"add": ["IPC_LOCK"]}}),
    },
)
SIDECARS = NAMES.filter(lambda name: name != "main").map(
    lambda name: {"name": f"x{name}", "image": "a:1"}
)
PODS = st.builds(
    lambda main, others, rest: {"containers": [main, *others], **rest},
    MAIN,
    st.lists(SIDECARS, max_size=1),
    st.fixed_dictionaries(
        {},
        optional={
            "nodeSelector": LABELS,
            "imagePullSecrets": st.just([{"name": "pull"}]),
            "tolerations": st.just([{"operator": "Exists"}]),
            "resourceClaims": st.just([{"name": "roce", "resourceClaimTemplateName": "t"}]),
            "volumes": st.just([{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]),
        },
    ),
)
TEMPLATES = st.fixed_dictionaries(
    {"spec": PODS},
    optional={
        "metadata": st.fixed_dictionaries({"labels": LABELS}, optional={"annotations": LABELS})
    },
)
COMPONENTS = st.fixed_dictionaries(
    {"name": NAMES, "podTemplate": TEMPLATES},
    optional={
        "type": st.sampled_from(["frontend", "worker", "prefill", "decode", "planner"]),
        "replicas": st.integers(1, 32),
        "multinode": st.integers(2, 8).map(lambda count: {"nodeCount": count}),
        "scalingAdapter": st.just({}),
        "sharedMemorySize": st.sampled_from(["0", "16Gi"]),
        "compilationCache": PATHS.map(lambda path: {"pvcName": "cache", "mountPath": path}),
        "globalDynamoNamespace": st.booleans(),
        "runtimeVersionOverride": st.just("1.6.1"),
        "modelRef": NAMES.map(lambda name: {"name": name}),
        "experimental": EXPERIMENTAL,
    },
)
GRAPHS = st.builds(
    lambda components, rest: {
        "apiVersion": BETA,
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": "g", "labels": {"a": "b"}},
        "spec": {**rest, "components": components},
    },
    st.lists(COMPONENTS, min_size=1, max_size=4, unique_by=lambda part: part["name"]),
    st.fixed_dictionaries(
        {},
        optional={
            "backendFramework": st.just("vllm"),
            "env": ENV,
            "labels": LABELS,
            "annotations": LABELS,
            "priorityClassName": NAMES,
            "topologyConstraint": st.just({"clusterTopologyName": "c", "packDomain": "rack"}),
        },
    ),
)


@settings(max_examples=100, deadline=None)
@given(GRAPHS)
def test_a_graph_that_loses_nothing_comes_back_as_it_was(graph: dict[str, Any]) -> None:
    before = copy.deepcopy(graph)
    down = convert(graph, ALPHA)
    assert graph == before, "the source was changed"
    assert not down.losses
    up = convert(down.graph, BETA)
    assert not up.losses
    assert sort_up(up.graph) == sort_up(graph)
    assert convert(up.graph, ALPHA).graph == down.graph


@settings(max_examples=30, deadline=None)
@given(GRAPHS)
def test_both_are_what_the_schemas_say(graph: dict[str, Any]) -> None:
    assert not list_faults(graph)
    assert not list_faults(convert(graph, ALPHA).graph)


def sort_up(graph: dict[str, Any]) -> dict[str, Any]:
    """Return a graph with its main containers first, and no empty ones: v1alpha1 has no order."""
    graph = copy.deepcopy(graph)
    for part in graph["spec"]["components"]:
        part["podTemplate"]["spec"]["containers"].sort(key=lambda c: c["name"] != "main")
    return graph


UNKNOWN = {
    "annotations": {"a": "b"},
    "labels": {"a": "b"},
    "ingress": {"enabled": True},
    "autoscaling": {"enabled": True},
    "dynamoNamespace": "other",
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_v1beta1_has_no_place_for_is_named(name: str) -> None:
    services = {"W": {"componentType": "worker", name: UNKNOWN[name]}}
    graph = {"apiVersion": ALPHA, "metadata": {"name": "g"}, "spec": {"services": services}}
    assert convert(graph, "v1beta1").losses == [f"spec.services.W.{name}"]


def test_claims_that_the_operator_would_make_are_named() -> None:
    pvcs = [{"name": "a", "create": True}, {"name": "b", "create": False}]
    graph = {"apiVersion": ALPHA, "metadata": {}, "spec": {"services": {}, "pvcs": pvcs}}
    assert convert(graph, BETA).losses == ["spec.pvcs.a (make the claim yourself)"]


def test_what_v1alpha1_has_no_place_for_is_named() -> None:
    part = {
        "name": "w",
        "experimental": {"grove": {"forceScalingGroup": True}},
        "podTemplate": {"metadata": {"finalizers": ["x"]}},
    }
    graph = {"apiVersion": BETA, "metadata": {}, "spec": {"components": [part]}}
    assert convert(graph, ALPHA).losses == [
        "spec.components.w.experimental.grove",
        "spec.components.w.podTemplate.metadata.finalizers",
    ]


def test_an_old_manifest_becomes_a_new_one() -> None:
    conversion = convert(yaml.safe_load(OLD), BETA)
    assert not conversion.losses
    assert not list_faults(conversion.graph)
    frontend, prefill = conversion.graph["spec"]["components"]
    assert (frontend["name"], frontend["type"]) == ("Frontend", "frontend")
    assert (prefill["name"], prefill["type"]) == ("Prefill", "prefill")
    assert prefill["sharedMemorySize"] == "80Gi"
    assert "scalingAdapter" not in prefill
    main, sidecar = prefill["podTemplate"]["spec"]["containers"]
    assert prefill["frontendSidecar"] == sidecar["name"]
    assert main["env"] == [{"name": "B", "value": "1"}, {"name": "C", "value": "2"}]
    assert main["envFrom"] == [{"secretRef": {"name": "hf"}}]
    limits = {"cpu": "4", "nvidia.com/gpu": "2", "rdma/ib": "1"}
    assert main["resources"] == {"limits": limits}
    assert main["volumeMounts"] == [{"name": "models", "mountPath": "/models"}]
    volumes = prefill["podTemplate"]["spec"]["volumes"]
    assert volumes == [{"name": "models", "persistentVolumeClaim": {"claimName": "models"}}]


def test_null_is_absent() -> None:
    services = {"W": {"envs": None, "volumeMounts": None, "extraPodSpec": {"volumes": None}}}
    graph = {"apiVersion": ALPHA, "metadata": {}, "spec": {"services": services, "pvcs": None}}
    assert convert(graph, BETA).graph["spec"] == {"components": [{"name": "W"}]}


def test_a_version_that_is_none_is_refused() -> None:
    with pytest.raises(SpecError, match="no version v2"):
        convert({"apiVersion": BETA}, "v2")
