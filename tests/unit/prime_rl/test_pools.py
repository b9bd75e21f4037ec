"""The static and the elastic pool: pods are stand-in servers at loopback addresses of their own.

Only the name server is replaced: 127.0.0.2 and 127.0.0.3 stand for pods of one Service."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rollway.errors import Unreachable, UsageError
from rollway.fleet import discovery
from rollway.integrations.prime_rl import client_admin, pools
from rollway.integrations.prime_rl.client import ClientConfig, ElasticConfig
from rollway.integrations.prime_rl.pools import ElasticPool, StaticPool, setup_inference_pool
from tests.unit.prime_rl.recording import RecordingServer, list_workers, serve
from tests.waiting import wait_until_async

BASE = {"id": "m"}
STEP = Path("/runs/broadcasts/step_3")


def adapter(path: Path) -> dict[str, Any]:
    return {"id": "policy", "parent": "m", "root": str(path)}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "READY_POLL_SECONDS", 0.01)
    for name in ("_REPEAT", "_REPEAT_LORA"):
        monkeypatch.setattr(client_admin, name, client_admin.ONCE)


@dataclass
class Service:
    """A headless Service: addresses by name."""

    names: dict[str, list[str]] = field(default_factory=dict)

    async def resolve(self, hostname: str) -> list[str]:
        return self.names.get(hostname, [])


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Service:
    service = Service({"pods": ["127.0.0.2", "127.0.0.3"]})
    monkeypatch.setattr(discovery, "resolve_addresses", service.resolve)
    return service


@pytest.fixture
async def pods(service: Service) -> AsyncIterator[list[RecordingServer]]:
    """Two pods whose models answer at one port, as those of a Service do."""
    async with contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(serve("127.0.0.2"))
        port = int(first.url.rpartition(":")[2])
        second = await stack.enter_async_context(serve("127.0.0.3", port))
        for pod in (first, second):
            pod.serve_models(BASE)
        yield [first, second]


@pytest.fixture
async def systems() -> AsyncIterator[list[RecordingServer]]:
    """The system ports of both pods, which list no models, as Dynamo's workers have them."""
    async with contextlib.AsyncExitStack() as stack:
        hosts = ("127.0.0.2", "127.0.0.3")
        ports = [await stack.enter_async_context(serve(host)) for host in hosts]
        for port in ports:
            port.answer("/v1/models", (404, {}))
            port.answer("/health", (503, {"status": "notready"}))  # while it serves
        yield ports


@pytest.fixture
async def listing() -> AsyncIterator[RecordingServer]:
    async with serve() as server:
        yield server


def make_config(pods: list[RecordingServer], **more: Any) -> ClientConfig:
    port = int(pods[0].url.rpartition(":")[2])
    return ClientConfig(
        elastic=ElasticConfig(hostname="pods", port=port, sync_interval=0.01), **more
    )


@contextlib.asynccontextmanager
async def opened(config: ClientConfig) -> AsyncIterator[ElasticPool]:
    pool = ElasticPool(config, "m")
    try:
        yield pool
    finally:
        await pool.stop()


# --- static --------------------------------------------------------------------------------------


async def test_discovery_is_repeated_until_the_workers_are_there(
    listing: RecordingServer, systems: list[RecordingServer]
) -> None:
    """The frontend starts after the orchestrator, and lists its workers one by one."""
    ready = list_workers(*(system.url for system in systems))
    failing = list_workers(systems[0].url, error="starting")
    listing.answer("/v1/rl/workers", (503, {}), (200, list_workers()), (200, failing), (200, ready))
    listing.answer("/v1/models", (200, {"data": []}), (200, {"data": [BASE]}))
    config = ClientConfig(
        backend="dynamo", base_url=[f"{listing.url}/v1"], rl_base_url=[listing.url]
    )
    pool = await setup_inference_pool(config, "m")
    assert isinstance(pool, StaticPool) and pool.admin_clients == []
    try:
        await pool.wait_for_ready(10.0)
        assert [client.url for client in pool.admin_clients] == [s.url for s in systems]
        # Models are asked at the frontend, and not at the system ports.
        assert all("GET /v1/models" not in system.lines for system in systems)
        await pool.update_weights(STEP, step=3)
        for system in systems:
            assert [line for line in system.lines if line.startswith("POST")] == [
                "POST /engine/pause_generation",
                "POST /engine/update_weights_from_disk",
                "POST /engine/resume_generation",
            ]
    finally:
        await pool.stop()


