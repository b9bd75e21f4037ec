"""Kinds of objects that only tests write."""

from __future__ import annotations

from rollway.kubernetes.objects import Kind

ENDPOINTS = Kind("", "v1", "endpoints", "Endpoints")
SECRET = Kind("", "v1", "secrets", "Secret")
SERVICE_ACCOUNT = Kind("", "v1", "serviceaccounts", "ServiceAccount")
CLAIM = Kind("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim")
NODE = Kind("", "v1", "nodes", "Node", namespaced=False)
ROLE = Kind("rbac.authorization.k8s.io", "v1", "roles", "Role")
ROLE_BINDING = Kind("rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding")
CRD = Kind(
    "apiextensions.k8s.io",
    "v1",
    "customresourcedefinitions",
    "CustomResourceDefinition",
    namespaced=False,
)
