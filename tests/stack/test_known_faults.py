"""The faults of Dynamo and vLLM that Rollway exists to keep from a trainer, one by one.

Where it is cheap and does no harm, a test first shows that the bare call still has the fault: a
test that could not fail protects nobody. Faults 10 to 13 are in
test_known_faults_deaths.py; 14, a killed frontend, is in test_vllm_stack.py.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

import rollway
from chaos.control import naive_refit
from rollway.aio import Stack
from rollway.errors import AdminError, RolloutError, Unreachable, UsageError
from rollway.fleet.report import RefitMode
from rollway.fleet.updates import FromDisk
from rollway.fleet.workers import Worker
from rollway.http import Http
from rollway.rollout.client import Rollout
from rollway.rollout.sampling import Sampling
from rollway.rollout.sender import all_or_none
from rollway.rollout.wire import DynamoAssembly, completion_request
from rollway.weights.checkpoint import check_checkpoint
from tests.stack.brake import slowed
from tests.stack.faults import (
    BAD,
    CLEARLY_OTHER,
    LONGER,
    SHORT,
    Bare,
    Move,
    assert_exact,
    damaged,
    flat,
    lose_a_layer,
    off,
    rounded,
    tokens_pass,
    under_way,
)
from tests.stack.policies import Policy
from tests.stack.serving import TOLERANCE, fresh_prompt, worst
from tests.waiting import wait_until_async

pytestmark = pytest.mark.stack


@pytest.fixture
async def http() -> AsyncIterator[Http]:
    async with Http() as http:
        yield http


@pytest.fixture
async def client(vllm_stack: rollway.Stack) -> AsyncIterator[Stack]:
    async with rollway.attach(vllm_stack.frontend_url) as stack:
        yield stack


@pytest.fixture
def bare(http: Http, client: Stack) -> Bare:
    return Bare(http, client.frontend_url, client.weights_secret)


# --- 1: stale KV ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["pause-all", "rolling", "in-flight"])
async def test_01_no_key_or_value_of_old_weights_is_read(
    client: Stack, bare: Bare, policies: list[Policy], mode: RefitMode, brake_file: Path, move: Move
) -> None:
    await move(client)
    idle, busy = [fresh_prompt() for _ in range(4)], [fresh_prompt() for _ in range(8)]
    rollouts = client.rollouts()
    await rollouts.generate_batch(idle + busy, SHORT)
    for prompt in idle:  # without the salt too: it is not all that stands between the versions
        await bare.ask(prompt, SHORT)
    with slowed(brake_file):
        running = await under_way(client, rollouts.generate_batch(busy, LONGER, n=2))
        version, policy = await move(client, mode)
    first = flat(await rollouts.generate_batch(idle, SHORT))
    assert [rollout.cached_tokens for rollout in first] == [0] * 4
    again = flat(await rollouts.generate_batch(idle + busy, SHORT, n=2))
    assert {rollout.weight_version for rollout in (*first, *again)} == {version}
    assert worst(policy, [*first, *again]) < TOLERANCE
    for prompt in idle:
        assert off(policy, prompt, await bare.complete(prompt, SHORT)) < TOLERANCE
    for rollout in flat(await running):
        assert len(rollout.token_ids) == 1000
        assert_exact(policies, rollout)


async def test_01_and_03_dynamo_alone_reads_old_kv_and_mixes_policies(
    client: Stack,
    bare: Bare,
    policies: list[Policy],
    brake_file: Path,
    versions: Iterator[int],
    move: Move,
) -> None:
    """What the tests around this one protect from is still there."""
    _, old = await move(client)
    prompt, worker = fresh_prompt(), (await client.fleet.workers())[0].instance_id
    requests = [bare.complete(prompt, LONGER, pin=worker) for _ in range(32)]
    version = next(versions)
    new = policies[version % len(policies)]
    with slowed(brake_file):
        running = await under_way(client, all_or_none(requests))
        await naive_refit(client.fleet, version, new.path)
    ended = await running
    assert {(rollout.finish_reason, len(rollout.token_ids)) for rollout in ended} == {
        ("length", 1000)
    }
    # Some may have ended before, or begun after.
    apart = [min(off(policy, prompt, rollout) for policy in (old, new)) for rollout in ended]
    assert max(apart) > CLEARLY_OTHER
    stale = await bare.complete(prompt, SHORT, pin=worker)
    assert stale.cached_tokens > 0 and off(new, prompt, stale) > CLEARLY_OTHER
    _, new = await move(client)
    assert off(new, prompt, await bare.complete(prompt, SHORT, pin=worker)) < TOLERANCE


# --- 2: an abort looks like a stop ----------------------------------------------------------------


async def test_02_an_aborted_rollout_does_not_look_finished(
    client: Stack, bare: Bare, policies: list[Policy], brake_file: Path, move: Move
) -> None:
    await move(client)
    rollouts = client.rollouts()
    rollouts.resumes = False
    ours = rollouts.generate(fresh_prompt(), LONGER, n=16)
    resumed = client.rollouts().generate(fresh_prompt(), LONGER, n=16)
    plain = all_or_none(bare.ask(fresh_prompt(), LONGER) for _ in range(16))
    with slowed(brake_file):
        running = await under_way(client, all_or_none([ours, plain, resumed]))
        await client.fleet.pause("abort")
    await client.fleet.resume()
    group, answers, whole = await running
    reasons = {answer["choices"][0]["finish_reason"] for answer in answers}
    assert "stop" in reasons  # Dynamo's word, although no token may end these
    assert {rollout.finish_reason for rollout in group} <= {"aborted", "length"}
    aborted = [rollout for rollout in group if rollout.finish_reason == "aborted"]
    assert aborted and all(len(rollout.token_ids) < 1000 for rollout in aborted)
    assert {(r.finish_reason, len(r.token_ids)) for r in whole} == {("length", 1000)}
    for rollout in [*group, *whole]:
        assert_exact(policies, rollout)


async def test_02_a_rollout_aborted_by_its_id_does_not_look_finished(
    client: Stack, bare: Bare, http: Http, policies: list[Policy], brake_file: Path, move: Move
) -> None:
    await move(client)
    (worker, _), prompt = await client.fleet.workers(), fresh_prompt()
    body = completion_request("tiny", prompt, LONGER, pin=worker.instance_id, stream=True)
    assembly, reasons = DynamoAssembly(LONGER, len(prompt)), []
    url = f"{client.frontend_url}/v1/completions"
    with slowed(brake_file):
        async with http.stream_lines(url, body, timeout=60) as lines:
            async for line in lines:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                assembly.add(event)
                reasons += [choice.get("finish_reason") for choice in event["choices"]]
                if not any(reasons):  # the engine may not know it yet when its first token comes
                    await bare.abort(worker, event["id"].removeprefix("cmpl-"))
    assert [reason for reason in reasons if reason] == ["stop"]
    assert assembly.finish().finish_reason == "aborted"
    assert len(assembly.token_ids) < 1000


# --- 3: mixed policies ----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["in-flight", "keep"])
@pytest.mark.parametrize("refits", [1, 2])
async def test_03_each_token_of_a_rollout_has_its_version(
    client: Stack,
    policies: list[Policy],
    refits: int,
    mode: RefitMode,
    brake_file: Path,
    move: Move,
) -> None:
    versions = [(await move(client))[0]]
    prompts = [fresh_prompt() for _ in range(12)]
    with slowed(brake_file):
        running = await under_way(client, client.rollouts().generate_batch(prompts, LONGER))
        for _ in range(refits):
            versions.append((await move(client, mode))[0])
            await tokens_pass(client)
    rollouts = flat(await running)
    for rollout in rollouts:
        assert (len(rollout.token_ids), rollout.finish_reason) == (1000, "length")
        assert rollout.weight_version == rollout.spans[0].version
        assert_exact(policies, rollout)
    assert versions in [[span.version for span in r.spans] for r in rollouts]


@pytest.mark.parametrize("mode", ["pause-all", "rolling", "in-flight", "keep"])
async def test_03_rollouts_continue_with_nothing_else_running(
    client: Stack, policies: list[Policy], mode: RefitMode, brake_file: Path, move: Move
) -> None:
    """Frozen requests stood still on a GPU until somebody sent another one. The brake makes pauses
    end as there; tests/device/test_modes.py is the same on a GPU."""
    before = (await move(client))[0]
    prompts, sampling = [fresh_prompt() for _ in range(12)], Sampling(200, ignore_eos=True)
    rollouts = client.rollouts()

    async def stream(prompt: list[int]) -> list[Rollout]:
        return [
            part async for part in rollouts.stream(prompt, sampling) if isinstance(part, Rollout)
        ]

    async def run() -> list[list[Rollout]]:
        generated = rollouts.generate_batch(prompts[:6], sampling)
        batch, *streams = await asyncio.gather(generated, *map(stream, prompts[6:]))
        return [*batch, *streams]

    with slowed(brake_file):
        running = await under_way(client, run())
        version = (await move(client, mode))[0]
        ended = flat(await asyncio.wait_for(running, 60.0))
    assert [len(rollout.token_ids) for rollout in ended] == [200] * len(prompts)
    for rollout in ended:
        assert_exact(policies, rollout)
    if mode in ("in-flight", "keep"):
        assert [before, version] in [[span.version for span in r.spans] for r in ended]


# --- 4, 5, 6: checkpoints that cannot be served ---------------------------------------------------


@pytest.mark.parametrize("case", BAD)
async def test_04_05_06_a_bad_checkpoint_is_refused_and_changes_nothing(
    client: Stack, policies: list[Policy], tmp_path: Path, case: str, versions: Iterator[int]
) -> None:
    served = await client.fleet.read_versions()
    (version,) = set(served.values())
    damage, words = BAD[case]
    path = tmp_path / "bad"
    if damage is not None:
        damaged(policies[1], path, damage)
    steps = []

    async def note(step: str, worker: Worker) -> None:
        steps.append(step)

    client.fleet.observer = note
    for mode in ("pause-all", "in-flight"):
        with pytest.raises(UsageError, match=words):
            await client.refit(next(versions), path, mode=mode)
    assert set(steps) <= {"preflight"}
    assert await client.fleet.read_versions() == served
    for rollout in flat(
        await client.rollouts().generate_batch([fresh_prompt() for _ in range(4)], SHORT)
    ):
        assert rollout.weight_version == version
        assert_exact(policies, rollout)


async def test_a_refused_refit_leaves_no_second_model_in_a_worker(
    client: Stack, policies: list[Policy], versions: Iterator[int]
) -> None:
    """Workers stage the weights before the refit learns that the version names others."""
    version = next(versions)
    await client.refit(version, policies[1].path)
    with pytest.raises(UsageError, match="already names other weights"):
        await client.refit(version, policies[2].path)
    staged = {"identity": check_checkpoint(policies[2].path).identity}
    for worker in await client.fleet.workers():
        with pytest.raises(AdminError, match="are not staged here"):
            await client.fleet.admin.call(worker, "rollway_swap", staged)


async def test_06_dynamo_alone_accepts_half_a_checkpoint(
    client: Stack,
    bare: Bare,
    policies: list[Policy],
    tmp_path: Path,
    versions: Iterator[int],
    move: Move,
) -> None:
    _, old = await move(client)
    worker, prompt, version = (await client.fleet.workers())[0], fresh_prompt(), next(versions)
    new = policies[version % len(policies)]
    half = damaged(new, tmp_path / "half", lose_a_layer)
    answer = await bare.load(worker, half, weight_version=version)
    assert answer["status"] == "ok" and answer["version"] == version
    mix = await bare.complete(prompt, SHORT, pin=worker.instance_id)
    assert min(off(old, prompt, mix), off(new, prompt, mix)) > CLEARLY_OTHER
    await move(client)


async def test_06_another_dtype_is_accepted_on_request(
    client: Stack, policies: list[Policy], tmp_path: Path, versions: Iterator[int], move: Move
) -> None:
    path = damaged(policies[1], tmp_path / "rounded", rounded)
    await client.refit(next(versions), FromDisk(path, allow_cast=True))
    group = await client.rollouts().generate(fresh_prompt(), SHORT, n=2)
    assert worst(Policy(path), group) < TOLERANCE
    await move(client)


# --- 7, 8, 9: labels, paused workers, skew --------------------------------------------------------


async def test_07_the_label_always_matches_the_served_weights(
    client: Stack, bare: Bare, policies: list[Policy], versions: Iterator[int], move: Move
) -> None:
    version, _ = await move(client)
    worker = (await client.fleet.workers())[0]
    await bare.load(worker, policies[(version + 1) % len(policies)].path)
    label = (await bare.admin.read(worker)).label
    assert label == version  # Dynamo's, of other weights

    older, newer = next(versions), next(versions)
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
            assert_exact(policies, rollout)
            with pytest.raises(UsageError, match="older than"):
                await stack.refit(older, policies[older % len(policies)].path)


async def test_08_no_request_hangs_on_a_paused_worker(
    client: Stack, bare: Bare, policies: list[Policy], move: Move
) -> None:
    await move(client)
    async with rollway.attach(client.frontend_url) as other:
        await client.fleet.pause()
        try:
            with pytest.raises(Unreachable, match="no answer within"):  # says Dynamo nothing
                await bare.ask(fresh_prompt(), SHORT, timeout=2.0)
            began = time.monotonic()
            with pytest.raises(RolloutError):
                await other.rollouts(patience=3.0).generate(fresh_prompt(), SHORT)
            assert time.monotonic() - began < 30.0
        finally:
            await client.fleet.resume()
        (rollout,) = await other.rollouts(patience=3.0).generate(fresh_prompt(), SHORT)
        assert_exact(policies, rollout)


async def test_08_generation_continues_during_a_rolling_refit(
    client: Stack, policies: list[Policy], move: Move
) -> None:
    old, _ = await move(client)
    windows: list[tuple[float, float]] = []
    seen: list[tuple[float, float, Rollout]] = []

    async def linger(step: str, worker: Worker) -> None:
        if step == "update":  # this worker generates nothing now
            opened = time.monotonic()

            async def another_generated() -> bool:
                return any(began > opened for began, *_ in seen)

            await wait_until_async(another_generated)
            windows.append((opened, time.monotonic()))

    async def generate() -> None:
        began = time.monotonic()
        (rollout,) = await client.rollouts().generate(fresh_prompt(), SHORT)
        seen.append((began, time.monotonic(), rollout))

    client.fleet.observer = linger
    refit = asyncio.create_task(move(client, "rolling"))
    async with asyncio.TaskGroup() as tasks:
        while not refit.done():
            tasks.create_task(generate())
            await asyncio.sleep(0.2)  # five new rollouts a second
    new, _ = await refit
    assert len(windows) == 2
    for opened, closed in windows:
        assert any(opened < began and ended < closed for began, ended, _ in seen)
    assert {rollout.weight_version for *_, rollout in seen} == {old, new}
    for *_, rollout in seen:
        assert_exact(policies, rollout)


async def test_09_a_worker_with_other_weights_is_not_chosen(
    client: Stack, bare: Bare, policies: list[Policy], move: Move
) -> None:
    version, policy = await move(client)
    odd, _ = await client.fleet.workers()
    other = policies[(version + 1) % len(policies)]
    await bare.admin.set_taints(odd, [])
    await bare.load(odd, other.path, weight_version=version - 1)
    prompts = [fresh_prompt() for _ in range(8)]
    served = await asyncio.gather(*(bare.complete(prompt, SHORT) for prompt in prompts))
    right = [off(policy, p, c) < TOLERANCE for p, c in zip(prompts, served, strict=True)]
    assert {True, False} == set(right)  # Dynamo serves both as one model

    for rollout in flat(await client.rollouts().generate_batch(prompts, SHORT, n=2)):
        assert rollout.weight_version == version
        assert_exact(policies, rollout)
    version, policy = await move(client)
    assert set((await client.fleet.read_versions()).values()) == {version}
    healed = await bare.complete(prompts[0], SHORT, pin=odd.instance_id)
    assert off(policy, prompts[0], healed) < TOLERANCE
