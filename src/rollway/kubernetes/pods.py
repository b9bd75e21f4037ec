"""What the infra file adds to every pod: image, secrets, placement, volumes, environment, claims.

What a pod says itself wins. So a manifest that runs elsewhere runs here, and nothing that its
author chose is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rollway.errors import SpecError
from rollway.kubernetes.objects import Object, check_image
from rollway.kubernetes.spec import EnvSecret, Infra, SecretRef

GPU = "nvidia.com/gpu"
KAI = "kai-scheduler"
KAI_QUEUE = "kai.scheduler/queue"
KUEUE_QUEUE = "kueue.x-k8s.io/queue-name"
SECRET_VARIABLE = "ROLLWAY_WEIGHTS_SECRET"
_HOSTNAME = "kubernetes.io/hostname"


def make_metadata(infra: Infra, name: str, labels: Object, annotations: Object) -> Object:
    """Return the metadata of an object; without a namespace if the run has none yet."""
    namespace = {"namespace": infra.namespace} if infra.namespace else {}
    noted = {"annotations": annotations} if annotations else {}
    return {"name": name, **namespace, "labels": labels, **noted}


def complete_pod(
    infra: Infra, pod: Object, container: Object, field: str, mounted: Iterable[str] = ()
) -> None:
    """Add what the infra file says to a pod's spec and to its main container, in place. `mounted`
    are places that already have something."""
    if not container.get("image"):
        if not infra.image:
            raise SpecError(
                f"`{field}` names no image, and `image` of the infra file is empty.", "Give one."
            )
        container["image"] = infra.image
    check_image(container["image"], field)
    if infra.imagePullSecrets:
        secrets = [{"name": name} for name in infra.imagePullSecrets]
        pod.setdefault("imagePullSecrets", secrets)
    _add_placement(infra, pod)
    _add_volumes(infra, pod, container, mounted)
    env: dict[str, str] = dict(infra.networking.variables)
    if infra.hf_cache:
        env["HF_HOME"] = infra.hf_cache.mountPath
    add_env(container, make_env(env))
    if asks_for_gpus(container):
        for name, template in infra.networking.claims.items():
            _add_claim(pod, container, name, template)


def add_env(container: Object, env: Iterable[Object]) -> None:
    """Add variables that a container does not have yet."""
    known = {entry["name"] for entry in container.get("env") or []}
    added = [entry for entry in env if entry["name"] not in known]
    if added:
        container["env"] = [*(container.get("env") or []), *added]


def make_env(variables: Mapping[str, str | EnvSecret]) -> list[Object]:
    """Return variables as a container names them."""
    return [
        {"name": name, "value": value}
        if isinstance(value, str)
        else {"name": name, "valueFrom": _refer(value.secret, value.key)}
        for name, value in variables.items()
    ]


def make_secret_env(secret: SecretRef) -> Object:
    """Return the variable that holds the secret of signed orders."""
    return {"name": SECRET_VARIABLE, "valueFrom": _refer(secret.name, secret.key)}


def _refer(secret: str, key: str) -> Object:
    return {"secretKeyRef": {"name": secret, "key": key}}


def asks_for_gpus(container: Object) -> bool:
    """Return whether a container has GPUs, as a resource or by a claim."""
    resources = container.get("resources") or {}
    named = {**(resources.get("requests") or {}), **(resources.get("limits") or {})}
    return bool(named.get(GPU) or named.get("gpu") or resources.get("claims"))


# --- placement -----------------------------------------------------------------------------------


def _add_placement(infra: Infra, pod: Object) -> None:
    placement = infra.placement
    if placement.nodeSelector:
        pod["nodeSelector"] = {**placement.nodeSelector, **(pod.get("nodeSelector") or {})}
    own = pod.get("tolerations") or []
    added = [toleration for toleration in placement.tolerations if toleration not in own]
    if added:
        pod["tolerations"] = [*own, *added]
    if placement.affinity:
        pod["affinity"] = {**placement.affinity, **(pod.get("affinity") or {})}
    if placement.exclude_nodes:
        pod["affinity"] = exclude_nodes(pod.get("affinity") or {}, placement.exclude_nodes)


def exclude_nodes(affinity: Object, nodes: list[str]) -> Object:
    """Return an affinity that also keeps pods off some nodes.

    The terms of a node selector are alternatives, so each of them gets the expression."""
    rule = {"key": _HOSTNAME, "operator": "NotIn", "values": list(nodes)}
    node = dict(affinity.get("nodeAffinity") or {})
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    terms = (node.get(required) or {}).get("nodeSelectorTerms") or [{}]
    node[required] = {
        "nodeSelectorTerms": [
            {**term, "matchExpressions": [*(term.get("matchExpressions") or []), rule]}
            for term in terms
        ]
    }
    return {**affinity, "nodeAffinity": node}


# --- volumes and claims --------------------------------------------------------------------------


def _add_volumes(infra: Infra, pod: Object, container: Object, mounted: Iterable[str]) -> None:
    mounts = list(container.get("volumeMounts") or [])
    volumes = list(pod.get("volumes") or [])
    paths = [*mounted, *(mount["mountPath"] for mount in mounts)]
    taken = {path.rstrip("/") for path in paths}
    names = {volume["name"] for volume in volumes}
    for name, volume in infra.all_volumes.items():
        if volume.mountPath.rstrip("/") in taken:
            continue  # the pod has something of its own there
        if name in names:
            raise SpecError(
                f"A pod has a volume `{name}` of its own, which is not mounted at "
                f"{volume.mountPath}.",
                "Rename the volume of the pod.",
            )
        volumes.append({"name": name, **volume.source})
        options = {"subPath": volume.subPath, "readOnly": volume.readOnly}
        mount: dict[str, Any] = {"name": name, "mountPath": volume.mountPath}
        mounts.append({**mount, **{key: value for key, value in options.items() if value}})
    if mounts:
        container["volumeMounts"], pod["volumes"] = mounts, volumes


def _add_claim(pod: Object, container: Object, name: str, template: str) -> None:
    claims = list(pod.get("resourceClaims") or [])
    if any(claim["name"] == name for claim in claims):
        return
    pod["resourceClaims"] = [*claims, {"name": name, "resourceClaimTemplateName": template}]
    resources = container.setdefault("resources", {})
    resources["claims"] = [*(resources.get("claims") or []), {"name": name}]
