"""The description of a stack: one typed model, read from YAML, a mapping or keywords.

    name: demo
    models:
      - path: /models/qwen3-0.6b
        name: policy
        replicas: 2
        args: {max-model-len: 4096}     # vLLM's own names, passed on unchanged
    router: {mode: kv}

Fields are typed where Rollway decides and raw where Dynamo or the engine decides. The preset fills
in the rest (`rollway.stack.preset`); `rollway up --dry-run` shows the result.
"""

from __future__ import annotations

import copy
import ipaddress
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator
from pydantic_core import PydanticSerializationError

from rollway.errors import SpecError
from rollway.model_spec import (
    Environment,
    ModelSpec,
    PlacedWorker,
    RawArgs,
    RuntimeEnv,
    check_model_path,
    merge_runtime_envs,
    name_workers,
    normalise_option,
    slug,
)
from rollway.yaml_input import SpecPart, apply_override, describe_error, read_yaml_file

_NO_TEXT = re.compile("[\0\ud800-\udfff]")
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")


def _make_absolute(path: Path) -> Path:
    """Make a path absolute: the supervisor and later commands run in other directories."""
    try:
        return path.expanduser().absolute()
    except RuntimeError as error:  # `~nobody-of-this-name`
        raise ValueError(f"{error}") from None


def check_stack_name(name: str) -> str:
    """Return the name; raise ValueError if it cannot name a stack, which has a directory."""
    if not _NAME.fullmatch(name):
        raise ValueError("use lower-case letters, digits and inner dashes, at most 40")
    return name


AbsolutePath: TypeAlias = Annotated[Path, AfterValidator(_make_absolute)]
Port: TypeAlias = Annotated[int, Field(ge=0, le=65535)]


class FrontendSpec(SpecPart):
    """Dynamo's HTTP frontend."""

    host: str = "127.0.0.1"
    """The address to listen on; 0.0.0.0 for all."""
    port: Port = 0
    """The port of the OpenAI API; 0 for a free one."""
    rl_port: Port = 0
    """The port of the list of RL workers; 0 for a free one."""
    args: RawArgs = Field(default_factory=dict)
    """Options of `dynamo.frontend`."""
    env: Environment = Field(default_factory=dict)
    """Environment variables of the frontend."""


class RouterSpec(SpecPart):
    """How the frontend picks a worker."""

    mode: Literal[
        "kv", "round-robin", "random", "power-of-two", "direct", "least-loaded",
        "device-aware-weighted",
    ] = "kv"  # fmt: skip
    """Dynamo's `--router-mode`."""
    args: RawArgs = Field(default_factory=dict)
    """Dynamo's `--router-*` options, under their whole names."""


class RestartSpec(SpecPart):
    """What happens when a process of a ready stack dies."""

    enabled: bool = True
    """Whether to restart it."""
    backoff_seconds: float = Field(default=1.0, gt=0)
    """The wait before the first restart. It doubles with every further failure."""
    max_backoff_seconds: float = Field(default=30.0, gt=0)
    """The longest wait."""
    max_failures: int = Field(default=5, ge=1)
    """Rollway gives up after this many deaths in a row without a stable minute in between."""


class JoinSpec(SpecPart):
    """A running stack, on this machine or another, that the workers of this one join. The
    `join_spec` of that stack has all these fields."""

    namespace: str = Field(min_length=1)
    """Its Dynamo namespace."""
    frontend: str = Field(pattern="^http")
    """The address of its frontend."""
    rl: str = Field(pattern="^http")
    """The address of its list of RL workers."""
    discovery_dir: Path | None = None
    """Its directory, with `discovery: file`. It works on the same machine only: Dynamo watches it
    with inotify, which does not see writes of another machine."""
    secret: str = Field(default="", repr=False)
    """The secret that signs its offers of weights. The default is $ROLLWAY_WEIGHTS_SECRET."""


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


