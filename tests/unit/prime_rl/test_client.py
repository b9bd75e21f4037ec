"""The client of June 2026 against stand-in servers that record every byte."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from rollway.errors import RolloutError, Unreachable, UsageError
from rollway.http import Http
from rollway.integrations.prime_rl.client import (
    ClientConfig,
    compute_teacher_logprobs,
    discover_dynamo_admin_base_urls,
    make_listings,
    read_config,
    read_transport,
    setup_admin_clients,
    setup_clients,
)
from tests.unit.prime_rl.recording import RecordingServer, list_workers

# --- settings ------------------------------------------------------------------------------------


def test_it_needs_neither_httpx_nor_verifiers() -> None:
    code = (
        "import sys\n"
        "for name in ('httpx', 'verifiers', 'renderers', 'tenacity', 'openai', 'torch', 'vllm'):\n"
        "    sys.modules[name] = None\n"
        "import rollway.integrations.prime_rl.client, rollway.integrations.prime_rl.pools\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_settings_have_junes_keys_and_refuse_others() -> None:
    table = {
        "backend": "dynamo", "base_url": ["http://a:8000/v1"], "rl_base_url": ["http://a:8001"],
        "dp_rank_count": 2, "elastic": {"hostname": "pods"}, "router_url": "http://r/v1",
        "headers_from_env": {"X-Team": "TEAM"}, "skip_model_check": True, "timeout": 5,
    }  # fmt: skip
    config = read_config(table)
    assert config.elastic is not None and config.elastic.port == 8000
    assert read_config({"base_url": "http://a/v1"}).base_url == ["http://a/v1"]
    assert read_config(SimpleNamespace(model_dump=lambda: table)) == config
    for wrong in (
        {"dynamo": {"enabled": True}},
        {"backend": "sglang"},
        {"base_url": ["a:8000"]},
        {"dp_rank_count": 0},
        {"elastic": {"hostname": "pods", "sync_interval": 0}},
        {"elastic": {"hostname": "pods"}, "admin_base_url": ["http://a"]},
    ):
        with pytest.raises(UsageError):
            read_config(wrong)


def test_admin_calls_never_go_to_the_listing_of_the_frontend() -> None:
    with pytest.raises(UsageError, match="takes no admin calls"):
        ClientConfig(backend="dynamo", admin_base_url=["http://frontend:8001/v1/rl"])


@dataclass
class _OldClient:
    """A client class of verifiers before transports."""

    api_base_url: str
    extra_headers: dict[str, str]
    max_retries: int = 0


@dataclass
class _NewClient:
    """A client class with the names of an earlier head."""

    base_url: str
    renderer_transport: Literal["vllm_generate", "dynamo_chat"]


# Classes of this file have annotations as texts; pydantic resolves them, so the test does, too.
_NewClient.__dataclass_fields__["renderer_transport"].type = Literal["vllm_generate", "dynamo_chat"]


def test_the_transport_follows_from_the_backend_in_the_names_that_a_client_knows() -> None:
    (vllm,) = setup_clients(ClientConfig())
    (dynamo,) = setup_clients(ClientConfig(backend="dynamo"), "renderer", pool_size=2)
    assert (vllm.transport, dynamo.transport) == ("vllm", "dynamo")
    assert (vllm.max_connections, vllm.max_retries) == (8192, 10)
    assert dynamo.make_options(_NewClient)["renderer_transport"] == "dynamo_chat"
    assert vllm.make_options(_NewClient)["renderer_transport"] == "vllm_generate"
    # An older client gets no argument that it does not know, and never another route in silence.
    options = vllm.make_options(_OldClient)
    assert options == {
        "api_base_url": "http://localhost:8000/v1", "extra_headers": {}, "max_retries": 10
    }  # fmt: skip
    timeouts = type("Timeouts", (), {"model_fields": {"connect": None, "read": None}})
    fields = {"timeout": SimpleNamespace(annotation=timeouts), "max_retries": None}
    latest = vllm.make_options(type("Client", (), {"model_fields": fields}))
    assert latest == {"timeout": {"connect": 30.0, "read": 1200}, "max_retries": 10}
    with pytest.raises(UsageError, match="renderer_transport"):
        dynamo.make_options(_OldClient)
    for name in ("dynamo", "dynamo_chat", "dynamo_chat_nvext"):
        assert read_transport(name) == "dynamo"
    for name in ("vllm", "vllm_generate", "prime_vllm_generate"):
        assert read_transport(name) == "vllm"
    with pytest.raises(UsageError, match="no renderer transport"):
        read_transport("grpc")


def test_every_data_parallel_rank_is_a_client() -> None:
    config = ClientConfig(base_url=["http://a/v1", "http://b/v1"], dp_rank_count=2)
    clients = setup_clients(config)
    ranks = [(c.base_url, c.headers["X-data-parallel-rank"]) for c in clients]
    assert ranks == [(f"http://{host}/v1", rank) for host in "ab" for rank in "01"]


# --- discovery -----------------------------------------------------------------------------------


async def test_workers_are_discovered_with_all_headers(
    http: Http, servers: list[RecordingServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEAM", "red")
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    server = servers[0]
    server.answer("/v1/rl/workers", (200, list_workers("http://10.0.0.1:9", "http://10.0.0.2:9")))
    config = ClientConfig(
        backend="dynamo",
        rl_base_url=[f"{server.url}/v1"],
        headers={"X-Run": "7"},
        headers_from_env={"X-Team": "TEAM", "X-Unset": "NOT_SET"},
    )
    clients = await setup_admin_clients(config, http)
    assert [client.url for client in clients] == ["http://10.0.0.1:9", "http://10.0.0.2:9"]
    wanted = {"x-run": "7", "x-team": "red", "authorization": "Bearer secret"}
    assert wanted.items() <= server.requests[0].headers.items()
    assert "x-unset" not in server.requests[0].headers
    # Admin calls have them, too.
    assert clients[0].headers["Authorization"] == "Bearer secret"
    assert "secret" not in f"{clients[0]!r} {make_listings(config)!r}"  # they are logged
    (models,) = await setup_admin_clients(config, http, use_admin_base_url=False)
    assert models.url == "http://localhost:8000"


async def test_the_listing_is_on_the_frontends_host_at_its_own_port(
    http: Http, servers: list[RecordingServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = servers[0]
    monkeypatch.setenv("DYN_RL_PORT", server.url.rpartition(":")[2])
    server.answer("/v1/rl/workers", (200, list_workers("http://10.0.0.1:9")))
    config = ClientConfig(backend="dynamo", base_url=["http://127.0.0.1:1/v1"])
    assert await discover_dynamo_admin_base_urls(config, http) == ["http://10.0.0.1:9"]


@pytest.mark.parametrize(
    ("listing", "reason"),
    [
        (list_workers(), "lists no worker"),
        (list_workers("http://0.0.0.0:9"), "0.0.0.0"),
        (list_workers("http://[::]:9"), "::"),
        (list_workers("http://10.0.0.1:9", error="timed out"), "timed out"),
        (list_workers(""), "without an admin address"),
    ],
)
async def test_a_worker_that_cannot_be_called_is_never_left_out(
    http: Http, servers: list[RecordingServer], listing: dict[str, Any], reason: str
) -> None:
    servers[0].answer("/v1/rl/workers", (200, listing))
    config = ClientConfig(backend="dynamo", rl_base_url=[servers[0].url])
    with pytest.raises(Unreachable, match=reason):
        await setup_admin_clients(config, http)


# --- teachers ------------------------------------------------------------------------------------

IDS = [5, 6, 7]
# Sorted by key, as JSON maps come from Dynamo: the likeliest token stands before the prompt's own.
SCORED = [None, {"1": {"logprob": -0.1}, "6": {"logprob": -2.0}}, {"7": {"logprob": -3.0}}]


async def test_a_teacher_is_asked_by_generate(http: Http, servers: list[RecordingServer]) -> None:
    server = servers[0]
    server.answer("/inference/v1/generate", (200, {"choices": [], "prompt_logprobs": SCORED}))
    clients = setup_clients(ClientConfig(base_url=[f"{server.url}/v1"]))
    sample = SimpleNamespace(prompt_ids=[5], completion_ids=[6, 7])
    scores = await compute_teacher_logprobs(clients, "m", [IDS, sample], http=http)
    assert scores == [[0.0, -2.0, -3.0]] * 2
    assert server.requests[0].body == (
        b'{"model":"m","token_ids":[5,6,7],"sampling_params":{"max_tokens":1,"temperature":1.0,'
        b'"top_p":1.0,"prompt_logprobs":1}}'
    )


async def test_a_teacher_is_asked_by_chat_with_a_placeholder(
    http: Http, servers: list[RecordingServer]
) -> None:
    server = servers[0]
    server.answer("/v1/chat/completions", (200, {"nvext": {"prompt_logprobs": SCORED}}))
    clients = setup_clients(ClientConfig(backend="dynamo", base_url=[f"{server.url}/v1"]))
    assert await compute_teacher_logprobs(clients, "m", [IDS], http=http) == [[0.0, -2.0, -3.0]]
    assert server.requests[0].body == (
        b'{"model":"m","messages":[{"role":"user","content":""}],"max_completion_tokens":1,'
        b'"temperature":1.0,"top_p":1.0,"prompt_logprobs":1,'
        b'"nvext":{"token_data":[5,6,7],"extra_fields":["prompt_logprobs"]}}'
    )


@pytest.mark.parametrize(
    "answer",
    [
        {"choices": []},
        {"nvext": {"prompt_logprobs": []}},
        {"nvext": {"prompt_logprobs": SCORED[:2]}},
        {"nvext": {"prompt_logprobs": [None, {"1": {"logprob": -0.1}}, SCORED[2]]}},
        {"nvext": {"prompt_logprobs": [None, None, SCORED[2]]}},
    ],
)
async def test_scores_that_are_missing_are_an_error(
    http: Http, servers: list[RecordingServer], answer: dict[str, Any]
) -> None:
    servers[0].answer("/v1/chat/completions", (200, answer))
    clients = setup_clients(ClientConfig(backend="dynamo", base_url=[f"{servers[0].url}/v1"]))
    with pytest.raises(RolloutError):
        await compute_teacher_logprobs(clients, "m", [IDS], http=http)


async def test_scores_are_spread_over_all_servers(
    http: Http, servers: list[RecordingServer]
) -> None:
    for server in servers:
        server.answer("/inference/v1/generate", (200, {"prompt_logprobs": SCORED}))
    clients = setup_clients(ClientConfig(base_url=[f"{server.url}/v1" for server in servers]))
    await compute_teacher_logprobs(clients, "m", [IDS] * 4, http=http)
    assert [len(server.requests) for server in servers] == [2, 2]
    with pytest.raises(UsageError, match="no server"):
        await compute_teacher_logprobs([], "m", [IDS], http=http)
