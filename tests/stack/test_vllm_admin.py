"""`VllmAdmin` against one real vLLM server on CPU, without Dynamo."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import rollway
from rollway import processes
from rollway.errors import AdminError
from rollway.fleet.admin import IN_DOUBT, NoSuchMethod
from rollway.fleet.vllm_admin import VllmAdmin
from rollway.fleet.workers import Worker
from rollway.http import Http
from rollway.rollout.client import Rollout
from rollway.rollout.sampling import Sampling
from rollway.spec import AdminTimeouts
from rollway.stack.preset import UNIPROCESS
from tests.stack import brake
from tests.stack.policies import Policy
from tests.stack.serving import fresh_prompt
from tests.stack.stacks import VLLM_ARGS
from tests.waiting import has_become, stays_async, wait_until_async

pytestmark = pytest.mark.stack

TOLERANCE = 1e-4
ENDLESS = 1800
"""Tokens: 18 seconds with the brake on, so such a request is in flight until it is ended."""
_versions = itertools.count(1)

# What a user's own engine code could look like.
EXTENSION = """
class Probe:
    def probe_receive(self, weights, tag):
        assert tag == {"step": 4}
        self.reload_weights(weights_path=weights)

    def probe_buggy(self):
        return None.missing
"""
SERVER_ENV = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
}
SERVER_ARGS = {
    **VLLM_ARGS,
    "dtype": "float32",  # by itself, vLLM would serve it in bfloat16
    "max-model-len": 2048,
    "served-model-name": "tiny",
    "block-size": 32,
    "distributed-executor-backend": UNIPROCESS,
    "worker-extension-cls": "probe_extension.Probe",
}


@pytest.fixture(scope="module")
def server(base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    directory = tmp_path_factory.mktemp("vllm")
    (directory / "probe_extension.py").write_text(EXTENSION)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(base_model), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--enforce-eager"]
    options = {**SERVER_ARGS, **brake.ARGS}
    command += [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    run_id = f"vllm-admin-{os.getpid()}-{port}"
    braked = brake.environment(directory / "brake")
    path = os.pathsep.join([str(directory), braked["PYTHONPATH"]])
    environment = {**os.environ, **SERVER_ENV, **braked, **processes.make_run_environment(run_id)}
    log = directory / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env={**environment, "PYTHONPATH": path},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=processes.die_with_parent,
        )
    try:
        _wait_until_up(process, port, log)
        with brake.slowed(directory / "brake"):
            yield Worker(-1, "tiny", f"http://127.0.0.1:{port}")
    finally:
        process.send_signal(signal.SIGTERM)
        # By the mark in their environment: EngineCore and Worker outlive a server that is killed.
        left = processes.end(partial(processes.find_members, run_id), grace_seconds=8.0)
        process.wait(10)
        processes.remove_shared_memory(left)


def _wait_until_up(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    def is_up() -> bool:
        if process.poll() is not None:
            return True
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).close()
        except OSError:
            return False
        return True

    if has_become(is_up, 180.0) and process.poll() is None:
        return
    pytest.fail(f"The server did not start:\n{log.read_text(errors='replace')[-3000:]}")


@pytest.fixture
async def http() -> AsyncIterator[Http]:
    async with Http() as http:
        yield http


@pytest.fixture
async def admin(http: Http, server: Worker) -> AsyncIterator[VllmAdmin]:
    admin = VllmAdmin(http, AdminTimeouts(pause=30.0, update=60.0))
    yield admin
    await admin.resume(server)  # a test that fails must not leave it paused


@dataclass
class Completion:
    """A streamed completion, as far as it has come."""

    prompt: list[int]
    id: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str | None = None

    def distance(self, policy: Policy) -> float:
        assert self.token_ids
        return policy.distance(self.prompt, self.token_ids, self.logprobs)


async def complete(
    http: Http, server: Worker, into: Completion, max_tokens: int = 8, **more: Any
) -> Completion:
    headers = {"X-Request-Id": more.pop("request_id")} if "request_id" in more else None
    body = {"model": "tiny", "prompt": into.prompt, "max_tokens": max_tokens, "logprobs": 0}
    body |= {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "ignore_eos": True}
    body |= {"stream": True, "return_token_ids": True, **more}
    url = f"{server.admin_url}/v1/completions"
    async with http.stream_lines(url, body, timeout=120, headers=headers) as lines:
        async for line in lines:
            text = line.decode().strip().removeprefix("data: ")
            if not text.startswith("{"):
                continue
            chunk = json.loads(text)
            choice = chunk["choices"][0]
            into.id = chunk["id"]
            into.token_ids += choice["token_ids"] or []
            into.logprobs += (choice["logprobs"] or {}).get("token_logprobs") or []
            into.finish = choice["finish_reason"] or into.finish
    return into


async def under_way(
    http: Http, server: Worker, max_tokens: int = ENDLESS, **more: Any
) -> tuple[Completion, asyncio.Task[Completion]]:
    """A request that is generating by now."""
    completion = Completion(fresh_prompt())
    task = asyncio.create_task(complete(http, server, completion, max_tokens, **more))
    await has_tokens(completion, task, 3)
    return completion, task


async def has_tokens(completion: Completion, task: asyncio.Task[Completion], count: int) -> None:
    async def enough() -> bool:
        assert not task.done(), task
        return len(completion.token_ids) >= count

    await wait_until_async(enough, every=0.02)


async def switch(admin: VllmAdmin, server: Worker, policy: Policy) -> int:
    version = next(_versions)
    await admin.pause(server)
    await admin.update_from_disk(server, policy.path, version)
    await admin.resume(server)
    return version


async def test_a_fresh_server_declares_nothing(admin: VllmAdmin, server: Worker) -> None:
    assert (await admin.read(server)).label is None
    for version in (2**63, IN_DOUBT, 0, None):
        await admin.declare_version(server, version)
        assert (await admin.read(server)).label == version
    await admin.set_taints(server, ["rollway-v1"])


async def test_an_update_serves_the_new_weights_and_no_old_block(
    admin: VllmAdmin, server: Worker, http: Http, policies: list[Policy]
) -> None:
    prompt = fresh_prompt()
    for policy in (policies[1], policies[2], policies[0]):
        version = await switch(admin, server, policy)
        assert (await admin.read(server)).label == version
        # Twice: the second is answered from the cache of the first.
        for _ in range(2):
            done = await complete(http, server, Completion(prompt), 16)
            assert done.distance(policy) <= TOLERANCE


async def test_an_engine_method_receives_weights(
    admin: VllmAdmin, server: Worker, http: Http, policies: list[Policy]
) -> None:
    await admin.pause(server)
    arguments = {"weights": str(policies[1].path), "tag": {"step": 4}}
    await admin.update_distributed(server, 900, "probe_receive", arguments)
    await admin.resume(server)
    assert (await admin.read(server)).label == 900
    done = await complete(http, server, Completion(fresh_prompt()))
    assert done.distance(policies[1]) <= TOLERANCE


async def test_a_failed_call_has_a_reason_and_changes_nothing(
    admin: VllmAdmin, server: Worker, http: Http, policies: list[Policy]
) -> None:
    version = await switch(admin, server, policies[0])
    with pytest.raises(AdminError, match="must be paused before its weights are updated"):
        await admin.update_from_disk(server, policies[1].path, 901)
    with pytest.raises(AdminError, match="must be paused before its weights are updated"):
        await admin.update_distributed(server, 901, "probe_receive", {})
    with pytest.raises(NoSuchMethod, match="no engine method `nothing_of_the_kind`"):
        await admin.call(server, "nothing_of_the_kind", {})
    with pytest.raises(AdminError, match="has no attribute 'missing'") as failure:
        await admin.call(server, "probe_buggy", {})
    assert not isinstance(failure.value, NoSuchMethod)
    await admin.pause(server)
    with pytest.raises(NoSuchMethod):
        await admin.update_distributed(server, 901, "nothing_of_the_kind", {})
    await admin.resume(server)
    assert (await admin.read(server)).label == version
    done = await complete(http, server, Completion(fresh_prompt()))
    assert done.distance(policies[0]) <= TOLERANCE


async def test_abort_ends_running_requests_and_holds_new_ones(
    admin: VllmAdmin, server: Worker, http: Http
) -> None:
    running, task = await under_way(http, server)
    await admin.pause(server, "abort")
    await asyncio.wait_for(task, 60)
    assert running.finish == "abort"
    late = asyncio.create_task(complete(http, server, Completion(fresh_prompt())))
    assert await stays_async(lambda: not late.done(), 0.5)
    await admin.resume(server)
    assert (await late).finish == "length"


async def test_wait_finishes_requests_and_allows_no_update_between_their_tokens(
    admin: VllmAdmin, server: Worker, http: Http, policies: list[Policy]
) -> None:
    version = await switch(admin, server, policies[0])
    running, task = await under_way(http, server, 300)

    async def is_paused() -> bool:
        answer = await http.get(f"{server.admin_url}/is_paused", timeout=10)
        return bool(answer["is_paused"])

    pausing = asyncio.create_task(admin.pause(server, "wait"))
    await wait_until_async(is_paused)
    with pytest.raises(AdminError, match="requests hold blocks"):
        await admin.update_from_disk(server, policies[1].path, 902)
    assert not pausing.done()
    await pausing
    await task
    assert running.finish == "length"
    assert running.distance(policies[0]) <= TOLERANCE
    assert (await admin.read(server)).label == version


async def test_keep_freezes_requests_and_continues_them_with_the_new_weights(
    admin: VllmAdmin, server: Worker, http: Http, policies: list[Policy]
) -> None:
    await switch(admin, server, policies[0])
    running, task = await under_way(http, server)
    await admin.pause(server, "keep")

    async def is_frozen() -> bool:
        """Whether no tokens come any more; a few may still be on their way after the pause."""
        before = len(running.token_ids)
        return await stays_async(lambda: len(running.token_ids) == before, 0.5)

    await wait_until_async(is_frozen)
    before = len(running.token_ids)
    await admin.update_from_disk(server, policies[1].path, next(_versions))
    await admin.resume(server)
    await has_tokens(running, task, before + 40)
    await admin.pause(server, "abort")
    await task
    ids, logprobs = running.token_ids, running.logprobs
    assert policies[0].distance(running.prompt, ids[:before], logprobs[:before]) <= TOLERANCE
    # As if the new policy had read all of it: nothing of the old one's cache is left.
    prompt = running.prompt + ids[:before]
    assert policies[1].distance(prompt, ids[before:], logprobs[before:]) <= TOLERANCE


async def test_an_update_is_refused_while_frozen_requests_hold_old_blocks(
    admin: VllmAdmin, server: Worker, http: Http, policies: list[Policy]
) -> None:
    version = await switch(admin, server, policies[0])
    running, task = await under_way(http, server)
    await admin.pause(server, "keep", clear_cache=False)
    with pytest.raises(AdminError, match="requests hold blocks"):
        await admin.update_from_disk(server, policies[1].path, 903)
    assert not task.done()
    assert (await admin.read(server)).label == version
    await admin.pause(server, "abort")
    await task
    assert running.distance(policies[0]) <= TOLERANCE


async def test_a_flush_is_refused_while_a_request_holds_blocks(
    admin: VllmAdmin, server: Worker, http: Http
) -> None:
    running, task = await under_way(http, server, 150)
    with pytest.raises(AdminError, match="requests hold blocks, and none was dropped"):
        await admin.flush_cache(server)
    await task
    assert running.finish == "length"
    await admin.flush_cache(server)


async def test_orders_are_refused(admin: VllmAdmin, server: Worker) -> None:
    for order in (admin.stage(server, {"seconds": 1.0}), admin.wake(server), admin.memory(server)):
        with pytest.raises(NoSuchMethod, match="takes no orders of Rollway"):
            await order


async def test_attach_refit_and_sample_on_a_plain_server(
    server: Worker, policies: list[Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a router there are no taints: a stamp rests on what the server says of itself."""
    async with rollway.attach(server.admin_url, watch=False) as stack:
        rollouts, sampling = stack.rollouts(), Sampling(max_tokens=16, ignore_eos=True)
        for number in (1, 2):
            version = 5000 + number
            report = await stack.refit(version, policies[number].path)
            assert [worker.proof for worker in report.workers] == ["canary"]
            prompt = fresh_prompt()
            for rollout in await rollouts.generate(prompt, sampling, n=2):
                assert rollout.weight_version == version
                far = policies[number].distance(prompt, rollout.token_ids, rollout.logprobs or [])
                assert far < TOLERANCE
            parts = [part async for part in rollouts.stream(prompt, sampling)]
            whole = parts[-1]
            assert isinstance(whole, Rollout)
            assert whole.token_ids == [token for part in parts[:-1] for token in part]  # type: ignore[union-attr]
            (scores,) = await stack.teacher().score([prompt])
            expected = policies[number].logprobs(prompt[:1], prompt[1:])
            apart = [
                abs((a or 0.0) - b) for a, b in zip(scores.logprobs[1:], expected, strict=True)
            ]
            assert max(apart) < TOLERANCE and scores.weight_version == version
