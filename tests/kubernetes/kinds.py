"""Kinds of objects that only tests write."""

from __future__ import annotations

from rollway.kubernetes.objects import ObjectKind

ENDPOINTS = ObjectKind("", "v1", "endpoints", "Endpoints")
SECRET = ObjectKind("", "v1", "secrets", "Secret")
SERVICE_ACCOUNT = ObjectKind("", "v1", "serviceaccounts", "ServiceAccount")
CLAIM = ObjectKind("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim")
NODE = ObjectKind("", "v1", "nodes", "Node", namespaced=False)
ROLE = ObjectKind("rbac.authorization.k8s.io", "v1", "roles", "Role")
ROLE_BINDING = ObjectKind("rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding")
CRD = ObjectKind(
    "apiextensions.k8s.io",
    "v1",
    "customresourcedefinitions",
    "CustomResourceDefinition",
    namespaced=False,
)