class AdminTimeouts(SpecPart):
    """Seconds that one attempt of a call to a worker may take."""

    probe: float = Field(default=10.0, gt=0)
    """For calls that change nothing."""
    pause: float = Field(default=300.0, gt=0)
    """For a pause. Refits that wait for running requests wait this long, too."""
    update: float = Field(default=720.0, gt=0)
    """For loading weights."""


class LogSpec(SpecPart):
    """How much of a process's log stays on disk: `keep` + 1 files of about `max_mb` MB each."""

    max_mb: float = Field(default=16.0, ge=0.001, le=1e6)
    """The size at which a log is rotated."""
    keep: int = Field(default=3, ge=1, le=1000)
    """The number of files with older lines; NAME.log.1 is the newest of them."""


class ObserveSpec(SpecPart):
    """What a stack records about itself. `observe: off` records nothing."""

    record: bool = True
    """Whether to record."""
    interval_seconds: float = Field(default=2.0, ge=0.1, le=3600)
    """How often the metrics of the workers and of the frontend are sampled."""
    directory: AbsolutePath | None = None
    """Where runs are recorded, one directory each. The default is `runs` below Rollway's home."""
    keep_runs: int | None = Field(default=None, ge=0, le=10_000)
    """How many ended runs of this stack keep their record. The default is the stack's
    `keep_runs`."""
    max_mb: float = Field(default=256.0, ge=0.1, le=1e6)
    """The size of the samples of one process, beyond which the oldest are thinned."""
    include: list[str] = Field(default_factory=list)
    """Beginnings of names of families to sample besides those of docs/metrics.md."""
    exclude: list[str] = Field(default_factory=list)
    """Beginnings of names of families not to sample."""
    part_of: str = Field(default="", pattern="^([a-z0-9-]+/[0-9a-f]{16})?$")
    """The stack and the run that this stack is one node's part of. A launcher fills it in."""


def _read_switch(value: Any) -> Any:
    """Read `observe: off` and `on`, which YAML takes for false and true."""
    if value in (False, "off"):
        return {"record": False}
    return {} if value in (True, "on") else value


