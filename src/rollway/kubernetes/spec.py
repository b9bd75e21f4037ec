"""The infra file: one typed description of a run on Kubernetes.

    name: math
    namespace: rl
    image: registry/rollway-trainer:1.6.1      # of Ray pods; a default only
    dynamo:
      policy: {manifest: policy.yaml}          # or `stack: stack.yaml`
    kuberay:
      training: {spec: {headGroupSpec: …}}     # KubeRay's own fields
    launch: {entrypoint: python train.py}

Fields that Kubernetes names keep its spelling (`nodeSelector`); ours have underscores. What belongs
to Kubernetes, KubeRay or the operator is raw. `rollway.kubernetes.infra` reads the file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, Field, model_validator

from rollway.kubernetes.objects import Object
from rollway.yaml_input import SpecPart

TRAINING = "training"
"""The role of the cluster that runs the driver."""
_KEY = re.compile(r"[a-z0-9]([-_a-z0-9]{0,38}[a-z0-9])?")


def _check_keys(value: dict[str, Any]) -> dict[str, Any]:
    for key in value:
        if not _KEY.fullmatch(key):
            raise ValueError(
                f"{key[:60]!r} cannot be a key here; use lower-case letters, digits and inner "
                "dashes, at most 40"
            )
    return value


_LabelKey = Annotated[
    str, Field(pattern=r"^([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$")
]
_LabelValue = Annotated[str, Field(pattern=r"^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$")]
Labels: TypeAlias = dict[_LabelKey, _LabelValue]
Annotations: TypeAlias = dict[_LabelKey, str]
Keyed = AfterValidator(_check_keys)


class SecretRef(SpecPart):
    """A key of a Secret in the run's namespace."""

    name: str = Field(min_length=1)
    """The name of the Secret."""
    key: str = Field(default="weights-secret", min_length=1)
    """The key in it."""


class EnvSecret(SpecPart):
    """The value of an environment variable that is in a Secret."""

    secret: str = Field(min_length=1)
    """The name of the Secret."""
    key: str = Field(min_length=1)
    """The key in it."""


Variables: TypeAlias = dict[str, str | EnvSecret]
"""Environment variables: each a text, or `{secret: NAME, key: KEY}`."""


class SchedulerSpec(SpecPart):
    """Who schedules the pods."""

    kind: Literal["default", "kai", "kueue"] = "default"
    """`kai`: the KAI scheduler. `kueue`: Kueue admits jobs and pods."""
    queue: str = ""
    """The queue, which KAI and Kueue need."""

    @model_validator(mode="after")
    def _check(self) -> SchedulerSpec:
        if (self.kind != "default") != bool(self.queue):
            raise ValueError("`queue` goes with `kind: kai` or `kind: kueue`, which need it")
        return self


class PlacementSpec(SpecPart):
    """Which nodes may run the pods. What a pod says itself wins."""

    nodeSelector: Labels = Field(default_factory=dict)
    """Labels that a node must have."""
    tolerations: list[Object] = Field(default_factory=list)
    """Taints that pods tolerate."""
    affinity: Object = Field(default_factory=dict)
    """Kubernetes' affinity."""
    exclude_nodes: list[str] = Field(default_factory=list)
    """Nodes, by name, that run none of the pods."""


class ClaimSpec(SpecPart):
    """A DRA claim of every pod that has GPUs."""

    template: str = Field(min_length=1)
    """The ResourceClaimTemplate, which must be there (deploy/manifests/rdma.yaml)."""
    name: str = ""
    """The name of the claim in the pod. The default is `roce` or `compute-domain`."""