async def test_a_pool_that_never_gets_ready_says_why(listing: RecordingServer) -> None:
    listing.answer("/v1/models", (200, {"data": [{"id": "other"}]}))
    pool = StaticPool(ClientConfig(base_url=[f"{listing.url}/v1"]), "m")
    try:
        with pytest.raises(Unreachable, match=r"after 0\.1 s: .* serves other, and not m"):
            await pool.wait_for_ready(0.1)
        listing.silent.add("/health")
        with pytest.raises(Unreachable, match="after"):
            await pool.wait_for_ready(0.1)
    finally:
        await pool.stop()
    unchecked = StaticPool(ClientConfig(base_url=[listing.url], skip_model_check=True), "m")
    listing.silent.clear()
    await unchecked.wait_for_ready(5.0)
    await unchecked.stop()


# --- elastic -------------------------------------------------------------------------------------


async def test_pods_are_matched_by_address_and_by_name(
    pods: list[RecordingServer],
    systems: list[RecordingServer],
    listing: RecordingServer,
    service: Service,
) -> None:
    """Health is asked at the system port, models at the inference port."""
    service.names["worker-b.pods"] = ["127.0.0.3"]
    named = systems[1].url.replace("127.0.0.3", "worker-b.pods")
    listing.answer("/v1/rl/workers", (200, list_workers(systems[0].url, named)))
    config = make_config(pods, backend="dynamo", rl_base_url=[listing.url])
    async with opened(config) as pool:
        await pool.sync()
        assert {u: s.admin.url for u, s in pool.servers.items()} == {
            pods[0].url: systems[0].url, pods[1].url: named
        }  # fmt: skip
        first = pool.servers[pods[0].url]
        assert first.status == "ready"
        assert systems[0].lines == ["GET /health"] and pods[0].lines == ["GET /v1/models"]


async def test_a_pod_that_nobody_lists_gets_nothing(
    pods: list[RecordingServer], systems: list[RecordingServer], listing: RecordingServer
) -> None:
    """It once got the first worker that was listed, and with it another pod's weights."""
    listing.answer("/v1/rl/workers", (200, list_workers(systems[0].url)))
    config = make_config(pods, backend="dynamo", rl_base_url=[listing.url])
    async with opened(config) as pool:
        await pool.sync()
        lost = pool.servers[pods[1].url]
        assert lost.status == "unhealthy" and "127.0.0.3 is unknown" in lost.cause
        assert pool.ready_urls == [f"{pods[0].url}/v1"]
        assert pool.get_metrics() == {
            "elastic/num_servers": 2, "elastic/num_ready_servers": 1, "elastic/desired_step": 0
        }  # fmt: skip
        with pytest.raises(Unreachable, match="1 of 2 pods"):
            await pool.wait_for_ready(0.05, servers=2)
    workers = [discovery.Worker(n, "m", systems[0].url) for n in (1, 2)]
    for listed in ([], workers):  # nobody, or two in one pod
        with pytest.raises(Unreachable, match="is unknown"):
            await discovery.find_pod_worker("127.0.0.2", listed)


async def test_rebuilt_clients_keep_the_backend(
    pods: list[RecordingServer],
    systems: list[RecordingServer],
    listing: RecordingServer,
    service: Service,
) -> None:
    listing.answer("/v1/rl/workers", (200, list_workers(*(s.url for s in systems))))
    config = make_config(
        pods, backend="dynamo", rl_base_url=[listing.url], dp_rank_count=2, headers={"X-Run": "7"}
    )
    async with opened(config) as pool:
        await pool.sync()
        assert len(pool.train_clients) == 4
        service.names["pods"] = ["127.0.0.3"]  # a pod leaves
        await pool.sync()
        clients = pool.train_clients
        assert [c.base_url for c in clients] == [f"{pods[1].url}/v1"] * 2
        assert {c.transport for c in clients} == {"dynamo"}
        assert all(c.headers["X-Run"] == "7" for c in clients)


