"""A real server accepts every example and every shipped file that it knows, validated strictly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollway.errors import RollwayError
from rollway.kubernetes import objects
from rollway.kubernetes.client import Cluster
from rollway.kubernetes.conversion import convert
from rollway.kubernetes.infra import DEFAULTS_VARIABLE, load_infra
from rollway.kubernetes.manifests import render_all
from rollway.kubernetes.objects import DGD, DGD_ALPHA, ObjectKind
from tests.kubernetes import kinds
from tests.kubernetes.kinds import CRD
from tests.observe.deployed import read_objects
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "kubernetes"
NAMES = sorted(p.stem for p in EXAMPLES.glob("*.yaml") if not p.stem.endswith("-graph"))
NAMED = {**vars(objects), **vars(kinds)}
KINDS = {(k.api_version, k.kind): k for k in NAMED.values() if isinstance(k, ObjectKind)}
GRAPHS = "dynamographdeployments.nvidia.com"


@pytest.fixture(autouse=True)
def no_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(DEFAULTS_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def render(cluster: Cluster, name: str, version: str) -> list[dict[str, Any]]:
    infra = load_infra(infra=EXAMPLES / f"{name}.yaml")
    objects = render_all(infra.model_copy(update={"namespace": cluster.namespace})).objects
    return [convert(body, version).graph if body["kind"] == DGD.kind else body for body in objects]


def find_kind(item: dict[str, Any]) -> ObjectKind | None:
    return KINDS.get((item["apiVersion"], item["kind"]))


@pytest.mark.parametrize("name", NAMES)
def test_the_server_accepts_an_example(admin: Cluster, name: str) -> None:
    for item in render(admin, name, "v1beta1"):
        kind = find_kind(item)
        assert kind is not None
        admin.create(kind, item, dry_run=True)
        applied = admin.apply(kind, item, dry_run=True)
        assert applied["metadata"]["name"] == item["metadata"]["name"]
        assert admin.get(kind, item["metadata"]["name"]) is None, "a dry run left something"


def test_the_server_accepts_claims_of_devices(admin: Cluster) -> None:
    """RoCE and a compute domain in every pod with GPUs. The server knows no ResourceClaimTemplates
    of its own (they came with 1.26), so the claims are validated where they are used."""
    claims = ["networking.roce.template=roce", "networking.compute_domain.template=nvlink"]
    infra = load_infra(None, EXAMPLES / "one-gpu.yaml", claims)
    rendered = render_all(infra.model_copy(update={"namespace": admin.namespace}))
    for item in rendered.objects:
        kind = find_kind(item)
        assert kind is not None
        accepted = admin.create(kind, item, dry_run=True)
        assert "resourceClaimTemplateName" in str(accepted["spec"])


@pytest.fixture
def old_versions(admin: Cluster) -> Iterator[None]:
    """Serve v1alpha1 without the operator's webhook, which converts it: the schema and the rules of
    v1alpha1 are checked, and nothing is stored."""
    live = admin.get(CRD, GRAPHS)
    assert live is not None
    before = live["spec"]["conversion"]
    admin.patch(CRD, GRAPHS, {"spec": {"conversion": {"strategy": "None", "webhook": None}}})
    body = render(admin, "kind-cpu", "v1alpha1")[0]
    wait_until(lambda: is_accepted(admin, body), 60)
    yield
    admin.patch(CRD, GRAPHS, {"spec": {"conversion": before}})
    wait_until(lambda: not is_accepted(admin, body), 60)


def is_accepted(cluster: Cluster, body: dict[str, Any]) -> bool:
    try:
        cluster.create(DGD_ALPHA, body, dry_run=True)
    except RollwayError:
        return False
    return True


def test_the_server_accepts_every_example_in_the_old_version(
    admin: Cluster, old_versions: None
) -> None:
    for name in NAMES:
        for item in render(admin, name, "v1alpha1"):
            if item["kind"] == DGD.kind:
                assert item["apiVersion"] == DGD_ALPHA.api_version
                admin.create(DGD_ALPHA, item, dry_run=True)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "deploy").glob("rbac/*.yaml")), ids=lambda p: p.stem
)
def test_the_server_accepts_the_shipped_roles(admin: Cluster, path: Path) -> None:
    for item in yaml.safe_load_all(path.read_text()):
        kind = find_kind(item)
        assert kind is not None
        admin.create(kind, item, dry_run=True)


def test_the_server_accepts_what_prometheus_operator_gets(admin: Cluster) -> None:
    kinds = {
        "PodMonitor": ObjectKind("monitoring.coreos.com", "v1", "podmonitors", "PodMonitor"),
        "PrometheusRule": ObjectKind(
            "monitoring.coreos.com", "v1", "prometheusrules", "PrometheusRule"
        ),
    }
    for item in read_objects():
        admin.create(kinds[item["kind"]], item, dry_run=True)