class NetworkingSpec(SpecPart):
    """Networks of the ranks, as environment of all pods and claims of those with GPUs."""

    gloo_interface: str = ""
    """GLOO_SOCKET_IFNAME: the interface over which ranks meet."""
    nccl_interface: str = ""
    """NCCL_SOCKET_IFNAME."""
    nccl: dict[str, str] = Field(default_factory=dict)
    """NCCL's variables without their prefix, for example {IB_HCA: mlx5, NET: IB}."""
    roce: ClaimSpec | None = None
    """A claim of RoCE devices."""
    compute_domain: ClaimSpec | None = None
    """A claim of a channel of a compute domain (NVLink over several nodes)."""
    env: dict[str, str] = Field(default_factory=dict)
    """More variables, for example UCX_TLS."""

    @property
    def variables(self) -> dict[str, str]:
        """The environment that follows from these fields."""
        interfaces = {
            "GLOO_SOCKET_IFNAME": self.gloo_interface,
            "NCCL_SOCKET_IFNAME": self.nccl_interface,
        }
        named = {f"NCCL_{name.removeprefix('NCCL_')}": value for name, value in self.nccl.items()}
        return {**{n: v for n, v in interfaces.items() if v}, **named, **self.env}

    @property
    def claims(self) -> dict[str, str]:
        """The templates of the claims, by the name of the claim in a pod."""
        claims = {"roce": self.roce, "compute-domain": self.compute_domain}
        return {claim.name or name: claim.template for name, claim in claims.items() if claim}


class VolumeSpec(SpecPart):
    """A volume of all pods: exactly one source, and where it is mounted."""

    existingClaim: str = ""
    """A PersistentVolumeClaim that is there. Rollway makes none: the data outlive a run."""
    hostPath: str = ""
    """A directory of the node."""
    configMap: str = ""
    """A ConfigMap, mounted as files."""
    mountPath: str = Field(pattern="^/")
    """Where the pods see it."""
    subPath: str = ""
    """A directory in the volume to mount instead of the whole."""
    readOnly: bool = False
    """Whether the pods may only read it."""

    @model_validator(mode="after")
    def _check(self) -> VolumeSpec:
        sources = [n for n in ("existingClaim", "hostPath", "configMap") if getattr(self, n)]
        if len(sources) != 1:
            raise ValueError("give one of `existingClaim`, `hostPath` and `configMap`")
        return self

    @property
    def source(self) -> Object:
        """The volume's source in a pod."""
        if self.existingClaim:
            return {"persistentVolumeClaim": {"claimName": self.existingClaim}}
        if self.hostPath:
            return {"hostPath": {"path": self.hostPath}}
        return {"configMap": {"name": self.configMap}}


class CodeSpec(SpecPart):
    """Where the driver's code comes from."""

    source: Literal["image", "volume", "upload"] = "image"
    """`image` and `volume`: the directory `path` of the pods. `upload`: the local directory `path`,
    which Rollway uploads to Ray; this needs `launch.mode: raycluster`."""
    path: str = ""
    """The directory in which the entry point runs. The default is the image's own."""

    @model_validator(mode="after")
    def _check(self) -> CodeSpec:
        if self.source != "image" and not self.path:
            raise ValueError(f"`source: {self.source}` needs `path`")
        if self.source != "upload" and self.path and not self.path.startswith("/"):
            raise ValueError("`path` is a directory of the pods, so it must begin with /")
        return self


class LaunchSpec(SpecPart):
    """The driver of the training job."""

    entrypoint: str = ""
    """What the driver runs, in `sh`. `${dynamo.KEY}` and `${deployments.KEY}` become the names of
    the objects."""
    env: Variables = Field(default_factory=dict)
    """Environment of the driver and of all pods of the training cluster."""
    code: CodeSpec = Field(default_factory=CodeSpec)
    """Where its code comes from."""
    mode: Literal["rayjob", "raycluster"] = "rayjob"
    """`rayjob`: a RayJob with a cluster of its own. `raycluster`: a long-lived cluster, to which
    the driver is submitted."""
    shutdown: bool = True
    """Whether KubeRay removes the cluster of a RayJob when the job ends."""
    ttl_seconds: int = Field(default=3600, ge=0)
    """How long the cluster stays after that."""
    deadline_seconds: int | None = Field(default=None, ge=1)
    """How long the job may run in all."""
    retries: int = Field(default=0, ge=0)
    """How often KubeRay starts a failed job again, with a new cluster."""
    overrides: Object = Field(default_factory=dict)
    """More fields of the RayJob's `spec`, merged over ours."""


