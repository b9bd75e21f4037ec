"""Kinds of objects, and the names that Kubernetes and the operators derive from ours.

    DGD `policy` in namespace `rl`     frontend's Service    policy-frontend
                                       Dynamo namespace      rl-policy
                                       of its workers        rl-policy-1a2b3c4d
    RayJob `train`                     RayCluster            train-x7k2p

Everything that computes or recognises such a name asks this module.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias
from urllib.parse import quote

from rollway.errors import SpecError

Object: TypeAlias = dict[str, Any]
"""An object of the Kubernetes API, as its JSON says it."""

KIND = "DynamoGraphDeployment"
ALPHA, BETA = "nvidia.com/v1alpha1", "nvidia.com/v1beta1"
"""The versions of a DynamoGraphDeployment (DGD)."""
MAIN = "main"
"""The container of a DGD's component that runs Dynamo."""

FIELD_MANAGER = "rollway"
MANAGED = {"app.kubernetes.io/managed-by": "rollway"}
RUN_LABEL = "rollway.dev/run"
"""The run that an object belongs to."""
KEY_LABEL = "rollway.dev/key"
"""The part of the infra file that it comes from: dynamo.KEY, kuberay.ROLE or deployments.KEY."""
DGD_LABEL = "nvidia.com/dynamo-graph-deployment-name"
"""The operator's label on the pods of a DynamoGraphDeployment."""
TYPE_LABEL = "nvidia.com/dynamo-component-type"
"""The operator's label on a pod: the type of its component."""
RAY_LABEL = "ray.io/cluster"
"""KubeRay's label on the pods of a RayCluster."""

HTTP_PORT, LISTING_PORT, SYSTEM_PORT = 8000, 8001, 9090
"""Where a frontend serves the OpenAI API and lists RL workers, and a worker its admin routes."""

_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")  # DNS-1035
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_SUFFIX = r"(-[0-9a-f]{8})?"
_SEMVER = re.compile(
    r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-[0-9A-Za-z.-]+)?(\+[0-9A-Za-z.-]+)?"
)

LONGEST = {"RayJob": 47, "RayCluster": 53, "Service": 63, "Deployment": 63}
"""The longest name of each kind. KubeRay appends to the names of its objects, and says so only in
the status of the object."""
_LONGEST_NAME = 253


# --- kinds --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ObjectKind:
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


DGD = ObjectKind("nvidia.com", "v1beta1", "dynamographdeployments", "DynamoGraphDeployment")
DGD_ALPHA = ObjectKind("nvidia.com", "v1alpha1", "dynamographdeployments", "DynamoGraphDeployment")
SCALING_ADAPTER = ObjectKind(
    "nvidia.com",
    "v1beta1",
    "dynamographdeploymentscalingadapters",
    "DynamoGraphDeploymentScalingAdapter",
)
RAYJOB = ObjectKind("ray.io", "v1", "rayjobs", "RayJob")
RAYCLUSTER = ObjectKind("ray.io", "v1", "rayclusters", "RayCluster")
POD = ObjectKind("", "v1", "pods", "Pod")
SERVICE = ObjectKind("", "v1", "services", "Service")
CONFIG_MAP = ObjectKind("", "v1", "configmaps", "ConfigMap")
QUOTA = ObjectKind("", "v1", "resourcequotas", "ResourceQuota")
EVENT = ObjectKind("", "v1", "events", "Event")
NAMESPACE = ObjectKind("", "v1", "namespaces", "Namespace", namespaced=False)
DEPLOYMENT = ObjectKind("apps", "v1", "deployments", "Deployment")


def find_kind(body: Mapping[str, Any]) -> ObjectKind:
    """Return the kind of an object of a run."""
    kinds = (DGD, RAYJOB, RAYCLUSTER, DEPLOYMENT, SERVICE)
    return {(kind.api_version, kind.kind): kind for kind in kinds}[body["apiVersion"], body["kind"]]


# --- labels --------------------------------------------------------------------------------------


def select_run(name: str) -> str:
    """Return the label selector of everything that a run owns."""
    return f"{RUN_LABEL}={name}"


def select_pods(graphs: list[str]) -> str:
    """Return the label selector of the pods of some DynamoGraphDeployments."""
    return f"{DGD_LABEL} in ({','.join(sorted(graphs))})"


def select_ray_pods(clusters: list[str]) -> str:
    """Return the label selector of the pods of some RayClusters."""
    return f"{RAY_LABEL} in ({','.join(sorted(clusters))})"


