"""The fields of a spec that say how many ranks a replica has, what each needs, and where it runs.

A replica of a model is one worker for its clients, but TP x PP x DP processes for the machines: its
ranks. `launcher: ray` places them on the nodes of a cluster (`rollway.stack.ray.placement`) and
tells each node's supervisor which of them are its own (`StackSpec.placed`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from rollway.plain import SpecPart

# --- parallel sizes ------------------------------------------------------------------------------


PARALLEL_ARGS = {
    "tensor_parallel": ("tensor-parallel-size", "tensor-parallel", "tp"),
    "pipeline_parallel": ("pipeline-parallel-size", "pipeline-parallel", "pp"),
    "data_parallel": ("data-parallel-size", "dp"),
}
"""The fields of a model for parallel sizes, and vLLM's names for each: the option, a prefix that
its parser accepts, and the short form."""
CONTEXT_PARALLEL_ARGS = ("prefill-context-parallel-size", "pcp")
"""One more size that multiplies the ranks; Rollway has no field for it."""
LAUNCH_ARGS = (
    "nnodes", "n", "node-rank", "r", "master-addr", "master-port", "headless",
    "data-parallel-size-local", "dpl", "data-parallel-rank", "dpn", "data-parallel-start-rank",
    "dpr", "data-parallel-address", "dpa", "data-parallel-rpc-port", "dpp",
    "data-parallel-hybrid-lb", "dph", "data-parallel-external-lb", "dpe",
)  # fmt: skip
"""vLLM's options that say which part of a replica a process is: a launcher sets them itself."""


def normalise_option(name: str) -> str:
    """Return an option as vLLM's parser reads it: no leading dashes, no underscores."""
    return name.lstrip("-").replace("_", "-")


def take_parallel_sizes(args: dict[str, Any], fields: Mapping[str, int]) -> dict[str, int]:
    """Remove the parallel sizes from raw arguments, and return them by the name of their field.

    `fields` are the sizes that the user has given as fields; a different one raises ValueError."""
    sizes: dict[str, int] = {}
    for field, options in PARALLEL_ARGS.items():
        for name in [name for name in args if normalise_option(name) in options]:
            if args[name] is None:
                continue  # `null` means: no such option
            size = _parse_size(name, args[name])
            requested = sizes.get(field, fields.get(field, size))
            if size != requested:
                raise ValueError(
                    f"`{field}` is {requested}, but `args.{name}` is {size}; keep one of them"
                )
            sizes[field] = size
            del args[name]
    return sizes


def read_context_parallel(args: Mapping[str, Any]) -> int:
    """Return vLLM's prefill-context-parallel size of raw arguments."""
    for name, value in args.items():
        if normalise_option(name) in CONTEXT_PARALLEL_ARGS and value is not None:
            return _parse_size(name, value)
    return 1


def _parse_size(name: str, value: object) -> int:
    text = str(value)
    if isinstance(value, bool) or not text.isdecimal() or len(text) > 4 or int(text) < 1:
        raise ValueError(f"`args.{name}` must be a whole number of 1 or more (got {text[:40]!r})")
    return int(text)


# --- Ray -----------------------------------------------------------------------------------------


class RaySpec(SpecPart):
    """How `launcher: ray` uses a Ray cluster."""

    address: str | None = None
    """The cluster, HOST:PORT. The default is the connection of this process, `$RAY_ADDRESS`, or the
    only cluster with a raylet of this user on this machine."""
    namespace: str = Field(default="rollway", min_length=1)
    """The Ray namespace of the stack's actors."""
    head: Literal["use", "avoid"] = "use"
    """Whether processes of the stack may run on the cluster's head node."""
    cpus: float = Field(default=1.0, ge=0, le=1024)
    """CPUs that each rank reserves; fractions are allowed."""
    gpus: float = Field(default=1.0, ge=0, le=1)
    """GPUs that each rank reserves: 1, 0 for engines on the CPU, or a fraction, which lets several
    replicas of one rank share a GPU."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Labels that a node must have, as in Ray's label selectors: `value`, `!value`, `in(a, b)` or
    `!in(a, b)`."""
    on_node_lost: Literal["replace", "fail"] = "replace"
    """`replace`: replicas of a lost node start elsewhere, where there is room. `fail`: the stack
    ends."""
    lifetime: Literal["owner", "detached"] = "owner"
    """`owner`: the stack ends with the process that started it. `detached`: `rollway down` ends it.
    `rollway up` always leaves a detached one."""