class HealthSpec(SpecPart):
    """How to see that a server answers."""

    port: int = Field(ge=1, le=65535)
    """The port of its Service."""
    path: str = Field(default="/health", pattern="^/")
    """The path to ask for; any answer below 500 counts."""
    timeout: float = Field(default=300.0, gt=0)
    """Seconds until the start counts as failed."""


class DaemonSpec(SpecPart):
    """A job that runs in a long-lived cluster for as long as the cluster does."""

    entrypoint: str = Field(min_length=1)
    """What it runs, in `sh`."""
    env: dict[str, str] = Field(default_factory=dict)
    """Its environment."""
    health: HealthSpec | None = None
    """How to see that it answers, on the cluster's head Service."""


class ClusterSpec(SpecPart):
    """A Ray cluster in a role: `training`, or one of your own such as `gym`."""

    name: str = ""
    """Its name. The default is that of the run, with the role appended except for `training`."""
    spec: Object | None = None
    """KubeRay's `RayCluster.spec`."""
    existing: str = ""
    """A running RayCluster to use. Rollway neither changes nor deletes it."""
    labels: Labels = Field(default_factory=dict)
    """Labels over those of the infra file."""
    annotations: Annotations = Field(default_factory=dict)
    """Annotations over those of the infra file."""
    daemon: DaemonSpec | None = None
    """A job to keep running in it."""

    @model_validator(mode="after")
    def _check(self) -> ClusterSpec:
        if bool(self.spec) == bool(self.existing):
            raise ValueError("give one of `spec` and `existing`")
        return self


class DeploymentSpec(SpecPart):
    """A server beside the training, such as a gym or a weight catalog."""

    name: str = ""
    """Its name. The default is the run's, with the key appended."""
    spec: Object = Field(min_length=1)
    """Kubernetes' `Deployment.spec`; Rollway fills in the selector and its labels."""
    ports: dict[str, int] = Field(default_factory=dict)
    """Ports of its Service, by name. Without any there is no Service."""
    health: HealthSpec | None = None
    """How to see that it answers."""
    labels: Labels = Field(default_factory=dict)
    """Labels over those of the infra file."""
    annotations: Annotations = Field(default_factory=dict)
    """Annotations over those of the infra file."""


class PodsSpec(SpecPart):
    """What pods of a stack run on."""

    image: str = ""
    """Their image. The default is that of the infra file."""
    gpus_per_node: int = Field(default=8, ge=0, le=64)
    """A worker with more ranks runs on several nodes. 0: workers run on CPUs."""
    rdma: bool = False
    """Whether the pods have RDMA devices, so that UCX may choose them."""
    cores: int = Field(default=4, ge=1)
    """Cores of a worker on CPUs, for the number of its threads."""
    requests: dict[str, str] = Field(default_factory=dict)
    """Kubernetes' resource requests of a worker, for example {cpu: "8", memory: 64Gi}."""
    shared_memory: str = ""
    """The size of a worker's /dev/shm. The operator's default is 8Gi."""


class DynamoSpec(SpecPart):
    """A DynamoGraphDeployment, from a manifest or from a stack."""

    manifest: Path | None = None
    """A YAML file with one DynamoGraphDeployment, beside the file that names it."""
    stack: Path | Object | None = None
    """A stack (docs/stack.md), as a file or as its fields."""
    pods: PodsSpec = Field(default_factory=PodsSpec)
    """What the pods of a stack run on; a manifest says it itself."""
    name: str = ""
    """Its name. The default is the manifest's; for a stack the run's, with the key appended."""
    overrides: Object = Field(default_factory=dict)
    """Fields merged over `.spec`; components by name."""
    labels: Labels = Field(default_factory=dict)
    """Labels over those of the infra file and of the manifest."""
    annotations: Annotations = Field(default_factory=dict)
    """Annotations over those of the infra file and of the manifest."""
    ready_timeout: float = Field(default=7200.0, gt=0)
    """Seconds until the gates must be passed. The operator's startup probes allow two hours."""

    @model_validator(mode="after")
    def _check(self) -> DynamoSpec:
        if (self.manifest is None) == (self.stack is None):
            raise ValueError("give one of `manifest` and `stack`")
        return self


