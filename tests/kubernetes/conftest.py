"""A control plane for the whole session, and a namespace for each test."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollway.kubernetes.cluster import Cluster
from rollway.kubernetes.kinds import NAMESPACE
from tests.kubernetes.control_plane import ControlPlane, find_assets


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
    cluster.close()


@pytest.fixture
def kubeconfig(control_plane: ControlPlane, admin: Cluster, tmp_path: Path) -> Path:
    """A kubeconfig for this test's namespace, for commands that read one."""
    path = tmp_path / "kubeconfig"
    return control_plane.write_kubeconfig(path, control_plane.token, admin.namespace)


def make_namespace(name: str) -> dict[str, object]:
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