class PlacedWorker(SpecPart):
    """One rank group of a replica that a launcher has placed on this machine."""

    model: str
    """The served name of its model."""
    replica: int = Field(ge=0)
    """Its number in the whole stack, which gives its name and its seed."""
    role: Literal["", "prefill", "decode"] = ""
    """Its pool in disaggregated serving."""
    gpus: list[str] = Field(default_factory=list)
    """What CUDA_VISIBLE_DEVICES gets; nothing is set if it is empty."""
    node_rank: int = Field(default=0, ge=0)
    """Its position among the machines of the replica. Rank 0 has the endpoint."""
    nodes: int = Field(default=1, ge=1)
    """The number of machines that the replica runs on."""
    master: str = ""
    """host:port of rank 0, where the ranks meet when there are several machines."""
    rpc_port: int = Field(default=0, ge=0, le=65535)
    """A second port of rank 0, for data-parallel engines on several machines."""
    admin_port: int = Field(default=0, ge=0, le=65535)
    """The admin port of rank 0, by which the other machines see whether it serves; 0 for a free
    one, which they then do not know."""

    @model_validator(mode="after")
    def _check(self) -> PlacedWorker:
        if self.node_rank >= self.nodes:
            raise ValueError(f"`node_rank` is {self.node_rank}, but `nodes` is {self.nodes}")
        host, _, port = self.master.rpartition(":")
        if self.nodes > 1 and not (host and port.isdecimal()):
            raise ValueError("a replica on several machines needs `master`, as host:port of rank 0")
        return self

    @property
    def is_headless(self) -> bool:
        """Whether another machine has the endpoint of the replica."""
        return self.node_rank > 0

    @property
    def master_host(self) -> str:
        return self.master.rpartition(":")[0]

    @property
    def master_port(self) -> str:
        return self.master.rpartition(":")[2]


# --- runtime environments ------------------------------------------------------------------------


_INSTALLERS = ("pip", "uv")


def check_runtime_env(value: dict[str, Any]) -> dict[str, Any]:
    """Return a runtime environment; raise ValueError if Ray would refuse it for its shape."""
    if not isinstance(value.get("env_vars", {}), dict):
        raise ValueError("`env_vars` must be a mapping of names to values")
    if not isinstance(value.get("working_dir", ""), str):
        raise ValueError("`working_dir` must be the path of a directory")
    for installer in _INSTALLERS:
        if not isinstance(value.get(installer, []), list | dict | str):
            raise ValueError(f"`{installer}` must be a list of packages or a mapping")
    if all(value.get(installer) for installer in _INSTALLERS):
        raise ValueError(
            "it has packages under both `pip` and `uv`, of which Ray accepts only one; "
            "list all packages under one of them"
        )
    return value


RuntimeEnv = Annotated[dict[str, Any], AfterValidator(check_runtime_env)]


def merge_runtime_envs(stack: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """Merge a model's runtime environment over the stack's; raise ValueError if they contradict.

    `env_vars` are united, and the model's value wins. Packages of `pip` and `uv` are added, the
    stack's first. Any other key of the model replaces the stack's."""
    merged = {**stack, **model}
    if "env_vars" in merged:
        merged["env_vars"] = {**stack.get("env_vars", {}), **model.get("env_vars", {})}
    for installer in _INSTALLERS:
        if stack.get(installer) and model.get(installer):
            merged[installer] = _merge_packages(stack[installer], model[installer])
    return check_runtime_env(merged)


def _merge_packages(stack: Any, model: Any) -> Any:
    """Add two lists of packages, each a list or Ray's mapping with `packages` and options."""
    if isinstance(stack, list) and isinstance(model, list):
        return [*stack, *model]
    if isinstance(stack, str) or isinstance(model, str):
        return model  # a requirements file, which replaces what it is merged over
    base, over = ({"packages": e} if isinstance(e, list) else e for e in (stack, model))
    added = {
        key: [*base[key], *over[key]]
        for key in base.keys() & over.keys()
        if isinstance(base[key], list) and isinstance(over[key], list)
    }
    return {**base, **over, **added}
