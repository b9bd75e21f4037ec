"""A control plane for the whole session, and a namespace for each test."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollway.kubernetes.client import Cluster
from rollway.kubernetes.objects import NAMESPACE
from tests.kubernetes.control_plane import ControlPlane, find_assets
from tests.kubernetes.dynamo_operator import DynamoOperator
from tests.kubernetes.kuberay_operator import KubeRayOperator


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the tests of this folder out of `make test-fast`."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.stack)


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A real API server with the CRDs of Dynamo and KubeRay."""
    assets = find_assets()
    if assets is None:
        pytest.skip("no control plane: `make setup-k8s` builds one, or set KUBEBUILDER_ASSETS")
    with ControlPlane(assets, tmp_path_factory.mktemp("control-plane")) as running:
        running.install_crds()
        yield running


@pytest.fixture
def admin(control_plane: ControlPlane) -> Iterator[Cluster]:
    """The administrator, in a namespace of this test's own."""
    name = f"t-{secrets.token_hex(4)}"
    cluster = Cluster.connect(kubeconfig=control_plane.kubeconfig, namespace=name)
    cluster.create(NAMESPACE, make_namespace(name))
    yield cluster
    cluster.delete(NAMESPACE, name)


@pytest.fixture
def kubeconfig(control_plane: ControlPlane, admin: Cluster, tmp_path: Path) -> Path:
    """A kubeconfig for this test's namespace, for commands that read one."""
    path = tmp_path / "kubeconfig"
    return control_plane.write_kubeconfig(path, control_plane.token, admin.namespace)


@pytest.fixture
def operators(control_plane: ControlPlane, admin: Cluster) -> Cluster:
    """The administrator again, with a count of requests of its own, for stand-ins."""
    return Cluster.connect(kubeconfig=control_plane.kubeconfig, namespace=admin.namespace)


@pytest.fixture
def dynamo(operators: Cluster, tmp_path: Path) -> Iterator[DynamoOperator]:
    """A stand-in for Dynamo's operator, with stubs of frontends."""
    with DynamoOperator(operators, tmp_path / "dynamo") as operator:
        yield operator


@pytest.fixture
def light_dynamo(operators: Cluster, tmp_path: Path, base_model: Path) -> Iterator[DynamoOperator]:
    """The same, with real frontends and light workers."""
    with DynamoOperator(operators, tmp_path / "dynamo", base_model) as operator:
        yield operator


@pytest.fixture
def kuberay(operators: Cluster, tmp_path: Path) -> Iterator[KubeRayOperator]:
    """A stand-in for KubeRay's operator."""
    with KubeRayOperator(operators, tmp_path / "kuberay") as operator:
        yield operator


def make_namespace(name: str) -> dict[str, object]:
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
