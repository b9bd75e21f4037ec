"""Admin calls of June 2026 to stand-in servers that record every byte."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from rollway.errors import AdminError, RequestFailed, Unreachable, UsageError
from rollway.http import Http, Retry
from rollway.integrations.prime_rl import client_admin
from rollway.integrations.prime_rl.client import ClientConfig, setup_admin_api
from rollway.integrations.prime_rl.client_admin import (
    AdminAPI,
    AdminClient,
    DynamoAdminAPI,
    VLLMAdminAPI,
    init_nccl_broadcast,
    update_weights,
)
from tests.unit.prime_rl.recording import RecordingServer
from tests.waiting import wait_until_async

GROUP = (
    b'{"host":"h","port":29501,"rank_offset":0,"inference_world_size":1,"timeout":1200,'
    b'"quantize_in_weight_transfer":false'
)


@pytest.fixture(autouse=True)
def quick_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeat without waits; the number of attempts stays."""
    for name in ("_REPEAT", "_REPEAT_LORA"):
        policy: Retry = getattr(client_admin, name)
        monkeypatch.setattr(client_admin, name, _without_waits(policy))


def _without_waits(policy: Retry) -> Retry:
    return Retry(policy.attempts, 0.0, 0.0, policy.total_seconds, statuses=policy.statuses)


def admin_clients(http: Http, servers: list[RecordingServer]) -> list[AdminClient]:
    return [AdminClient(http, server.url) for server in servers]


async def call_everything(admin: AdminAPI, client: AdminClient) -> None:
    await admin.health(client)
    await admin.list_models(client)
    await admin.pause(client)
    await admin.update_weights(client, "/runs/step_3")
    await admin.resume(client)
    await admin.load_lora_adapter(client, "p", "/runs/step 3")
    await admin.init_broadcaster(
        client, host="h", port=29501, rank_offset=0, inference_world_size=1, timeout=1200
    )


async def test_a_vllm_server_gets_these_bytes(http: Http, servers: list[RecordingServer]) -> None:
    server = servers[0]
    server.serve_models({"id": "m"})
    server.answer("/load_lora_adapter", (200, "Success: LoRA adapter 'p' added successfully."))
    server.answer("/health", (200, ""))
    await call_everything(VLLMAdminAPI(), AdminClient(http, server.url))
    assert [(request.line, request.body) for request in server.requests] == [
        ("GET /health", b""),
        ("GET /v1/models", b""),
        ("POST /pause?mode=keep&clear_cache=false", b""),
        ("POST /update_weights", b'{"weight_dir":"/runs/step_3"}'),
        ("POST /resume", b""),
        ("POST /load_lora_adapter", b'{"lora_name":"p","lora_path":"/runs/step 3"}'),
        ("POST /init_broadcaster", GROUP + b"}"),
    ]


async def test_a_dynamo_worker_gets_these_bytes(http: Http, servers: list[RecordingServer]) -> None:
    server = servers[0]
    server.serve_models({"id": "m"})
    client = AdminClient(http, server.url)
    await call_everything(DynamoAdminAPI(), client)
    await DynamoAdminAPI(weight_broadcast_type="nccl").update_weights(client, "runs/step_3")
    await DynamoAdminAPI().update_weights(client, None)
    assert [(request.line, request.body) for request in server.requests[2:]] == [
        ("POST /engine/pause_generation", b'{"mode":"keep","clear_cache":false}'),
        (
            "POST /engine/update_weights_from_disk",
            b'{"model_path":"/runs/step_3","weight_version":"step_3",'
            b'"engine_rpc":"reload_weights"}',
        ),
        ("POST /engine/resume_generation", b"{}"),
        (
            "POST /engine/load_lora",
            b'{"lora_name":"p","source":{"uri":"file:///runs/step%203"}}',
        ),
        (
            "POST /engine/init_weights_update_group",
            GROUP + b',"engine_rpc":"init_broadcaster"}',
        ),
        (
            "POST /engine/update_weights_from_distributed",
            b'{"weight_version":"step_3","weight_dir":"runs/step_3",'
            b'"engine_rpc":"update_weights_from_path"}',
        ),
    ]


