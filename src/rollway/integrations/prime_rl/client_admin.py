"""The admin calls of prime-rl's orchestrator of June 2026, to one server or worker, and to all.

    call               VLLMAdminAPI                DynamoAdminAPI: POST /engine/…
    pause              POST /pause?mode=keep…      pause_generation
    update_weights     POST /update_weights        update_weights_from_disk, …_from_distributed
    resume             POST /resume                resume_generation
    load_lora_adapter  POST /load_lora_adapter     load_lora
    init_broadcaster   POST /init_broadcaster      init_weights_update_group
    health             GET /health                 GET /health
    list_models        GET /v1/models, at the address where the model answers, on both

Every call has a limit. Pause and resume are repeated after a timeout or a 5xx. An update is
repeated after a 5xx only: one that got no answer may still be running. A collective is sent once,
because the trainer sends its side once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from rollway.errors import AdminError, RequestFailed, UsageError
from rollway.fleet.admin import call_all, collect_failures, run_to_the_end
from rollway.http import IDEMPOTENT, ONCE, Http, Retry

BroadcastType = Literal["filesystem", "nccl", "nixl", "mx_refit"]
NCCL_READY = "NCCL_READY"

PROBE_SECONDS = 10.0
ADMIN_SECONDS = 300.0
UPDATE_SECONDS = 720.0
LORA_SECONDS = 30.0
LORA_TOTAL_SECONDS = 120.0
RENDEZVOUS_MARGIN_SECONDS = 30.0
"""How much longer than a rendezvous its call may take."""

_REPEAT = Retry(attempts=10, wait_seconds=1.0, max_wait_seconds=10.0)
# A network file system may show the adapter's files a moment later, which vLLM answers with 404.
_REPEAT_LORA = replace(_REPEAT, total_seconds=LORA_TOTAL_SECONDS, statuses=frozenset({404}))


def strip_v1(url: str) -> str:
    """Return the root of a server, whose OpenAI address ends with /v1."""
    return url.rstrip("/").removesuffix("/v1")


@dataclass(frozen=True, slots=True)
class AdminClient:
    """One server or worker, and the headers that it wants."""

    http: Http
    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)  # with the API key

    async def get(self, path: str, *, timeout: float = PROBE_SECONDS, retry: Retry = ONCE) -> Any:
        return await self.http.get(
            f"{self.url}{path}", timeout=timeout, retry=retry, headers=self.headers
        )

    async def post(
        self,
        path: str,
        body: Any = None,
        *,
        timeout: float = ADMIN_SECONDS,
        retry: Retry | None = None,
    ) -> Any:
        """POST, and return the answer; None if it is not JSON. Without `retry`, the call is
        repeated for twice its limit."""
        retry = retry or _REPEAT
        limited = replace(retry, total_seconds=min(retry.total_seconds, 2 * timeout))
        try:
            return await self.http.post(
                f"{self.url}{path}", body, timeout=timeout, retry=limited, headers=self.headers
            )
        except RequestFailed as error:
            # vLLM answers some calls with plain text: only the status counts.
            if error.status != 200:
                raise
            return None

    def __str__(self) -> str:
        return self.url


class AdminAPI(Protocol):
    """The admin calls, by the kind of server."""

    weight_broadcast_type: BroadcastType

    async def health(self, client: AdminClient) -> None: ...

    async def list_models(self, client: AdminClient) -> list[dict[str, Any]]:
        """Return the models of a client of the address where they answer: a worker's system port
        lists none."""
        ...

    async def pause(self, client: AdminClient) -> None: ...

    async def resume(self, client: AdminClient) -> None: ...

    async def update_weights(self, client: AdminClient, weight_dir: str | None) -> None: ...

    async def load_lora_adapter(
        self, client: AdminClient, lora_name: str, lora_path: str, *, timeout: float = LORA_SECONDS
    ) -> None: ...

    async def init_broadcaster(
        self,
        client: AdminClient,
        *,
        host: str,
        port: int,
        rank_offset: int,
        inference_world_size: int,
        timeout: float,
        quantize_in_weight_transfer: bool = False,
    ) -> None: ...


@dataclass(slots=True)
class VLLMAdminAPI:
    """prime-rl's own server, and Rollway's."""

    weight_broadcast_type: BroadcastType = "filesystem"

    async def health(self, client: AdminClient) -> None:
        """Raise unless the server is ready; one without this route counts as ready."""
        try:
            await client.get("/health")
        except RequestFailed as error:
            if error.status not in (200, 404):  # 200: its answer is not JSON
                raise

    async def list_models(self, client: AdminClient) -> list[dict[str, Any]]:
        return await _list_models(client)

    async def pause(self, client: AdminClient) -> None:
        await client.post("/pause?mode=keep&clear_cache=false")

    async def resume(self, client: AdminClient) -> None:
        await client.post("/resume")

    async def update_weights(self, client: AdminClient, weight_dir: str | None) -> None:
        retry = _choose_update_retry(self.weight_broadcast_type)
        body = {"weight_dir": weight_dir}
        await client.post("/update_weights", body, timeout=UPDATE_SECONDS, retry=retry)

    async def load_lora_adapter(
        self, client: AdminClient, lora_name: str, lora_path: str, *, timeout: float = LORA_SECONDS
    ) -> None:
        body = {"lora_name": lora_name, "lora_path": lora_path}
        await client.post("/load_lora_adapter", body, timeout=timeout, retry=_REPEAT_LORA)

    async def init_broadcaster(
        self, client: AdminClient, *, timeout: float, **arguments: Any
    ) -> None:
        body, limit = _make_group(timeout, arguments)
        await client.post("/init_broadcaster", body, timeout=limit, retry=ONCE)


@dataclass(slots=True)
class DynamoAdminAPI:
    """Dynamo's workers, at their system ports."""

    engine_rpc: str = "reload_weights"
    weight_broadcast_type: BroadcastType = "filesystem"

    async def health(self, client: AdminClient) -> None:
        """Raise unless the worker answers. It may say 503 while it serves; that its model is listed
        at the inference address is what counts."""
        with contextlib.suppress(RequestFailed):
            await client.get("/health")

    async def list_models(self, client: AdminClient) -> list[dict[str, Any]]:
        return await _list_models(client)

    async def pause(self, client: AdminClient) -> None:
        await _post_engine(client, "pause_generation", {"mode": "keep", "clear_cache": False})

    async def resume(self, client: AdminClient) -> None:
        await _post_engine(client, "resume_generation", {})

    async def update_weights(self, client: AdminClient, weight_dir: str | None) -> None:
        if weight_dir is None:
            return
        version = Path(weight_dir).name
        route, body = "update_weights_from_distributed", {"weight_version": version}
        if self.weight_broadcast_type == "filesystem":
            # Absolute: transformers takes a relative path for the name of a repository.
            route, path = "update_weights_from_disk", str(Path(weight_dir).absolute())
            body = {"model_path": path, **body, "engine_rpc": self.engine_rpc}
        else:
            body |= {"weight_dir": weight_dir, "engine_rpc": "update_weights_from_path"}
        retry = _choose_update_retry(self.weight_broadcast_type)
        await _post_engine(client, route, body, timeout=UPDATE_SECONDS, retry=retry)

    async def load_lora_adapter(
        self, client: AdminClient, lora_name: str, lora_path: str, *, timeout: float = LORA_SECONDS
    ) -> None:
        source = {"uri": Path(lora_path).absolute().as_uri()}
        body = {"lora_name": lora_name, "source": source}
        options: dict[str, Any] = {"timeout": timeout, "retry": _REPEAT_LORA}
        reply = await _post_engine(client, "load_lora", body, **options)
        if "already loaded" in str(reply.get("message", "")):
            # Dynamo reports success and keeps the old weights. If unloading fails, so does this.
            await _post_engine(client, "unload_lora", {"lora_name": lora_name}, **options)
            await _post_engine(client, "load_lora", body, **options)

    async def init_broadcaster(
        self, client: AdminClient, *, timeout: float, **arguments: Any
    ) -> None:
        body, limit = _make_group(timeout, arguments)
        body["engine_rpc"] = "init_broadcaster"
        await _post_engine(client, "init_weights_update_group", body, timeout=limit, retry=ONCE)