async def test_rollouts_go_to_the_router_once_a_pod_is_ready(pods: list[RecordingServer]) -> None:
    async with opened(make_config(pods, router_url="http://router/v1")) as pool:
        assert pool.train_clients == []
        await pool.sync()
        assert [client.base_url for client in pool.train_clients] == ["http://router/v1"]
        assert len(pool.admin_clients) == 2


async def test_an_adapter_is_loaded_into_every_pod_and_read_back(
    pods: list[RecordingServer],
) -> None:
    async with opened(make_config(pods)) as pool:
        pods[0].answer(
            "/v1/models", (200, {"data": [BASE]}), (200, {"data": [BASE, adapter(STEP)]})
        )
        # This pod reports success, and keeps what it had.
        pods[1].serve_models(BASE, adapter(STEP.with_name("step_2")))
        await pool.update_weights(STEP, "policy", step=3)
        assert pool.ready_urls == [f"{pods[0].url}/v1"]
        assert "step_2" in pool.servers[pods[1].url].cause
        assert pool.get_metrics()["elastic/desired_step"] == 3 and pool.model_name == "policy"
        with pytest.raises(UsageError, match="no full weights"):
            await pool.update_weights(STEP, None, step=3)


async def test_a_restarted_pod_gets_its_adapter_before_any_rollout(
    pods: list[RecordingServer],
) -> None:
    has_it = (200, {"data": [BASE, adapter(STEP)]})
    async with opened(make_config(pods)) as pool:
        for pod in pods:
            pod.answer("/v1/models", has_it)
        await pool.update_weights(STEP, "policy", step=3)
        assert len(pool.ready_urls) == 2 and not pods[0].sent_to("/load_lora_adapter")
        # The same address, and nothing loaded. It cannot load it yet.
        pods[0].serve_models(BASE)
        pods[0].answer("/load_lora_adapter", (503, {"error": "starting"}))
        await pool.sync()
        assert pool.ready_urls == [f"{pods[1].url}/v1"]
        pods[0].answer("/load_lora_adapter", (200, {"status": "ok"}))
        pods[0].answer("/v1/models", (200, {"data": [BASE]}), has_it)
        await pool.sync()
        assert len(pool.ready_urls) == 2 and pods[0].sent_to("/load_lora_adapter")


async def test_pods_join_and_leave_while_the_pool_runs(
    pods: list[RecordingServer], service: Service
) -> None:
    service.names["pods"] = []
    pool = await setup_inference_pool(make_config(pods), "m")
    assert isinstance(pool, ElasticPool)
    try:
        assert pool.get_metrics()["elastic/num_servers"] == 0
        service.names["pods"] = ["127.0.0.2", "127.0.0.3"]
        await pool.wait_for_ready(10.0, servers=2)
        service.names["pods"] = ["127.0.0.2"]
        await wait_until_async(lambda: pool.get_metrics()["elastic/num_servers"] == 1)
    finally:
        await pool.stop()


async def test_a_name_server_that_fails_removes_no_pod(
    pods: list[RecordingServer], service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(make_config(pods)) as pool:
        await pool.sync()

        async def fail(hostname: str) -> list[str]:
            raise Unreachable(f"{hostname} cannot be resolved.")

        monkeypatch.setattr(discovery, "resolve_addresses", fail)
        with pytest.raises(Unreachable):
            await pool.sync()
        assert len(pool.ready_urls) == 2


async def test_names_are_resolved_by_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await discovery.resolve_addresses("localhost") == ["127.0.0.1"]
    assert await discovery.resolve_addresses("127.0.0.7") == ["127.0.0.7"]

    def fail(number: int) -> Callable[..., None]:
        def raise_it(*_: object, **__: object) -> None:
            raise socket.gaierror(number, "no")

        return raise_it

    # A Service without pods has no address; a name server that does not answer says nothing.
    monkeypatch.setattr(socket, "getaddrinfo", fail(socket.EAI_NONAME))
    assert await discovery.resolve_addresses("pods") == []
    monkeypatch.setattr(socket, "getaddrinfo", fail(socket.EAI_AGAIN))
    with pytest.raises(Unreachable, match="cannot be resolved"):
        await discovery.resolve_addresses("pods")