class StackSpec(SpecPart):
    """A whole stack: models, frontend, router, planes, ports, logs.

    docs/stack.md explains the fields with examples.

    Example:
        spec = rollway.StackSpec(name="trainer", models=[{"path": "/models/policy", "replicas": 2}])
    """

    name: Annotated[str, AfterValidator(check_stack_name)] = "default"
    """The name of the stack, by which all commands find it."""
    preset: Literal["rl", "plain"] = "rl"
    """`rl` adds Rollway's defaults for RL; `plain` leaves Dynamo's."""
    models: list[ModelSpec] = Field(min_length=1)
    """The models to serve."""
    frontend: FrontendSpec = Field(default_factory=FrontendSpec)
    """The HTTP frontend."""
    router: RouterSpec = Field(default_factory=RouterSpec)
    """How requests are distributed to workers."""
    migration_limit: int | None = Field(default=None, ge=0)
    """How often a request may move to another worker when its worker dies. The default is the
    preset's."""
    discovery: Literal["file", "etcd"] = "file"
    """How processes find each other; several machines need `etcd`."""
    etcd_endpoints: str | None = None
    """A running etcd. By default Rollway starts one if it needs one."""
    event_plane: Literal["zmq", "nats"] = "zmq"
    """What carries KV events and load."""
    request_plane: Literal["tcp", "nats"] = "tcp"
    """What carries requests and answers."""
    nats_server: str | None = None
    """A running NATS, as nats://host:port. By default Rollway starts one if it needs one."""
    admin_host: str = "127.0.0.1"
    """The address on which workers serve their admin (system) port and receive requests, and on
    which etcd and NATS listen. Admin calls are signed (`admin_orders`); the others have no
    authentication."""
    admin_orders: Literal["signed", "open"] = "signed"
    """`signed`: workers obey admin calls of this stack's own processes only. `open`: of anyone who
    reaches the port, for tools that call Dynamo's admin routes themselves."""
    launcher: Literal["local", "ray"] = "local"
    """`ray` runs the stack on a Ray cluster, one supervisor per node."""
    ray: RaySpec = Field(default_factory=RaySpec)
    """How `launcher: ray` uses the cluster."""
    runtime_env: RuntimeEnv = Field(default_factory=dict)
    """Ray's runtime environment of all workers."""
    placed: list[PlacedWorker] | None = None
    """The workers of this machine. A launcher fills it in; by default all workers run here."""
    join: JoinSpec | None = None
    """A stack to join. This one then has workers only, no frontend and no services."""
    python: str | None = None
    """The interpreter whose environment has Dynamo and the engine. The default is this one."""
    checkpoint_roots: list[AbsolutePath] = Field(default_factory=list)
    """Refits accept checkpoints only from below these directories; from anywhere if empty."""
    log_dir: AbsolutePath | None = None
    """The directory of the logs. The default is below the stack's own directory."""
    logs: LogSpec = Field(default_factory=LogSpec)
    """How much of each log stays."""
    keep_runs: int = Field(default=5, ge=0, le=10_000)
    """How many ended runs keep their logs; with 0 a run that ended well leaves nothing."""
    observe: Annotated[ObserveSpec, BeforeValidator(_read_switch)] = Field(
        default_factory=ObserveSpec
    )
    """What is recorded about the stack; `off` for nothing."""
    env: Environment = Field(default_factory=dict)
    """Environment variables of all processes."""
    start_seconds: float = Field(default=900, gt=0, le=7 * 86400)
    """How long a start may take."""
    stop_seconds: float = Field(default=20, gt=0, le=86400)
    """The wait between SIGTERM and SIGKILL."""
    restart: RestartSpec = Field(default_factory=RestartSpec)
    """What happens when a process dies."""
    timeouts: AdminTimeouts = Field(default_factory=AdminTimeouts)
    """How long calls to workers may take."""
    warmup: bool = True
    """Whether every worker answers two requests before the stack is ready."""

    @model_validator(mode="after")
    def _check(self) -> StackSpec:
        names = [model.name for model in self.models]
        duplicates = sorted({name for name in names if names.count(name) > 1})
        if duplicates:
            raise ValueError(
                f"two models are served under one name ({', '.join(duplicates)}); "
                "give each a `name`"
            )
        prefixes = [name_workers(slug(m.name), role) for m in self.models for role in m.roles]
        if len(set(prefixes)) < len(prefixes):
            raise ValueError(
                "two model names differ only in signs that an endpoint name cannot hold; "
                "choose names with different letters or digits"
            )
        if self.etcd_endpoints and self.discovery != "etcd":
            raise ValueError("`etcd_endpoints` is given but `discovery` is not `etcd`")
        if self.nats_server and "nats" not in (self.event_plane, self.request_plane):
            raise ValueError("`nats_server` is given but no plane is `nats`")
        if self.join is not None:
            _check_join(self, self.join)
        _check_launcher(self)
        _check_router(self)
        return self

    @property
    def needs_etcd(self) -> bool:
        """Whether Rollway must start an etcd."""
        return self.discovery == "etcd" and self.etcd_endpoints is None

    @property
    def needs_nats(self) -> bool:
        """Whether Rollway must start a NATS server."""
        return "nats" in (self.event_plane, self.request_plane) and self.nats_server is None


def _check_join(spec: StackSpec, join: JoinSpec) -> None:
    if spec.discovery == "file" and join.discovery_dir is None:
        raise ValueError("`join` with `discovery: file` needs `join.discovery_dir`")
    if spec.needs_etcd:
        raise ValueError("`join` with `discovery: etcd` needs the other stack's `etcd_endpoints`")
    if spec.needs_nats:
        raise ValueError("`join` with a plane on `nats` needs the other stack's `nats_server`")
    if any(model.engine == "mocker" for model in spec.models):
        raise ValueError("mockers cannot `join`: no listing shows which stack a mocker belongs to")
    if is_loopback(spec.admin_host) and not is_loopback(urlsplit(join.frontend).hostname or ""):
        raise ValueError(
            f"`admin_host` is {spec.admin_host}, where {join.frontend} cannot reach the workers; "
            "give an address of this machine in its network"
        )


