"""The user's options for verl, under `actor_rollout_ref.rollout.engine_kwargs.dynamo`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rollway.config import RawArgs
from rollway.errors import UsageError

WHERE = "actor_rollout_ref.rollout.engine_kwargs.dynamo"
WHERE_SEPARATE = "actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.rollway"
Affinity = Literal["group", "trajectory", "off"]
"""What stays on one worker: all rollouts of a prompt, the turns of one rollout, or nothing."""
Transport = Literal[
    "auto", "shm", "cuda_ipc", "files", "delta", "collective", "nixl", "verl_buckets"
]


class WeightOptions(BaseModel):
    """Options for how engines receive new weights."""

    model_config = ConfigDict(extra="forbid", coerce_numbers_to_str=True)

    weights: Transport = "auto"
    """`auto`: `cuda_ipc` from a GPU, `shm` from a CPU; to other machines `files` if there is a
    `weights_dir`, else `nixl`."""
    weights_dir: Path | None = None
    """For `files` and `delta`: a directory that trainer and engines see."""


class Options(WeightOptions):
    """All options of the rollout. Each has a default; `docs/verl.md` explains them."""

    router_mode: str = "kv"
    router_args: RawArgs = Field(default_factory=dict)
    """Dynamo's own `--router-*` options, without the dashes."""
    affinity: Affinity = "group"
    frontend_port: int = Field(default=0, ge=0, le=65535)
    rl_port: int = Field(default=0, ge=0, le=65535)
    served_model_name: str = ""
    """If empty, the last part of the model's path."""
    engine_args: RawArgs = Field(default_factory=dict)
    """vLLM's own options, without the dashes; they override verl's config."""
    engine_env: dict[str, str] = Field(default_factory=dict)
    frontend_args: RawArgs = Field(default_factory=dict)
    kv_offload: RawArgs | None = None
    """vLLM's `kv-transfer-config`, unchanged."""
    python: str | None = None
    """The interpreter that has Dynamo, vLLM and Rollway, if it is not the trainer's."""
    request_timeout_s: float = Field(default=3600.0, gt=0)
    start_seconds: float = Field(default=900.0, gt=0)
    abort_seconds: float = Field(default=60.0, gt=0)
    """How long an abort may take before it is an error."""
    free_engine: bool | None = None
    """Whether engines release their memory while the trainer trains; None:
    `rollout.free_cache_engine` decides."""
    etcd_endpoints: str | None = None
    """A running etcd for a pool on several nodes; without it Rollway starts one."""
    log_dir: Path | None = None
    """Each process writes its log there, in a directory for each pool."""
    metrics_dir: Path | None = None
    """Rollway writes the addresses of all metrics there, in a file for each pool, for
    Prometheus."""
    request_log: Path | None = None
    """A file that gets a JSON line for each answer; `request_log.RequestRecord` has the fields."""
    restart: bool = True
    """Whether an engine that dies is restarted, or ends the run."""
    fallback: Literal["vllm"] | None = None
    """`vllm`: if the stack does not start, use verl's own vLLM rollout; None: raise an error."""


Kind = TypeVar("Kind", bound=WeightOptions)


def read_options(engine_kwargs: Mapping[str, Any] | None) -> Options:
    """Read the options from a rollout's `engine_kwargs`."""
    return parse_options(Options, (engine_kwargs or {}).get("dynamo") or {}, WHERE)


def parse_options(kind: type[Kind], fields: Mapping[str, Any], where: str) -> Kind:
    """Validate options; `where` is the config key that errors name."""
    try:
        options = kind.model_validate(dict(fields))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        is_unknown = first["type"] == "extra_forbidden"
        message = "there is no such option" if is_unknown else str(first["msg"])
        names = ", ".join(sorted(kind.model_fields))
        raise UsageError(f"{where}.{key}: {message}.", f"Options are: {names}.") from error
    if options.weights in ("files", "delta") and options.weights_dir is None:
        raise UsageError(
            f"{where}.weights={options.weights} needs a directory.",
            f"Set {where}.weights_dir to one that the trainer and the engines see.",
        )
    return options
