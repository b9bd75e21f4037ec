"""What a user can say about a stack: one typed model, read from YAML, a dict or keywords.

    name: demo
    models:
      - path: /models/qwen3-0.6b
        name: policy
        replicas: 2
        args: {max-model-len: 4096}     # vLLM's own names, passed through untouched
    router: {mode: kv}

Typed where Rollway decides, raw where Dynamo or the engine decides. What is not said is filled in
by the preset (`rollway.stack.preset`); `rollway up --dry-run` shows the outcome.
"""

from __future__ import annotations

import copy
import difflib
import ipaddress
import re
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticSerializationError

from rollway.errors import SpecError, UsageError
from rollway.plain import check_plain, read_yaml

RawArgs: TypeAlias = dict[str, Any]
"""Options of another program under its own names, without the dashes.

`true` gives `--name`, `false` gives `--no-name`, `null` removes a preset's value, a mapping is
passed as JSON, a list as several values."""

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")
_PORT = Field(default=0, ge=0, le=65535)
LONGEST_STOP_SECONDS = 86400.0
_LARGEST_FILE = 256 << 10  # bytes


def _check_variables(value: dict[str, str]) -> dict[str, str]:
    for name in value:
        if not name or "=" in name:
            raise ValueError(f"{name[:60]!r} cannot be the name of an environment variable")
    return value


Environment: TypeAlias = Annotated[dict[str, str], AfterValidator(_check_variables)]


class _Part(BaseModel):
    model_config = ConfigDict(
        extra="forbid", validate_default=True, coerce_numbers_to_str=True, allow_inf_nan=False
    )


class ModelSpec(_Part):
    """One served model: its checkpoint, its engine and how many workers serve it."""

    path: str
    """A local checkpoint directory, or a Hugging Face id."""
    name: str = ""
    """The served name; the last part of `path` when empty."""
    engine: Literal["vllm", "mocker", "custom"] = "vllm"
    module: str = ""
    """With `engine: custom`, what runs as a worker: `python -m MODULE --model … --endpoint …`. It
    takes the options of dynamo.vllm that say what to serve and where."""
    replicas: int = Field(default=1, ge=1, le=4096)
    tensor_parallel: int = Field(default=1, ge=1, le=1024)
    seed: int = Field(default=0, ge=0)
    """Replica i samples with seed + i: equal seeds would make two workers sample equal tokens."""
    args: RawArgs = Field(default_factory=dict)
    env: Environment = Field(default_factory=dict)

    @model_validator(mode="after")
    def _consistent(self) -> ModelSpec:
        if not self.name:
            self.name = Path(self.path).name
        if (self.engine == "custom") != bool(self.module):
            raise ValueError("`engine: custom` and `module` go together")
        return self

    @property
    def takes_refits(self) -> bool:
        """Whether its workers have admin routes and weights that can change."""
        return self.engine != "mocker"


class FrontendSpec(_Part):
    """Dynamo's HTTP frontend. Port 0 means a free one."""

    host: str = "127.0.0.1"
    port: int = _PORT
    rl_port: int = _PORT
    """Port of the RL worker listing; every stack has its own."""
    args: RawArgs = Field(default_factory=dict)
    env: Environment = Field(default_factory=dict)


class RouterSpec(_Part):
    """How the frontend picks a worker. `args` are Dynamo's own `--router-*` names."""

    mode: Literal[
        "kv", "round-robin", "random", "power-of-two", "direct", "least-loaded",
        "device-aware-weighted",
    ] = "kv"  # fmt: skip
    args: RawArgs = Field(default_factory=dict)


class RestartSpec(_Part):
    """What happens when a process of a ready stack dies."""

    enabled: bool = True
    backoff_seconds: float = Field(default=1.0, gt=0)
    max_backoff_seconds: float = Field(default=30.0, gt=0)
    max_failures: int = Field(default=5, ge=1)
    """Deaths in a row, without a stable minute in between, after which Rollway gives up."""


