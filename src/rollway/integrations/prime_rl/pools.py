"""The servers of a run as one pool: a fixed list, or the pods of a headless Service.

    elastic: at every interval, and at every new version of the adapter

      Service's name ──DNS──► pods ──listing──► the admin address of each, or it is unhealthy
                                │
                /health at the admin address, /v1/models at the inference address
                                │ base model there?
                  adapter is the desired one ──► ready: rollouts go there
                                │ no
                        load it, read /v1/models again ──► ready, or unhealthy

What a pod has loaded is read from the pod every time and never remembered: a pod that was restarted
has its address and no adapter.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from rollway.errors import RollwayError, Unreachable, UsageError
from rollway.fleet.discovery import DnsListing, Worker, discover
from rollway.http import ONCE, Http
from rollway.integrations.prime_rl.client import (
    ClientConfig,
    RolloutClient,
    compute_teacher_logprobs,
    make_listings,
    setup_admin_api,
    setup_admin_clients,
    setup_clients,
)
from rollway.integrations.prime_rl.client_admin import (
    AdminAPI,
    AdminClient,
    BroadcastType,
    update_weights,
)
from rollway.integrations.prime_rl.directories import read_step

log = logging.getLogger(__name__)

READY_POLL_SECONDS = 1.0
ServerStatus = Literal["discovering", "syncing", "ready", "unhealthy"]


class StaticPool:
    """A fixed list of servers, which may start later than the pool."""

    def __init__(
        self,
        config: ClientConfig,
        model_name: str,
        *,
        weight_broadcast_type: BroadcastType = "filesystem",
        **renderer: Any,
    ) -> None:
        """Make the clients; `renderer` has the options of `setup_clients`."""
        self.config = config
        self.model_name = model_name
        self.admin: AdminAPI = setup_admin_api(config, weight_broadcast_type)
        self.train_clients: list[RolloutClient] = setup_clients(config, **renderer)
        self.admin_clients: list[AdminClient] = []
        self._http = Http()

    async def wait_for_ready(self, timeout: float | None = None) -> None:
        """Wait until all servers answer and have the model. Workers are discovered here: the
        frontend may start after the orchestrator."""
        seconds = self.config.wait_for_ready_timeout if timeout is None else timeout
        await _poll(self._check_ready, seconds)

    async def update_weights(
        self, weight_dir: Path | None, lora_name: str | None = None, step: int = 0
    ) -> None:
        await update_weights(self.admin_clients, weight_dir, lora_name, step, admin=self.admin)
        if lora_name is not None:
            self.model_name = lora_name

    async def score(self, token_ids: list[int]) -> list[float]:
        """Return the log-probs of a sequence under the pool's model."""
        (logprobs,) = await compute_teacher_logprobs(
            self.train_clients, self.model_name, [token_ids], http=self._http
        )
        return logprobs

    def get_metrics(self) -> dict[str, float]:
        return {}

    async def stop(self) -> None:
        await self._http.close()

    async def _check_ready(self) -> None:
        if not self.admin_clients:
            self.admin_clients = await setup_admin_clients(
                self.config, self._http, model=self.model_name
            )
        await asyncio.gather(*map(self.admin.health, self.admin_clients))
        if self.config.skip_model_check:
            return
        # At the address where rollouts go: a worker's system port lists no models.
        for client in await setup_admin_clients(self.config, self._http, use_admin_base_url=False):
            await _check_model(self.admin, client, self.model_name)


@dataclass(frozen=True, slots=True)
class AdapterState:
    """A version of an adapter, as loaded or as desired."""

    name: str
    path: Path
    step: int = 0

    def is_served_by(self, loaded: AdapterState | None) -> bool:
        """Return whether a pod has this version. Pods may mount the directory elsewhere, so its
        step counts, too."""
        if loaded is None or loaded.name != self.name:
            return False
        return loaded.path == self.path or (self.step > 0 and loaded.step == self.step)


