"""Faults 10 to 13, and workers that are out of the ordinary; see test_known_faults.py."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file

import rollway
from rollway import processes
from rollway.aio import Stack
from rollway.errors import AdminError, NoWorkers, RefitError, UsageError
from rollway.fleet.fleet import Fleet
from rollway.fleet.workers import Worker
from rollway.http import Http
from rollway.processes import ProcessId
from rollway.rollout.client import Rollout
from rollway.rollout.sender import all_or_none
from rollway.weights.transports.shm import ShmPublisher
from tests.soak import SOAK
from tests.stack import rendezvous
from tests.stack.brake import slowed
from tests.stack.faults import (
    BAD,
    CLEARLY_OTHER,
    GREEDY,
    LONG,
    SHORT,
    Bare,
    Move,
    assert_exact,
    damaged,
    flat,
    off,
    read,
    under_way,
)
from tests.stack.moe import build_moe
from tests.stack.policies import Policy, perturbed
from tests.stack.serving import (
    TOLERANCE,
    LongRollouts,
    find_process,
    fresh_prompt,
    kill,
    read_state,
    some_rollouts,
    wait_for_version,
    worst,
)
from tests.stack.stacks import VLLM_ARGS
from tests.waiting import wait_until_async

pytestmark = pytest.mark.stack
LOAD_PAUSE_SECONDS = 0.5
"""Between two batches while a worker restarts, which needs the cores too."""


def list_children(pid: int | None) -> set[ProcessId]:
    children = psutil.Process(pid).children(recursive=True)
    return {process for child in children if (process := ProcessId.of(child.pid))}


# --- 10, 11, 12: a worker dies --------------------------------------------------------------------


@dataclass
class Aftermath:
    """What was under way when a worker was killed, and what was sent just after."""

    version: int
    dead: int
    ours: list[Rollout]
    plain: list[tuple[list[int], Any]]
    late: list[Rollout]
    meanwhile: list[Rollout]
    """Sampled while the worker restarted, and just after it was ready again."""
    orphans: set[ProcessId]


async def _kill_a_worker(stack: rollway.Stack, move: Move, brake_file: Path) -> Aftermath:
    async with rollway.attach(stack.frontend_url) as client, Http() as http:
        bare = Bare(http, stack.frontend_url, client.weights_secret)
        version, _ = await move(client)
        victim = find_process("tiny-0")
        family = list_children(victim.pid)
        assert victim.instance is not None and len(family) >= 2
        prompts = [fresh_prompt() for _ in range(16)]
        ours = client.rollouts().generate_batch(prompts, LONG)
        plain = all_or_none(bare.ask(prompt, LONG) for prompt in prompts)
        with slowed(brake_file):
            running = await under_way(client, all_or_none([ours, plain]))
            kill("tiny-0")
        late = await client.rollouts().generate_batch([fresh_prompt() for _ in range(32)], SHORT)
        orphans = await asyncio.to_thread(processes.wait_gone, family, 15.0)
        groups, answers = await running
        meanwhile, ready = list[Rollout](), False
        while not ready:
            ready = find_process("tiny-0").state == "ready"
            meanwhile += await asyncio.to_thread(some_rollouts, stack, 20 if ready else 4)
            await asyncio.sleep(LOAD_PAUSE_SECONDS)
    plain_answers = list(zip(prompts, answers, strict=True))
    return Aftermath(
        version, victim.instance, flat(groups), plain_answers, flat(late), meanwhile, orphans
    )


@pytest.fixture(scope="module")
def aftermath(
    vllm_stack: rollway.Stack, move: Move, session_home: Path, brake_file: Path
) -> Aftermath:
    """kill -9 of the main process orphans its EngineCore."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLWAY_HOME", str(session_home))
        result = asyncio.run(_kill_a_worker(vllm_stack, move, brake_file))
        wait_for_version(vllm_stack, result.version)
    return result


