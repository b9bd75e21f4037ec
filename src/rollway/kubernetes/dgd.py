"""DynamoGraphDeployments (DGDs) of a run: from a manifest or a stack, with what the run adds.

    manifest or stack  ->  overrides  ->  name, labels, annotations  ->  every pod

Both versions of the CRD are read; what comes out is v1beta1. What a manifest says about a pod wins
over the infra file, except for `overrides`, which are the user's word for this run.
"""

from __future__ import annotations

import difflib
from copy import deepcopy
from pathlib import Path
from typing import Any

from rollway.errors import SpecError
from rollway.kubernetes import pods
from rollway.kubernetes.conversion import Conversion, convert
from rollway.kubernetes.infra import read_yaml_documents
from rollway.kubernetes.objects import (
    ALPHA,
    BETA,
    KIND,
    MAIN,
    Object,
    check_graph_name,
    check_name,
    has_version_tag,
    make_labels,
)
from rollway.kubernetes.render import render_part
from rollway.kubernetes.spec import DynamoSpec, Infra

_KAI_QUEUE = "nvidia.com/kai-scheduler-queue"


def load_graph(infra: Infra, key: str) -> Conversion:
    """Return the DGD of a part of the infra file, complete."""
    spec, field = infra.dynamo[key], f"dynamo.{key}"
    if spec.manifest is not None:
        source = read_manifest(spec.manifest)
        own_namespace = source["metadata"].get("namespace")
        if own_namespace and infra.namespace and own_namespace != infra.namespace:
            raise SpecError(
                f"`{field}.manifest`: {spec.manifest.name} is for the namespace {own_namespace}, "
                f"and the run for {infra.namespace}.",
                "Remove the namespace from the manifest, or correct one of the two.",
            )
    else:
        source = render_part(infra, key)
    source = deepcopy(source)
    source["spec"] = override_spec(source, spec.overrides, f"{field}.overrides")
    conversion = convert(source, BETA)
    graph = conversion.graph
    _set_metadata(infra, graph, spec, field)
    names = [component["name"] for component in graph["spec"]["components"]]
    check_graph_name(graph["metadata"]["name"], names, f"{field}.name")
    for component in graph["spec"]["components"]:
        where = f"{field}: component {component['name']}"
        image = _complete_component(infra, component, where)
        if not component.get("runtimeVersionOverride") and not has_version_tag(image):
            conversion.warnings.append(
                f"`{field}`: component {component['name']}: operators since 1.5 read Dynamo's "
                f"version from the image's tag, and {image} has none like 1.6.1. Tag the image "
                "with the version, or set `runtimeVersionOverride` in `overrides`."
            )
    return conversion


# --- manifests -----------------------------------------------------------------------------------


def read_manifest(path: Path) -> Object:
    """Return the only DGD of a YAML file, which may have other documents, too."""
    documents = read_yaml_documents(path)
    graphs = [d for d in documents if isinstance(d, dict) and d.get("kind") == KIND]
    if len(graphs) != 1:
        kinds = sorted({str(d.get("kind")) for d in documents if isinstance(d, dict)})
        count = "no" if not graphs else str(len(graphs))
        raise SpecError(
            f"{path} has {count} {KIND}{'s' if len(graphs) > 1 else ''} "
            f"(it has {', '.join(kinds) or 'nothing'}).",
            "Name a file with exactly one.",
        )
    check_graph(graphs[0], str(path))
    return graphs[0]


def check_graph(graph: Object, source: str) -> None:
    """Raise SpecError unless an object is a DGD of a known version, with components."""
    version, spec = graph.get("apiVersion"), graph.get("spec")
    if version not in (ALPHA, BETA):
        raise SpecError(
            f"{source} is of the version {version}.", f"Use {BETA}, or {ALPHA} for old operators."
        )
    if not (graph.get("metadata") or {}).get("name") or not isinstance(spec, dict):
        raise SpecError(f"{source} has no `metadata.name` or no `spec`.", "Give both.")
    field, kind = ("services", dict) if version == ALPHA else ("components", list)
    if not isinstance(spec.get(field), kind) or not spec[field]:
        what = "mapping" if kind is dict else "list"
        raise SpecError(f"{source}: `spec.{field}` is no {what} of components.", "Give it.")


