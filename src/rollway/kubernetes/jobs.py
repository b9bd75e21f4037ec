"""The Ray jobs, Ray clusters and deployments of a run, as objects.

A RayJob is submitted in HTTPMode: its own submitter pod (K8sJobMode) would wait for the pods that
gang schedulers hold back until all of them are there.
"""

from __future__ import annotations

from typing import Any

import yaml

from rollway.errors import SpecError
from rollway.kubernetes import pods
from rollway.kubernetes.entrypoint import resolve_entrypoint
from rollway.kubernetes.infra import merge
from rollway.kubernetes.names import Object, check_name, make_labels
from rollway.kubernetes.pods import make_metadata
from rollway.kubernetes.shapes import check_shapes
from rollway.kubernetes.spec import TRAINING, Infra
from rollway.plain import drop_null

_SELECTOR = "ray.io/cluster"


def make_rayjob(infra: Infra, names: dict[str, str], *, suspend: bool) -> Object:
    """Return the RayJob of the training. `names` are those of the objects that its entry point may
    refer to, as `list_names` returns them."""
    if TRAINING not in infra.kuberay:
        raise SpecError("The infra file has no `kuberay.training`.", "Say where the driver runs.")
    if infra.launch.code.source == "upload":
        raise SpecError(
            "`launch.code.source: upload` does not go with `launch.mode: rayjob`: KubeRay submits "
            "the job, and has no files of this machine.",
            "Use `source: volume` or `image`, or `mode: raycluster`.",
        )
    cluster, launch = infra.kuberay[TRAINING], infra.launch
    spec: Object = {
        "submissionMode": "HTTPMode",
        "entrypoint": make_entrypoint(infra, names),
        "backoffLimit": launch.retries,
        "shutdownAfterJobFinishes": launch.shutdown and not cluster.existing,
    }
    if env := make_runtime_env(infra):
        spec["runtimeEnvYAML"] = yaml.safe_dump(env, sort_keys=False)
    if spec["shutdownAfterJobFinishes"]:
        spec["ttlSecondsAfterFinished"] = launch.ttl_seconds
    if launch.deadline_seconds:
        spec["activeDeadlineSeconds"] = launch.deadline_seconds
    if cluster.existing:
        spec["clusterSelector"] = {_SELECTOR: cluster.existing}
    else:
        spec["rayClusterSpec"] = _make_cluster_spec(infra, TRAINING)
    spec = merge(spec, launch.overrides)
    if suspend:
        reason = explain_no_suspend(infra)
        if reason:
            raise SpecError(reason, "Use `--order inference-first`.")
        spec["suspend"] = True
    name = cluster.name or infra.name if cluster.existing else infra.name_cluster(TRAINING)
    check_name("RayJob", name, "kuberay.training.name")
    return _make_object(infra, "ray.io/v1", "RayJob", name, f"kuberay.{TRAINING}", spec)


def explain_no_suspend(infra: Infra) -> str | None:
    """Return why the RayJob cannot be created suspended; None if it can.

    KubeRay says the first two in the job's status only."""
    shutdown = infra.launch.overrides.get("shutdownAfterJobFinishes", infra.launch.shutdown)
    if TRAINING in infra.kuberay and infra.kuberay[TRAINING].existing:
        return "A job on an existing Ray cluster cannot be suspended."
    if not shutdown:
        return "A job whose cluster stays (`launch.shutdown: false`) cannot be suspended."
    if infra.scheduler.kind == "kueue":
        return "Kueue resumes a suspended job as soon as there is quota, whoever has suspended it."
    return None


def make_raycluster(infra: Infra, role: str) -> Object:
    """Return the RayCluster in a role."""
    name = infra.name_cluster(role)
    check_name("RayCluster", name, f"kuberay.{role}.name")
    spec = _make_cluster_spec(infra, role)
    return _make_object(infra, "ray.io/v1", "RayCluster", name, f"kuberay.{role}", spec)


def make_deployment(infra: Infra, key: str) -> Object:
    """Return a Deployment."""
    part, name = infra.deployments[key], infra.name_deployment(key)
    field = f"deployments.{key}"
    check_name("Deployment", name, f"{field}.name")
    check_shapes(part.spec, f"{field}.spec")
    spec = drop_null(part.spec)
    template = spec.setdefault("template", {})
    labels = make_labels(infra.name, field)
    spec["selector"] = {"matchLabels": labels}
    _complete_template(infra, template, f"{field}.spec", labels)
    pod = template["spec"]
    if infra.serviceAccount:
        pod.setdefault("serviceAccountName", infra.serviceAccount)
    return _make_object(infra, "apps/v1", "Deployment", name, field, spec)


