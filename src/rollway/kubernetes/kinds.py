"""The kinds of objects that Rollway reads and writes, with their paths in the API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from rollway.kubernetes.names import Object as Object


@dataclass(frozen=True, slots=True)
class Kind:
    """One version of one kind of object. Its path is known, so that no discovery is needed."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def resource(self) -> str:
        """The name as RBAC messages have it, for example `rayjobs.ray.io`."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    def make_path(self, namespace: str, name: str = "", subresource: str = "") -> str:
        root = f"/apis/{self.group}" if self.group else "/api"
        where = f"/namespaces/{quote(namespace, safe='')}" if self.namespaced else ""
        parts = [root, f"/{self.version}", where, f"/{self.plural}"]
        parts += [f"/{quote(part, safe='')}" for part in (name, subresource) if part]
        return "".join(parts)


DGD = Kind("nvidia.com", "v1beta1", "dynamographdeployments", "DynamoGraphDeployment")
DGD_ALPHA = Kind("nvidia.com", "v1alpha1", "dynamographdeployments", "DynamoGraphDeployment")
SCALING_ADAPTER = Kind(
    "nvidia.com",
    "v1beta1",
    "dynamographdeploymentscalingadapters",
    "DynamoGraphDeploymentScalingAdapter",
)
RAYJOB = Kind("ray.io", "v1", "rayjobs", "RayJob")
RAYCLUSTER = Kind("ray.io", "v1", "rayclusters", "RayCluster")
POD = Kind("", "v1", "pods", "Pod")
SERVICE = Kind("", "v1", "services", "Service")
ENDPOINTS = Kind("", "v1", "endpoints", "Endpoints")
CONFIG_MAP = Kind("", "v1", "configmaps", "ConfigMap")
SECRET = Kind("", "v1", "secrets", "Secret")
SERVICE_ACCOUNT = Kind("", "v1", "serviceaccounts", "ServiceAccount")
CLAIM = Kind("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim")
QUOTA = Kind("", "v1", "resourcequotas", "ResourceQuota")
EVENT = Kind("", "v1", "events", "Event")
NODE = Kind("", "v1", "nodes", "Node", namespaced=False)
NAMESPACE = Kind("", "v1", "namespaces", "Namespace", namespaced=False)
DEPLOYMENT = Kind("apps", "v1", "deployments", "Deployment")
LEASE = Kind("coordination.k8s.io", "v1", "leases", "Lease")
ROLE = Kind("rbac.authorization.k8s.io", "v1", "roles", "Role")
ROLE_BINDING = Kind("rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding")
CRD = Kind(
    "apiextensions.k8s.io",
    "v1",
    "customresourcedefinitions",
    "CustomResourceDefinition",
    namespaced=False,
)

KINDS = (
    DGD, DGD_ALPHA, SCALING_ADAPTER, RAYJOB, RAYCLUSTER, POD, SERVICE, ENDPOINTS, CONFIG_MAP,
    SECRET, SERVICE_ACCOUNT, CLAIM, QUOTA, EVENT, NODE, NAMESPACE, DEPLOYMENT, LEASE, ROLE,
    ROLE_BINDING, CRD,
)  # fmt: skip


def find_kind(body: Mapping[str, Any]) -> Kind:
    """Return the kind of an object, by its apiVersion and kind; raise KeyError for others."""
    wanted = body.get("apiVersion"), body.get("kind")
    for kind in KINDS:
        if (kind.api_version, kind.kind) == wanted:
            return kind
    raise KeyError(f"{wanted[0]} {wanted[1]}")