def _check_launcher(spec: StackSpec) -> None:
    """Check what only a launcher reads or fills in."""
    for model in spec.models:
        try:
            merge_runtime_envs(spec.runtime_env, model.runtime_env)
        except ValueError as error:
            raise ValueError(
                f"the runtime_env of `{model.name}` over the stack's: {error}"
            ) from None
    if spec.launcher == "ray" and (spec.join is not None or spec.placed is not None):
        raise ValueError(
            "`launcher: ray` fills in `join` and `placed` itself; remove them from the stack"
        )
    roles = {model.name: model.roles for model in spec.models}
    seen = set()
    for worker in spec.placed or ():
        if worker.model not in roles:
            raise ValueError(f"`placed` names the model `{worker.model}`, which is not served")
        if worker.role not in roles[worker.model]:
            known = " and ".join(f"`{role}`" for role in roles[worker.model] if role)
            raise ValueError(
                f"`placed` has a worker of `{worker.model}` in the role `{worker.role}`; "
                f"the roles of this model are {known or 'not apart'}"
            )
        key = (worker.model, worker.role, worker.replica, worker.node_rank)
        if key in seen:
            raise ValueError(
                f"`placed` has replica {worker.replica} of `{worker.model}` twice; keep one"
            )
        seen.add(key)


def _check_router(spec: StackSpec) -> None:
    """Check that a router which was told to use KV events can get them from every model.

    By default the router uses events where there are any, so only an explicit wish is checked."""
    wishes = {
        f"{part}.args.{name}": value
        for part, args in (("router", spec.router.args), ("frontend", spec.frontend.args))
        for name, value in args.items()
        if normalise_option(name) == "router-kv-events"
    }
    for field, value in wishes.items():
        if value is not True:
            continue
        if spec.router.mode != "kv":
            raise ValueError(
                f"`{field}` is true, but `router.mode` is `{spec.router.mode}`, which uses no "
                "events; set `router.mode: kv`, or remove the option"
            )
        for model in spec.models:
            # A decode worker gives none: the router looks for prefixes at prefill workers.
            roles = (settings for role, settings in model.roles.items() if role != "decode")
            reasons = (_explain_missing_events(settings.args) for settings in roles)
            reason = next(filter(None, reasons), None)
            if model.engine == "vllm" and reason:
                raise ValueError(
                    f"`{field}` is true, but workers of `{model.name}` give no KV events: "
                    f"{reason}; change one of the two"
                )


def _explain_missing_events(args: Mapping[str, Any]) -> str | None:
    """Return why a vLLM worker with these options publishes no KV events; None if it does."""
    options = {normalise_option(name): value for name, value in args.items()}
    if options.get("enable-prefix-caching") is False or options.get("no-enable-prefix-caching"):
        return "`args.enable-prefix-caching` is false"
    config = options.get("kv-events-config")
    if isinstance(config, str):
        try:
            config = json.loads(config)
        except ValueError:
            return None  # vLLM says what is wrong with it
    if isinstance(config, dict) and not config.get("enable_kv_cache_events"):
        return "`args.kv-events-config` does not set `enable_kv_cache_events`"
    return None


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a host. Names that begin with 127. do not count."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def load_spec(
    source: StackSpec | Mapping[str, Any] | str | Path | None = None,
    overrides: Sequence[str] = (),
    **fields: Any,
) -> StackSpec:
    """Read a spec from a YAML file, a mapping or keywords, then apply overrides.

    Args:
        source: a YAML file, a mapping, or a `StackSpec`; None when `fields` say everything.
        overrides: changes of single fields, for example "models.0.replicas=4".
        **fields: fields of the spec, for example `name="trainer"`.

    Returns:
        The spec, validated.

    Raises:
        SpecError: a field is unknown or wrong; the message has its path.

    Example:
        spec = rollway.load_spec("stack.yaml", ["router.mode=kv"])
    """
    if isinstance(source, StackSpec):
        data: dict[str, Any] = source.model_dump(mode="json", exclude_unset=True)
    elif isinstance(source, Mapping):
        data = copy.deepcopy(dict(source))
    else:
        data = {} if source is None else read_yaml_file(Path(source))
    data.update(fields)
    for override in overrides:
        apply_override(data, override)
    return parse_spec(data)


