"""The keys of a NeMo-RL recipe that Rollway reads.

    policy.generation.dynamo_cfg    where the stack is, limits of time, metrics
    policy.generation.vllm_cfg      sizes and options of engines that Rollway starts
    cluster.weight_sync             how weights travel: {method, mx_config}

Keys of NeMo-RL's own managed mode keep their meaning. A key that nobody knows is an error.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field, ValidationError, field_validator, model_validator

from rollway.errors import SpecError, UsageError
from rollway.spec import StackSpec
from rollway.weights.layout import Role
from rollway.yaml_input import SpecPart, describe_error

WHERE = "policy.generation.dynamo_cfg"
WAYS = ("stack", "frontend_url", "dgd_name")
"""The keys that say where the stack is; a recipe has one of them."""
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
Method = Literal["auto", "shm", "cuda_ipc", "files", "delta", "collective", "nixl", "nccl"]
"""The transports of weights; `mx` is another name of `nixl`, and `nccl` is vLLM's own."""

Endpoint = Literal["chat", "completions"]

_ENGINE_OPTIONS = {
    "gpu_memory_utilization": "gpu-memory-utilization",
    "max_model_len": "max-model-len",
    "kv_cache_dtype": "kv-cache-dtype",
    "load_format": "load-format",
    "enforce_eager": "enforce-eager",
    "enable_return_routed_experts": "enable-return-routed-experts",
}
"""Keys of `vllm_cfg` that are options of vLLM."""
NO_REPLAY = (
    "NeMo-RL's Megatron workers replay the routing of its own vLLM generation alone.",
    "Set it to false; vllm_cfg.enable_return_routed_experts puts the experts into each batch.",
)
"""Why `policy.router_replay.enabled` is refused."""
_PRECISIONS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


class WorkerArgs(SpecPart):
    """Options of the workers, as NeMo-RL's managed mode has them."""

    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    exclude_tools_when_tool_choice_none: bool = True
    enable_structural_tag: bool = False
    structural_tag_scope: Literal["auto", "always"] = "auto"
    structural_tag_schema: Literal["auto", "strict"] = "auto"
    custom_jinja_template: str | None = None
    endpoint_types: list[Endpoint] = Field(default=["chat", "completions"], min_length=1)
    extra_cli_args: list[str] = Field(default_factory=list)


class FrontendArgs(SpecPart):
    """Options of the frontend, as NeMo-RL's managed mode has them."""

    tokenizer: Literal["default", "fastokens"] = "default"
    tokenizer_cache: bool = True
    tokenizer_cache_bytes: int = Field(default=1 << 28, gt=0)
    router_mode: str = "kv"
    router_reset_states: bool = True
    extra_cli_args: list[str] = Field(default_factory=list)


OWN_CATALOG = "rollway://"
"""Before the address of a catalog of Rollway's own."""


class MxConfig(SpecPart):
    """`cluster.weight_sync.mx_config`, under the names of NeMo-RL's ModelExpress work."""

    enabled: bool = False
    mx_server_url: str = "modelexpress-server:8001"
    """A ModelExpress server: HOST:PORT; or rollway://HOST:PORT, a catalog of Rollway's."""
    timeout_seconds: float = Field(default=300.0, gt=0)
    same_rank_only: bool = True
    tree_scale_out: bool = True
    """Workers pass a version on to each other."""
    moe_expert_filter: bool = True
    nic_pin: str = "auto"
    retain_latest_k: int = Field(default=2, ge=1)
    register_self_buffers: bool = True
    megatron_role_overrides: dict[str, Role] = Field(default_factory=dict)
    """How ranks share parameters that Rollway does not know, by patterns of Megatron's names."""


class WeightSync(SpecPart):
    """`cluster.weight_sync`: how weights travel from the trainer to the engines."""

    method: Method = "auto"
    shards: bool = False
    """Publish what each rank holds, without gathering; the policy's workers need `ShardPublishing`
    (docs/nemo-rl.md), and the method is shm or nixl."""
    directory: str | None = None
    """For `files` and `delta`: a directory that the trainer and all engines see."""
    bucket_bytes: int | None = Field(default=None, gt=0)
    """The most memory for tensors in transit on a trainer's rank."""
    mx_config: MxConfig = Field(default_factory=MxConfig)

    @field_validator("method", mode="before")
    @classmethod
    def _rename(cls, method: Any) -> Any:
        return "nixl" if method == "mx" else method

    @model_validator(mode="after")
    def _check(self) -> WeightSync:
        if self.method == "nccl" and self.shards:
            raise ValueError("`shards` are sent by shm or nixl; nccl sends whole tensors")
        return self