def test_10_no_rollout_is_lost_with_its_worker(
    aftermath: Aftermath, policies: list[Policy]
) -> None:
    assert [len(rollout.token_ids) for rollout in aftermath.ours] == [400] * 16
    for rollout in (*aftermath.ours, *aftermath.late):
        assert rollout.weight_version == aftermath.version
        assert_exact(policies, rollout)


def test_11_a_migrated_answer_names_no_worker(aftermath: Aftermath, policies: list[Policy]) -> None:
    moved = [(p, a) for p, a in aftermath.plain if a["usage"]["prompt_tokens"] > len(p)]
    assert moved
    for prompt, answer in moved:
        assert answer["nvext"]["worker_id"]["decode_worker_id"] == aftermath.dead  # Dynamo's word
        completion = read(answer, prompt, LONG)
        assert completion.worker_id is None
        assert len(completion.token_ids) == 400
        policy = policies[aftermath.version % len(policies)]
        assert off(policy, prompt, completion) < TOLERANCE


def test_12_a_dead_worker_leaves_no_orphans(aftermath: Aftermath) -> None:
    assert aftermath.orphans == set()


def test_a_restarted_worker_gets_no_traffic_before_it_is_refitted(
    aftermath: Aftermath, policies: list[Policy]
) -> None:
    """It starts from the base checkpoint, and serves the fleet's version from then on."""
    assert len(aftermath.meanwhile) > 20
    for rollout in aftermath.meanwhile:
        assert rollout.weight_version == aftermath.version
        assert_exact(policies, rollout)


@pytest.mark.soak
def test_a_restarted_worker_continues_the_rollouts_of_another_that_dies(
    aftermath: Aftermath, vllm_stack: rollway.Stack, policies: list[Policy], versions: Iterator[int]
) -> None:
    policy = policies[aftermath.version % len(policies)]
    with LongRollouts(vllm_stack) as running:
        kill("tiny-1")
    assert not running.failures()
    assert {rollout.weight_version for rollout in running.finished()} == {aftermath.version}
    assert worst(policy, running.finished()) < TOLERANCE
    wait_for_version(vllm_stack, aftermath.version)
    version = next(versions)
    vllm_stack.refit(version, policies[2].path)
    rollouts = some_rollouts(vllm_stack)
    assert len({rollout.worker_id for rollout in rollouts}) == 2
    assert worst(policies[2], rollouts) < TOLERANCE


# --- a stack of its own: experts; workers without our methods, with 4 and 13 ----------------------


@pytest.fixture(scope="module")
def odd_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("odd-home")


