"""A stack as a DynamoGraphDeployment: the processes of `rollway up`, as pods.

    stack.yaml ─► StackSpec ─► commands and environment (`rollway.stack.commands`)
                                  │      rollway up: ports of this machine, files of a run
                                  └────► here: a pod's own address, fixed ports

The pods of a role have one command line; `rollway.engine.pod` adds what differs between them. A
worker whose ranks need more GPUs than a node has is `multinode`: the operator starts its ranks.
"""

from __future__ import annotations

import math
from pathlib import Path

from rollway.engine.pod import COMPONENT, SEED
from rollway.errors import SpecError
from rollway.kubernetes import pods
from rollway.kubernetes.objects import (
    BETA,
    HTTP_PORT,
    KIND,
    LISTING_PORT,
    MAIN,
    SYSTEM_PORT,
    Object,
)
from rollway.kubernetes.spec import Infra, PodsSpec, SecretRef
from rollway.model_spec import (
    LAUNCH_ARGS,
    ModelSpec,
    PlacedWorker,
    WorkerRole,
    name_component,
    name_workers,
    normalise_option,
    slug,
)
from rollway.spec import FrontendSpec, StackSpec, parse_spec
from rollway.stack.commands import make_frontend_command, make_planes_env, make_worker_command
from rollway.stack.preset import Machine
from rollway.yaml_input import read_yaml_file

FRONTEND = "Frontend"
POD_IP = "POD_IP"
_HOST = f"$({POD_IP})"  # Kubernetes replaces it in the values of variables
_PYTHON = "python3"
_SIDE_CHANNEL = 20097
_RUN_DIR = Path("/tmp")
_CACHE = Path("/tmp/rollway-cache")


def render_part(infra: Infra, key: str) -> Object:
    """Return the DGD of a stack in the infra file, without what the file adds to every pod."""
    part = infra.dynamo[key]
    assert part.stack is not None
    if isinstance(part.stack, Path):
        spec = read_stack(part.stack)
    else:
        spec = parse_spec(part.stack, on_this_machine=False)
    name = part.name or infra.name_part(key)
    return render_stack(spec, name=name, secret=infra.weights_secret, options=part.pods)


def read_stack(path: Path) -> StackSpec:
    """Read a stack file whose checkpoints are where the pods see them."""
    return parse_spec(read_yaml_file(path), on_this_machine=False)


def render_stack(
    spec: StackSpec, *, name: str, secret: SecretRef, options: PodsSpec | None = None
) -> Object:
    """Return a stack as a v1beta1 DynamoGraphDeployment, whose containers name no image."""
    _check_stack(spec)
    renderer = _Renderer(spec, secret, options or PodsSpec())
    workers = [
        renderer.make_worker(model, settings, role)
        for model in spec.models
        for role, settings in model.roles.items()
    ]
    names = [FRONTEND.lower(), *(worker["name"] for worker in workers)]
    if len(set(names)) < len(names):
        raise SpecError(
            f"A model cannot be called {FRONTEND.lower()} in a DynamoGraphDeployment.",
            "Give it another `name`.",
        )
    body = {"backendFramework": "vllm", "components": [renderer.make_frontend(), *workers]}
    return {"apiVersion": BETA, "kind": KIND, "metadata": {"name": name}, "spec": body}


def _check_stack(spec: StackSpec) -> None:
    """Raise SpecError for what a stack says that pods cannot follow."""
    for field in ("join", "placed"):
        if getattr(spec, field) is not None:
            raise SpecError(
                f"`{field}` of a stack says where its processes run, which the operator decides.",
                "Remove it.",
            )
    if spec.needs_nats or spec.needs_etcd:
        wanted = "etcd_endpoints" if spec.needs_etcd else "nats_server"
        raise SpecError(
            f"The stack starts a server of its own (`{wanted}` is empty), which pods do not reach.",
            f"Give `{wanted}`, or keep the default planes.",
        )
    for model in spec.models:
        for settings in model.roles.values():
            own = [arg for arg in settings.args if normalise_option(arg) in LAUNCH_ARGS]
            if own and settings.engine == "vllm":
                raise SpecError(
                    f"`{model.name}`: `args.{own[0]}` says which part of a replica a process is.",
                    "Remove it: the operator says that to each pod.",
                )