class DynamoCfg(SpecPart):
    """`policy.generation.dynamo_cfg`."""

    stack: dict[str, Any] | str | None = None
    """A StackSpec, or the path of its file: Rollway starts it, and stops it with the driver."""
    workers: int | None = Field(default=None, ge=1)
    """With `stack`: how many workers serve the model."""
    frontend_url: str | None = None
    """The address of a running Dynamo frontend."""
    dgd_name: str | None = None
    """A DynamoGraphDeployment in this pod's cluster."""
    namespace: str | None = None
    """Its Kubernetes namespace; by default the one of this pod's service account."""
    frontend_port: int = Field(default=8000, ge=1, le=65535)
    rl_url: str | None = None
    """The address of the list of RL workers, if it is not port 8001 of the frontend's host."""
    dyn_system_port: int = Field(default=9090, ge=1, le=65535)
    """The admin port of a deployment's workers, for deployments without a list of RL workers."""
    refit_worker_namespaces: list[str] | None = None
    """The Dynamo namespaces of the workers, for pools behind a global router."""
    engine: Literal["vllm"] = "vllm"
    startup_timeout_s: float = Field(default=900.0, gt=0)
    request_timeout_s: float = Field(default=3600.0, gt=0)
    """How long a rollout may take, with all retries."""
    control_timeout_s: float = Field(default=300.0, gt=0)
    """How long one call to a worker may take."""
    refit_timeout_s: float | None = Field(default=None, gt=0)
    """How long a refit may take."""
    refit_mode: Literal["pause-all", "in-flight"] = "pause-all"
    """`in-flight` cuts running rollouts and continues them on the new weights."""
    worker_args: WorkerArgs = Field(default_factory=WorkerArgs)
    frontend_args: FrontendArgs = Field(default_factory=FrontendArgs)
    metrics_include_prefixes: list[str] | None = None
    """Series of the workers to log: null for a chosen few, an empty list for all."""
    metrics_exclude_prefixes: list[str] | None = None
    weight_sync: WeightSync = Field(default_factory=WeightSync)
    """The same as `cluster.weight_sync`, for loops of one's own."""

    @model_validator(mode="after")
    def _check(self) -> DynamoCfg:
        given = [name for name in WAYS if getattr(self, name) is not None]
        for name in given:
            if getattr(self, name) == "":
                raise ValueError(f"`{name}` is empty; remove it, or say where the stack is")
        if len(given) > 1:
            names = " and ".join(f"`{name}`" for name in given)
            raise ValueError(f"{names} are given together; keep one")
        if not given:
            raise ValueError(
                "nothing says where the stack is; give one of "
                + ", ".join(f"`{name}`" for name in WAYS)
            )
        for name in ("frontend_url", "rl_url"):
            url = getattr(self, name)
            if url and not url.startswith(("http://", "https://")):
                raise ValueError(f"`{name}` is {url!r}, no address; write http://HOST:PORT")
        if self.workers is not None and self.stack is None:
            raise ValueError("`workers` is the size of a `stack`, and there is none")
        return self


class GenerationConfig(SpecPart):
    """`policy.generation` as a whole: what Rollway reads of it, and everything else as it is."""

    model_config = ConfigDict(extra="allow")

    backend: Literal["dynamo"]
    dynamo_cfg: DynamoCfg
    vllm_cfg: dict[str, Any] = Field(default_factory=dict)
    vllm_kwargs: dict[str, Any] = Field(default_factory=dict)
    model_name: str = ""

    @model_validator(mode="after")
    def _check(self) -> GenerationConfig:
        extra = self.model_extra or {}
        for other in ("sglang_cfg", "trtllm_cfg"):
            if extra.get(other):
                raise ValueError(f"`{other}` is of another engine; Dynamo's workers run vLLM here")
        colocated = extra.get("colocated") or {}
        if not isinstance(colocated, Mapping):
            raise ValueError("`colocated` is no mapping; write colocated: {enabled: false}")
        if colocated.get("enabled"):
            raise ValueError(
                "`colocated.enabled` is true; the engines have GPUs of their own, so set it to "
                "false (all of the trainer's GPUs train)"
            )
        if extra.get("refit_transport") is not None:
            raise ValueError(
                "`refit_transport` is set; Rollway moves the weights, by cluster.weight_sync.method"
            )
        sizes = {name: self._read_size(name) for name in ("tensor", "pipeline", "expert")}
        experts = sizes["expert"]
        if experts not in (1, sizes["tensor"]):
            raise ValueError(
                f"`vllm_cfg.expert_parallel_size` is {experts}, and vLLM spreads experts over the "
                "ranks of an engine; set it to 1 or to tensor_parallel_size"
            )
        if len(extra.get("stop_strings") or ()) > 32:
            raise ValueError("`stop_strings` has more than 32 entries, which Dynamo refuses")
        return self

    def _read_size(self, name: str) -> int:
        """Return one of the parallel sizes of an engine; 1 if the recipe has none."""
        key = f"{name}_parallel_size"
        text = str(self.vllm_cfg.get(key) or 1)
        if not text.isdecimal():
            raise ValueError(f"`vllm_cfg.{key}` is {text!r}; give a whole number of ranks")
        return int(text)

    @property
    def engine_world_size(self) -> int:
        """The ranks of one engine. NeMo-RL's `setup` reads it from the config in place of its own
        class's, to count GPUs."""
        return self._read_size("tensor") * self._read_size("pipeline")


