"""The client side of prime-rl of June 2026, for orchestrators with `client.backend`.

    config = read_config({"backend": "dynamo", "base_url": ["http://host:8000/v1"]})
    admin = setup_admin_api(config, weight_broadcast_type="filesystem")
    async with Http() as http:
        clients = await setup_admin_clients(config, http)
        await update_weights(clients, Path("outputs/broadcasts/step_3"), step=3, admin=admin)

It needs neither httpx nor verifiers: `RolloutClient.make_options` returns the arguments for a
client class of verifiers. `pools` has the static and the elastic pool on top of it.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

import msgspec

from rollway.errors import RolloutError, Unreachable, UsageError
from rollway.fleet.discovery import RlListing, Worker, discover
from rollway.http import ONCE, Http, Retry
from rollway.integrations.prime_rl.client_admin import (
    AdminAPI,
    AdminClient,
    BroadcastType,
    DynamoAdminAPI,
    VLLMAdminAPI,
    init_nccl_broadcast,
    load_lora_adapter,
    strip_v1,
    update_weights,
)
from rollway.rollout.sender import all_or_none
from rollway.rollout.teacher import flatten, read_prompt_logprobs

__all__ = [
    "AdminAPI", "AdminClient", "ClientConfig", "DynamoAdminAPI", "ElasticConfig", "RolloutClient",
    "VLLMAdminAPI", "compute_teacher_logprobs", "discover_dynamo_admin_base_urls",
    "init_nccl_broadcast", "load_lora_adapter", "read_config", "read_transport", "setup_admin_api",
    "setup_admin_clients", "setup_clients", "update_weights",
]  # fmt: skip

Backend = Literal["vllm", "dynamo"]
MAX_CONNECTIONS = 8192
MAX_RETRIES = 10
SCORES_IN_FLIGHT = 64
DEFAULT_RL_PORT = 8001

# The same two transports, as three heads of June spell them, the last one first.
_SPELLINGS: dict[Backend, tuple[str, ...]] = {
    "vllm": ("vllm", "vllm_generate", "prime_vllm_generate"),
    "dynamo": ("dynamo", "dynamo_chat", "dynamo_chat_nvext"),
}


class ElasticConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A pool that follows the pods of a headless Service."""

    hostname: str
    port: int = 8000
    sync_interval: float = 5.0


class ClientConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """prime-rl's `ClientConfig` of June 2026; a key of another generation is an error."""

    base_url: list[str] = msgspec.field(default_factory=lambda: ["http://localhost:8000/v1"])
    backend: Backend = "vllm"
    rl_base_url: list[str] | None = None
    """Where Dynamo lists its workers; without it `base_url` at the port $DYN_RL_PORT (8001)."""
    admin_base_url: list[str] | None = None
    """The workers' system ports (dynamo) or the servers (vllm), in place of a listing."""
    router_url: str | None = None
    """With `elastic`: where rollouts go, while admin calls go to the pods."""
    elastic: ElasticConfig | None = None
    dp_rank_count: int = 1
    api_key_var: str = "VLLM_API_KEY"
    headers: dict[str, str] = {}
    headers_from_env: dict[str, str] = {}
    """The name of a header to the environment variable with its value."""
    extra_headers_from_state: dict[str, str] = {}
    skip_model_check: bool = False
    timeout: float = 1200
    connect_timeout: float = 30.0
    wait_for_ready_timeout: float = 1800

    def __post_init__(self) -> None:
        for name in ("dp_rank_count", "timeout", "connect_timeout", "wait_for_ready_timeout"):
            if getattr(self, name) <= 0:
                raise UsageError(f"client.{name} is {getattr(self, name)}.", "Use more than 0.")
        for name in ("base_url", "rl_base_url", "admin_base_url"):
            for url in getattr(self, name) or []:
                _check_url(name, url)
        if self.elastic is not None and self.elastic.sync_interval <= 0:
            raise UsageError("client.elastic.sync_interval is not above 0.", "Use 5.")
        if self.elastic is not None and self.admin_base_url:
            raise UsageError(
                "client.admin_base_url has no effect with elastic, whose pods come and go.",
                "Leave it out; Dynamo's workers are found by rl_base_url.",
            )
        if self.backend == "dynamo":
            _refuse_frontend(self.admin_base_url or [])

    def read_headers(self) -> dict[str, str]:
        """Return the static headers and those whose variables are set."""
        named = {name: os.environ.get(key) for name, key in self.headers_from_env.items()}
        return {**self.headers, **{name: value for name, value in named.items() if value}}

    def read_admin_headers(self) -> dict[str, str]:
        """Return these headers with the API key, if there is one."""
        key = os.environ.get(self.api_key_var, "")
        token = {"Authorization": f"Bearer {key}"} if key not in ("", "EMPTY") else {}
        return {**self.read_headers(), **token}