def parse_spec(data: Mapping[str, Any], *, on_this_machine: bool = True) -> StackSpec:
    """Validate plain data; a SpecError names each wrong field by its path. Checkpoint directories
    are looked up if the stack will run here."""
    models = data.get("models")
    if not isinstance(models, list) or not any(
        isinstance(model, dict) and model.get("path") for model in models
    ):
        raise SpecError(
            "The stack names no model.",
            "Give a YAML file with `models: [{path: …}]`, or `--model PATH`.",
        )
    try:
        spec = StackSpec.model_validate(data)
        if path := _find_lossy(spec.model_dump(), ""):
            what = "a NUL, half of a character, or a number that is not finite"
            raise SpecError(f"`{path}` holds {what}.", "Correct it.")
        spec.model_dump_json()  # as the supervisor receives it
    except ValidationError as error:
        raise SpecError(describe_error(error, StackSpec)) from error
    except (PydanticSerializationError, RecursionError) as error:
        raise SpecError(
            f"The stack holds a value that is not plain: {error}.",
            "Use text, numbers, true, false, null, lists and mappings.",
        ) from error
    for index, model in enumerate(spec.models):
        is_elsewhere = spec.launcher == "ray" or not on_this_machine
        if is_elsewhere and Path(model.path).is_absolute():
            continue  # a directory of the nodes, where the launcher looks for it
        check_model_path(model.path, f"models.{index}.path")
    return _locate_paths(spec) if spec.launcher == "ray" else spec


def _find_lossy(value: Any, path: str) -> str | None:
    """Return where data has a value that JSON or a process would not take as it is; None if
    nowhere. The place of a key is its mapping's."""
    items = value if isinstance(value, list | tuple) else ()
    for key, item in value.items() if isinstance(value, dict) else enumerate(items):
        place = _find_lossy(key, path) or _find_lossy(item, f"{path}.{key}".lstrip("."))
        if place:
            return place
    is_text = isinstance(value, str | Path)
    is_lossy = is_text and _NO_TEXT.search(str(value))
    return path if is_lossy or (isinstance(value, float) and not math.isfinite(value)) else None


def _locate_paths(spec: StackSpec) -> StackSpec:
    """Return the spec with absolute paths: processes of Ray have working directories of their own.
    What is no directory here is a Hugging Face id, and a program without a slash is looked for."""

    def locate(path: str) -> str:
        # Without `resolve`: the link to an interpreter is what makes it a virtual environment's.
        try:
            return str(_make_absolute(Path(path)))
        except ValueError:
            return path  # whoever looks for it says that it is not there

    def locate_in(settings: Mapping[str, Any]) -> dict[str, Any]:
        located = dict(settings)
        python, directory = settings.get("py_executable"), settings.get("working_dir")
        if isinstance(python, str) and "/" in python and " " not in python:
            located["py_executable"] = locate(python)
        if directory and "://" not in directory:
            located["working_dir"] = locate(directory)
        return located

    models = []
    for model in spec.models:
        is_directory = Path(model.path).expanduser().is_dir()
        path = locate(model.path) if is_directory else model.path
        own = {"path": path, "runtime_env": locate_in(model.runtime_env)}
        models.append(model.model_copy(update=own))
    python = locate(spec.python) if spec.python and "/" in spec.python else spec.python
    fields = {"models": models, "python": python, "runtime_env": locate_in(spec.runtime_env)}
    return spec.model_copy(update=fields)