def parse_generation(config: Mapping[str, Any]) -> GenerationConfig:
    """Validate `policy.generation`; an error names each wrong key by its path."""
    try:
        return GenerationConfig.model_validate(dict(config))
    except ValidationError as error:
        text = describe_error(error, GenerationConfig).replace("`the stack`: ", "")
        raise SpecError(f"policy.generation: {text}", "docs/nemo-rl.md lists the keys.") from error


def make_stack_fields(config: GenerationConfig) -> dict[str, Any]:
    """Return the fields of the stack that Rollway starts: the recipe's `stack`, completed by
    `vllm_cfg`, `vllm_kwargs`, `worker_args` and `frontend_args` where it says nothing itself."""
    from rollway.yaml_input import read_yaml_file

    dynamo = config.dynamo_cfg
    given = dynamo.stack
    fields = read_yaml_file(Path(given)) if isinstance(given, str) else dict(given or {})
    models = list(fields.get("models") or [{}])
    if len(models) > 1:
        raise UsageError(
            f"{WHERE}.stack has {len(models)} models, and a trainer has one policy.",
            "Keep one model, or start the stack yourself and give `frontend_url`.",
        )
    model = {"path": config.model_name, "name": config.model_name, **models[0]}
    sizes = {
        f"{name}_parallel": int(config.vllm_cfg[f"{name}_parallel_size"])
        for name in ("tensor", "pipeline")
        if config.vllm_cfg.get(f"{name}_parallel_size")
    }
    if dynamo.workers is not None:
        model["replicas"] = dynamo.workers
    args = _list_engine_args(config)
    _add_options(args, dynamo.worker_args.extra_cli_args, f"{WHERE}.worker_args.extra_cli_args")
    model["args"] = {**args, **model.get("args", {})}
    fields["models"] = [{**sizes, **model}]
    router = dict(fields.get("router") or {})
    router.setdefault("mode", dynamo.frontend_args.router_mode)
    fields["router"] = router
    fields.update(_make_frontend(dynamo.frontend_args, fields.get("frontend") or {}))
    fields.setdefault("name", f"nemo-rl-{os.getpid()}")
    fields.setdefault("start_seconds", dynamo.startup_timeout_s)
    timeouts = dict(fields.get("timeouts") or {})
    timeouts.setdefault("pause", dynamo.control_timeout_s)
    fields["timeouts"] = timeouts
    if variables := config.vllm_cfg.get("env_vars"):
        fields["env"] = {**variables, **fields.get("env", {})}
    unknown = sorted(fields.keys() - StackSpec.model_fields.keys())
    if unknown:
        raise SpecError(
            f"{WHERE}.stack.{unknown[0]} is no field of a stack.", "docs/stack.md lists them."
        )
    return fields