def read_config(raw: Any) -> ClientConfig:
    """Return the settings from a TOML table, or from prime-rl's own `ClientConfig`."""
    if isinstance(raw, ClientConfig):
        return raw
    table = raw.model_dump() if hasattr(raw, "model_dump") else raw
    if isinstance(table, dict) and isinstance(table.get("base_url"), str):
        table = {**table, "base_url": [table["base_url"]]}  # later generations have one
    try:
        return msgspec.convert(table, ClientConfig)
    except msgspec.ValidationError as error:
        raise UsageError(
            f"The client's settings are wrong: {error}.",
            "Use the keys of June 2026; docs/prime-rl.md lists them.",
        ) from error


# --- rollouts ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RolloutClient:
    """Where and how rollouts are sampled: the fields of a client config of verifiers."""

    base_url: str
    transport: Backend
    api_key_var: str = "VLLM_API_KEY"
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    extra_headers_from_state: Mapping[str, str] = field(default_factory=dict)
    client_type: str = "openai_chat_completions"
    renderer_config: Any = None
    renderer_model_name: str | None = None
    pool_size: int | None = None
    timeout: float = 1200
    connect_timeout: float = 30.0
    max_connections: int = MAX_CONNECTIONS
    max_retries: int = MAX_RETRIES

    def make_options(self, target: type) -> dict[str, Any]:
        """Return keyword arguments for a client class of verifiers, under the names that its
        version has. Raise if it cannot use this transport: it would sample at another route."""
        known: Mapping[str, Any] = getattr(target, "model_fields", None) or getattr(
            target, "__dataclass_fields__", {}
        )
        options = {}
        for name, alternatives in _OPTION_NAMES.items():
            value = getattr(self, name)
            option = next((option for option in alternatives if option in known), None)
            if option is not None and value is not None:
                options[option] = value
        if hasattr(_read_annotation(known.get("timeout")), "model_fields"):  # since August 2026
            options["timeout"] = {"connect": self.connect_timeout, "read": self.timeout}
        if "renderer_transport" in known:
            choices = _read_choices(known["renderer_transport"])
            options["renderer_transport"] = spell_transport(self.transport, choices)
        elif self.transport == "dynamo":
            raise UsageError(
                f"{target.__name__} has no renderer_transport, so it cannot sample by chat.",
                'Use backend = "vllm" with Rollway, which serves /inference/v1/generate.',
            )
        return options


_OPTION_NAMES = {
    "base_url": ("base_url", "api_base_url"),
    "api_key_var": ("api_key_var",),
    "headers": ("headers", "extra_headers"),
    "extra_headers_from_state": ("extra_headers_from_state",),
    "client_type": ("client_type",),
    "renderer_config": ("renderer_config", "renderer"),
    "renderer_model_name": ("renderer_model_name",),
    "pool_size": ("pool_size", "renderer_pool_size"),
    "timeout": ("timeout",),
    "connect_timeout": ("connect_timeout",),
    "max_connections": ("max_connections",),
    "max_retries": ("max_retries",),
}


