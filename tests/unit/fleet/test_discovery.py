"""Listing workers: three sources, joins and leaves."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollway.errors import RequestFailed, Unreachable
from rollway.fleet.workers import (
    DnsListing,
    HealthListing,
    Membership,
    RlListing,
    StaticList,
    discover,
    list_instances,
)
from rollway.http import Http
from tests.unit.fleet.fake_fleet import FakeWorker, fake_fleet, serving

BIG = 2**64 - 59


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
        workers = await discover(http, HealthListing(url, ("rl",), system_port=port))
        assert [worker.instance_id for worker in workers] == [7, BIG]  # a hash, not a longer name
        assert {worker.admin_url for worker in workers} == {f"http://127.0.0.1:{port}"}
        assert all(worker.error is None for worker in workers)
        dead = await discover(http, HealthListing(url, ("rl",), system_port=9))
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
        members = Membership(http, RlListing(url))
        await asyncio.gather(*(members.workers() for _ in range(10)))
        await members.workers()
        assert calls == 1
        await members.workers(fresh=True)
        assert calls == 2


async def test_a_poll_says_who_joined_and_left_and_a_failed_listing_is_not_a_leave() -> None:
    entries: dict[str, Any] = {}
    async with serving("/v1/rl/workers", lambda: entries) as url, Http() as http:
        members = Membership(http, RlListing(url))

        async def poll() -> list[list[int]] | None:
            changes = await members.poll()
            if changes is None:
                return None
            return [[w.instance_id for w in part] for part in (changes.joined, changes.left)]

        first, second, third = (
            {"instance_id": n, "system_url": f"http://h:{n}", "routes": FakeWorker(n).routes}
            for n in (1, 2, 3)
        )
        entries["workers"] = [third]
        await members.workers()
        entries["workers"] = [first, {**second, "error": "DeadlineExceeded"}]
        assert await poll() == [[1], [3]]  # since the listing before
        entries["workers"] = None
        assert await poll() is None
        entries["workers"] = [first, second]
        await members.workers(fresh=True)  # another listing takes no news away
        assert await poll() == [[2], []]
        entries["workers"] = [second]
        assert await poll() == [[], [1]]


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


def test_the_pods_of_a_service_are_found_by_a_real_name_server(tmp_path: Path) -> None:
    """Pods are matched by address and by name; one that nobody lists is listed with the reason. A
    Service without pods has no address; a name server that fails says nothing about its pods."""
    (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:2 attempts:1\n")
    own = f'mount --bind {tmp_path}/resolv.conf /etc/resolv.conf && ip link set lo up && exec "$@"'
    flags = "-mn" if os.getuid() == 0 else "-Urmn"
    inside = ["unshare", flags, "sh", "-c", own, "sh"]
    if subprocess.run([*inside, "true"], capture_output=True).returncode:
        pytest.skip("no namespaces are permitted here")
    scene = [sys.executable, "-m", "tests.unit.fleet.dns_scene"]
    done = subprocess.run([*inside, *scene], stdout=subprocess.PIPE, check=True, timeout=60)
    answer = json.loads(done.stdout)
    lost, first, second = answer["workers"]
    assert first == ["http://127.0.0.2:9090", None]
    assert second == ["http://worker-b.rl:9091", None]
    assert lost[0] == "" and "127.0.0.4 is unknown" in lost[1]
    assert answer["names"]["empty"] == answer["names"]["unknown"] == []
    assert "broken.rl cannot be resolved" in answer["names"]["broken"]
    assert "broken.rl cannot be resolved" in answer["failure"]  # a name of a worker


async def test_a_pod_with_two_workers_gets_no_calls() -> None:
    urls = ["http://127.0.0.2:9090", "http://127.0.0.2:9091"]
    workers = [{"instance_id": n, "system_url": url} for n, url in enumerate(urls)]
    async with serving("/v1/rl/workers", {"workers": workers}) as url, Http() as http:
        (pod,) = await discover(http, DnsListing("127.0.0.2", (RlListing(url),)))
    assert pod.admin_url == "" and "is unknown: 2 of 2" in (pod.error or "")