def make_service(infra: Infra, key: str) -> Object | None:
    """Return the Service of a Deployment; None if it has no ports."""
    part, name = infra.deployments[key], infra.name_deployment(key)
    field = f"deployments.{key}"
    if not part.ports:
        return None
    check_name("Service", name, f"{field}.name")
    # A server-side apply merges ports by number and protocol, so it needs both.
    ports = [
        {"name": title, "protocol": "TCP", "port": port, "targetPort": port}
        for title, port in part.ports.items()
    ]
    spec = {"selector": make_labels(infra.name, field), "ports": ports}
    return _make_object(infra, "v1", "Service", name, field, spec)


# --- what the driver gets ------------------------------------------------------------------------


def list_names(infra: Infra, graphs: dict[str, Object]) -> dict[str, str]:
    """Return the names of the objects that an entry point may refer to."""
    named = {f"dynamo.{key}": graph["metadata"]["name"] for key, graph in graphs.items()}
    return {**named, **{f"deployments.{key}": infra.name_deployment(key) for key in
                        infra.deployments}}  # fmt: skip


def make_entrypoint(infra: Infra, names: dict[str, str]) -> str:
    """Return what `sh` runs as the driver, in the directory of the code."""
    launch = infra.launch
    if not launch.entrypoint.strip():
        raise SpecError("`launch.entrypoint` is empty.", "Say what the driver runs.")
    text = resolve_entrypoint(launch.entrypoint, names, "launch.entrypoint").strip()
    if launch.code.source == "upload" or not launch.code.path:
        return text
    return f"cd {_quote(launch.code.path)} || exit 1\n{text}"


def make_runtime_env(infra: Infra) -> Object:
    """Return Ray's runtime environment of the driver: variables that are no secrets."""
    plain = {name: value for name, value in infra.launch.env.items() if isinstance(value, str)}
    return {"env_vars": plain} if plain else {}


def _quote(path: str) -> str:
    return "'" + path.replace("'", "'\\''") + "'"


# --- pods ----------------------------------------------------------------------------------------


def _make_cluster_spec(infra: Infra, role: str) -> Object:
    """Return a RayCluster's spec with what the infra file adds to its pods."""
    field = f"kuberay.{role}.spec"
    check_shapes(infra.kuberay[role].spec, field)
    spec: Object = drop_null(infra.kuberay[role].spec)
    labels = make_labels(infra.name, f"kuberay.{role}")
    groups = [("headGroupSpec", spec.get("headGroupSpec"))]
    groups += [
        (f"workerGroupSpecs.{i}", g) for i, g in enumerate(spec.get("workerGroupSpecs") or [])
    ]
    env = infra.launch.env if role == TRAINING else {}
    for position, group in groups:
        if not isinstance(group, dict) or not isinstance(group.get("template"), dict):
            raise SpecError(
                f"`{field}.{position}` has no `template`.",
                "Give the pod as in a RayCluster of KubeRay.",
            )
        group.setdefault("rayStartParams", {})
        container = _complete_template(infra, group["template"], f"{field}.{position}", labels)
        pods.add_env(container, pods.make_env(env))
        if uses_secret(infra):
            pods.add_env(container, [pods.make_secret_env(infra.weights_secret)])
        if infra.serviceAccount:
            group["template"]["spec"].setdefault("serviceAccountName", infra.serviceAccount)
    return spec


def uses_secret(infra: Infra) -> bool:
    """Return whether trainers sign orders: a stack asks for it, or the user named the Secret."""
    has_stack = any(part.stack is not None for part in infra.dynamo.values())
    return has_stack or "weights_secret" in infra.model_fields_set


def _complete_template(infra: Infra, template: Object, field: str, labels: Object) -> Object:
    """Add to a pod template what the infra file says, and return its main container."""
    pod: Any = template.get("spec")
    containers = pod.get("containers") if isinstance(pod, dict) else None
    if not isinstance(containers, list) or not containers or not isinstance(containers[0], dict):
        raise SpecError(f"`{field}` has no containers.", "Give at least one.")
    metadata = template.setdefault("metadata", {})
    queue: Object = {}
    if infra.scheduler.kind == "kai":
        pod.setdefault("schedulerName", pods.KAI)
        queue = {pods.KAI_QUEUE: infra.scheduler.queue}
    metadata["labels"] = {**queue, **(metadata.get("labels") or {}), **labels}
    container: Object = containers[0]
    pods.complete_pod(infra, pod, container, field)
    return container


def _make_object(
    infra: Infra, version: str, kind: str, name: str, key: str, spec: Object
) -> Object:
    section, _, part = key.partition(".")
    own = getattr(infra, section)[part]
    queue: Object = {}
    if infra.scheduler.kind == "kai":
        queue = {pods.KAI_QUEUE: infra.scheduler.queue}
    elif infra.scheduler.kind == "kueue" and kind != "Service":
        queue = {pods.KUEUE_QUEUE: infra.scheduler.queue}
    labels = {**queue, **infra.labels, **own.labels, **make_labels(infra.name, key)}
    annotations = {**infra.annotations, **own.annotations}
    metadata = make_metadata(infra, name, labels, annotations)
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}
