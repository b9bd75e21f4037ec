"""All objects of a run, rendered from its infra file without a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from rollway.errors import SpecError
from rollway.kubernetes.dgd import load_graph
from rollway.kubernetes.entrypoint import check_line_ends, explain_hidden_status
from rollway.kubernetes.jobs import (
    list_names,
    make_deployment,
    make_raycluster,
    make_rayjob,
    make_service,
)
from rollway.kubernetes.names import BETA, Object
from rollway.kubernetes.spec import TRAINING, Infra


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


def render_all(infra: Infra, *, version: str = BETA) -> Manifests:
    """Render a run; raise SpecError for what no cluster would accept or run as meant.

    `version` is the version of the CRD to write, v1beta1 unless the cluster has only v1alpha1."""
    conversions = {key: load_graph(infra, key, version) for key in infra.dynamo}
    graphs = {key: conversion.graph for key, conversion in conversions.items()}
    _check_names("DynamoGraphDeployment", "dynamo", graphs)
    names = list_names(infra, graphs)
    own_roles = [role for role, spec in infra.kuberay.items() if not spec.existing]
    is_job = infra.launch.mode == "rayjob" and TRAINING in infra.kuberay and has_driver(infra)
    roles = [role for role in own_roles if not (is_job and role == TRAINING)]
    clusters = {role: make_raycluster(infra, role) for role in roles}
    deployments = {key: make_deployment(infra, key) for key in infra.deployments}
    services = {key: make_service(infra, key) for key in infra.deployments}
    _check_names("RayCluster", "kuberay", clusters)
    _check_names("Deployment", "deployments", deployments)
    return Manifests(
        graphs=graphs,
        jobs={TRAINING: make_rayjob(infra, names, suspend=False)} if is_job else {},
        clusters=clusters,
        deployments=deployments,
        services={key: service for key, service in services.items() if service is not None},
        names=names,
        warnings=[
            *(
                f"`dynamo.{key}`: {version} has no place for {', '.join(conversion.losses)}."
                for key, conversion in conversions.items()
                if conversion.losses
            ),
            *(text for conversion in conversions.values() for text in conversion.warnings),
            *list_warnings(infra, names),
        ],
    )


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


def _check_names(kind: str, section: str, objects: dict[str, Object]) -> None:
    seen: dict[str, str] = {}
    for key, item in objects.items():
        name = item["metadata"]["name"]
        if name in seen:
            raise SpecError(
                f"`{section}.{seen[name]}` and `{section}.{key}` are both the {kind} {name}.",
                "Give one of them another `name`.",
            )
        seen[name] = key


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
