"""Small manifests for tests of the API."""

from __future__ import annotations

from typing import Any

from rollway.kubernetes.objects import DGD, RAYCLUSTER, RAYJOB, Object, make_labels

RUN = "grpo"


def make_graph(name: str = "policy", *, run: str = RUN, workers: int = 1, **spec: Any) -> Object:
    """Return a DynamoGraphDeployment with a frontend and workers of the model `tiny`."""
    return {
        "apiVersion": DGD.api_version,
        "kind": DGD.kind,
        "metadata": {"name": name, "labels": make_labels(run, "dynamo.policy")},
        "spec": {
            "components": [
                make_component("Frontend", "frontend", 1, []),
                make_component("worker", "worker", workers, ["--served-model-name", "tiny"]),
            ],
            **spec,
        },
    }


def make_component(name: str, kind: str, replicas: int, args: list[str]) -> Object:
    container = {"name": "main", "image": "dynamo:1.6.0", "args": args}
    return {
        "name": name,
        "type": kind,
        "replicas": replicas,
        "podTemplate": {"spec": {"containers": [container]}},
    }


def make_ray_spec(workers: int = 0) -> Object:
    """Return the spec of a RayCluster."""
    container = {"name": "ray", "image": "rayproject/ray:2.60.0"}
    template = {"spec": {"containers": [container]}}
    group = {
        "groupName": "workers",
        "replicas": workers,
        "minReplicas": workers,
        "maxReplicas": workers,
        "rayStartParams": {},
        "template": template,
    }
    head = {"rayStartParams": {}, "template": template}
    return {"headGroupSpec": head, "workerGroupSpecs": [group] if workers else []}


def make_job(name: str = "train", *, run: str = RUN, suspend: bool = True, **spec: Any) -> Object:
    """Return a RayJob."""
    return {
        "apiVersion": RAYJOB.api_version,
        "kind": RAYJOB.kind,
        "metadata": {"name": name, "labels": make_labels(run, "kuberay.training")},
        "spec": {
            "entrypoint": "true",
            "submissionMode": "HTTPMode",
            "shutdownAfterJobFinishes": True,
            "suspend": suspend,
            "rayClusterSpec": make_ray_spec(),
            **spec,
        },
    }


def make_ray_cluster(name: str = "train", *, run: str = RUN) -> Object:
    return {
        "apiVersion": RAYCLUSTER.api_version,
        "kind": RAYCLUSTER.kind,
        "metadata": {"name": name, "labels": make_labels(run, "kuberay.training")},
        "spec": make_ray_spec(),
    }