class _Renderer:
    """Makes the components of one stack."""

    def __init__(self, spec: StackSpec, secret: SecretRef, options: PodsSpec) -> None:
        frontend = FrontendSpec(
            **{**spec.frontend.model_dump(), "host": "0.0.0.0", "port": HTTP_PORT}
        )
        self.spec = spec.model_copy(update={"admin_host": _HOST, "frontend": frontend})
        self.secret = secret
        self.options = options
        self.python = spec.python or _PYTHON

    def make_frontend(self) -> Object:
        ports = {"http": HTTP_PORT, "rl": LISTING_PORT}
        machine = self._describe_machine(None)
        command = make_frontend_command(self.spec, self.python, ports, machine)
        env = {**self._make_planes(""), **command.env, **self.spec.env, **self.spec.frontend.env}
        container = {
            **self._name_main(),
            **_split(command.argv, 3),
            "env": pods.make_env(env),
            # The operator's own port, http, and that of the RL listing.
            "ports": [
                {"name": "http", "containerPort": HTTP_PORT},
                {"name": "listing", "containerPort": LISTING_PORT},
            ],
        }
        template = {"spec": {"containers": [container]}}
        return {"name": FRONTEND, "type": "frontend", "replicas": 1, "podTemplate": template}

    def make_worker(self, model: ModelSpec, settings: ModelSpec, role: WorkerRole) -> Object:
        """Return the component of a model's workers in a role."""
        nodes, gpus = self._divide(settings)
        placed = PlacedWorker(model=model.name, replica=0, role=role)
        ports = {"system": SYSTEM_PORT}
        if role and settings.engine == "vllm":
            ports["kv"] = _SIDE_CHANNEL
        machine = self._describe_machine(settings)
        command = make_worker_command(
            self.spec.model_copy(update={"placed": [placed]}),
            settings,
            placed,
            python=self.python,
            path=settings.path,
            endpoint="",
            ports=ports,
            run_dir=_RUN_DIR,
            machine=machine,
        )
        argv, start = self._wrap(command.argv, settings)
        variables: dict[str, str] = {**self._make_planes(_HOST), **command.env}
        variables[COMPONENT] = name_component(slug(model.name), role)
        if seeds := self._take_seed(argv, settings):
            variables[SEED] = seeds
        env = [
            {"name": POD_IP, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            *pods.make_env({**variables, **self.spec.env, **settings.env}),
        ]
        if settings.can_refit and self.spec.admin_orders == "signed":
            env.append(pods.make_secret_env(self.secret))
        container: Object = {**self._name_main(), **_split(argv, start), "env": env}
        if settings.can_refit:
            container |= _make_probes()
        resources = self._make_resources(gpus)
        container |= {"resources": resources} if resources else {}
        component: Object = {
            "name": self._name_component(model, role),
            "type": role or "worker",
            "replicas": settings.replicas,
        }
        if nodes > 1:
            component["multinode"] = {"nodeCount": nodes}
        if self.options.shared_memory:
            component["sharedMemorySize"] = self.options.shared_memory
        return {**component, "podTemplate": {"spec": {"containers": [container]}}}

    def _name_main(self) -> Object:
        image = {"image": self.options.image} if self.options.image else {}
        return {"name": MAIN, **image}

    def _name_component(self, model: ModelSpec, role: WorkerRole) -> str:
        """Return the name of a component: as in Dynamo's examples if there is one model."""
        if len(self.spec.models) == 1:
            return role or "worker"
        return name_workers(slug(model.name), role)

    def _divide(self, model: ModelSpec) -> tuple[int, int]:
        """Return how many nodes a worker runs on, and how many GPUs it has on each."""
        limit = self.options.gpus_per_node
        if model.engine == "mocker" or limit == 0:
            return 1, 0
        if model.ranks <= limit:
            return 1, model.ranks
        nodes = math.ceil(model.ranks / limit)
        if model.ranks % nodes:
            raise SpecError(
                f"`{model.name}` has {model.ranks} ranks, which do not divide evenly over nodes of "
                f"{limit} GPUs.",
                "Change the parallel sizes, or `gpus_per_node`.",
            )
        return nodes, model.ranks // nodes

    def _wrap(self, argv: list[str], model: ModelSpec) -> tuple[list[str], int]:
        """Return the command behind `rollway.engine.pod`, and where its arguments begin.

        The operator reads parallel sizes in `args`, and appends to them what a rank is told."""
        is_guarded = self.spec.admin_orders == "signed" and model.engine != "mocker"
        module = argv[2]
        guard = ["rollway.engine.guard"] if is_guarded else []
        head = [argv[0], "-m", "rollway.engine.pod", *guard, module]
        return [*head, *argv[3:]], len(head)

    def _take_seed(self, argv: list[str], model: ModelSpec) -> str:
        """Remove the seed that the command has for its replica, unless the user has chosen it."""
        if model.engine == "mocker" or "seed" in map(normalise_option, model.args):
            return ""
        position = argv.index("--seed")
        seed = argv[position + 1]
        del argv[position : position + 2]
        return seed

    def _describe_machine(self, model: ModelSpec | None) -> Machine:
        has_gpus = self.options.gpus_per_node > 0 and model is not None and model.can_refit
        return Machine(has_gpus, self.options.rdma, self.options.cores, _CACHE)

    def _make_planes(self, host: str) -> dict[str, str]:
        """Return how processes find and reach each other. The operator says what is discovered by
        Kubernetes itself."""
        env = {**make_planes_env(self.spec, host), "DYN_SDK_DISABLE_ANSI_LOGGING": "1"}
        if self.spec.etcd_endpoints:
            env["DYN_DISCOVERY_BACKEND"] = "etcd"
            env["ETCD_ENDPOINTS"] = self.spec.etcd_endpoints
        if self.spec.nats_server:
            env["NATS_SERVER"] = self.spec.nats_server
        return env

    def _make_resources(self, gpus: int) -> Object:
        limits = {pods.GPU: str(gpus)} if gpus else {}
        named = {"requests": dict(self.options.requests), "limits": limits}
        return {name: values for name, values in named.items() if values}


def _split(argv: list[str], start: int) -> Object:
    args = {"args": argv[start:]} if argv[start:] else {}
    return {"command": argv[:start], **args}


def _make_probes() -> Object:
    """Return the probes of a worker.

    The operator's own restart a worker that does not answer one question within 4 s. A worker that
    loads weights answers nothing for longer than that, and must not be restarted for it."""
    live = {"httpGet": {"path": "/live", "port": SYSTEM_PORT}, "timeoutSeconds": 10}
    health = {"httpGet": {"path": "/health", "port": SYSTEM_PORT}, "timeoutSeconds": 10}
    return {
        "startupProbe": {**live, "periodSeconds": 10, "failureThreshold": 720},
        "livenessProbe": {**live, "periodSeconds": 15, "failureThreshold": 40},
        "readinessProbe": {**health, "periodSeconds": 10, "failureThreshold": 6},
    }