class JoinSpec(_Part):
    """A stack that runs already, on this machine or another, which the workers are to serve in.
    Its `invitation` has all of this."""

    namespace: str = Field(min_length=1)
    frontend: str = Field(pattern="^http")
    rl: str = Field(pattern="^http")
    """Its RL listing."""
    discovery_dir: Path | None = None
    """Its directory, with `discovery: file`. On the same machine only: Dynamo watches it with
    inotify, which does not hear what another machine writes."""
    secret: str = Field(default="", repr=False)
    """What its offers of weights are signed with; $ROLLWAY_WEIGHTS_SECRET when empty."""


class AdminTimeouts(_Part):
    """Seconds that one attempt of a call to a worker may take."""

    probe: float = Field(default=10.0, gt=0)
    pause: float = Field(default=300.0, gt=0)
    """Also how long refits that let running requests finish wait for them."""
    update: float = Field(default=720.0, gt=0)


class LogSpec(_Part):
    """How much of a process's log stays on disk: `keep` + 1 files of about `max_mb` MB each."""

    max_mb: float = Field(default=16.0, ge=0.001, le=1e6)
    keep: int = Field(default=3, ge=1, le=1000)
    """Files of older lines, NAME.log.1 being the newest of them."""


class StackSpec(_Part):
    """A whole stack: models, frontend, router, planes, ports, logs."""

    name: str = "default"
    preset: Literal["rl", "plain"] = "rl"
    models: list[ModelSpec] = Field(min_length=1)
    frontend: FrontendSpec = Field(default_factory=FrontendSpec)
    router: RouterSpec = Field(default_factory=RouterSpec)
    migration_limit: int | None = Field(default=None, ge=0)
    """How often a request may move to another worker when its worker dies; None: the preset's."""
    discovery: Literal["file", "etcd"] = "file"
    etcd_endpoints: str | None = None
    """A running etcd; without it Rollway starts one."""
    event_plane: Literal["zmq", "nats"] = "zmq"
    request_plane: Literal["tcp", "nats"] = "tcp"
    nats_server: str | None = None
    """A running NATS, as nats://host:port; without it Rollway starts one."""
    admin_host: str = "127.0.0.1"
    """Where workers bind their admin (system) port and take requests, and where etcd and NATS
    listen. Admin calls are signed (`admin_orders`); the others have no authentication."""
    admin_orders: Literal["signed", "open"] = "signed"
    """`signed`: workers carry out admin calls of this stack's own processes only. `open`: of anyone
    who reaches the port, for tools that call Dynamo's admin routes themselves."""
    join: JoinSpec | None = None
    """Workers only: no frontend and no services of its own."""
    python: str | None = None
    """Interpreter whose environment has Dynamo and the engine; this one when not given."""
    checkpoint_roots: list[Path] = Field(default_factory=list)
    """Refits take checkpoints only from below these directories; from anywhere when empty."""
    log_dir: Path | None = None
    logs: LogSpec = Field(default_factory=LogSpec)
    keep_runs: int = Field(default=5, ge=0, le=10_000)
    """Ended runs of this stack whose logs stay; 0 keeps nothing of a run that ended well."""
    env: Environment = Field(default_factory=dict)
    start_seconds: float = Field(default=900, gt=0, le=7 * 86400)
    stop_seconds: float = Field(default=20, gt=0, le=LONGEST_STOP_SECONDS)
    restart: RestartSpec = Field(default_factory=RestartSpec)
    timeouts: AdminTimeouts = Field(default_factory=AdminTimeouts)
    warmup: bool = True

    @field_validator("log_dir")
    @classmethod
    def _absolute(cls, value: Path | None) -> Path | None:
        """The supervisor and later commands run elsewhere."""
        return None if value is None else _expand(value)

    @field_validator("checkpoint_roots")
    @classmethod
    def _absolute_roots(cls, value: list[Path]) -> list[Path]:
        return [_expand(root) for root in value]

    @field_validator("name")
    @classmethod
    def _usable_name(cls, value: str) -> str:
        return check_stack_name(value)

    @model_validator(mode="after")
    def _consistent(self) -> StackSpec:
        names = [model.name for model in self.models]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(
                f"two models are served under one name ({', '.join(twice)}); "
                "give each a `name` of its own"
            )
        slugs = {slug(name) for name in names}
        if len(slugs) < len(names):
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
        return self

    @property
    def needs_etcd(self) -> bool:
        return self.discovery == "etcd" and self.etcd_endpoints is None

    @property
    def needs_nats(self) -> bool:
        return "nats" in (self.event_plane, self.request_plane) and self.nats_server is None