@dataclass(slots=True)
class Server:
    """One pod."""

    worker: Worker
    admin: AdminClient
    models: AdminClient
    status: ServerStatus = "discovering"
    adapter: AdapterState | None = None
    cause: str = ""
    """Why it is unhealthy."""


class ElasticPool:
    """The pods of a headless Service, with one adapter. Only ready ones get rollouts."""

    def __init__(self, config: ClientConfig, model_name: str, **renderer: Any) -> None:
        """Prepare to follow the pods; `renderer` has the options of `setup_clients`."""
        if config.elastic is None:
            raise UsageError("client.elastic is missing.", "Name the Service: elastic.hostname.")
        self.config = config
        self.base_model = self.model_name = model_name
        self.admin: AdminAPI = setup_admin_api(config)
        self.servers: dict[str, Server] = {}
        """Pods by the address where their models answer."""
        self.desired: AdapterState | None = None
        self._renderer = renderer
        self._http = Http()
        self._lock = asyncio.Lock()
        self._syncing: asyncio.Task[None] | None = None
        # A derived config keeps the backend, and with it the transport and the admin calls.
        named = f"http://{config.elastic.hostname}:{config.elastic.port}/v1"
        at_service = msgspec.structs.replace(config, base_url=[named])
        self._source = DnsListing(
            config.elastic.hostname,
            config.elastic.port,
            config.elastic.sync_interval,
            make_listings(at_service) if config.backend == "dynamo" else (),
        )

    @property
    def ready_urls(self) -> list[str]:
        return [f"{url}/v1" for url, server in self.servers.items() if server.status == "ready"]

    @property
    def admin_clients(self) -> list[AdminClient]:
        return [server.admin for server in self.servers.values()]

    @property
    def train_clients(self) -> list[RolloutClient]:
        """Clients of the ready pods, or of the router once there is one."""
        urls = self.ready_urls
        if urls and self.config.router_url:
            urls = [self.config.router_url]
        derived = msgspec.structs.replace(self.config, base_url=urls, elastic=None)
        return setup_clients(derived, **self._renderer)

    async def start(self) -> None:
        """Look for pods once, then at every interval."""
        await self._sync_or_log()
        self._syncing = asyncio.create_task(self._sync_repeatedly())

    async def wait_for_ready(self, timeout: float | None = None, *, servers: int = 1) -> None:
        """Wait until so many pods are ready."""
        seconds = self.config.wait_for_ready_timeout if timeout is None else timeout

        async def check() -> None:
            await self.sync()
            ready = len(self.ready_urls)
            if ready < servers:
                causes = [f"{url}: {s.cause}" for url, s in self.servers.items() if s.cause]
                raise Unreachable(
                    f"{ready} of {len(self.servers)} pods of {self._source.hostname} are ready, "
                    f"and {servers} are needed. {' '.join(causes)}".rstrip()
                )

        await _poll(check, seconds)

    async def update_weights(
        self, weight_dir: Path | None, lora_name: str | None = None, step: int = 0
    ) -> None:
        """Make an adapter the desired one, and load it into all pods. A pod that fails gets no
        rollouts until a later sync succeeds."""
        if lora_name is None or weight_dir is None:
            raise UsageError(
                "An elastic pool serves adapters, and no full weights: a pod that joins later "
                "would have none of them.",
                "Train with LoRA, or use `rollway prime-rl serve`, which refits whole fleets.",
            )
        self.desired = AdapterState(lora_name, weight_dir.absolute(), step)
        self.model_name = lora_name
        await self.sync()
        if self.servers and not self.ready_urls:
            causes = "; ".join(f"{url}: {server.cause}" for url, server in self.servers.items())
            raise Unreachable(f"No pod serves {lora_name} of step {step}: {causes}")

    async def sync(self) -> None:
        """Follow the Service's pods, and load the desired adapter into each."""
        async with self._lock:
            workers = await discover(self._http, self._source, retry=ONCE)
            headers = self.config.read_admin_headers()
            servers = {}
            for worker in workers:
                known = self.servers.get(worker.inference_url)
                servers[worker.inference_url] = Server(
                    worker,
                    AdminClient(self._http, worker.admin_url, headers),
                    AdminClient(self._http, worker.inference_url, headers),
                    # It stays ready while it is asked again: rollouts continue there.
                    known.status if known is not None else "discovering",
                )
            self.servers = servers
            await asyncio.gather(*(self._sync_server(server) for server in servers.values()))

    def get_metrics(self) -> dict[str, float]:
        return {
            "elastic/num_servers": len(self.servers),
            "elastic/num_ready_servers": len(self.ready_urls),
            "elastic/desired_step": self.desired.step if self.desired else 0,
        }

    async def stop(self) -> None:
        if self._syncing is not None:
            self._syncing.cancel()
            await asyncio.gather(self._syncing, return_exceptions=True)
        await self._http.close()

    async def _sync_server(self, server: Server) -> None:
        try:
            if server.worker.error is not None:
                raise Unreachable(server.worker.error)
            await self.admin.health(server.admin)
            await self._read_adapter(server)
            if self.desired is not None and not self.desired.is_served_by(server.adapter):
                server.status = "syncing"
                path = self.desired.path.as_posix()
                await self.admin.load_lora_adapter(server.admin, self.desired.name, path)
                # Read it back: an engine may keep the old weights of a name, and report success.
                await self._read_adapter(server)
                if not self.desired.is_served_by(server.adapter):
                    raise Unreachable(f"it has {server.adapter} after {self.desired} was loaded.")
            server.status = "ready"
        except RollwayError as error:
            if server.status != "unhealthy":
                log.warning("%s gets no rollouts: %s", server.models, error)
            server.status, server.cause = "unhealthy", str(error)

    async def _read_adapter(self, server: Server) -> None:
        """Read what a pod has loaded; raise if it lacks the base model."""
        models = await _check_model(self.admin, server.models, self.base_model)
        wanted = None if self.desired is None else self.desired.name
        server.adapter = None
        for model in models:
            is_child = model.get("parent") == self.base_model
            if (model.get("id") == wanted) if wanted else is_child:
                path = Path(str(model.get("root") or ""))
                server.adapter = AdapterState(str(model.get("id")), path, read_step(path) or 0)
                return

    async def _sync_repeatedly(self) -> None:
        while True:
            await asyncio.sleep(self._source.interval)
            await self._sync_or_log()

    async def _sync_or_log(self) -> None:
        try:
            await self.sync()
        except RollwayError as error:  # a listing that failed changes nothing
            log.warning("the pods cannot be listed: %s", error)


async def setup_inference_pool(
    config: ClientConfig, model_name: str, **options: Any
) -> StaticPool | ElasticPool:
    """Return the pool that a config describes."""
    if config.elastic is None:
        return StaticPool(config, model_name, **options)
    pool = ElasticPool(config, model_name, **options)
    await pool.start()
    return pool


async def _check_model(admin: AdminAPI, client: AdminClient, model: str) -> list[dict[str, Any]]:
    models = await admin.list_models(client)
    if not any(entry.get("id") == model for entry in models):
        names = ", ".join(str(entry.get("id")) for entry in models) or "nothing"
        raise Unreachable(f"{client} serves {names}, and not {model}.")
    return models


async def _poll(check: Callable[[], Awaitable[None]], seconds: float) -> None:
    """Repeat a check until it raises no more; after so many seconds raise its last error."""
    last: RollwayError | None = None
    try:
        async with asyncio.timeout(seconds):
            while True:
                try:
                    return await check()
                except UsageError:
                    raise
                except RollwayError as error:
                    last = error
                await asyncio.sleep(READY_POLL_SECONDS)
    except TimeoutError:
        cause = last or "nothing has answered."
        raise Unreachable(f"Not ready after {seconds:g} s: {cause}") from last