def make_labels(run: str, key: str) -> dict[str, str]:
    """Return the labels of an object of a run, by which any later command finds it."""
    return {**MANAGED, RUN_LABEL: run, KEY_LABEL: key}


def name_mark(run: str) -> str:
    """Return the name of the ConfigMap that says which command starts a run."""
    return f"rollway-{run}"


def make_reference(owner: Object) -> Object:
    """Refer to an owner, with which the garbage collector deletes an object. It does not control,
    and does not block, so both operators may go on."""
    return {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        "controller": False,
        "blockOwnerDeletion": False,
    }


def add_owner(body: Object, owner: Object | None) -> Object:
    """Return a copy of an object to apply that `owner` owns."""
    if owner is None:
        return body
    metadata = {**body["metadata"], "ownerReferences": [make_reference(owner)]}
    return {**body, "metadata": metadata}


def list_components(graph: Object) -> dict[str, Object]:
    """Return the components of a DGD, by name."""
    return {part["name"]: part for part in graph["spec"].get("components") or []}


# --- names of others -----------------------------------------------------------------------------


def name_service(graph: str, component: str) -> str:
    """Return the name of the Service and of the scaling adapter that the operator makes for a
    component."""
    return f"{graph}-{component}".lower().replace(".", "-")


def name_dynamo_namespace(namespace: str, graph: str) -> str:
    """Return the Dynamo namespace of a DynamoGraphDeployment, without the suffix of its workers."""
    return f"{namespace}-{graph.replace('.', '-')}"


def is_worker_namespace(candidate: str, namespace: str, graph: str) -> bool:
    """Return whether workers of a DynamoGraphDeployment register in a Dynamo namespace.

    The operator appends eight hexadecimal digits to that of workers in Deployments, and none to
    that of frontends and of workers that Grove runs."""
    name = re.escape(name_dynamo_namespace(namespace, graph))
    return re.fullmatch(name + _SUFFIX, candidate) is not None


def find_frontend(graph: Object) -> str | None:
    """Return the Service of a DynamoGraphDeployment's frontend; None if it has no frontend."""
    for name, component in list_components(graph).items():
        if component.get("type") == "frontend":
            return name_service(graph["metadata"]["name"], name)
    return None


# --- checks --------------------------------------------------------------------------------------


def check_name(kind: str, name: str, field: str) -> str:
    """Return a name; raise SpecError if Kubernetes or the operator of its kind would refuse it."""
    limit = LONGEST.get(kind, _LONGEST_NAME)
    if len(name) > limit:
        raise SpecError(
            f"`{field}`: the {kind} {name} has a name of {len(name)} characters.",
            f"Use at most {limit}.",
        )
    pattern = _LABEL if kind in ("RayJob", "RayCluster", "Service") else _SUBDOMAIN
    if not pattern.fullmatch(name):
        rule = "lower-case letters, digits and inner dashes"
        first = ", with a letter first" if pattern is _LABEL else ""
        raise SpecError(
            f"`{field}`: {name!r} cannot be the name of a {kind}.", f"Use {rule}{first}."
        )
    return name


def check_graph_name(name: str, components: list[str], field: str) -> None:
    """Raise SpecError if a DynamoGraphDeployment's name is too long once the operator has
    appended the names of its components."""
    check_name("DynamoGraphDeployment", name, field)
    for component in components:
        service = name_service(name, component)
        if len(service) > LONGEST["Service"]:
            raise SpecError(
                f"`{field}`: the operator names the Service of component {component} {service}, "
                f"which has {len(service)} characters.",
                f"Use a name of at most {LONGEST['Service'] - len(component) - 1}.",
            )


def read_tag(image: str) -> str:
    """Return the tag of an image; "" if it has none. A port of the registry is no tag."""
    name = image.partition("@")[0].rpartition("/")[2]
    return name.partition(":")[2]


def check_image(image: str, field: str) -> str:
    """Return an image; raise SpecError if it names no version: it could change between pods."""
    if not read_tag(image) and "@sha256:" not in image:
        raise SpecError(
            f"`{field}`: the image {image} has no tag, so pods may run different versions.",
            "Append a tag or a digest.",
        )
    return image


def has_version_tag(image: str) -> bool:
    """Return whether the Dynamo operator can read the runtime's version from an image's tag."""
    return _SEMVER.fullmatch(read_tag(image)) is not None