def read_transport(name: str) -> Backend:
    """Return the transport that a name stands for, in any of its spellings."""
    for transport, spellings in _SPELLINGS.items():
        if name in spellings:
            return transport
    names = ", ".join(itertools.chain(*_SPELLINGS.values()))
    raise UsageError(f"{name!a} is no renderer transport.", f"Use one of {names}.")


def spell_transport(transport: Backend, known: Collection[str] = ()) -> str:
    """Return a transport's name in the spelling that a client knows; the newest if it knows any."""
    spellings = _SPELLINGS[transport]
    spelling = next((name for name in spellings if not known or name in known), None)
    if spelling is None:
        raise UsageError(f"The client knows the transports {', '.join(known)}, not {transport}.")
    return spelling


def setup_clients(
    config: ClientConfig,
    client_type: str = "openai_chat_completions",
    renderer_config: Any = None,
    renderer_model_name: str | None = None,
    pool_size: int | None = None,
) -> list[RolloutClient]:
    """Return one client for each address and data-parallel rank."""
    headers, ranks = config.read_headers(), config.dp_rank_count
    return [
        RolloutClient(
            base_url,
            config.backend,
            config.api_key_var,
            headers if ranks == 1 else {**headers, "X-data-parallel-rank": str(rank)},
            config.extra_headers_from_state,
            client_type,
            renderer_config,
            renderer_model_name,
            pool_size,
            config.timeout,
            config.connect_timeout,
        )
        for base_url in config.base_url
        for rank in range(ranks)
    ]


# --- admin ---------------------------------------------------------------------------------------


def setup_admin_api(
    config: ClientConfig, weight_broadcast_type: BroadcastType = "filesystem"
) -> AdminAPI:
    """Return the admin calls that a backend takes."""
    if weight_broadcast_type not in get_args(BroadcastType):
        kinds = ", ".join(get_args(BroadcastType))
        raise UsageError(
            f"weight_broadcast.type is {weight_broadcast_type!a}.", f"Use one of {kinds}."
        )
    if config.backend == "dynamo":
        return DynamoAdminAPI(weight_broadcast_type=weight_broadcast_type)
    return VLLMAdminAPI(weight_broadcast_type)


async def setup_admin_clients(
    config: ClientConfig, http: Http, *, use_admin_base_url: bool = True, model: str = ""
) -> list[AdminClient]:
    """Return the clients of all servers or workers; without `use_admin_base_url`, those of
    `base_url`, where models answer."""
    urls = config.base_url
    if use_admin_base_url and config.admin_base_url:
        urls = config.admin_base_url
    elif use_admin_base_url and config.backend == "dynamo":
        urls = await discover_dynamo_admin_base_urls(config, http, model=model)
    headers = config.read_admin_headers()
    return [AdminClient(http, strip_v1(url), headers) for url in urls]


async def discover_dynamo_admin_base_urls(
    config: ClientConfig, http: Http, *, model: str = ""
) -> list[str]:
    """Return the system addresses of all listed workers; raise until every one of them has one. A
    worker that is left out now would keep its weights for the whole run."""
    parts = [await discover(http, source, retry=ONCE) for source in make_listings(config)]
    workers = [w for part in parts for w in part if not model or w.model in (model, "")]
    for worker in workers:
        if reason := worker.error or _find_address_problem(worker):
            raise Unreachable(f"{worker} cannot be called: {reason}.", "Wait, or correct it.")
    if not workers:
        places = ", ".join(source.url for source in make_listings(config))
        raise Unreachable(f"{places} lists no worker.", "Start the workers with --enable-rl.")
    return list(dict.fromkeys(worker.admin_url for worker in workers))


def make_listings(config: ClientConfig) -> tuple[RlListing, ...]:
    """Return where workers are listed, with the headers that every other call has, too."""
    headers = tuple(config.read_admin_headers().items())
    urls = config.rl_base_url or [_replace_port(url) for url in config.base_url]
    return tuple(RlListing(strip_v1(url), headers=headers) for url in urls)