def _list_engine_args(config: GenerationConfig) -> dict[str, Any]:
    args: dict[str, Any] = {}
    for key, option in _ENGINE_OPTIONS.items():
        value = config.vllm_cfg.get(key)
        # NeMo-RL's engines start with dummy weights; an engine of ours with its checkpoint.
        if value is not None and (key, value) != ("load_format", "dummy"):
            args[option] = value
    precision = str(config.vllm_cfg.get("precision") or "").lower()
    if precision:
        args["dtype"] = _PRECISIONS.get(precision, precision)
    if int(config.vllm_cfg.get("expert_parallel_size") or 1) > 1:
        args["enable-expert-parallel"] = True
    for key, value in config.vllm_kwargs.items():
        if value not in (None, {}, []):
            args[key.replace("_", "-")] = value
    workers = config.dynamo_cfg.worker_args
    if not workers.exclude_tools_when_tool_choice_none:
        args["exclude-tools-when-tool-choice-none"] = False
    if workers.enable_structural_tag:
        # One option in Dynamo 1.6, three in the version that NeMo-RL pins.
        args["dyn-structural-tag"] = {
            "scope": workers.structural_tag_scope,
            "schema": workers.structural_tag_schema,
        }
    if "endpoint_types" in workers.model_fields_set:
        args["endpoint-types"] = ",".join(workers.endpoint_types)
    if workers.tool_call_parser:
        args["dyn-tool-call-parser"] = workers.tool_call_parser
    if workers.reasoning_parser:
        args["dyn-reasoning-parser"] = workers.reasoning_parser
    if workers.custom_jinja_template:
        args["custom-jinja-template"] = workers.custom_jinja_template
    if config.dynamo_cfg.weight_sync.method == "nccl":
        args["weight-transfer-config"] = {"backend": "nccl"}
    return args


def _make_frontend(options: FrontendArgs, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the stack's `frontend`: what the recipe's `frontend_args` say, under what is given.

    `router_reset_states` has no effect: every start has a namespace of its own in Dynamo."""
    args: dict[str, Any] = {}
    env: dict[str, str] = {}
    if options.tokenizer != "default":
        args["tokenizer"] = options.tokenizer
    if not options.tokenizer_cache:
        env["DYN_TOKENIZER_CACHE"] = "0"
    elif "tokenizer_cache_bytes" in options.model_fields_set:
        env["DYN_TOKENIZER_CACHE_BYTES"] = str(options.tokenizer_cache_bytes)
    _add_options(args, options.extra_cli_args, f"{WHERE}.frontend_args.extra_cli_args")
    own = {
        name: {**values, **given.get(name, {})}
        for name, values in (("args", args), ("env", env))
        if values
    }
    return {"frontend": {**given, **own}} if own else {}


def _add_options(args: dict[str, Any], words: Sequence[str], where: str) -> None:
    """Add options that are written as on a command line: --name, --name value, --name=value."""
    name = ""
    for word in words:
        if word.startswith("--"):
            name, has_value, value = word[2:].partition("=")
            if name.replace("_", "-").removeprefix("no-") in args:
                raise UsageError(f"{where} sets --{name}, which is set already.", "Keep one.")
            name = name.replace("_", "-")
            args[name] = value if has_value else True
            name = "" if has_value else name
        elif name:
            args[name], name = word, ""
        else:
            raise UsageError(
                f"{where} has {word!r}, which belongs to no option.",
                "Write each option as two entries, --name and its value, or as --name=value.",
            )


def find_deployment_url(dynamo: DynamoCfg) -> str:
    """Return the address of a deployment's frontend; raise outside a pod, where its name means
    nothing."""
    assert dynamo.dgd_name is not None
    if "KUBERNETES_SERVICE_HOST" not in os.environ:
        raise UsageError(
            f"{WHERE}.dgd_name is {dynamo.dgd_name}, and this process runs in no pod of Kubernetes,"
            " where that name could be resolved.",
            "Run the driver in a pod of the cluster, or give the frontend's address as "
            "`frontend_url` (for example through kubectl port-forward).",
        )
    namespace = find_namespace(dynamo)
    service = f"{dynamo.dgd_name.lower().replace('.', '-')}-frontend"
    return f"http://{service}.{namespace}.svc.cluster.local:{dynamo.frontend_port}"


def find_namespace(dynamo: DynamoCfg) -> str:
    """Return the Kubernetes namespace of a deployment."""
    if dynamo.namespace:
        return dynamo.namespace
    try:
        return _NAMESPACE_FILE.read_text().strip()
    except OSError:
        warnings.warn(
            f"{WHERE}.namespace is not set and no service account names one: `default` is used",
            stacklevel=2,
        )
        return "default"


def returns_experts(config: Mapping[str, Any]) -> bool:
    """Return whether answers carry the experts of each token; NeMo-RL has two places for that."""
    parts = (config.get("vllm_cfg") or {}, config.get("vllm_kwargs") or {})
    return any(part.get("enable_return_routed_experts") for part in parts)