def _list_written(graph: Object) -> dict[str, Object]:
    """Return the components of a DGD of either version, by name, as its author wrote them."""
    if graph["apiVersion"] == ALPHA:
        return dict(graph["spec"]["services"])
    return {part["name"]: part for part in graph["spec"]["components"]}


# --- overrides -----------------------------------------------------------------------------------


def override_spec(graph: Object, overrides: Object, field: str) -> Object:
    """Return the spec of a DGD with a user's fields over it.

    Components are merged by name, written as a mapping or as the list of the manifest, and so are
    lists whose items all have a `name` (containers, env, volumes)."""
    section = "services" if graph["apiVersion"] == ALPHA else "components"
    other = "components" if section == "services" else "services"
    if other in overrides:
        raise SpecError(
            f"`{field}.{other}`: a manifest of {graph['apiVersion']} has `{section}`.",
            f"Write `{section}`.",
        )
    over = deepcopy(overrides)
    named = over.pop(section, {})
    if isinstance(named, list):
        named = {str(part.get("name")): part for part in named if isinstance(part, dict)}
    if not isinstance(named, dict):
        raise SpecError(f"`{field}.{section}` is no mapping of components.", "Name them.")
    spec: Object = _merge_named(graph["spec"], over)
    known = _list_written(graph)
    for name, part in named.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean {close[0]}?" if close else f"It has {', '.join(known)}."
            raise SpecError(f"`{field}`: the graph has no component {name}.", hint)
        known[name] = _merge_named(known[name], part)
    spec[section] = known if section == "services" else list(known.values())
    return spec


def _merge_named(base: Any, over: Any) -> Any:
    if isinstance(base, dict) and isinstance(over, dict):
        return {**base, **{key: _merge_named(base.get(key), value) for key, value in over.items()}}
    if _is_named(base) and _is_named(over):
        items = {item["name"]: item for item in base}
        for item in over:
            items[item["name"]] = _merge_named(items.get(item["name"]), item)
        return list(items.values())
    return over


def _is_named(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, dict) and "name" in item for item in value)
    )


# --- what the run adds ---------------------------------------------------------------------------


def _set_metadata(infra: Infra, graph: Object, spec: DynamoSpec, field: str) -> None:
    metadata = graph["metadata"]
    queue = {_KAI_QUEUE: infra.scheduler.queue} if infra.scheduler.kind == "kai" else {}
    labels = {**infra.labels, **(metadata.get("labels") or {}), **spec.labels}
    own = {**queue, **infra.annotations, **(metadata.get("annotations") or {})}
    annotations = {**own, **spec.annotations}
    name = check_name(KIND, spec.name or metadata["name"], f"{field}.name")
    labels |= make_labels(infra.name, field)
    graph["metadata"] = pods.make_metadata(infra, name, labels, annotations)
    graph.pop("status", None)


def _complete_component(infra: Infra, component: Object, field: str) -> str:
    """Add to a component what the infra file says, and return its image."""
    template = component.setdefault("podTemplate", {})
    pod = template.setdefault("spec", {})
    container = _find_main(pod)
    cache = component.get("compilationCache") or {}
    pods.complete_pod(infra, pod, container, field, [cache.get("mountPath", "")])
    if infra.scheduler.kind == "kueue":
        metadata = template.setdefault("metadata", {})
        queue = {pods.KUEUE_QUEUE: infra.scheduler.queue}
        metadata["labels"] = {**queue, **(metadata.get("labels") or {})}
    return str(container["image"])


def _find_main(pod: Object) -> Object:
    """Return the main container of a pod, which is added if it is missing."""
    containers: list[Object] = pod.setdefault("containers", [])
    for container in containers:
        if container.get("name") == MAIN:
            return container
    containers.insert(0, {"name": MAIN})
    return containers[0]
