"""The description of one served model: its checkpoint, its engine, its workers.

A model is served by `replicas` equal workers, or by prefill and decode workers, whose settings
stand over the model's:

    serving: disaggregated
    prefill: {replicas: 2, tensor_parallel: 2}
    decode: {replicas: 4, args: {max-num-seqs: 256}}

A worker is one for its clients, but TP x PP x DP processes for the machines: its ranks.
`launcher: ray` places them on the nodes of a cluster (`rollway.stack.ray.placement`) and tells each
node's supervisor which of them are its own (`StackSpec.placed`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, Field, model_validator

from rollway.errors import SpecError
from rollway.yaml_input import SpecPart

RawArgs: TypeAlias = dict[str, Any]
"""Options of another program under its own names, without the dashes.

`true` becomes `--name`, `false` becomes `--no-name`, and `null` removes a value of the preset. A
mapping is passed as JSON, a list as several values."""

WorkerRole: TypeAlias = Literal["", "prefill", "decode"]
"""What a worker does for its model: everything, or one half of disaggregated serving."""


def _check_variables(value: dict[str, str]) -> dict[str, str]:
    for name in value:
        if not name or "=" in name:
            raise ValueError(f"{name[:60]!r} cannot be the name of an environment variable")
    return value


Environment: TypeAlias = Annotated[dict[str, str], AfterValidator(_check_variables)]


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


# --- models --------------------------------------------------------------------------------------


class RoleSpec(SpecPart):
    """The prefill or the decode workers of a model with `serving: disaggregated`."""

    replicas: int = Field(default=1, ge=1, le=4096)
    """The number of workers."""
    tensor_parallel: int | None = Field(default=None, ge=1, le=1024)
    """Ranks that share each layer. The default of this and the next two is the model's."""
    pipeline_parallel: int | None = Field(default=None, ge=1, le=1024)
    """Stages that share the layers."""
    data_parallel: int | None = Field(default=None, ge=1, le=1024)
    """Engines behind one endpoint."""
    args: RawArgs = Field(default_factory=dict)
    """Options of the engine, over the model's."""
    env: Environment = Field(default_factory=dict)
    """Environment variables of the workers, over the model's."""

    @property
    def sizes(self) -> dict[str, int]:
        """The parallel sizes that this role has of its own."""
        names = ("tensor_parallel", "pipeline_parallel", "data_parallel")
        return {name: size for name in names if (size := getattr(self, name)) is not None}

    def take_sizes_from_args(self) -> None:
        """Move parallel sizes from `args` to the fields, so that there is one place to read."""
        for name, size in take_parallel_sizes(self.args, self.sizes).items():
            setattr(self, name, size)


def check_roles(model: ModelSpec) -> None:
    """Raise ValueError if the settings of the roles contradict each other."""
    missing = [name for name in ("prefill", "decode") if getattr(model, name) is None]
    if model.serving == "aggregated":
        if len(missing) < 2:
            raise ValueError("`prefill` and `decode` need `serving: disaggregated`")
        return
    if missing:
        raise ValueError(
            f"`serving: disaggregated` has no `{missing[0]}` workers; give both `prefill` and "
            "`decode`, for example {replicas: 1} each"
        )
    if model.replicas != 1:
        raise ValueError(
            "`replicas` says nothing with `serving: disaggregated`; give `prefill.replicas` and "
            "`decode.replicas`"
        )
    for role in model.roles.values():
        if "disaggregation-mode" in map(normalise_option, role.args):
            raise ValueError(
                "`args.disaggregation-mode` contradicts `serving: disaggregated`, which sets it "
                "for each worker; remove it"
            )


def apply_role(model: ModelSpec, role: RoleSpec) -> ModelSpec:
    """Return the model with the settings of a role."""
    return model.model_copy(
        update={
            "replicas": role.replicas,
            **role.sizes,
            "args": {**model.args, **role.args},
            "env": {**model.env, **role.env},
        }
    )


def name_workers(slug: str, role: WorkerRole) -> str:
    """Return the common part of the names of a model's workers of one role."""
    return f"{slug}-{role}" if role else slug


def name_component(slug: str, role: WorkerRole) -> str:
    """Return the Dynamo component of a model's workers. A slug has no underscore, so no other
    model's component ends like that of a role."""
    return f"{slug}_{role}" if role else slug


def find_role(component: str) -> WorkerRole:
    """Return the role that the name of a component tells, ours or Dynamo's own `prefill`."""
    name = component.rpartition("_")[2]
    return name if name in ("prefill", "decode") else ""  # type: ignore[return-value]