# --- to all servers -----------------------------------------------------------------------------


async def init_nccl_broadcast(
    clients: Sequence[AdminClient],
    host: str,
    port: int,
    timeout: float,
    inference_world_size: int | None = None,
    quantize_in_weight_transfer: bool = False,
    *,
    admin: AdminAPI,
) -> None:
    """Form the group of the trainer and all ranks; raise if any server does not join."""
    size = len(clients) if inference_world_size is None else inference_world_size
    if not clients or size % len(clients):
        raise UsageError(
            f"{size} ranks do not divide among {len(clients)} servers.",
            "Set weight_broadcast.inference_world_size to the number of all GPUs.",
        )
    offsets = {client.url: index * (size // len(clients)) for index, client in enumerate(clients)}
    await _call_all(
        clients,
        lambda client: admin.init_broadcaster(
            client,
            host=host,
            port=port,
            rank_offset=offsets[client.url],
            inference_world_size=size,
            timeout=timeout,
            quantize_in_weight_transfer=quantize_in_weight_transfer,
        ),
        "The broadcast group was not formed",
    )


async def update_weights(
    clients: Sequence[AdminClient],
    weight_dir: Path | None,
    lora_name: str | None = None,
    step: int = 0,
    *,
    admin: AdminAPI,
) -> None:
    """Move all servers to new weights, or to a new version of an adapter.

    If a pause fails, the others are undone. If an update fails, all servers stay paused: some may
    have the new weights, and two policies must not sample together."""
    if lora_name is not None and weight_dir is not None:
        await load_lora_adapter(clients, lora_name, weight_dir, admin=admin)
        return
    try:
        await _call_all(clients, admin.pause, f"Step {step} is not served")
        if weight_dir is not None and admin.weight_broadcast_type != "filesystem":
            # A trainer that broadcasts waits for this file, without a limit.
            await asyncio.to_thread(_touch, weight_dir / NCCL_READY)
    except BaseException:
        await run_to_the_end(_resume(clients, admin))
        raise
    name = None if weight_dir is None else weight_dir.as_posix()
    await _call_all(
        clients,
        lambda client: admin.update_weights(client, name),
        f"Step {step} is not served, and generation stays paused",
    )
    await _call_all(clients, admin.resume, f"Step {step} is loaded, and some stay paused")


async def load_lora_adapter(
    clients: Sequence[AdminClient], lora_name: str, lora_path: Path, *, admin: AdminAPI
) -> None:
    """Load an adapter into all servers."""
    path = lora_path.as_posix()
    await _call_all(
        clients,
        lambda client: admin.load_lora_adapter(client, lora_name, path),
        f"The adapter {lora_name} is not served",
    )


# --- helpers -----------------------------------------------------------------------------------


async def _call_all(
    clients: Sequence[AdminClient], call: Callable[[AdminClient], Any], problem: str
) -> None:
    """Make one call on every server; raise with the cause of each that failed."""
    failures = await collect_failures(clients, call)
    if not failures:
        return
    causes = "; ".join(f"{client}: {error}" for client, error in failures)
    raise AdminError(
        f"{problem}: {len(failures)} of {len(clients)} servers failed. {causes}",
        "Correct the cause, and restart the servers that are named.",
    ) from failures[0][1]


async def _resume(clients: Sequence[AdminClient], admin: AdminAPI) -> None:
    await call_all(clients, admin.resume)


def _touch(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()


async def _list_models(client: AdminClient) -> list[dict[str, Any]]:
    answer = await client.get("/v1/models", retry=IDEMPOTENT)
    entries = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise RequestFailed(f"{client}/v1/models answered without models.", status=200)
    return entries


async def _post_engine(
    client: AdminClient,
    route: str,
    body: Mapping[str, Any],
    *,
    timeout: float = ADMIN_SECONDS,
    retry: Retry | None = None,
) -> dict[str, Any]:
    """Call a route of a worker. Dynamo reports a failure as `status: error`, with HTTP 200."""
    reply = await client.post(f"/engine/{route}", body, timeout=timeout, retry=retry)
    reply = reply if isinstance(reply, dict) else {}
    # Most routes say "ok", those of adapters "success".
    if reply.get("status") == "error":
        raise AdminError(f"{client} refused `{route}`: {reply.get('message', 'no reason given')}.")
    return reply


def _choose_update_retry(kind: BroadcastType) -> Retry:
    return replace(_REPEAT, after_silence=False) if kind == "filesystem" else ONCE


def _make_group(timeout: float, arguments: Mapping[str, Any]) -> tuple[dict[str, Any], float]:
    """Return the body that forms a group of ranks, and the limit of its call."""
    names = ("host", "port", "rank_offset", "inference_world_size")
    body = {name: arguments[name] for name in names}
    body["timeout"] = timeout
    body["quantize_in_weight_transfer"] = bool(arguments.get("quantize_in_weight_transfer"))
    return body, timeout + RENDEZVOUS_MARGIN_SECONDS
