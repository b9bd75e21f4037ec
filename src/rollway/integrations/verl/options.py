"""What a verl user can say, under `actor_rollout_ref.rollout.engine_kwargs.dynamo`."""

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
"""What stays on one worker: all rollouts of a prompt, the turns of one, or nothing."""
Transport = Literal[
    "auto", "shm", "cuda_ipc", "files", "delta", "collective", "nixl", "verl_buckets"
]


class WeightOptions(BaseModel):
    """How new weights go to the engines."""

    model_config = ConfigDict(extra="forbid", coerce_numbers_to_str=True)

    weights: Transport = "auto"
    """`auto`: `cuda_ipc` from a GPU, `shm` from a CPU; to other machines `files` if there is a
    `weights_dir`, else `nixl`."""
    weights_dir: Path | None = None
    """For `files` and `delta`: a directory that trainer and engines see."""


class Options(WeightOptions):
    """Everything has a default; `docs/verl.md` explains each."""

    router_mode: str = "kv"
    router_args: RawArgs = Field(default_factory=dict)
    """Dynamo's own `--router-*` options, without the dashes."""
    affinity: Affinity = "group"
    frontend_port: int = Field(default=0, ge=0, le=65535)
    rl_port: int = Field(default=0, ge=0, le=65535)
    served_model_name: str = ""
    """The last part of the model's path when empty."""
    engine_args: RawArgs = Field(default_factory=dict)
    """vLLM's own options, without the dashes; they outweigh what verl's config says."""
    engine_env: dict[str, str] = Field(default_factory=dict)
    frontend_args: RawArgs = Field(default_factory=dict)
    kv_offload: RawArgs | None = None
    """vLLM's `kv-transfer-config`, as it is."""
    python: str | None = None
    """The interpreter that has Dynamo, vLLM and Rollway, where it is not the trainer's."""
    request_timeout_s: float = Field(default=3600.0, gt=0)
    start_seconds: float = Field(default=900.0, gt=0)
    abort_seconds: float = Field(default=60.0, gt=0)
    """How long an abort may take before it is an error."""
    free_engine: bool | None = None
    """Whether engines give their memory back while the trainer trains; as
    `rollout.free_cache_engine` says, when not given."""
    etcd_endpoints: str | None = None
    """A running etcd, for a pool on several nodes; without it Rollway starts one."""
    log_dir: Path | None = None
    """Where each process writes its log, in a directory for each pool."""
    metrics_dir: Path | None = None
    """Where the addresses of all metrics are written, in a file for each pool, for Prometheus."""
    request_log: Path | None = None
    """A file to which a line is added for each answer: `traffic.Answer`."""
    restart: bool = True
    """Whether an engine that dies is started anew, or ends the run."""
    fallback: Literal["vllm"] | None = None
    """`vllm`: where the stack does not start, verl's own vLLM rollout; else that is an error."""


Kind = TypeVar("Kind", bound=WeightOptions)


def read_options(engine_kwargs: Mapping[str, Any] | None) -> Options:
    """Of a rollout's `engine_kwargs`."""
    return checked(Options, (engine_kwargs or {}).get("dynamo") or {}, WHERE)


def checked(kind: type[Kind], said: Mapping[str, Any], where: str) -> Kind:
    """Options of a kind, from what the user wrote at a place, which every complaint names."""
    try:
        options = kind.model_validate(dict(said))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        known = ", ".join(sorted(kind.model_fields))
        unknown = first["type"] == "extra_forbidden"
        words = "there is no such option" if unknown else str(first["msg"])
        raise UsageError(f"{where}.{key}: {words}.", f"Options are: {known}.") from error
    if options.weights in ("files", "delta") and options.weights_dir is None:
        raise UsageError(
            f"{where}.weights={options.weights} needs a directory.",
            f"Give {where}.weights_dir, which the trainer and the engines see.",
        )
    return options
