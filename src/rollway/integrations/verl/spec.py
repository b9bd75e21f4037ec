"""The user's options, and verl's rollout config as the spec of a stack: one worker per replica.

Options are under `actor_rollout_ref.rollout.engine_kwargs.dynamo`.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rollway.errors import UsageError
from rollway.model_spec import RawArgs, slug
from rollway.spec import StackSpec
from rollway.stack.commands import WORKER_EXTENSION
from rollway.weights.checkpoint import read_headers

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
    sleep_level: Literal[1, 2] = 1
    """1: engines keep the weights in the host's memory while the trainer trains. 2: they forget
    them, and every update brings them back; not with adapters."""
    etcd_endpoints: str | None = None
    """A running etcd for a pool on several nodes; without it Rollway starts one."""
    log_dir: Path | None = None
    """Each process writes its log there, in a directory for each pool."""
    metrics_dir: Path | None = None
    """Rollway writes the addresses of all metrics there, in a file for each pool, for
    Prometheus."""
    request_log: Path | None = None
    """A file that gets a JSON line for each answer; `requests.RequestRecord` has the fields."""
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


# --- the spec of a stack -------------------------------------------------------------------------


_ENGINE_FIELDS = (
    *("gpu_memory_utilization", "max_model_len", "max_num_batched_tokens", "max_num_seqs", "dtype"),
    *("enforce_eager", "enable_chunked_prefill", "enable_prefix_caching", "logprobs_mode"),
    "quantization",
)
"""Fields of verl's RolloutConfig that are options of vLLM too, with dashes."""
_UNSUPPORTED = {
    "pipeline_model_parallel_size": "pipeline parallelism",
    "data_parallel_size": "data parallelism inside a replica",
    "expert_parallel_size": "expert parallelism inside a replica",
}
ADAPTERS_KEPT = 2
"""Versions of the policy's adapter in an engine: the newest, and one that requests still use."""
_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The values of vLLM's `max-lora-rank`; adapters of lower rank fit too."""


def make_stack_spec(
    rollout: Any,
    model: Any,
    options: Options,
    *,
    pool: str,
    replicas: int,
    has_gpus: bool,
    is_spread: bool = False,
) -> StackSpec:
    """Make the spec of a pool's stack, which runs where verl has placed the replicas.

    `rollout` and `model` are verl's RolloutConfig and HFModelConfig; `is_spread` says whether the
    replicas are on several nodes."""
    _refuse_unsupported(rollout)
    adapter_env = {"DYN_LORA_ENABLED": "true"} if read_lora_rank(model) else {}
    served: dict[str, Any] = {
        "path": get_model_path(model),
        "replicas": replicas,
        "tensor_parallel": int(rollout.tensor_model_parallel_size),
        "seed": int(getattr(rollout, "seed", 0) or 0),
        "args": _make_engine_args(rollout, model, options, has_gpu=has_gpus),
        "env": {**adapter_env, **options.engine_env},
    }
    if options.served_model_name:
        served["name"] = options.served_model_name
    fields: dict[str, Any] = {
        "name": f"verl-{slug(pool)[:20].rstrip('-')}-{secrets.token_hex(4)}",
        "models": [served],
        "router": {"mode": options.router_mode, "args": options.router_args},
        "frontend": {
            "port": options.frontend_port,
            "rl_port": options.rl_port,
            "args": options.frontend_args,
        },
        "python": options.python,
        "start_seconds": options.start_seconds,
        "restart": {"enabled": options.restart},
        "log_dir": options.log_dir and options.log_dir / pool,
        "launcher": "ray",
        # verl's workers hold the GPUs. A lost node is an error, not a slower run that nobody
        # notices for days.
        "ray": {"cpus": 0, "gpus": 0, "on_node_lost": "fail"},
    }
    if is_spread:
        fields |= {"discovery": "etcd", "etcd_endpoints": options.etcd_endpoints}
    return StackSpec.model_validate(fields)


def _refuse_unsupported(rollout: Any) -> None:
    for field, feature in _UNSUPPORTED.items():
        if int(getattr(rollout, field, 1) or 1) > 1:
            raise UsageError(
                f"rollout.{field} is {getattr(rollout, field)}, and rollout.name=dynamo does not "
                f"support {feature}.",
                f"Leave rollout.{field} at 1; Dynamo's router distributes requests to replicas.",
            )


def _make_engine_args(rollout: Any, model: Any, options: Options, *, has_gpu: bool) -> RawArgs:
    args: RawArgs = {}
    for field in _ENGINE_FIELDS:
        # Without a GPU, the stack's CPU profile sets these two.
        is_for_gpu = field in ("gpu_memory_utilization", "enforce_eager")
        value = getattr(rollout, field, None)
        if value is not None and (has_gpu or not is_for_gpu):
            args[field.replace("_", "-")] = value
    length = getattr(rollout, "max_model_len", None)
    args["max-model-len"] = int(length or rollout.prompt_length + rollout.response_length)
    if getattr(model, "trust_remote_code", False):
        args["trust-remote-code"] = True
    if should_free_memory(rollout, options):
        args["enable-sleep-mode"] = True
    if getattr(rollout, "enable_rollout_routing_replay", False):
        args["enable-return-routed-experts"] = True
    if rank := read_lora_rank(model):
        # A rank beyond the list is passed on, so that vLLM refuses it with its own message.
        max_rank = next((value for value in _LORA_RANKS if value >= rank), rank)
        args |= {"enable-lora": True, "max-lora-rank": max_rank, "max-cpu-loras": ADAPTERS_KEPT + 1}
    if options.kv_offload is not None:
        args["kv-transfer-config"] = options.kv_offload
    if options.python is not None:
        args["worker-extension-cls"] = WORKER_EXTENSION  # that environment has Rollway too
    return {**args, **options.engine_args}


def get_model_path(model: Any) -> str:
    return str(getattr(model, "local_path", None) or model.path)


def find_tied_names(model: Path) -> frozenset[str]:
    """Return the parameters that a model's files leave out: a head that is the embedding."""
    config = model / "config.json"
    if not config.is_file() or not json.loads(config.read_text()).get("tie_word_embeddings"):
        return frozenset()
    return frozenset({"lm_head.weight"} - read_headers(model).keys())


def read_lora_rank(model: Any) -> int:
    """Return the rank of the adapters that verl sends; 0 if there are none or verl merges them."""
    lora = getattr(model, "lora", None) or {}
    if lora.get("merge", False):
        return 0
    return int(lora.get("rank", 0) or getattr(model, "lora_rank", 0) or 0)


def should_free_memory(rollout: Any, options: Options) -> bool:
    """Return whether engines release their memory while the trainer trains."""
    if options.free_engine is None:
        return bool(rollout.free_cache_engine)
    return options.free_engine