async def test_a_relative_directory_is_sent_as_an_absolute_one(
    http: Http, servers: list[RecordingServer]
) -> None:
    await DynamoAdminAPI().update_weights(AdminClient(http, servers[0].url), "out/step_3")
    (body,) = servers[0].sent_to("/engine/update_weights_from_disk")
    assert json.loads(body)["model_path"] == str(Path.cwd() / "out/step_3")


async def test_an_error_in_an_answer_with_200_is_an_error(
    http: Http, servers: list[RecordingServer]
) -> None:
    server = servers[0]
    server.answer("/engine/pause_generation", (200, {"status": "error", "message": "no"}))
    with pytest.raises(AdminError, match="refused `pause_generation`: no"):
        await DynamoAdminAPI().pause(AdminClient(http, server.url))
    assert len(server.requests) == 1


@pytest.mark.parametrize("admin", [VLLMAdminAPI(), DynamoAdminAPI()])
async def test_pause_and_resume_are_bounded_and_repeated(
    http: Http, servers: list[RecordingServer], admin: AdminAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, client = servers[0], AdminClient(http, servers[0].url)
    for path in ("/pause", "/resume", "/engine/pause_generation", "/engine/resume_generation"):
        server.answer(path, (503, {}), (500, {}), (200, {"status": "ok"}))
    for call in (admin.pause, admin.resume):
        await call(client)
    assert len(server.requests) == 6
    for path in ("/pause", "/engine/pause_generation"):
        server.answer(path, (400, {}))
    with pytest.raises(RequestFailed):  # a 4xx is not repeated
        await admin.pause(client)
    assert len(server.requests) == 7
    server.silent |= {"/resume", "/engine/resume_generation"}
    post = AdminClient.post

    async def post_briefly(self: AdminClient, path: str, body: Any = None, **more: Any) -> Any:
        return await post(self, path, body, **{**more, "timeout": 0.05})

    monkeypatch.setattr(AdminClient, "post", post_briefly)
    with pytest.raises(Unreachable, match="no answer within"):
        await admin.resume(client)
    assert 7 + 2 <= len(server.requests) <= 7 + 10  # repeated, for twice the limit


@pytest.mark.parametrize("kind", ["filesystem", "nccl"])
async def test_an_update_without_an_answer_is_not_sent_again(
    http: Http,
    servers: list[RecordingServer],
    kind: client_admin.BroadcastType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_admin, "UPDATE_SECONDS", 0.1)
    server = servers[0]
    route = "/engine/update_weights_from_" + ("disk" if kind == "filesystem" else "distributed")
    server.silent.add(route)
    admin = DynamoAdminAPI(weight_broadcast_type=kind)
    with pytest.raises(Unreachable):
        await admin.update_weights(AdminClient(http, server.url), "/runs/step_1")
    assert len(server.sent_to(route)) == 1
    server.silent.clear()
    server.answer(route, (503, {}), (200, {"status": "ok"}))
    updating = admin.update_weights(AdminClient(http, server.url), "/runs/step_1")
    if kind == "filesystem":  # the call has ended, so it may be repeated
        await updating
    else:  # the trainer sends a collective once
        with pytest.raises(RequestFailed):
            await updating
    assert len(server.sent_to(route)) == (3 if kind == "filesystem" else 2)


async def test_an_adapter_whose_name_is_taken_is_loaded_anew(
    http: Http, servers: list[RecordingServer]
) -> None:
    server = servers[0]
    again = {"status": "success", "message": "LoRA adapter 'p' already loaded"}
    server.answer("/engine/load_lora", (200, again), (200, {"status": "success"}))
    await DynamoAdminAPI().load_lora_adapter(AdminClient(http, server.url), "p", "/runs/step_3")
    names = [request.path.rpartition("/")[2] for request in server.requests]
    assert names == ["load_lora", "unload_lora", "load_lora"]
    server.answer("/engine/load_lora", (200, again))
    server.answer("/engine/unload_lora", (200, {"status": "error", "message": "busy"}))
    with pytest.raises(AdminError, match="busy"):
        await DynamoAdminAPI().load_lora_adapter(AdminClient(http, server.url), "p", "/runs/x")


async def test_an_adapter_that_is_not_visible_yet_is_asked_for_again(
    http: Http, servers: list[RecordingServer]
) -> None:
    servers[0].answer("/load_lora_adapter", (404, {}), (500, {}), (200, {"status": "ok"}))
    await VLLMAdminAPI().load_lora_adapter(AdminClient(http, servers[0].url), "p", "/runs/step_3")
    assert len(servers[0].requests) == 3


# --- all servers ---------------------------------------------------------------------------------


async def test_all_servers_pause_before_any_is_updated(
    http: Http, servers: list[RecordingServer], tmp_path: Path
) -> None:
    step = tmp_path / "step_1"
    await update_weights(admin_clients(http, servers), step, step=1, admin=VLLMAdminAPI())
    for server in servers:
        assert [line.partition("?")[0] for line in server.lines] == [
            "POST /pause", "POST /update_weights", "POST /resume"
        ]  # fmt: skip
    assert not (step / "NCCL_READY").exists()  # no trainer waits for it
    await update_weights(admin_clients(http, servers), step, admin=VLLMAdminAPI("nccl"))
    assert (step / "NCCL_READY").exists()


async def test_a_pause_that_fails_is_undone_everywhere(
    http: Http, servers: list[RecordingServer]
) -> None:
    servers[1].answer("/pause", (400, {"error": "busy"}))
    with pytest.raises(AdminError, match=r"1 of 2 servers failed.*busy"):
        await update_weights(
            admin_clients(http, servers), Path("/runs/step_1"), admin=VLLMAdminAPI()
        )
    for server in servers:
        assert server.lines[-1] == "POST /resume" and not server.sent_to("/update_weights")


async def test_an_update_that_fails_on_one_server_resumes_none(
    http: Http, servers: list[RecordingServer]
) -> None:
    servers[1].answer("/update_weights", (400, {"error": "no such directory"}))
    with pytest.raises(AdminError, match="stays paused"):
        await update_weights(
            admin_clients(http, servers), Path("/runs/step_1"), admin=VLLMAdminAPI()
        )
    assert all("POST /resume" not in server.lines for server in servers)


async def test_a_group_gets_all_ranks_by_the_calls_of_its_backend(
    http: Http, servers: list[RecordingServer]
) -> None:
    config = ClientConfig(backend="dynamo")
    clients, admin = admin_clients(http, servers), setup_admin_api(config, "nccl")
    await init_nccl_broadcast(clients, "h", 29501, 60, 4, admin=admin)
    bodies = [json.loads(s.sent_to("/engine/init_weights_update_group")[0]) for s in servers]
    assert [body["rank_offset"] for body in bodies] == [0, 2]
    assert {body["inference_world_size"] for body in bodies} == {4}
    for answer in ((404, {}), (500, {}), (200, {"status": "error", "message": "no"})):
        servers[1].answer("/engine/init_weights_update_group", answer)
        with pytest.raises(AdminError, match="group was not formed"):
            await init_nccl_broadcast(clients, "h", 29501, 60, 4, admin=admin)
    with pytest.raises(UsageError, match="5 ranks do not divide among 2"):
        await init_nccl_broadcast(clients, "h", 29501, 60, 5, admin=admin)


async def test_a_group_that_hangs_ends_with_its_timeout(
    http: Http, servers: list[RecordingServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_admin, "RENDEZVOUS_MARGIN_SECONDS", 0.05)
    servers[0].silent.add("/init_broadcaster")
    with pytest.raises(AdminError, match="no answer within"):
        await init_nccl_broadcast(
            admin_clients(http, servers[:1]), "h", 1, 0.05, admin=VLLMAdminAPI("nccl")
        )


async def test_a_cancelled_pause_is_undone(http: Http, servers: list[RecordingServer]) -> None:
    servers[0].silent.add("/pause")
    updating = asyncio.create_task(
        update_weights(admin_clients(http, servers), Path("/runs/step_1"), admin=VLLMAdminAPI())
    )
    await wait_until_async(lambda: servers[0].requests, every=0.001)
    updating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await updating
    assert all(server.lines[-1] == "POST /resume" for server in servers)