# --- teachers ------------------------------------------------------------------------------------


async def compute_teacher_logprobs(
    clients: Sequence[RolloutClient], model: str, samples: Sequence[Any], *, http: Http
) -> list[list[float]]:
    """Return the log-prob of every token under a teacher; 0.0 for the first, which has none.

    `samples` are lists of ids, or objects with `prompt_ids` and `completion_ids`. Each position is
    read by the token's id: an entry also names the likeliest token, in any order."""
    if not clients:
        raise UsageError("There is no server to score with.", "Wait until the pool is ready.")
    slots = asyncio.Semaphore(SCORES_IN_FLIGHT)

    async def score(client: RolloutClient, ids: list[int]) -> list[float]:
        async with slots:
            return await _score(http, client, model, ids)

    sequences = [_read_sample(sample) for sample in samples]
    return await all_or_none(
        score(client, ids) for client, ids in zip(itertools.cycle(clients), sequences, strict=False)
    )


async def _score(http: Http, client: RolloutClient, model: str, ids: list[int]) -> list[float]:
    params = {"temperature": 1.0, "top_p": 1.0, "prompt_logprobs": 1}
    if client.transport == "vllm":
        url = f"{strip_v1(client.base_url)}/inference/v1/generate"
        params = {"max_tokens": 1, **params}
        body: dict[str, Any] = {"model": model, "token_ids": ids, "sampling_params": params}
    else:
        url = f"{client.base_url.rstrip('/')}/chat/completions"
        body = {
            "model": model,
            "messages": [{"role": "user", "content": ""}],  # Dynamo refuses an empty list
            "max_completion_tokens": 1,
            **params,
            "nvext": {"token_data": ids, "extra_fields": ["prompt_logprobs"]},
        }
    key = os.environ.get(client.api_key_var) or "EMPTY"
    headers = {"Authorization": f"Bearer {key}", **client.headers}
    retry = Retry(attempts=client.max_retries, max_wait_seconds=10.0)
    answer = await http.post(url, body, timeout=client.timeout, retry=retry, headers=headers)
    raw, _ = read_prompt_logprobs(answer)
    if raw is None:
        raise RolloutError(
            f"{url} answered without prompt_logprobs.",
            "The engine must compute them: the mocker does not.",
        )
    return [0.0 if logprob is None else logprob for logprob in flatten(raw, ids)]


def _read_sample(sample: Any) -> list[int]:
    if hasattr(sample, "prompt_ids"):
        return [*sample.prompt_ids, *sample.completion_ids]
    return list(sample)


def _read_choices(model_field: Any) -> Collection[str]:
    """Return the values that a field of a client class allows; none if it allows any text."""
    choices = get_args(_read_annotation(model_field))
    return [choice for choice in choices if isinstance(choice, str)]


def _read_annotation(model_field: Any) -> Any:
    """Return the type of a field of a pydantic model or of a dataclass."""
    return getattr(model_field, "annotation", None) or getattr(model_field, "type", None)


def _check_url(name: str, url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"client.{name} has {url!a}.", "Use http://HOST:PORT/v1.")


def _refuse_frontend(urls: Sequence[str]) -> None:
    for url in urls:
        if urlsplit(url).path.rstrip("/").endswith("/v1/rl"):
            raise UsageError(
                f"client.admin_base_url has {url}, which lists workers and takes no admin calls.",
                "Name the workers' system addresses, or set rl_base_url and leave this out.",
            )


def _find_address_problem(worker: Worker) -> str:
    """Return why an address cannot be called from here; empty if it can."""
    host = urlsplit(worker.admin_url).hostname
    if host in ("0.0.0.0", "::"):
        return f"it lists {host}, which every machine takes for itself (DYN_SYSTEM_HOST)"
    return ""


def _replace_port(url: str) -> str:
    parts = urlsplit(url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    port = os.environ.get("DYN_RL_PORT", DEFAULT_RL_PORT)
    return f"{parts.scheme}://{host}:{port}"