def _check_join(spec: StackSpec, join: JoinSpec) -> None:
    if spec.discovery == "file" and join.discovery_dir is None:
        raise ValueError("`join` with `discovery: file` needs `join.discovery_dir`")
    if spec.needs_etcd:
        raise ValueError("`join` with `discovery: etcd` needs the other stack's `etcd_endpoints`")
    if spec.needs_nats:
        raise ValueError("`join` with a plane on `nats` needs the other stack's `nats_server`")
    if any(model.engine == "mocker" for model in spec.models):
        raise ValueError("mockers cannot `join`: which of them are whose is not to be seen")
    if is_loopback(spec.admin_host) and not is_loopback(urlsplit(join.frontend).hostname or ""):
        raise ValueError(
            f"`admin_host` is {spec.admin_host}, where {join.frontend} cannot reach the workers; "
            "give an address of this machine in its network"
        )


def _expand(path: Path) -> Path:
    try:
        return path.expanduser().absolute()
    except RuntimeError as error:  # `~nobody-of-this-name`
        raise ValueError(f"{error}") from None


def check_stack_name(name: str) -> str:
    """Refuse with ValueError what cannot name a stack: the name becomes a directory."""
    if not _NAME.fullmatch(name):
        raise ValueError("use lower-case letters, digits and inner dashes, at most 40")
    return name


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host; a name that begins with 127. is elsewhere."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def slug(name: str) -> str:
    """A model name as a Dynamo component name."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "model"


def load_spec(
    source: StackSpec | Mapping[str, Any] | str | Path | None = None,
    overrides: Sequence[str] = (),
    **fields: Any,
) -> StackSpec:
    """Read a spec from a YAML file, a mapping or keywords, then apply `a.b=c` overrides."""
    if isinstance(source, StackSpec):
        data: dict[str, Any] = source.model_dump(mode="json", exclude_unset=True)
    elif isinstance(source, Mapping):
        check_plain(source, "The stack")
        data = copy.deepcopy(dict(source))
    elif source is not None:
        data = _read_file(Path(source))
    else:
        data = {}
    data.update(fields)
    for override in overrides:
        _apply(data, override)
    return parse_spec(data)


def parse_spec(data: Mapping[str, Any]) -> StackSpec:
    """Validate plain data; every complaint names the field by its path."""
    check_plain(data, "The stack", free_text=("args", "env"))
    if not isinstance(data.get("models"), list) or not any(
        isinstance(model, dict) and model.get("path") for model in data["models"]
    ):
        raise SpecError(
            "The stack names no model.",
            "Give a YAML file with `models: [{path: …}]`, or `--model PATH`.",
        )
    try:
        spec = StackSpec.model_validate(data)
        spec.model_dump_json()  # as the supervisor will get it
    except ValidationError as error:
        raise SpecError(_explain(error)) from error
    except PydanticSerializationError as error:
        raise SpecError(
            f"The stack holds a value that is not plain: {error}.",
            "Use text, numbers, true, false, null, lists and mappings.",
        ) from error
    for index, model in enumerate(spec.models):
        _check_model_path(model.path, f"models.{index}.path")
    return spec


def _read_file(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST_FILE + 1)
        text = content.decode()
    except FileNotFoundError:
        raise UsageError(f"There is no file {path}.", "Check the path of the stack file.") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"{path} cannot be read: {reason}.", "Check the file.") from error
    if len(content) > _LARGEST_FILE:
        raise SpecError(
            f"{path} has more than {_LARGEST_FILE >> 10} KiB, which no stack file needs.",
            "Is it the right file?",
        )
    data = read_yaml(text, str(path))
    if not isinstance(data, dict):
        kind = "is empty" if data is None else f"holds a {type(data).__name__}"
        raise SpecError(
            f"{path} {kind}, not a mapping of fields.",
            "Start it with `models:`, see docs/stack.md.",
        )
    return data


def _apply(data: dict[str, Any], override: str) -> None:
    """`models.0.replicas=4`: a path through mappings and lists, and a YAML value."""
    path, separator, text = override.partition("=")
    shown = f"`--set {override if override.isprintable() else ascii(override)}`"[:200]
    if not separator or not path:
        raise UsageError(
            f"{shown} is not of the form a.b=value.", "For example: --set router.mode=kv"
        )
    if len(override) > _LARGEST_FILE:
        raise UsageError(f"{shown} has more than {_LARGEST_FILE >> 10} KiB.", "Use a stack file.")
    value = read_yaml(text, shown) if text else None
    keys = path.split(".")
    target: Any = data
    for key in keys[:-1]:
        target = _descend(target, key, shown)
    if isinstance(target, list):
        target[_index(target, keys[-1], shown)] = value
    else:
        target[keys[-1]] = value


def _descend(target: Any, key: str, shown: str) -> Any:
    if isinstance(target, list):
        child = target[_index(target, key, shown)]
    else:
        child = target.setdefault(key, {})
        if child is None:
            child = target[key] = {}
    if not isinstance(child, (dict, list)):
        raise UsageError(
            f"{shown}: `{key[:60]}` holds a value, so it has no fields.", "Set it whole."
        )
    return child


def _index(items: list[Any], key: str, shown: str) -> int:
    if not (key.isdecimal() and len(key) < 10) or int(key) >= len(items):
        raise UsageError(
            f"{shown}: `{key[:60]}` is no position in a list of {len(items)}.",
            f"Use 0 to {len(items) - 1}." if items else "The list is empty.",
        )
    return int(key)


def _explain(error: ValidationError) -> str:
    details = error.errors()
    more = f" There are {len(details) - 5} more." if len(details) > 5 else ""
    return " ".join(_explain_one(dict(detail)) for detail in details[:5]) + more


def _explain_one(detail: dict[str, Any]) -> str:
    path = ".".join(str(part) for part in detail["loc"]) or "the stack"
    if detail["type"] == "extra_forbidden":
        return f"`{path}`: there is no such field.{_nearest(detail['loc'])}"
    message = str(detail["msg"]).removeprefix("Value error, ")
    given = detail.get("input")
    plain = isinstance(given, (str, int, float, bool, type(None))) and "join" not in detail["loc"]
    shown = f" (got {repr(given)[:100]})" if plain else ""
    return f"`{path}`: {message}{shown}."


def _nearest(location: tuple[int | str, ...]) -> str:
    part: type[BaseModel] = StackSpec
    for step in location[:-1]:
        if isinstance(step, str):
            part = _part_of(part, step)
    close = difflib.get_close_matches(str(location[-1]), list(part.model_fields), n=1, cutoff=0.5)
    if close:
        return f" Did you mean `{close[0]}`?"
    return f" Known here: {', '.join(sorted(part.model_fields))}."


def _part_of(part: type[BaseModel], field: str) -> type[BaseModel]:
    annotation = part.model_fields[field].annotation
    for candidate in (annotation, *typing.get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return part


def _check_model_path(path: str, field: str) -> None:
    try:
        directory = Path(path).expanduser()
        exists = directory.is_dir()
    except (OSError, RuntimeError) as error:  # too long, or `~nobody-of-this-name`
        reason = getattr(error, "strerror", None) or str(error)
        raise SpecError(
            f"`{field}`: {path[:100]} cannot be looked up: {reason}.",
            "Give an existing checkpoint directory.",
        ) from error
    if exists:
        if not (directory / "config.json").is_file():
            raise SpecError(
                f"`{field}`: {path} has no config.json, so it is not a checkpoint.",
                "Point it at a directory in Hugging Face format.",
            )
        return
    looks_like_hub_id = re.fullmatch(r"[\w.-]+/[\w.-]+", path) and not path.startswith(".")
    if not looks_like_hub_id:
        raise SpecError(
            f"`{field}`: there is no directory {path}.",
            "Give an existing checkpoint directory, or a Hugging Face id such as Qwen/Qwen3-0.6B.",
        )