class Infra(SpecPart):
    """A run on Kubernetes: its cluster settings, its inference, its training."""

    name: str = ""
    """The run, by which all commands find it. The default is the name of the recipe's file."""
    namespace: str = ""
    """The Kubernetes namespace. The default is that of the kubeconfig's context, or of the pod."""
    image: str = ""
    """The image of pods that name none."""
    imagePullSecrets: list[str] = Field(default_factory=list)
    """Secrets for pulling images."""
    serviceAccount: str = ""
    """The service account of Ray's pods and of deployments. Pods of a DynamoGraphDeployment keep
    the operator's, which may read what discovery needs."""
    labels: Labels = Field(default_factory=dict)
    """Labels of all objects."""
    annotations: Annotations = Field(default_factory=dict)
    """Annotations of all objects."""
    scheduler: SchedulerSpec = Field(default_factory=SchedulerSpec)
    """Who schedules the pods."""
    placement: PlacementSpec = Field(default_factory=PlacementSpec)
    """Where pods may run."""
    networking: NetworkingSpec = Field(default_factory=NetworkingSpec)
    """How ranks reach each other."""
    workspace: VolumeSpec | None = None
    """The volume of code and data."""
    hf_cache: VolumeSpec | None = None
    """The volume of Hugging Face's cache; HF_HOME names it."""
    checkpoints: VolumeSpec | None = None
    """The volume of checkpoints, also of those that workers load in a refit."""
    volumes: Annotated[dict[str, VolumeSpec], Keyed] = Field(default_factory=dict)
    """More volumes of all pods, for example ConfigMaps."""
    weights_secret: SecretRef = Field(default_factory=lambda: SecretRef(name="rollway"))
    """The Secret that signs orders to workers. Stacks with signed orders and the trainer's pods
    have it in ROLLWAY_WEIGHTS_SECRET."""
    launch: LaunchSpec = Field(default_factory=LaunchSpec)
    """The driver of the training job."""
    dynamo: Annotated[dict[str, DynamoSpec], Keyed] = Field(default_factory=dict)
    """DynamoGraphDeployments, each under a key of your choice."""
    kuberay: Annotated[dict[str, ClusterSpec], Keyed] = Field(default_factory=dict)
    """Ray clusters, by role."""
    deployments: Annotated[dict[str, DeploymentSpec], Keyed] = Field(default_factory=dict)
    """Servers beside the training."""

    @property
    def all_volumes(self) -> dict[str, VolumeSpec]:
        """All volumes, by the name that they have in a pod."""
        named = {
            "workspace": self.workspace,
            "hf-cache": self.hf_cache,
            "checkpoints": self.checkpoints,
        }
        own = {name.replace("_", "-"): volume for name, volume in self.volumes.items()}
        return {**{name: volume for name, volume in named.items() if volume}, **own}

    @property
    def targets(self) -> list[str]:
        """The parts, as `--target` names them."""
        sections: dict[str, Mapping[str, object]] = {
            "dynamo": self.dynamo,
            "kuberay": self.kuberay,
            "deployments": self.deployments,
        }
        return [f"{section}.{key}" for section, parts in sections.items() for key in parts]

    def name_part(self, key: str) -> str:
        """Return the default name of an object of this run."""
        return f"{self.name}-{key.replace('_', '-')}"

    def name_cluster(self, role: str) -> str:
        """Return the name of the cluster in a role; in `rayjob` mode that of the RayJob."""
        spec = self.kuberay[role]
        default = self.name if role == TRAINING else self.name_part(role)
        return spec.existing or spec.name or default

    def name_deployment(self, key: str) -> str:
        return self.deployments[key].name or self.name_part(key)