class ModelSpec(SpecPart):
    """One served model: its checkpoint, its engine and the number of its workers."""

    path: str
    """A local checkpoint directory, or a Hugging Face id."""
    name: str = Field(default="", max_length=200)  # it is in the names of logs
    """The served name. The default is the last part of `path`."""
    engine: Literal["vllm", "mocker", "custom"] = "vllm"
    """`mocker` is Dynamo's simulated engine; `custom` runs `module`."""
    module: str = ""
    """The worker of `engine: custom`, run as `python -m MODULE --model … --endpoint …`. It must
    accept the options of dynamo.vllm that say what to serve and where."""
    replicas: int = Field(default=1, ge=1, le=4096)
    """The number of workers."""
    tensor_parallel: int = Field(default=1, ge=1, le=1024)
    """Ranks that share each layer; vLLM's tensor-parallel-size."""
    pipeline_parallel: int = Field(default=1, ge=1, le=1024)
    """Stages that share the layers; vLLM's pipeline-parallel-size."""
    data_parallel: int = Field(default=1, ge=1, le=1024)
    """Engines behind one endpoint; vLLM's data-parallel-size. A worker has
    tensor_parallel x pipeline_parallel x data_parallel ranks, with a GPU each."""
    seed: int = Field(default=0, ge=0)
    """Replica i samples with seed + i: with equal seeds two workers would sample equal tokens."""
    args: RawArgs = Field(default_factory=dict)
    """Options of the engine."""
    env: Environment = Field(default_factory=dict)
    """Environment variables of the workers."""
    runtime_env: RuntimeEnv = Field(default_factory=dict)
    """Ray's runtime environment of the workers, merged over the stack's: `env_vars` are united,
    packages are added, any other key replaces the stack's."""
    serving: Literal["aggregated", "disaggregated"] = "aggregated"
    """`disaggregated`: prefill workers compute the KV of prompts, decode workers fetch it and
    generate."""
    prefill: RoleSpec | None = None
    """The prefill workers, with `serving: disaggregated`."""
    decode: RoleSpec | None = None
    """The decode workers, with `serving: disaggregated`."""

    @model_validator(mode="after")
    def _check(self) -> ModelSpec:
        if not self.name:
            self.name = Path(self.path).name
        if self.engine == "vllm":
            self._take_sizes_from_args()
        if (self.engine == "custom") != bool(self.module):
            raise ValueError("`engine: custom` and `module` need each other")
        check_roles(self)
        return self

    def _take_sizes_from_args(self) -> None:
        """Move parallel sizes from `args` to the fields, so that there is one place to read."""
        given = {name: getattr(self, name) for name in self.model_fields_set}
        sizes = take_parallel_sizes(self.args, given)
        for name, size in sizes.items():
            setattr(self, name, size)
        for role in filter(None, (self.prefill, self.decode)):
            role.take_sizes_from_args()
        read_context_parallel(self.args)  # refuses what is no size

    @property
    def ranks(self) -> int:
        """The number of ranks of one worker."""
        context = read_context_parallel(self.args) if self.engine == "vllm" else 1
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel * context

    @property
    def roles(self) -> dict[WorkerRole, ModelSpec]:
        """The model as the workers of each role run it: with the role's own settings."""
        if self.prefill is None or self.decode is None:
            return {"": self}
        return {
            "prefill": apply_role(self, self.prefill),
            "decode": apply_role(self, self.decode),
        }

    @property
    def can_refit(self) -> bool:
        """Whether the workers have admin routes and weights that can change."""
        return self.engine != "mocker"


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


def slug(name: str) -> str:
    """Turn a model name into a Dynamo component name."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "model"


def check_model_path(path: str, field: str) -> None:
    """Raise SpecError for a `path` that is neither a checkpoint nor a Hugging Face id."""
    try:
        directory = Path(path).expanduser()
        is_directory = directory.is_dir()
    except (OSError, RuntimeError) as error:  # too long, or `~nobody-of-this-name`
        reason = (getattr(error, "strerror", None) or str(error)).rstrip(".")
        raise SpecError(
            f"`{field}`: {path[:100]} cannot be looked up: {reason}.",
            "Give an existing checkpoint directory.",
        ) from error
    if is_directory and not (directory / "config.json").is_file():
        raise SpecError(
            f"`{field}`: {path} has no config.json, so it is not a checkpoint.",
            "Point it at a directory in Hugging Face format.",
        )
    is_hub_id = re.fullmatch(r"[\w.-]+/[\w.-]+", path) and not path.startswith(".")
    if not is_directory and not is_hub_id:
        raise SpecError(
            f"`{field}`: there is no directory {path}.",
            "Give an existing checkpoint directory, or a Hugging Face id like Qwen/Qwen3-0.6B.",
        )
