"""Listing workers: three sources, joins and leaves."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from rollway.errors import RequestFailed, Unreachable
from rollway.fleet import discovery
from rollway.fleet.discovery import (
    DnsListing,
    HealthListing,
    RlListing,
    StaticList,
    Worker,
    discover,
    list_instances,
)
from rollway.fleet.membership import Membership
from rollway.http import Http
from tests.unit.fleet.fake_fleet import FakeWorker, fake_fleet

BIG = 2**64 - 59


@asynccontextmanager
async def serving(path: str, answer: Any) -> AsyncIterator[str]:
    """Serve one GET route; `answer` is JSON, or a function that returns it."""

    async def handle(_: web.Request) -> web.Response:
        return web.json_response(answer() if callable(answer) else answer)

    app = web.Application()
    app.router.add_get(path, handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def instance(number: int, endpoint: str = "generate", namespace: str = "rl") -> dict[str, Any]:
    transport = {"tcp": f"127.0.0.1:4{number % 10}/abc/{namespace}/backend/{endpoint}"}
    return {
        "instance_id": number,
        "endpoint": endpoint,
        "component": "backend",
        "namespace": namespace,
        "transport": transport,
    }


async def test_health_instances_are_deduplicated_and_get_an_admin_address() -> None:
    entries = [
        instance(BIG),
        instance(BIG, "rl"),
        instance(BIG, "clear_kv_blocks"),
        instance(7, namespace="rl-7f3a09bc"),
        instance(8, namespace="rlother"),
        instance(9, namespace="rl-2"),  # a deployment whose name begins alike
    ]
    async with serving("/health", {"instances": entries}) as url, Http() as http:
        port = int(url.rpartition(":")[2])
        workers = await discover(http, HealthListing(url, "rl", system_port=port))
        assert [worker.instance_id for worker in workers] == [7, BIG]  # a hash, not a longer name
        assert {worker.admin_url for worker in workers} == {f"http://127.0.0.1:{port}"}
        assert all(worker.error is None for worker in workers)
        dead = await discover(http, HealthListing(url, "rl", system_port=9))
        assert all("no connection" in (worker.error or "") for worker in dead)


async def test_an_instance_without_an_address_is_listed_with_an_error() -> None:
    entry = {**instance(1), "transport": {"nats_tcp": "rl.backend.generate"}}
    async with serving("/health", {"instances": [entry]}) as url, Http() as http:
        (worker,) = await discover(http, HealthListing(url))
        assert worker.error == "its transport names no address"


async def test_a_static_list_shows_which_workers_do_not_answer() -> None:
    async with fake_fleet(FakeWorker(1)) as url, Http() as http:
        (listed,) = await discover(http, RlListing(url))
        source = StaticList((listed.admin_url, listed.admin_url + "/", "http://127.0.0.1:9"))
        workers = await discover(http, source)
        assert len({worker.instance_id for worker in workers}) == len(workers)
        assert all(worker.instance_id < 0 for worker in workers)
        broken = [worker for worker in workers if worker.error is not None]
        assert [worker.admin_url for worker in broken] == ["http://127.0.0.1:9"]


@pytest.mark.parametrize(
    "answer", [{"workers": None}, [], {"workers": [{"instance_id": "7"}]}, {"workers": [7]}]
)
async def test_a_listing_of_the_wrong_shape_is_an_error(answer: Any) -> None:
    async with serving("/v1/rl/workers", answer) as url, Http() as http:
        with pytest.raises(RequestFailed):
            await discover(http, RlListing(url))


async def test_a_worker_that_cannot_be_administered_is_listed_with_the_reason() -> None:
    entries = [
        {"instance_id": 1, "system_url": "", "routes": ["pause_generation", "resume_generation"]},
        {"instance_id": 2, "system_url": "http://127.0.0.1:1", "routes": ["flush_cache"]},
        {
            "instance_id": 3,
            "system_url": "http://127.0.0.1:1",
            "routes": ["control/pause_generation", "control/resume_generation"],
        },
    ]
    async with serving("/v1/rl/workers", {"workers": entries}) as url, Http() as http:
        first, second, third = await discover(http, RlListing(url))
    assert "without an admin address" in (first.error or "")
    assert "does not offer pause_generation, resume_generation" in (second.error or "")
    assert third.error is None


async def test_callers_at_the_same_time_share_a_listing() -> None:
    calls = 0

    def answer() -> dict[str, Any]:
        nonlocal calls
        calls += 1
        return {"workers": []}

    async with serving("/v1/rl/workers", answer) as url, Http() as http:
        members = Membership(http, RlListing(url), keep_seconds=5.0)
        await asyncio.gather(*(members.workers() for _ in range(10)))
        await members.workers()
        assert calls == 1
        await members.workers(fresh=True)
        assert calls == 2


async def test_listeners_are_notified_and_a_failed_listing_is_not_a_leave() -> None:
    fleet = [FakeWorker(1), FakeWorker(2, error="DeadlineExceeded")]
    events: list[str] = []

    async def joined(worker: Worker) -> None:
        events.append(f"+{worker.instance_id}")

    async def left(worker: Worker) -> None:
        events.append(f"-{worker.instance_id}")

    entries: dict[str, Any] = {}

    def listing() -> dict[str, Any]:
        return entries

    async with serving("/v1/rl/workers", listing) as url, Http() as http:
        members = Membership(http, RlListing(url))
        members.on_join(joined)
        members.on_leave(left)
        routes = fleet[0].routes
        first = {"instance_id": 1, "system_url": "http://h:1", "routes": routes, "model": "m"}
        second = {"instance_id": 2, "system_url": "http://h:2", "routes": routes, "model": "m"}
        entries["workers"] = [first, {**second, "error": "DeadlineExceeded"}]
        assert await members.poll()
        assert events == ["+1"]
        entries["workers"] = None
        assert not await members.poll()
        entries["workers"] = [first, second]
        await members.poll()
        entries["workers"] = [second]
        await members.poll()
    assert events == ["+1", "+2", "-1"]


async def test_an_unreachable_listing_raises() -> None:
    async with Http() as http:
        with pytest.raises(Unreachable):
            await Membership(http, RlListing("http://127.0.0.1:9")).workers()


async def test_the_health_page_names_the_workers_without_asking_them() -> None:
    entries = [instance(BIG), instance(BIG, "rl"), instance(7, "rl"), instance(9)]
    async with serving("/health", {"instances": entries}) as url, Http() as http:
        assert await list_instances(http, RlListing("http://127.0.0.1:9", url)) == {BIG, 7}


@pytest.mark.parametrize("answer", [{}, [], {"instances": [{"endpoint": "rl"}]}, {"instances": 7}])
async def test_a_health_page_that_cannot_be_read_says_nothing(answer: Any) -> None:
    async with serving("/health", answer) as url, Http() as http:
        assert await list_instances(http, RlListing(url, url)) is None
        assert await list_instances(http, RlListing(url)) is None
        assert await list_instances(http, StaticList((url,))) is None


async def test_a_listing_is_confirmed_only_if_nobody_joined_or_left() -> None:
    workers, entries = [FakeWorker(1), FakeWorker(2)], [instance(1, "rl"), instance(2, "rl")]
    async with (
        fake_fleet(*workers) as rl_url,
        serving("/health", lambda: {"instances": entries}) as frontend_url,
        Http() as http,
    ):
        membership = Membership(http, RlListing(rl_url, frontend_url))
        assert await membership.confirm() is None  # never listed
        listed = await membership.workers()
        assert await membership.confirm() == listed
        entries.append(instance(3, "rl"))
        assert await membership.confirm() is None
        del entries[1:]
        assert await membership.confirm() is None
        entries.append(instance(2, "rl"))
        workers[0].error = "DeadlineExceeded"
        await membership.workers(fresh=True)
        assert await membership.confirm() is None  # somebody did not answer


async def test_roles_are_told_by_components_and_remembered() -> None:
    """Dynamo's own decode workers are known by the prefill workers beside them, which may die."""

    def entry(number: int, component: str) -> dict[str, Any]:
        routes = ["pause_generation", "resume_generation"]
        fields = {"instance_id": number, "component": component, "model": "m", "routes": routes}
        return {**fields, "system_url": f"http://127.0.0.1:{number}"}

    workers = [entry(1, "prefill"), entry(2, "backend")]
    noted: list[Any] = []
    async with serving("/v1/rl/workers", lambda: {"workers": workers}) as url, Http() as http:
        membership = Membership(http, RlListing(url), "m", note_roles=noted.append)
        listed = await membership.workers(fresh=True)
        assert [worker.role for worker in listed] == ["prefill", "decode"]
        del workers[0]
        (left,) = await membership.workers(fresh=True)
        assert left.role == "decode"
    assert noted == [{1: "prefill", 2: "decode"}, {2: "decode"}]


