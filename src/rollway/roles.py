"""The fields of a spec for disaggregated serving: prefill workers and decode workers.

    serving: disaggregated
    prefill: {replicas: 2, tensor_parallel: 2}
    decode: {replicas: 4, args: {max-num-seqs: 256}}

A role's settings stand over the model's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, Field

from rollway.plain import SpecPart
from rollway.ranks import normalise_option, take_parallel_sizes

if TYPE_CHECKING:
    from rollway.model_spec import ModelSpec

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
