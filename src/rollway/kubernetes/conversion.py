"""DynamoGraphDeployments of v1alpha1 as v1beta1, and back, with what is lost.

    v1alpha1                                  v1beta1
    services: {NAME: …}                       components: [{name: NAME, …}]
    componentType, subComponentType           type
    envs, resources, probes, volumeMounts     podTemplate.spec.containers[main]
    extraPodSpec.mainContainer                    the same container
    extraPodSpec, extraPodMetadata            podTemplate
    sharedMemory, scalingAdapter.enabled      sharedMemorySize, scalingAdapter

The operator converts stored objects with annotations that keep what the other version lacks. We
write objects, so we say instead what the other version cannot hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rollway.errors import SpecError
from rollway.kubernetes.objects import ALPHA, BETA, MAIN, Object
from rollway.kubernetes.pods import GPU
from rollway.yaml_input import drop_null

TYPES = ("frontend", "worker", "prefill", "decode", "planner", "epp")
_ROLES = ("prefill", "decode")
_SAME_SPEC = (
    "annotations", "labels", "backendFramework", "priorityClassName", "restart", "providerOverride",
    "experimental",
)  # fmt: skip
_SAME_PART = (
    "replicas", "multinode", "modelRef", "minAvailable", "globalDynamoNamespace",
    "runtimeVersionOverride", "eppConfig", "topologyConstraint", "providerOverride",
)  # fmt: skip
_PROBES = ("livenessProbe", "readinessProbe")
_SIDECAR = "sidecar-frontend"
_PLAIN_RESOURCES = ("cpu", "memory")


@dataclass(slots=True)
class Conversion:
    """A converted graph, and the paths of the fields that it does not have any more."""

    graph: Object
    losses: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    """What an operator may refuse, once the graph is complete."""


def convert(graph: Object, version: str) -> Conversion:
    """Return a graph in a version of the CRD; `version` is with or without the group."""
    wanted = version if "/" in version else f"nvidia.com/{version}"
    if wanted not in (ALPHA, BETA):
        raise SpecError(f"There is no version {version}.", "Use v1beta1 or v1alpha1.")
    graph = drop_null(graph)
    if graph["apiVersion"] == wanted:
        return Conversion(graph)
    converter, body = _Converter(), graph["spec"]
    spec = converter.raise_spec(body) if wanted == BETA else converter.lower_spec(body)
    rest = {key: value for key, value in graph.items() if key not in ("spec", "status")}
    return Conversion({**rest, "apiVersion": wanted, "spec": spec}, converter.losses)


def raise_live(graph: Object) -> Object:
    """Return a graph that a server has in v1alpha1 as v1beta1, with its status."""
    status = dict(graph.get("status") or {})
    if "services" in status:
        status["components"] = status.pop("services")
    return {**convert(graph, BETA).graph, **({"status": status} if status else {})}


class _Converter:
    """Takes fields out of one version and puts them into the other; what remains is lost."""

    def __init__(self) -> None:
        self.losses: list[str] = []
        self._path = ["spec"]

    # --- to v1beta1 ------------------------------------------------------------------------------

    def raise_spec(self, old: Object) -> Object:
        new = _move(old, _SAME_SPEC)
        if "envs" in old:
            new["env"] = old.pop("envs")
        if "topologyConstraint" in old:
            new["topologyConstraint"] = _rename(
                old.pop("topologyConstraint"), "topologyProfile", "clusterTopologyName"
            )
        services = old.pop("services", {})
        claims = {claim["name"]: claim for claim in old.pop("pvcs", [])}
        for name, claim in claims.items():
            if claim.get("create"):
                self.losses.append(f"spec.pvcs.{name} (make the claim yourself)")
        self._lose(old)
        new["components"] = []
        for name, service in services.items():
            with self._inside(f"services.{name}"):
                new["components"].append({"name": name, **self._raise_part(service)})
        return new

    def _raise_part(self, old: Object) -> Object:
        kind, role = old.pop("componentType", ""), old.pop("subComponentType", "")
        new: Object = {}
        if kind == "worker" and role in _ROLES:
            new["type"] = role
        else:
            if kind in TYPES:
                new["type"] = kind
            elif kind not in ("", "default"):
                self.losses.append(f"{self._where}.componentType ({kind})")
            if role:
                self.losses.append(f"{self._where}.subComponentType ({role})")
        new |= _move(old, _SAME_PART)
        if memory := old.pop("sharedMemory", None):
            new["sharedMemorySize"] = "0" if memory.get("disabled") else memory.get("size", "8Gi")
        if (old.pop("scalingAdapter", None) or {}).get("enabled"):
            new["scalingAdapter"] = {}
        if experimental := self._raise_experimental(old):
            new["experimental"] = experimental
        template = self._raise_pod(old, new)
        if old.get("serviceName") == self._path[-1].rpartition(".")[2]:
            del old["serviceName"]  # the name of the component itself
        self._lose(old)
        return {**new, "podTemplate": template} if template else new

    def _raise_experimental(self, old: Object) -> Object:
        experimental = {}
        for name in ("gpuMemoryService", "failover"):
            part = old.pop(name, None) or {}
            if part.pop("enabled", False):
                if "mode" in part:
                    part["mode"] = part["mode"][:1].upper() + part["mode"][1:]
                experimental[name] = part
        return {**experimental, **_move(old, ("checkpoint",))}

    def _raise_pod(self, old: Object, new: Object) -> Object:
        pod = old.pop("extraPodSpec", {})
        main: Object = {**pod.pop("mainContainer", {}), "name": MAIN}
        if env := _join(old.pop("envs", []), main.pop("env", [])):
            main["env"] = env
        if secret := old.pop("envFromSecret", ""):
            main["envFrom"] = [*main.get("envFrom", []), {"secretRef": {"name": secret}}]
        if "resources" in old:
            main["resources"] = _raise_resources(old.pop("resources"))
        main |= _move(old, _PROBES)
        for mount in old.pop("volumeMounts", []):
            if mount.get("useAsCompilationCache"):
                new["compilationCache"] = {
                    "pvcName": mount["name"], "mountPath": mount["mountPoint"]
                }  # fmt: skip
                continue
            claim = {"name": mount["name"], "mountPath": mount["mountPoint"]}
            main["volumeMounts"] = [*main.get("volumeMounts", []), claim]
            volume = {"persistentVolumeClaim": {"claimName": mount["name"]}, "name": mount["name"]}
            if volume not in pod.get("volumes", []):
                pod["volumes"] = [*pod.get("volumes", []), volume]
        others = pod.pop("containers", [])
        if sidecar := old.pop("frontendSidecar", None):
            others = [*others, _raise_sidecar(sidecar)]
            new["frontendSidecar"] = _SIDECAR
        template: Object = {}
        if metadata := old.pop("extraPodMetadata", {}):
            template["metadata"] = metadata
        if len(main) > 1 or others or pod:
            template["spec"] = {"containers": [main, *others], **pod}
        return template

    # --- to v1alpha1 -----------------------------------------------------------------------------

    def lower_spec(self, old: Object) -> Object:
        new = _move(old, _SAME_SPEC)
        if "env" in old:
            new["envs"] = old.pop("env")
        if "topologyConstraint" in old:
            new["topologyConstraint"] = _rename(
                old.pop("topologyConstraint"), "clusterTopologyName", "topologyProfile"
            )
        components = old.pop("components", [])
        self._lose(old)
        new["services"] = {}
        caches = []
        for component in components:
            name = component.pop("name")
            with self._inside(f"components.{name}"):
                if cache := component.get("compilationCache"):
                    caches.append({"name": cache["pvcName"], "create": False})
                new["services"][name] = self._lower_part(component)
        if caches:
            new["pvcs"] = list({claim["name"]: claim for claim in caches}.values())
        return new

    def _lower_part(self, old: Object) -> Object:
        kind = old.pop("type", "")
        new: Object = {}
        if kind in _ROLES:
            new |= {"componentType": "worker", "subComponentType": kind}
        elif kind:
            new["componentType"] = kind
        new |= _move(old, _SAME_PART)
        if size := old.pop("sharedMemorySize", None):
            new["sharedMemory"] = {"disabled": True} if str(size) == "0" else {"size": size}
        if old.pop("scalingAdapter", None) is not None:
            new["scalingAdapter"] = {"enabled": True}
        experimental = old.pop("experimental", {})
        for name in ("gpuMemoryService", "failover"):
            if name in experimental:
                part = experimental.pop(name)
                if "mode" in part:
                    part["mode"] = part["mode"][:1].lower() + part["mode"][1:]
                new[name] = {"enabled": True, **part}
        new |= _move(experimental, ("checkpoint",))
        with self._inside("experimental"):
            self._lose(experimental)
        self._lower_pod(old.pop("podTemplate", {}), old.pop("frontendSidecar", ""), new)
        if cache := old.pop("compilationCache", None):
            mount = {"name": cache["pvcName"], "mountPoint": cache.get("mountPath", "")}
            new["volumeMounts"] = [{**mount, "useAsCompilationCache": True}]
        self._lose(old)
        return new

    def _lower_pod(self, template: Object, sidecar: str, new: Object) -> None:
        metadata = template.pop("metadata", {})
        if kept := _move(metadata, ("labels", "annotations")):
            new["extraPodMetadata"] = kept
        with self._inside("podTemplate.metadata"):
            self._lose(metadata)
        pod = template.pop("spec", {})
        others = []
        main: Object = {}
        for container in pod.pop("containers", []):
            if container["name"] == MAIN:
                main = container
            elif container["name"] == sidecar:
                new["frontendSidecar"] = self._lower_sidecar(container)
            else:
                others.append(container)
        main.pop("name", None)
        if "env" in main:
            new["envs"] = main.pop("env")
        if "resources" in main:
            new["resources"] = _lower_resources(main.pop("resources"))
        new |= _move(main, _PROBES)
        extra = {**pod, **({"containers": others} if others else {})}
        extra |= {"mainContainer": main} if main else {}
        if extra:
            new["extraPodSpec"] = extra
        with self._inside("podTemplate"):
            self._lose(template)

    def _lower_sidecar(self, container: Object) -> Object:
        name = container.pop("name")
        sidecar = _move(container, ("image", "args"))
        if "env" in container:
            sidecar["envs"] = container.pop("env")
        sources = container.get("envFrom", [])
        if len(sources) == 1 and sources[0].keys() == {"secretRef"}:
            sidecar["envFromSecret"] = container.pop("envFrom")[0]["secretRef"]["name"]
        with self._inside(f"podTemplate.spec.containers.{name}"):
            self._lose(container)
        return sidecar

    # --- losses ----------------------------------------------------------------------------------

    @contextmanager
    def _inside(self, name: str) -> Iterator[None]:
        self._path.append(name)
        yield
        self._path.pop()

    @property
    def _where(self) -> str:
        return ".".join(self._path)

    def _lose(self, rest: Object) -> None:
        self.losses += [f"{self._where}.{name}" for name in rest]


def _move(source: Object, names: tuple[str, ...]) -> Object:
    return {name: source.pop(name) for name in names if name in source}


def _rename(source: Object, old: str, new: str) -> Object:
    return {new if name == old else name: value for name, value in source.items()}


def _join(envs: list[Object], own: list[Object]) -> list[Object]:
    """Join two lists of variables; the container's own win."""
    names = {entry["name"] for entry in own}
    return [*(entry for entry in envs if entry["name"] not in names), *own]


def _raise_resources(old: Object) -> Object:
    new: Object = {}
    for side in ("requests", "limits"):
        if side not in old:
            continue
        values = dict(old[side])
        gpus, kind = values.pop("gpu", None), values.pop("gpuType", GPU)
        custom = values.pop("custom", {})
        new[side] = {**values, **({kind: gpus} if gpus is not None else {}), **custom}
    return {**new, **({"claims": old["claims"]} if "claims" in old else {})}


def _lower_resources(old: Object) -> Object:
    new: Object = {}
    for side in ("requests", "limits"):
        if side not in old:
            continue
        values = {name: str(value) for name, value in old[side].items()}
        plain = _move(values, _PLAIN_RESOURCES)
        if GPU in values:
            plain["gpu"] = values.pop(GPU)
        new[side] = {**plain, **({"custom": values} if values else {})}
    return {**new, **({"claims": old["claims"]} if "claims" in old else {})}


def _raise_sidecar(old: Object) -> Object:
    new = {"name": _SIDECAR, **_move(old, ("image", "args"))}
    if "envs" in old:
        new["env"] = old["envs"]
    if "envFromSecret" in old:
        new["envFrom"] = [{"secretRef": {"name": old["envFromSecret"]}}]
    return new