@pytest.fixture(scope="module")
def odd_stack(odd_home: Path, base_model: Path) -> Iterator[rollway.Stack]:
    foreign = {"worker-extension-cls": f"{rendezvous.__name__}.{rendezvous.Rendezvous.__name__}"}
    env = {
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "DYN_RL_INIT_WEIGHTS_TIMEOUT_S": "2",
    }
    models = [
        {
            "path": str(build_moe(base_model, odd_home / "moe")),
            "args": {**VLLM_ARGS, "max-model-len": 512},
        },
        {"path": str(base_model), "name": "tiny", "args": VLLM_ARGS | foreign, "env": env},
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLWAY_HOME", str(odd_home))
        opening = rollway.up({"name": "odd", "models": models})
        stack = opening.__enter__()
    yield stack
    opening.__exit__(None, None, None)


@pytest.fixture
async def odd(
    odd_stack: rollway.Stack, odd_home: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Stack]:
    monkeypatch.setenv("ROLLWAY_HOME", str(odd_home))
    async with rollway.attach(odd_stack.name) as stack:
        yield stack


async def test_experts_are_refitted_on_cpu(odd: Stack, odd_home: Path) -> None:
    """vLLM alone corrupts them when it reloads them in place, also with what it serves."""
    fleet, rollouts, prompt = odd.fleet_of("moe"), odd.rollouts("moe"), fresh_prompt(16)
    first = Policy(odd_home / "moe")
    other = Policy(perturbed(first.path, odd_home / "moe-other", 1))
    with ShmPublisher() as publisher:
        offered = publisher.publish(2, load_file(first.path / "model.safetensors").items())
        for version, policy, weights in ((1, other, other.path), (2, first, offered)):
            report = await fleet.refit(version, weights)
            assert [worker.proof for worker in report.workers] == ["parameters"]
            group = await rollouts.generate(prompt, GREEDY)
            assert group[0].token_ids == policy.greedy(prompt, 12)
            assert worst(policy, group) < TOLERANCE

    (worker,) = await fleet.workers()
    async with Http() as http:
        bare = Bare(http, odd.frontend_url, odd.weights_secret, "moe")
        assert (await bare.load(worker, first.path))["status"] == "ok"
        assert off(first, prompt, await bare.complete(prompt, GREEDY)) > CLEARLY_OTHER


async def _on_version_1(odd: Stack, policies: list[Policy]) -> Fleet:
    fleet = odd.fleet_of("tiny")
    if 1 not in (await fleet.read_versions()).values():
        await fleet.refit(1, policies[1].path)
    return fleet


async def _assert_replaced(odd: Stack, before: Worker, policies: list[Policy]) -> None:
    """Another worker takes its place and is refitted to version 1."""

    async def is_replaced() -> bool:
        with contextlib.suppress(NoWorkers):
            versions = await odd.fleet_of("tiny").read_versions()
            return list(versions.values()) == [1] and before.instance_id not in versions
        return False

    await wait_until_async(is_replaced, 120.0, every=0.5)
    (rollout,) = await odd.rollouts("tiny").generate(fresh_prompt(), SHORT)
    assert_exact(policies, rollout)


async def test_a_worker_without_our_methods_is_verified_by_a_canary(
    odd: Stack, policies: list[Policy], tmp_path: Path
) -> None:
    fleet = odd.fleet_of("tiny")
    for case in ("05 shape", "06 layer", "06 extra", "06 dtype"):
        damage, words = BAD[case]
        assert damage is not None
        with pytest.raises(UsageError, match=words):
            await fleet.refit(1, damaged(policies[1], tmp_path / case[3:], damage))
    assert set((await fleet.read_versions()).values()) == {0}
    report = await fleet.refit(1, policies[1].path)
    assert [worker.proof for worker in report.workers] == ["canary"]
    (rollout,) = await odd.rollouts("tiny").generate(fresh_prompt(), SHORT)
    assert rollout.weight_version == 1
    assert_exact(policies, rollout)


async def test_04_a_worker_whose_checkpoint_vanished_is_replaced(
    odd: Stack, policies: list[Policy], tmp_path: Path
) -> None:
    fleet = await _on_version_1(odd, policies)
    (before,), path = await fleet.workers(), damaged(policies[2], tmp_path / "brief")

    async def vanish(step: str, worker: Worker) -> None:
        if step == "update":
            shutil.rmtree(path)

    fleet.observer = vanish
    with pytest.raises(RefitError) as caught:
        await fleet.refit(2, path)
    fleet.observer = None
    assert [worker.state for worker in caught.value.report.workers] == ["replaced"]
    await _assert_replaced(odd, before, policies)


async def test_13_a_worker_that_waits_for_a_missing_trainer_is_replaced(
    odd: Stack, policies: list[Policy]
) -> None:
    fleet = await _on_version_1(odd, policies)
    known = next(p for p in read_state("odd").processes if p.name == "tiny-0")
    family = list_children(known.pid)
    (before,), began = await fleet.workers(), time.monotonic()
    with pytest.raises(
        AdminError, match=r"did not join the weight group.*Check that the trainer joins"
    ):
        await fleet.admin.init_group(before, {})
    assert time.monotonic() - began < 20.0
    assert await asyncio.to_thread(processes.wait_gone, family, 15.0) == set()

    def is_restarted() -> bool:
        process = next(p for p in read_state("odd").processes if p.name == "tiny-0")
        return process.restarts > known.restarts and process.pid != known.pid

    await wait_until_async(is_restarted)
    if SOAK:  # a new worker starts and is refitted as after fault 4
        await _assert_replaced(odd, before, policies)
