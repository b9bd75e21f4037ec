"""All objects of a run, rendered from its infra file without a cluster.

A RayJob is submitted in HTTPMode: its own submitter pod (K8sJobMode) would wait for the pods that
gang schedulers hold back until all of them are there.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import yaml

from rollway.errors import REPOSITORY, SpecError
from rollway.kubernetes import pods
from rollway.kubernetes.dgd import load_graph
from rollway.kubernetes.entrypoint import check_line_ends, explain_hidden_status, resolve_entrypoint
from rollway.kubernetes.infra import merge
from rollway.kubernetes.objects import BETA, RAY_LABEL, Object, check_name, make_labels
from rollway.kubernetes.spec import TRAINING, Infra
from rollway.yaml_input import drop_null


@dataclass(frozen=True, slots=True)
class Manifests:
    """The objects of a run, by the key that they have in the infra file."""

    graphs: dict[str, Object] = field(default_factory=dict)
    """DynamoGraphDeployments."""
    jobs: dict[str, Object] = field(default_factory=dict)
    """The RayJob under `training`, in mode `rayjob`; not suspended."""
    clusters: dict[str, Object] = field(default_factory=dict)
    """RayClusters that Rollway makes itself."""
    deployments: dict[str, Object] = field(default_factory=dict)
    """Deployments."""
    services: dict[str, Object] = field(default_factory=dict)
    """The Services of those deployments that have ports."""
    names: dict[str, str] = field(default_factory=dict)
    """What entry points may refer to: dynamo.KEY and deployments.KEY, with the objects' names."""
    warnings: list[str] = field(default_factory=list)
    """What will run, and probably not as meant."""

    @property
    def objects(self) -> list[Object]:
        """All objects, in the order in which they need each other."""
        groups = (self.deployments, self.services, self.graphs, self.clusters, self.jobs)
        return [item for group in groups for item in group.values()]


def render_all(infra: Infra) -> Manifests:
    """Render a run; raise SpecError for what no cluster would accept or run as meant."""
    conversions = {}
    for key in infra.dynamo:
        with name_shape(f"dynamo.{key}"):
            conversions[key] = load_graph(infra, key)
    graphs = {key: conversion.graph for key, conversion in conversions.items()}
    names = list_names(infra, graphs)
    is_job = infra.launch.mode == "rayjob" and TRAINING in infra.kuberay and has_driver(infra)
    roles = [role for role, spec in infra.kuberay.items() if not spec.existing]
    with name_shape("kuberay"):
        own = [role for role in roles if not (is_job and role == TRAINING)]
        clusters = {role: make_raycluster(infra, role) for role in own}
        jobs = {TRAINING: make_rayjob(infra, names)} if is_job else {}
    with name_shape("deployments"):
        deployments = {key: make_deployment(infra, key) for key in infra.deployments}
    services = {key: make_service(infra, key) for key in infra.deployments}
    for section, objects in (
        ("dynamo", graphs),
        ("kuberay", clusters),
        ("deployments", deployments),
    ):
        _check_names(section, objects)
    losses = (
        f"`dynamo.{key}`: {BETA} has no place for {', '.join(conversion.losses)}."
        for key, conversion in conversions.items()
        if conversion.losses
    )
    warnings = (text for conversion in conversions.values() for text in conversion.warnings)
    return Manifests(
        graphs=graphs,
        jobs=jobs,
        clusters=clusters,
        deployments=deployments,
        services={key: service for key, service in services.items() if service is not None},
        names=names,
        warnings=[*losses, *warnings, *list_warnings(infra, names)],
    )


@contextmanager
def name_shape(field: str) -> Iterator[None]:
    """Raise SpecError where the user's raw fields have not the shape of Kubernetes' own."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise SpecError(
            f"`{field}` has a field of another shape than Kubernetes' own ({error}).",
            f"Compare it with examples/kubernetes of {REPOSITORY}.",
        ) from error


def has_driver(infra: Infra) -> bool:
    """Return whether the run has a training job, and not only servers."""
    return bool(infra.launch.entrypoint.strip())


def list_warnings(infra: Infra, names: dict[str, str]) -> list[str]:
    """Return what the entry points of a run hide, and what its driver does not get."""
    entrypoints = {"launch.entrypoint": infra.launch.entrypoint}
    for role, spec in infra.kuberay.items():
        if spec.daemon is not None:
            entrypoints[f"kuberay.{role}.daemon.entrypoint"] = spec.daemon.entrypoint
    warnings = []
    for path, text in entrypoints.items():
        check_line_ends(text, path)
        if reason := explain_hidden_status(text):
            warnings.append(f"`{path}` hides how its command ended. {reason}")
    graphs = [name for name in names if name.startswith("dynamo.")]
    unnamed = [name for name in graphs if f"${{{name}}}" not in infra.launch.entrypoint]
    if len(graphs) > 1 and has_driver(infra) and unnamed:
        warnings.append(
            f"The run has {len(graphs)} DynamoGraphDeployments, and `launch.entrypoint` does not "
            f"name {', '.join(f'${{{name}}}' for name in unnamed)}."
        )
    return warnings


def _check_names(section: str, objects: dict[str, Object]) -> None:
    seen: dict[str, str] = {}
    for key, item in objects.items():
        name = item["metadata"]["name"]
        if name in seen:
            raise SpecError(
                f"`{section}.{seen[name]}` and `{section}.{key}` both have the name {name}.",
                "Give one of them another `name`.",
            )
        seen[name] = key


# --- objects ------------------------------------------------------------------------------------


def make_rayjob(infra: Infra, names: dict[str, str]) -> Object:
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
        spec["clusterSelector"] = {RAY_LABEL: cluster.existing}
    else:
        spec["rayClusterSpec"] = _make_cluster_spec(infra, TRAINING)
    spec = merge(spec, launch.overrides)
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
    return f"cd {shlex.quote(launch.code.path)} || exit 1\n{text}"


def make_runtime_env(infra: Infra) -> Object:
    """Return Ray's runtime environment of the driver: variables that are no secrets."""
    plain = {name: value for name, value in infra.launch.env.items() if isinstance(value, str)}
    return {"env_vars": plain} if plain else {}


# --- pods ----------------------------------------------------------------------------------------


def _make_cluster_spec(infra: Infra, role: str) -> Object:
    """Return a RayCluster's spec with what the infra file adds to its pods."""
    field = f"kuberay.{role}.spec"
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
    metadata = pods.make_metadata(infra, name, labels, annotations)
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}


# --- YAML ---------------------------------------------------------------------------------------


class _Dumper(yaml.SafeDumper):
    """Writes every object in full: an anchor would hide what a pod has."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _write_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    )


_Dumper.add_representer(str, _write_text)


def write_yaml(objects: Sequence[Object]) -> str:
    """Return objects as a YAML text of several documents."""
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=110, allow_unicode=True)
