"""Check that raw parts of Kubernetes objects have the shapes that Rollway relies on.

The server checks everything, but only what reaches it: a list in the place of a mapping would stop
the rendering first. Fields that Rollway does not look into are left to the server.
"""

from __future__ import annotations

from typing import Any

from rollway.errors import SpecError

_NAMED = (
    "containers", "initContainers", "env", "envs", "volumes", "volumeMounts", "resourceClaims",
    "claims", "pvcs", "components",
)  # fmt: skip
"""Lists of mappings that have a `name`."""
_LISTS = ("imagePullSecrets", "tolerations", "nodeSelectorTerms", "matchExpressions", "envFrom",
          "workerGroupSpecs")  # fmt: skip
"""Lists of mappings."""
_MAPPINGS = (
    "metadata", "spec", "template", "podTemplate", "extraPodSpec", "extraPodMetadata",
    "mainContainer", "resources", "limits", "requests", "custom", "affinity", "nodeAffinity",
    "requiredDuringSchedulingIgnoredDuringExecution", "services", "sharedMemory", "scalingAdapter",
    "experimental", "gpuMemoryService", "failover", "multinode", "compilationCache",
    "topologyConstraint", "headGroupSpec", "secretRef", "labels", "annotations", "nodeSelector",
)  # fmt: skip
_FREE = ("labels", "annotations", "nodeSelector", "matchLabels", "rayStartParams", "value",
         "limits", "requests", "custom")  # fmt: skip
"""Mappings whose keys the user chooses."""
_TEXT = {
    "volumeMounts": ("mountPath", "mountPoint"), "compilationCache": ("pvcName", "mountPath"),
    "gpuMemoryService": ("mode",), "failover": ("mode",),
    "components": ("type", "frontendSidecar"),
    "containers": ("image",), "mainContainer": ("image",), "metadata": ("name", "namespace"),
    "services": ("componentType", "subComponentType", "envFromSecret"),
}  # fmt: skip
"""Fields of a part that must be text, if they are there."""
_NEEDED = {
    "volumeMounts": ("mountPath", "mountPoint"), "compilationCache": ("pvcName",),
    "secretRef": ("name",),
}  # fmt: skip
"""Fields of which a part has one."""


def check_shapes(value: Any, path: str) -> None:
    """Raise SpecError if a mapping has a field of a shape that cannot be right."""
    if not isinstance(value, dict):
        raise SpecError(f"`{path}` must be a mapping.", "Compare it with examples/kubernetes.")
    for key, item in value.items():
        where = f"{path}.{key}"
        if item is None:
            continue
        if key in _NAMED or key in _LISTS:
            _check_list(key, item, where)
        elif key in _MAPPINGS:
            _check_mapping(key, item, where)
        elif isinstance(item, dict):
            check_shapes(item, where)


def _check_list(key: str, items: Any, where: str) -> None:
    if not isinstance(items, list):
        raise SpecError(f"`{where}` must be a list.", "Begin each item with a dash.")
    for index, item in enumerate(items):
        _check_mapping(key, item, f"{where}.{index}")
        if key in _NAMED and not isinstance(item.get("name"), str):
            raise SpecError(f"`{where}.{index}` has no name.", "Give it a `name`.")


def _check_mapping(key: str, item: Any, where: str) -> None:
    if not isinstance(item, dict):
        raise SpecError(f"`{where}` must be a mapping.", "Compare it with examples/kubernetes.")
    if key in _FREE:
        custom = item.get("custom") if key in ("limits", "requests") else None
        if custom is not None and not isinstance(custom, dict):  # of v1alpha1
            raise SpecError(f"`{where}.custom` must be a mapping.", "Name the resources in it.")
        return
    if key == "services":  # of v1alpha1: components by name
        for name, service in item.items():
            check_shapes(service, f"{where}.{name}")
            _check_text(key, service, f"{where}.{name}")
            if service.get("frontendSidecar") is not None:
                check_shapes(service["frontendSidecar"], f"{where}.{name}.frontendSidecar")
        return
    _check_text(key, item, where)
    needed = _NEEDED.get(key, ())
    if needed and not any(item.get(name) for name in needed):
        raise SpecError(f"`{where}` has no `{needed[0]}`.", "Give it.")
    check_shapes(item, where)


def _check_text(key: str, item: dict[str, Any], where: str) -> None:
    for name in _TEXT.get(key, ()):
        if item.get(name) is not None and not isinstance(item[name], str):
            raise SpecError(f"`{where}.{name}` must be text.", "Put it in quotes.")