async def test_a_pod_gets_calls_only_at_an_address_that_is_known_to_be_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pods are matched by address and by name; one that nobody lists is listed with the reason."""
    names = {
        "pods": ["127.0.0.2", "127.0.0.3", "127.0.0.4"], "worker-b.pods": ["127.0.0.3"]
    }  # fmt: skip

    async def resolve(hostname: str) -> list[str]:
        return names.get(hostname, [])

    monkeypatch.setattr(discovery, "resolve_addresses", resolve)
    urls = ["http://127.0.0.2:9090", "http://worker-b.pods:9091"]
    entries = [
        {"instance_id": n, "model": "m", "system_url": url, "routes": [*discovery.NEEDED_ROUTES]}
        for n, url in enumerate(urls, 1)
    ]  # fmt: skip
    async with Http() as http, serving("/v1/rl/workers", {"workers": entries}) as url:
        workers = await discover(http, DnsListing("pods", 8000, (RlListing(url),)))
    by_url = {worker.inference_url: worker for worker in workers}
    first, second, lost = (by_url[f"http://{pod}:8000"] for pod in names["pods"])
    assert [first.admin_url, second.admin_url, lost.admin_url] == [*urls, ""]
    assert lost.error is not None and "127.0.0.4 is unknown" in lost.error
    twice = [Worker(n, "m", urls[0]) for n in (1, 2)]
    with pytest.raises(Unreachable, match="is unknown"):
        await discovery.find_pod_worker("127.0.0.2", twice)


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
