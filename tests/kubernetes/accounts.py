"""Users of a test cluster with few permissions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rollway.kubernetes.client import Cluster
from rollway.kubernetes.objects import DGD
from tests.kubernetes.control_plane import ControlPlane
from tests.kubernetes.kinds import ROLE, ROLE_BINDING, SERVICE_ACCOUNT
from tests.waiting import wait_until


def connect_as(
    control_plane: ControlPlane, admin: Cluster, folder: Path, rules: list[dict[str, Any]]
) -> Cluster:
    """Return the cluster as a service account that has only these rules."""
    admin.create(SERVICE_ACCOUNT, {"metadata": {"name": "user"}})
    admin.create(ROLE, {"metadata": {"name": "user"}, "rules": rules})
    subject = {"kind": "ServiceAccount", "name": "user", "namespace": admin.namespace}
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "user"}
    binding = {"metadata": {"name": "user"}, "subjects": [subject], "roleRef": reference}
    admin.create(ROLE_BINDING, binding)
    token = control_plane.make_token(admin.namespace, "user")
    path = control_plane.write_kubeconfig(folder / "user", token, admin.namespace)
    cluster = Cluster.connect(kubeconfig=path)
    assert cluster.namespace == admin.namespace
    wait_until(lambda: cluster.may("get", DGD), 20, what="the role")
    return cluster
