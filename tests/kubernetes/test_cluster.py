"""Calls to a real API server: what it accepts, what it refuses, and what we say about it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollway.errors import (
    ClusterError,
    Conflict,
    Forbidden,
    InvalidObject,
    KindMissing,
    NamespaceMissing,
    UsageError,
)
from rollway.kubernetes import api_server
from rollway.kubernetes.client import Cluster
from rollway.kubernetes.objects import CONFIG_MAP, DGD, POD, RAYJOB, ObjectKind
from rollway.kubernetes.waits import Deadline, wait_until_gone
from tests.kubernetes.accounts import connect_as
from tests.kubernetes.control_plane import ControlPlane
from tests.kubernetes.kinds import SERVICE_ACCOUNT
from tests.kubernetes.manifests import make_component, make_graph, make_job
from tests.waiting import wait_until

RULES = [{"apiGroups": ["nvidia.com"], "resources": ["dynamographdeployments"], "verbs": ["get"]}]


# --- apply -----------------------------------------------------------------------------------


def test_an_apply_of_the_same_object_changes_nothing(admin: Cluster) -> None:
    first = admin.apply(DGD, make_graph())
    second = admin.apply(DGD, make_graph())
    assert first["metadata"]["generation"] == second["metadata"]["generation"] == 1
    assert first["metadata"]["resourceVersion"] == second["metadata"]["resourceVersion"]


def test_a_dry_run_leaves_nothing(admin: Cluster) -> None:
    assert admin.apply(DGD, make_graph(), dry_run=True)["metadata"]["name"] == "policy"
    assert admin.get(DGD, "policy") is None


def test_a_conflict_names_the_field_and_its_manager(
    admin: Cluster, control_plane: ControlPlane
) -> None:
    admin.apply(DGD, make_graph())
    path = f"{DGD.make_path(admin.namespace, 'policy')}?fieldManager=planner&force=true"
    theirs = {
        "apiVersion": DGD.api_version,
        "kind": DGD.kind,
        "spec": {"components": [{"name": "worker", "replicas": 7}]},
    }
    control_plane.request("PATCH", path, theirs, "application/apply-patch+yaml")
    with pytest.raises(Conflict, match=r"planner") as raised:
        admin.apply(DGD, make_graph(workers=2))
    assert '.spec.components[name="worker"].replicas' in raised.value.message


def test_only_our_own_fields_can_drift(admin: Cluster, control_plane: ControlPlane) -> None:
    admin.apply(DGD, make_graph())
    assert admin.find_drift(DGD, make_graph()) == ()
    # A field of somebody else, and defaults, are no drift.
    path = DGD.make_path(admin.namespace, "policy")
    body = {"metadata": {"annotations": {"other": "x"}}, "spec": {"backendFramework": "vllm"}}
    control_plane.request("PATCH", path, body, "application/merge-patch+json")
    assert admin.find_drift(DGD, make_graph()) == ()
    components = make_graph(workers=5)["spec"]["components"]
    change = {"spec": {"components": components}}
    control_plane.request("PATCH", path, change, "application/merge-patch+json")
    assert admin.find_drift(DGD, make_graph()) == ("spec.components.worker.replicas",)


def test_an_object_of_another_owner_is_refused(admin: Cluster, control_plane: ControlPlane) -> None:
    admin.apply(DGD, make_graph())
    with pytest.raises(Conflict, match="belongs to run grpo"):
        admin.apply(DGD, make_graph(run="other"))
    foreign = make_graph("theirs")
    del foreign["metadata"]["labels"]
    control_plane.request("POST", DGD.make_path(admin.namespace), foreign)
    with pytest.raises(Conflict, match="was not created by Rollway"):
        admin.apply(DGD, make_graph("theirs"))
    assert "labels" not in (admin.get(DGD, "theirs") or {})["metadata"]


def test_an_object_that_is_being_deleted_is_refused(admin: Cluster) -> None:
    graph = make_graph()
    graph["metadata"]["finalizers"] = ["example.com/held"]
    admin.apply(DGD, graph)
    admin.delete(DGD, "policy")
    with pytest.raises(Conflict, match=r"still being deleted .held by finalizer example.com/held"):
        admin.apply(DGD, make_graph())
    with pytest.raises(ClusterError, match=r"policy .held by finalizer example.com/held") as raised:
        wait_until_gone(admin, DGD, ["policy"], Deadline(1.5))
    assert "not gone in time" in raised.value.message
    admin.patch(DGD, "policy", {"metadata": {"finalizers": None}})
    wait_until_gone(admin, DGD, ["policy"], Deadline(20))
    assert admin.get(DGD, "policy") is None


# --- refusals --------------------------------------------------------------------------------


def test_an_unknown_field_is_the_users_error(admin: Cluster) -> None:
    with pytest.raises(InvalidObject, match=r"spec.compnents: field not declared") as raised:
        admin.apply(DGD, make_graph(compnents=[]))
    assert raised.value.exit_code == 2
    with pytest.raises(InvalidObject, match="compnents"):
        admin.create(DGD, make_graph(compnents=[]))


def test_a_wrong_type_names_its_path(admin: Cluster) -> None:
    with pytest.raises(InvalidObject, match=r"replicas"):
        graph = make_graph()
        graph["spec"]["components"][1]["replicas"] = "two"
        admin.apply(DGD, graph)


def test_a_rule_of_the_crd_is_shown_as_written(admin: Cluster) -> None:
    graph = make_graph()
    graph["spec"]["components"].append(make_component("WORKER", "worker", 1, []))
    with pytest.raises(InvalidObject, match=r"spec.components.*unique"):
        admin.apply(DGD, graph)


def test_a_missing_crd_is_named_with_what_installs_it(admin: Cluster) -> None:
    missing = ObjectKind("ray.io", "v1", "rayservices", "RayService")
    with pytest.raises(KindMissing, match="does not serve RayService") as raised:
        admin.get(missing, "any")
    assert "helm install kuberay-operator" in raised.value.hint
    with pytest.raises(KindMissing):
        admin.list(
            ObjectKind("nvidia.com", "v9", "dynamographdeployments", "DynamoGraphDeployment")
        )


def test_a_missing_namespace_is_named(admin: Cluster) -> None:
    with pytest.raises(NamespaceMissing, match="Namespace nowhere does not exist"):
        admin.in_namespace("nowhere").apply(DGD, make_graph())


def test_a_patch_of_an_older_version_is_a_conflict(admin: Cluster) -> None:
    version = admin.apply(DGD, make_graph())["metadata"]["resourceVersion"]
    admin.patch(DGD, "policy", {"metadata": {"annotations": {"a": "b"}}})
    with pytest.raises(Conflict, match="has been modified"):
        admin.patch(DGD, "policy", {"metadata": {}}, resource_version=version)
    with pytest.raises(ClusterError, match="does not exist"):
        admin.patch(DGD, "missing", {"metadata": {}})


def test_only_the_object_with_the_uid_is_deleted(admin: Cluster) -> None:
    uid = admin.apply(DGD, make_graph())["metadata"]["uid"]
    with pytest.raises(Conflict):
        admin.delete(DGD, "policy", uid="00000000-0000-0000-0000-000000000000")
    assert admin.delete(DGD, "policy", uid=uid)
    assert not admin.delete(DGD, "policy")


def test_creating_twice_is_a_conflict(admin: Cluster) -> None:
    admin.create(RAYJOB, make_job())
    with pytest.raises(Conflict, match="already exists"):
        admin.create(RAYJOB, make_job())


def test_a_forbidden_verb_is_named_with_its_rule(
    admin: Cluster, control_plane: ControlPlane, tmp_path: Path
) -> None:
    user = connect_as(control_plane, admin, tmp_path, RULES)
    assert user.get(DGD, "policy") is None
    assert user.may("get", DGD) and not user.may("patch", DGD)
    with pytest.raises(Forbidden) as raised:
        user.apply(DGD, make_graph())
    rule = {
        "apiGroups": ["nvidia.com"],
        "resources": ["dynamographdeployments"],
        "verbs": ["patch"],
    }
    assert raised.value.rule == rule
    assert json.dumps(rule) in raised.value.hint
    with pytest.raises(Forbidden) as raised:
        user.list(POD)
    assert raised.value.rule == {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}
    with pytest.raises(Forbidden) as raised:
        user.ask_service("policy-frontend", 8000, "/health")
    assert raised.value.rule["resources"] == ["services/proxy"]


def test_a_quota_is_no_missing_permission(admin: Cluster, control_plane: ControlPlane) -> None:
    path = f"/api/v1/namespaces/{admin.namespace}/resourcequotas"
    quota = {"metadata": {"name": "none"}, "spec": {"hard": {"count/configmaps": "0"}}}
    control_plane.request("POST", path, quota)
    status = f"{path}/none"
    wait_until(lambda: control_plane.request("GET", status).get("status", {}).get("used"), 20)

    def is_refused() -> bool:
        try:
            admin.create(CONFIG_MAP, {"metadata": {"name": "any"}})
        except ClusterError as error:
            assert "exceeded quota" in error.message and not isinstance(error, Forbidden)
            return True
        admin.delete(CONFIG_MAP, "any")
        return False

    wait_until(is_refused, 20, what="the quota")


def test_wrong_credentials_and_addresses_are_told_apart(
    control_plane: ControlPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = control_plane.write_kubeconfig(tmp_path / "expired", "not-a-token")
    with pytest.raises(ClusterError, match="does not accept your credentials"):
        Cluster.connect(kubeconfig=path).list(POD)
    nowhere = json.loads(path.read_text())
    nowhere["clusters"][0]["cluster"]["server"] = "https://127.0.0.1:9"
    path.write_text(json.dumps(nowhere))
    with pytest.raises(ClusterError, match=r"127.0.0.1:9 does not answer"):
        Cluster.connect(kubeconfig=path).list(POD)
    with pytest.raises(UsageError, match="no context `other`"):
        Cluster.connect(kubeconfig=path, context="other")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "missing"))
    with pytest.raises(UsageError, match="No cluster is configured"):
        Cluster.connect()


def test_a_pod_uses_its_service_account_and_services_directly(
    admin: Cluster,
    control_plane: ControlPlane,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    admin.create(SERVICE_ACCOUNT, {"metadata": {"name": "pod"}})
    (tmp_path / "token").write_text(control_plane.make_token(admin.namespace, "pod"))
    (tmp_path / "namespace").write_text(admin.namespace)
    certificate = json.loads(control_plane.kubeconfig.read_text())["clusters"][0]["cluster"]
    (tmp_path / "ca.crt").write_text(Path(certificate["certificate-authority"]).read_text())
    monkeypatch.setattr(api_server, "ACCOUNT", tmp_path)
    monkeypatch.delenv("KUBECONFIG", raising=False)
    host, port = control_plane.url.removeprefix("https://").split(":")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", port)
    pod = Cluster.connect()
    assert pod.in_cluster and pod.namespace == admin.namespace
    with pytest.raises(Forbidden, match=f"system:serviceaccount:{admin.namespace}:pod"):
        pod.list(POD)
    # There is no cluster DNS here: a Service that cannot be reached is a 502, as of the proxy.
    assert pod.ask_service("policy-frontend", 8000, "/health")[0] == 502
