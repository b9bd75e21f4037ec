"""A user's own config: what is wrong in it is named with its key, its cause and its fix."""

from __future__ import annotations

import asyncio
import tomllib
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rollway.cli import main
from rollway.errors import UsageError
from rollway.integrations.prime_rl.check import (
    find_problems,
    find_remote_problems,
    make_toml,
    read_toml,
)
from tests.awkward_tokenizer import build

CLIENT = """
[orchestrator.model.client]
base_url = "http://gw:8000/v1"
admin_base_url = ["http://gw:8100/v1"]
"""


def test_what_config_prints_has_no_problem() -> None:
    text = make_toml("policy", "http://gw:8000/v1", "http://gw:8100/v1")
    assert find_problems(tomllib.loads(text)) == []


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("", "orchestrator.model.client"),
        (CLIENT + "[inference]\n", "inference"),
        (
            CLIENT + "[weight_broadcast]\ntype = 'nccl'\n",
            "weight_broadcast.inference_world_size",
        ),
        (CLIENT + "[weight_broadcast]\ntype = 'mx_refit'\n", "weight_broadcast.type"),
        (
            CLIENT + "[weight_broadcast]\ntype = 'nccl'\n[trainer.model]\nlora = {rank = 8}\n",
            "weight_broadcast.type",
        ),
        (CLIENT + "[trainer.weight_broadcast]\ntype = 'nixl'\n", "weight_broadcast.port"),
        (CLIENT + "[weight_broadcast]\nkeep_recent = 2\n", "weight_broadcast.keep_recent"),
        (
            CLIENT + "[weight_broadcast]\nquantize_in_weight_transfer = true\n",
            "weight_broadcast.quantize_in_weight_transfer",
        ),
        (CLIENT.replace("8100/v1", "8100/v1/rl"), "orchestrator.model.client.admin_base_url"),
        (
            CLIENT.replace('v1"]', 'v1", "http://b:1"]'),
            "orchestrator.model.client.admin_base_url",
        ),
        ("[client]\nbase_url = ['http://gw:8000/v1']\n", "client.base_url"),
    ],
)
def test_a_problem_is_named_by_its_key(text: str, key: str) -> None:
    problems = find_problems(tomllib.loads(text))
    assert key in [problem.what for problem in problems]
    assert all(problem.cause and problem.fix for problem in problems)


def test_steps_may_be_fewer(tmp_path: Path) -> None:
    text = CLIENT + "[weight_broadcast]\nkeep_recent = 2\n"
    assert find_problems(tomllib.loads("[orchestrator]\nmax_off_policy_steps = 2\n" + text)) == []
    file = tmp_path / "rl.toml"
    file.write_text("a =")
    with pytest.raises(UsageError, match="not TOML"):
        read_toml(file)
    with pytest.raises(UsageError, match="cannot be read"):
        read_toml(tmp_path / "none.toml")


async def test_addresses_are_asked_for_their_series(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And names for their tokenizers: prime-rl loads the one of rollouts by the model's name."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    policy = str(build(tmp_path))
    page = ["dynamo_frontend_requests_total 1\n"]

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(text=page[0])

    async def health(request: web.Request) -> web.Response:
        return web.json_response({})

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": policy}, {"id": "policy"}]})

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/health", health)
    async with TestServer(app) as server:
        config = {"client": {"admin_base_url": [f"{server.make_url('/v1')}"]}}
        (problem,) = await find_remote_problems(config)
        assert "vllm:*" in problem.cause
        page[0] = 'vllm:num_requests_running{engine="0"} 0\n'
        assert await find_remote_problems(config) == []
        assert await find_remote_problems({**config, "model": {"name": policy}}) == []
        (problem,) = await find_remote_problems({**config, "model": {"name": "policy"}})
        assert problem.what == "model.name" and "loads a tokenizer by this name" in problem.cause
        problem, _ = await find_remote_problems({**config, "model": {"name": "other"}})
        assert problem.what == "model.name" and f"only {policy}" in problem.cause
    (problem,) = await find_remote_problems(config)
    assert "prime-rl serve" in problem.fix


async def test_an_address_that_answers_other_calls_alone_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`serve --admin-port` has an address for rollouts and one for admin calls."""
    planes = {"rollouts": "rollouts", "admin": "admin"}
    keys: set[str | None] = set()
    monkeypatch.setenv("VLLM_API_KEY", "operator")

    def make_app(plane: str) -> web.Application:
        async def answer(request: web.Request) -> web.Response:
            keys.add(request.headers.get("Authorization"))
            if request.path == "/metrics":
                return web.Response(text="vllm:num_requests_running 0\n")
            return web.json_response({"answers": planes[plane], "data": [{"id": "policy"}]})

        app = web.Application()
        app.router.add_get("/{path:.*}", answer)
        return app

    async with TestServer(make_app("rollouts")) as rollouts, TestServer(make_app("admin")) as admin:
        url, admin_url = str(rollouts.make_url("/v1")), str(admin.make_url("/v1"))
        right = {"client": {"base_url": url, "admin_base_url": [admin_url]}}
        assert await find_remote_problems(right) == []
        (problem,) = await find_remote_problems({"client": {"base_url": url}})
        assert "rollouts alone" in problem.cause and problem.what == "client.admin_base_url"
        crossed = {"client": {"base_url": admin_url, "admin_base_url": [admin_url]}}
        (problem,) = await find_remote_problems(crossed)
        assert "admin calls alone" in problem.cause and problem.what == "client.base_url"
        config = ["prime-rl", "config", url]
        assert await asyncio.to_thread(main, config) == 2
        assert "--admin-url" in capsys.readouterr().err
        assert await asyncio.to_thread(main, [*config, "--admin-url", admin_url]) == 0
        assert admin_url in capsys.readouterr().out
    assert keys == {"Bearer operator"}
