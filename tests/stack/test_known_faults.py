"""The faults of Dynamo and vLLM that Rollway exists to keep from a trainer, one by one.

Where it is cheap and does no harm, a test first shows that the bare call still has the fault: a
test that could not fail protects nobody. Fault 14, a killed frontend, is in test_vllm_stack.py.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import rollway
from rollway.api import Stack
from rollway.chaos.naive import naive_refit
from rollway.errors import AdminError, RefitError, RolloutError, Unreachable, UsageError
from rollway.fleet.admin import DynamoAdmin
from rollway.fleet.discovery import Worker
from rollway.fleet.report import RefitMode
from rollway.fleet.updates import FromDisk
from rollway.http import Http
from rollway.rollout.client import Rollout
from rollway.rollout.sampling import Sampling
from rollway.rollout.wire import Assembly, Completion, completion_request
from rollway.stack import processes
from rollway.sync import SyncStack
from tests.stack import rendezvous
from tests.stack.conftest import VLLM_ARGS
from tests.stack.moe import build_moe
from tests.stack.policies import Policy
from tests.stack.test_vllm_stack import (
    TOLERANCE,
    UNDER_WAY_SECONDS,
    LongRollouts,
    _kill,
    _process,
    _until_all_serve,
    _versions,
    fresh_prompt,
    worst,
)

pytestmark = pytest.mark.stack

SHORT = Sampling(max_tokens=6, ignore_eos=True)
LONG = Sampling(max_tokens=400, ignore_eos=True)
GREEDY = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)
CLEARLY_OTHER = 0.05
"""Log-probs of two of the policies differ by more than this at some token."""


@pytest.fixture
async def http() -> AsyncIterator[Http]:
    async with Http() as http:
        yield http


@pytest.fixture
async def client(vllm_stack: SyncStack) -> AsyncIterator[Stack]:
    async with rollway.attach(vllm_stack.frontend_url) as stack:
        yield stack


@pytest.fixture
def bare(http: Http, client: Stack) -> Bare:
    return Bare(http, client.frontend_url)


class Bare:
    """Dynamo without Rollway: no version, no taint, no salt, no check."""

    def __init__(self, http: Http, frontend_url: str, model: str = "tiny") -> None:
        self.admin = DynamoAdmin(http)
        self._http = http
        self._url = f"{frontend_url}/v1/completions"
        self._model = model

    async def ask(self, prompt: list[int], sampling: Sampling, **options: Any) -> Any:
        timeout = options.pop("timeout", 60.0)
        body = completion_request(self._model, prompt, sampling, **options)
        return await self._http.post(self._url, body, timeout=timeout)

    async def complete(self, prompt: list[int], sampling: Sampling, **options: Any) -> Completion:
        return _read(await self.ask(prompt, sampling, **options), prompt, sampling)

    async def load(self, worker: Worker, path: Path, **body: Any) -> Any:
        """Pause, update, resume: the documented way, on one worker."""
        await self.admin.pause(worker, "abort")
        url = f"{worker.admin_url}/engine/update_weights_from_disk"
        answer = await self._http.post(url, {"model_path": str(path), **body}, timeout=60.0)
        await self.admin.resume(worker)
        return answer


def _read(answer: Any, prompt: list[int], sampling: Sampling) -> Completion:
    assembly = Assembly(sampling, len(prompt))
    assembly.add(answer)
    return assembly.finish()


def _off(policy: Policy, prompt: list[int], completion: Completion) -> float:
    return policy.distance(prompt, completion.token_ids, completion.logprobs or [])


async def _move(
    stack: Stack, policies: list[Policy], mode: RefitMode = "pause-all"
) -> tuple[int, Policy]:
    """Refit to the next version; neighbours are different policies."""
    version = next(_versions)
    policy = policies[version % len(policies)]
    await stack.refit(version, policy.path, mode=mode)
    return version, policy


def _assert_exact(policies: list[Policy], rollout: Rollout) -> None:
    """Every token is of the version that its span names, and no token is in two spans or none."""
    assert rollout.logprobs is not None
    ends = [0, *(span.end for span in rollout.spans)]
    assert [span.start for span in rollout.spans] == ends[:-1]
    assert ends[-1] == len(rollout.token_ids) == len(rollout.logprobs)
    for span in rollout.spans:
        assert span.version is not None
        policy = policies[span.version % len(policies)]
        wanted = policy.logprobs(rollout.prompt_ids, rollout.token_ids)[span.start : span.end]
        got = rollout.logprobs[span.start : span.end]
        assert max(abs(a - b) for a, b in zip(wanted, got, strict=True)) < TOLERANCE


def _flat(groups: list[list[Rollout]]) -> list[Rollout]:
    return list(itertools.chain(*groups))


# --- 1: stale KV ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["pause-all", "rolling", "in-flight"])
async def test_01_no_key_or_value_of_old_weights_is_read(
    client: Stack, bare: Bare, policies: list[Policy], mode: RefitMode
) -> None:
    await _move(client, policies)
    idle, busy = [fresh_prompt() for _ in range(4)], [fresh_prompt() for _ in range(8)]
    rollouts = client.rollouts()
    await rollouts.generate_batch(idle + busy, SHORT)
    for prompt in idle:  # without the salt too: it is not all that stands between the versions
        await bare.ask(prompt, SHORT)
    running = asyncio.create_task(rollouts.generate_batch(busy, LONG, n=4))
    await asyncio.sleep(UNDER_WAY_SECONDS)
    assert not running.done()

    version, policy = await _move(client, policies, mode)
    first = _flat(await rollouts.generate_batch(idle, SHORT))
    assert [rollout.cached_tokens for rollout in first] == [0] * 4
    again = _flat(await rollouts.generate_batch(idle + busy, SHORT, n=2))
    assert {rollout.weight_version for rollout in (*first, *again)} == {version}
    assert worst(policy, [*first, *again]) < TOLERANCE
    for prompt in idle:
        assert _off(policy, prompt, await bare.complete(prompt, SHORT)) < TOLERANCE
    for rollout in _flat(await running):
        assert len(rollout.token_ids) == 400
        _assert_exact(policies, rollout)


async def test_01_and_03_dynamo_alone_reads_old_kv_and_mixes_policies(
    client: Stack, bare: Bare, policies: list[Policy]
) -> None:
    """What the two tests around this one protect from is still there."""
    _, old = await _move(client, policies)
    prompt, worker = fresh_prompt(), (await client.fleet.workers())[0].instance_id
    running = asyncio.create_task(bare.complete(prompt, LONG, pin=worker))
    await asyncio.sleep(UNDER_WAY_SECONDS)
    assert not running.done()
    version = next(_versions)
    new = policies[version % len(policies)]
    await naive_refit(client.fleet, version, new.path)
    mixed = await running
    after = await bare.complete(prompt, SHORT, pin=worker)
    assert mixed.finish_reason == "length" and len(mixed.token_ids) == 400
    assert _off(old, prompt, mixed) > CLEARLY_OTHER and _off(new, prompt, mixed) > CLEARLY_OTHER
    assert after.cached_tokens > 0 and _off(new, prompt, after) > CLEARLY_OTHER
    version, new = await _move(client, policies)
    assert _off(new, prompt, await bare.complete(prompt, SHORT, pin=worker)) < TOLERANCE


# --- 2: an abort looks like a stop ----------------------------------------------------------------


async def test_02_an_aborted_rollout_does_not_look_finished(
    client: Stack, bare: Bare, policies: list[Policy]
) -> None:
    await _move(client, policies)
    prompt = fresh_prompt()
    ours = asyncio.create_task(client.rollouts().generate(prompt, LONG, n=16))
    plain = asyncio.create_task(bare.ask(prompt, LONG))
    await asyncio.sleep(UNDER_WAY_SECONDS)
    await client.fleet.pause("abort")
    await client.fleet.resume()
    answer = await plain
    assert answer["choices"][0]["finish_reason"] == "stop"  # says Dynamo
    group = await ours
    assert {rollout.finish_reason for rollout in group} <= {"aborted", "length"}
    aborted = [rollout for rollout in group if rollout.finish_reason == "aborted"]
    assert aborted and all(len(rollout.token_ids) < 400 for rollout in aborted)
    for rollout in group:
        _assert_exact(policies, rollout)


async def test_02_nor_does_one_that_was_aborted_by_its_id(
    client: Stack, bare: Bare, http: Http, policies: list[Policy]
) -> None:
    await _move(client, policies)
    (worker, _), prompt = await client.fleet.workers(), fresh_prompt()
    body = completion_request("tiny", prompt, LONG, pin=worker.instance_id, stream=True)
    assembly, said, began = Assembly(LONG, len(prompt)), [], False
    async with http.stream_lines(
        f"{client.frontend_url}/v1/completions", body, timeout=60
    ) as lines:
        async for line in lines:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            assembly.add(event)
            said += [choice["finish_reason"] for choice in event["choices"]]
            if not began:
                await bare.admin.abort(worker, event["id"].removeprefix("cmpl-"))
                began = True
    assert [reason for reason in said if reason] == ["stop"]
    assert assembly.finish().finish_reason == "aborted"
    assert len(assembly.token_ids) < 400


# --- 3: mixed policies ----------------------------------------------------------------------------


@pytest.mark.parametrize("refits", [1, 2])
async def test_03_each_token_of_a_rollout_has_its_version(
    client: Stack, policies: list[Policy], refits: int
) -> None:
    versions = [(await _move(client, policies))[0]]
    prompts = [fresh_prompt() for _ in range(32)]
    running = asyncio.create_task(client.rollouts().generate_batch(prompts, LONG))
    for _ in range(refits):
        await asyncio.sleep(UNDER_WAY_SECONDS)
        assert not running.done()
        versions.append((await _move(client, policies, "in-flight"))[0])
    flat = _flat(await running)
    for rollout in flat:
        assert (len(rollout.token_ids), rollout.finish_reason) == (400, "length")
        assert rollout.weight_version == rollout.spans[0].version
        _assert_exact(policies, rollout)
    assert versions in [[span.version for span in rollout.spans] for rollout in flat]


# --- 4, 5, 6: checkpoints that cannot be served ---------------------------------------------------

Damage = Callable[[dict[str, torch.Tensor]], None]


def _copy(policy: Policy, directory: Path, damage: Damage = lambda _: None) -> Path:
    shutil.copytree(policy.path, directory)
    tensors = load_file(directory / "model.safetensors")
    damage(tensors)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


def _cut(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:32].clone()


def _lose_a_layer(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if ".layers.1." in name]:
        del tensors[name]


def _lose_a_tensor(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.norm.weight"]


def _add_a_tensor(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.extra.weight"] = torch.zeros(4)


def _round(tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        tensors[name] = tensor.bfloat16()


BAD = {
    "04 missing": (None, "no checkpoint directory"),
    "05 shape": (_cut, r"model.norm.weight is F32\[32\], served is F32\[64\]"),
    "06 layer": (_lose_a_layer, r"model.layers.1.\S+ is missing"),
    "06 tensor": (_lose_a_tensor, "model.norm.weight is missing"),
    "06 extra": (_add_a_tensor, "model.extra.weight is not part of the model"),
    "06 dtype": (_round, r"is BF16\S+, served is F32"),
}


@pytest.mark.parametrize("case", BAD)
async def test_04_05_06_a_bad_checkpoint_is_refused_untouched(
    client: Stack, policies: list[Policy], tmp_path: Path, case: str
) -> None:
    versions = await client.fleet.read_versions()
    (version,) = set(versions.values())
    damage, words = BAD[case]
    path = tmp_path / "bad"
    if damage is not None:
        _copy(policies[1], path, damage)
    steps = []

    async def note(step: str, worker: Worker) -> None:
        steps.append(step)

    client.fleet.observer = note
    for mode in ("pause-all", "in-flight"):
        with pytest.raises(UsageError, match=words):
            await client.refit(next(_versions), path, mode=mode)
    assert set(steps) <= {"preflight"}
    assert await client.fleet.read_versions() == versions
    for rollout in _flat(
        await client.rollouts().generate_batch([fresh_prompt() for _ in range(4)], SHORT)
    ):
        assert rollout.weight_version == version
        _assert_exact(policies, rollout)


async def test_06_dynamo_alone_takes_half_a_checkpoint(
    client: Stack, bare: Bare, policies: list[Policy], tmp_path: Path
) -> None:
    _, old = await _move(client, policies)
    worker, prompt, version = (await client.fleet.workers())[0], fresh_prompt(), next(_versions)
    new = policies[version % len(policies)]
    half = _copy(new, tmp_path / "half", _lose_a_layer)
    answer = await bare.load(worker, half, weight_version=version)
    assert answer["status"] == "ok" and answer["version"] == version
    mix = await bare.complete(prompt, SHORT, pin=worker.instance_id)
    assert min(_off(old, prompt, mix), _off(new, prompt, mix)) > CLEARLY_OTHER
    await _move(client, policies)


async def test_06_another_dtype_is_taken_when_the_refit_says_so(
    client: Stack, policies: list[Policy], tmp_path: Path
) -> None:
    path = _copy(policies[1], tmp_path / "rounded", _round)
    await client.refit(next(_versions), FromDisk(path, allow_cast=True))
    group = await client.rollouts().generate(fresh_prompt(), SHORT, n=2)
    assert worst(Policy(path), group) < TOLERANCE
    await _move(client, policies)


# --- 7, 8, 9: labels, paused workers, skew --------------------------------------------------------


async def test_07_the_label_always_says_what_is_served(
    client: Stack, bare: Bare, policies: list[Policy]
) -> None:
    version, _ = await _move(client, policies)
    worker = (await client.fleet.workers())[0]
    await bare.load(worker, policies[(version + 1) % len(policies)].path)
    assert await bare.admin.weight_version(worker) == version  # Dynamo's, of other weights

    older, newer = next(_versions), next(_versions)
    async with rollway.attach(client.frontend_url) as other:
        both = await asyncio.gather(
            client.refit(newer, policies[newer % len(policies)].path),
            other.refit(older, policies[older % len(policies)].path),
            return_exceptions=True,
        )
        assert not isinstance(both[0], BaseException)
        assert not isinstance(both[1], BaseException) or "older than" in str(both[1])
        for stack in (client, other):
            assert set((await stack.fleet.read_versions()).values()) == {newer}
            (rollout,) = await stack.rollouts().generate(fresh_prompt(), SHORT)
            assert rollout.weight_version == newer
            _assert_exact(policies, rollout)
            with pytest.raises(UsageError, match="older than"):
                await stack.refit(older, policies[older % len(policies)].path)


async def test_08_no_request_hangs_on_a_paused_worker(
    client: Stack, bare: Bare, policies: list[Policy]
) -> None:
    await _move(client, policies)
    async with rollway.attach(client.frontend_url) as other:
        await client.fleet.pause()
        try:
            with pytest.raises(Unreachable, match="no answer within"):  # says Dynamo nothing
                await bare.ask(fresh_prompt(), SHORT, timeout=2.0)
            began = time.monotonic()
            with pytest.raises(RolloutError):
                await other.rollouts(patience=3.0).generate(fresh_prompt(), SHORT)
            assert time.monotonic() - began < 10.0
        finally:
            await client.fleet.resume()
        (rollout,) = await other.rollouts(patience=3.0).generate(fresh_prompt(), SHORT)
        _assert_exact(policies, rollout)


async def test_08_generation_goes_on_during_a_rolling_refit(
    client: Stack, policies: list[Policy]
) -> None:
    old, _ = await _move(client, policies)
    seen: list[tuple[Worker, Rollout]] = []

    async def generate(step: str, worker: Worker) -> None:
        if step in ("update", "resume"):  # this worker generates nothing now
            group = client.rollouts(patience=3.0).generate(fresh_prompt(), SHORT)
            seen.append((worker, (await group)[0]))

    client.fleet.observer = generate
    new, _ = await _move(client, policies, "rolling")
    assert [rollout.weight_version for _, rollout in seen] == [old, old, new, new]
    for worker, rollout in seen:
        assert rollout.worker_id != worker.instance_id
        _assert_exact(policies, rollout)


async def test_09_a_worker_with_other_weights_is_passed_over(
    client: Stack, bare: Bare, policies: list[Policy]
) -> None:
    version, policy = await _move(client, policies)
    odd, _ = await client.fleet.workers()
    other = policies[(version + 1) % len(policies)]
    await bare.admin.set_taints(odd, [])
    await bare.load(odd, other.path, weight_version=version - 1)
    prompts = [fresh_prompt() for _ in range(8)]
    served = await asyncio.gather(*(bare.complete(prompt, SHORT) for prompt in prompts))
    right = [_off(policy, p, c) < TOLERANCE for p, c in zip(prompts, served, strict=True)]
    assert {True, False} == set(right)  # Dynamo serves both as one model

    for rollout in _flat(await client.rollouts().generate_batch(prompts, SHORT, n=2)):
        assert rollout.weight_version == version
        _assert_exact(policies, rollout)
    version, policy = await _move(client, policies)
    assert set((await client.fleet.read_versions()).values()) == {version}
    healed = await bare.complete(prompts[0], SHORT, pin=odd.instance_id)
    assert _off(policy, prompts[0], healed) < TOLERANCE


# --- 10, 11, 12: a worker dies --------------------------------------------------------------------


def test_10_11_12_a_dead_worker_costs_no_rollout_and_leaves_no_orphan(
    vllm_stack: SyncStack, policies: list[Policy]
) -> None:
    version = next(_versions)
    vllm_stack.refit(version, policies[version % len(policies)].path)
    dead = _process("tiny-0")
    family = processes.descendants(dead.pid or 0)
    assert len(family) >= 2
    with LongRollouts(vllm_stack) as running:
        _kill("tiny-0")
        assert processes.wait_gone(family, 15.0) == set()
    assert not running.failures()
    for rollout in running.finished():
        assert (len(rollout.token_ids), rollout.weight_version) == (400, version)
        _assert_exact(policies, rollout)
    workers = {rollout.worker_id for rollout in running.finished()}
    assert None in workers and dead.instance not in workers  # Dynamo names the dead one
    _until_all_serve(vllm_stack, version)


# --- a stack of its own: experts, workers without our methods, 4 and 13 ---------------------------


@pytest.fixture(scope="module")
def odd_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("odd-home")


@pytest.fixture(scope="module")
def _odd_stack(odd_home: Path, base_model: Path) -> Iterator[SyncStack]:
    foreign = {"worker-extension-cls": f"{rendezvous.__name__}.{rendezvous.Rendezvous.__name__}"}
    env = {
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "DYN_RL_INIT_WEIGHTS_TIMEOUT_S": "2",
    }
    models = [
        {"path": str(build_moe(base_model, odd_home / "moe")), "args": VLLM_ARGS},
        {"path": str(base_model), "name": "tiny", "args": VLLM_ARGS | foreign, "env": env},
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLWAY_HOME", str(odd_home))
        with rollway.up({"name": "odd", "models": models}) as stack:
            yield stack


@pytest.fixture
def odd_stack(
    _odd_stack: SyncStack, odd_home: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> SyncStack:
    monkeypatch.setenv("ROLLWAY_HOME", str(odd_home))
    return _odd_stack
