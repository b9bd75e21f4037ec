"""The description of one served model: its checkpoint, its engine, its workers.

A model is served by `replicas` equal workers, or by prefill and decode workers, whose settings
stand over the model's:

    serving: disaggregated
    prefill: {replicas: 2, tensor_parallel: 2}
    decode: {replicas: 4, args: {max-num-seqs: 256}}

A worker has one rank or several (`rollway.ranks`).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, Field, model_validator

from rollway.errors import SpecError
from rollway.plain import SpecPart
from rollway.ranks import RuntimeEnv, normalise_option, read_context_parallel, take_parallel_sizes

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
