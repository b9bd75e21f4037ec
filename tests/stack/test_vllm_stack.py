"""Rollouts and refits on real vLLM workers behind a real frontend."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rollway
from rollway.errors import RolloutError, UsageError
from rollway.rollout.client import Rollout
from rollway.rollout.sampling import Sampling
from tests.conftest import Footprint
from tests.stack.brake import slowed
from tests.stack.faults import under_way
from tests.stack.policies import Policy
from tests.stack.serving import (
    LONG,
    TOLERANCE,
    LongRollouts,
    find_process,
    fresh_prompt,
    generated_tokens,
    kill,
    worst,
)
from tests.stack.stacks import VLLM_ARGS
from tests.waiting import stays_async, wait_until, wait_until_async

pytestmark = pytest.mark.stack


@pytest.fixture
def served(
    vllm_stack: rollway.Stack, policies: list[Policy], versions: Iterator[int]
) -> tuple[int, Policy]:
    """Puts the shared stack on a known policy under a new version."""
    version = next(versions)
    policy = policies[version % len(policies)]
    vllm_stack.refit(version, policy.path)
    return version, policy


def test_both_workers_are_listed(vllm_stack: rollway.Stack) -> None:
    workers = vllm_stack.fleet.workers()
    assert len(workers) == 2
    assert {worker.model for worker in workers} == {"tiny"}


def test_greedy_tokens_and_logprobs_equal_torch(
    vllm_stack: rollway.Stack, served: tuple[int, Policy]
) -> None:
    version, policy = served
    prompt = fresh_prompt()
    (rollout,) = vllm_stack.rollouts().generate(
        prompt, Sampling(max_tokens=24, temperature=0.0, ignore_eos=True)
    )
    assert rollout.token_ids == policy.greedy(prompt, 24)
    assert worst(policy, [rollout]) < TOLERANCE
    assert rollout.finish_reason == "length"
    assert rollout.weight_version == version


def test_generation_config_does_not_change_a_request(
    vllm_stack: rollway.Stack, policies: list[Policy], base_model: Path, versions: Iterator[int]
) -> None:
    """The checkpoint ships top_k 20 and top_p 0.9; the log-probs are of the whole distribution."""
    vllm_stack.refit(next(versions), policies[1].path)
    shipped = json.loads((base_model / "generation_config.json").read_text())
    assert shipped["top_k"] == 20 and shipped["top_p"] < 1
    prompt, sampling = fresh_prompt(), Sampling(max_tokens=32, ignore_eos=True)
    group = vllm_stack.rollouts().generate(prompt, sampling, n=8)
    assert worst(policies[1], group) < TOLERANCE
    assert worst(policies[1], [_naive_request(vllm_stack, prompt)]) > 0.01  # the trap is there


def _plain_request(stack: rollway.Stack, prompt: list[int]) -> Any:
    """A request as any client could send it, not through Rollway."""
    extra = ["completion_token_ids", "worker_id", "timing"]
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 32, "temperature": 1.0, "logprobs": 0,
            "ignore_eos": True, "nvext": {"extra_fields": extra}}  # fmt: skip
    request = urllib.request.Request(
        f"{stack.frontend_url}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def _naive_request(stack: rollway.Stack, prompt: list[int]) -> Rollout:
    """What a client gets that says `temperature: 1` and trusts that nothing else is changed."""
    answer = _plain_request(stack, prompt)
    logprobs = answer["choices"][0]["logprobs"]["token_logprobs"]
    return Rollout(prompt, answer["nvext"]["completion_token_ids"], logprobs, "length", (), 0)


def test_a_group_shares_one_worker_and_its_prefix(
    vllm_stack: rollway.Stack, served: tuple[int, Policy]
) -> None:
    groups = vllm_stack.rollouts().generate_batch(
        [fresh_prompt() for _ in range(6)], Sampling(max_tokens=4), n=6
    )
    for group in groups:
        assert len({rollout.worker_id for rollout in group}) == 1
        assert sum(rollout.cached_tokens for rollout in group) >= 4 * 96
    assert len({group[0].worker_id for group in groups}) == 2


def test_the_router_knows_what_the_workers_have_cached(
    vllm_stack: rollway.Stack, served: tuple[int, Policy]
) -> None:
    """Without a session id only the workers' KV events can bring a prompt back to its worker."""
    for _ in range(4):
        prompt = fresh_prompt()
        first = _plain_request(vllm_stack, prompt)
        assert first["nvext"]["timing"]["kv_hit_rate"] == 0

        def is_cached(prompt: list[int] = prompt) -> Any:
            again = _plain_request(vllm_stack, prompt)["nvext"]
            return again if again["timing"]["kv_hit_rate"] > 0.5 else None

        # Events travel beside the answer.
        again = wait_until(is_cached, every=0.2)
        assert again["worker_id"] == first["nvext"]["worker_id"]


def test_worker_ids_are_exact(vllm_stack: rollway.Stack, served: tuple[int, Policy]) -> None:
    listed = {worker.instance_id for worker in vllm_stack.fleet.workers()}
    group = vllm_stack.rollouts().generate(fresh_prompt(), Sampling(max_tokens=2), n=2)
    assert {rollout.worker_id for rollout in group} <= listed
    assert max(listed) > 2**53


def test_seeds_repeat_a_batch_and_differ_within_it(
    vllm_stack: rollway.Stack, served: tuple[int, Policy]
) -> None:
    prompt, sampling = fresh_prompt(), Sampling(max_tokens=12, seed=5, ignore_eos=True)
    first = vllm_stack.rollouts().generate_batch([prompt, prompt], sampling, n=4)
    again = vllm_stack.rollouts().generate_batch([prompt, prompt], sampling, n=4)
    tokens = [[rollout.token_ids for rollout in group] for group in first]
    assert tokens == [[rollout.token_ids for rollout in group] for group in again]
    assert len({tuple(ids) for group in tokens for ids in group}) == 8


def test_unseeded_workers_do_not_sample_alike(
    vllm_stack: rollway.Stack, served: tuple[int, Policy]
) -> None:
    """Two engines with one seed would answer one prompt with the same tokens."""
    prompt = fresh_prompt()
    groups = vllm_stack.rollouts().generate_batch(
        [prompt] * 8, Sampling(max_tokens=8, ignore_eos=True), n=2
    )
    assert len({tuple(r.token_ids) for group in groups for r in group}) == 16


def test_stop_token_is_part_of_the_rollout(
    vllm_stack: rollway.Stack, served: tuple[int, Policy]
) -> None:
    prompt = fresh_prompt()
    expected = served[1].greedy(prompt, 6)
    stop = expected[3]
    (rollout,) = vllm_stack.rollouts().generate(
        prompt,
        Sampling(max_tokens=6, temperature=0.0, stop_token_ids=(stop,)),
    )
    assert rollout.finish_reason == "stop"
    assert rollout.token_ids == expected[: expected.index(stop) + 1]
    assert worst(served[1], [rollout]) < TOLERANCE


async def test_streaming_gives_the_same_tokens(
    vllm_stack: rollway.Stack, served: tuple[int, Policy]
) -> None:
    prompt = fresh_prompt()
    sampling = Sampling(max_tokens=150, temperature=0.0, ignore_eos=True)
    async with rollway.attach(vllm_stack.frontend_url) as stack:
        parts = [part async for part in stack.rollouts().stream(prompt, sampling)]
        *chunks, whole = parts
        assert isinstance(whole, Rollout)
        assert list(itertools.chain(*chunks)) == whole.token_ids  # type: ignore[arg-type]
        assert 2 <= len(chunks) <= 5  # coalesced: the first token, then 64 at a time
        assert whole.weight_version == served[0]
        (unary,) = await stack.rollouts().generate(prompt, sampling)
        assert unary.token_ids == whole.token_ids
    assert worst(served[1], [whole]) < TOLERANCE


async def test_cancelling_ends_the_request_on_the_worker(
    vllm_stack: rollway.Stack, served: tuple[int, Policy], brake_file: Path
) -> None:
    async def is_idle() -> bool:
        tokens = await asyncio.to_thread(generated_tokens, vllm_stack)

        async def is_same() -> bool:
            return await asyncio.to_thread(generated_tokens, vllm_stack) == tokens

        return await stays_async(is_same, 1.0, every=0.5)

    async with rollway.attach(vllm_stack.frontend_url) as stack:
        # The counter lags behind: tokens of an earlier test must not count here.
        await wait_until_async(is_idle)
        before = await asyncio.to_thread(generated_tokens, vllm_stack)
        with slowed(brake_file):
            task = await under_way(stack, stack.rollouts().generate(fresh_prompt(), LONG, n=32))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await wait_until_async(is_idle)
    assert await asyncio.to_thread(generated_tokens, vllm_stack) < before + 32 * LONG.max_tokens


def test_refit_changes_every_worker_and_no_old_kv_is_read(
    vllm_stack: rollway.Stack, policies: list[Policy], versions: Iterator[int]
) -> None:
    prompts = [fresh_prompt() for _ in range(6)]
    sampling = Sampling(max_tokens=8, ignore_eos=True)
    for _ in range(2):
        version = next(versions)
        policy = policies[version % len(policies)]
        report = vllm_stack.refit(version, policy.path)
        assert [worker.state for worker in report.workers] == ["serving", "serving"]
        assert 0 < report.paused_seconds <= report.seconds
        first = vllm_stack.rollouts().generate_batch(prompts, sampling, n=1)
        assert all(group[0].cached_tokens == 0 for group in first)
        warm = vllm_stack.rollouts().generate_batch(prompts, sampling, n=4)
        flat = [rollout for group in (*first, *warm) for rollout in group]
        assert len({rollout.worker_id for rollout in flat}) == 2
        assert {rollout.weight_version for rollout in flat} == {version}
        assert worst(policy, flat) < TOLERANCE
    other = policies[(version + 1) % len(policies)]
    assert worst(other, flat) > 0.1  # the comparison can tell two policies apart


async def test_requests_in_flight_are_stamped_with_the_version_that_sampled_them(
    vllm_stack: rollway.Stack, policies: list[Policy], versions: Iterator[int]
) -> None:
    old, new = next(versions), next(versions)
    async with rollway.attach(vllm_stack.frontend_url) as stack:
        await stack.refit(old, policies[old % len(policies)].path)
        running = await under_way(stack, stack.rollouts().generate(fresh_prompt(), LONG, n=32))
        refit = asyncio.create_task(stack.refit(new, policies[new % len(policies)].path))
        await wait_until_async(lambda: stack.fleet.versions.is_closed or refit.done(), every=0.005)
        late = await stack.rollouts().generate(fresh_prompt(), Sampling(max_tokens=4), n=2)
        await refit
        group = await running
    # Those that ran when the pause came ended on the old weights; those that still queued in the
    # router were sampled again. Each names its version, and matches it.
    assert old in {rollout.weight_version for rollout in group}
    assert {rollout.weight_version for rollout in late} == {new}
    for rollout in (*group, *late):
        assert rollout.weight_version in (old, new)
        policy = policies[rollout.weight_version % len(policies)]
        assert worst(policy, [rollout]) < TOLERANCE
    vllm_stack.fleet.read_versions()


def test_bad_checkpoints_and_versions_are_refused_and_change_nothing(
    vllm_stack: rollway.Stack, served: tuple[int, Policy], tmp_path: Path
) -> None:
    version, policy = served
    with pytest.raises(UsageError, match="older than"):
        vllm_stack.refit(version - 1, policy.path)
    with pytest.raises(UsageError, match="no checkpoint directory"):
        vllm_stack.refit(version + 1000, tmp_path / "nowhere")
    half = tmp_path / "half"
    shutil.copytree(policy.path, half)
    (half / "model.safetensors").unlink()
    with pytest.raises(UsageError, match="lacks weight files"):
        vllm_stack.refit(version + 1000, half)
    group = vllm_stack.rollouts().generate(fresh_prompt(), Sampling(max_tokens=4), n=2)
    assert {rollout.weight_version for rollout in group} == {version}
    assert worst(policy, group) < TOLERANCE


def test_pause_and_resume(vllm_stack: rollway.Stack, served: tuple[int, Policy]) -> None:
    vllm_stack.fleet.pause()
    vllm_stack.fleet.resume()
    vllm_stack.fleet.flush_cache()
    assert vllm_stack.rollouts().generate(fresh_prompt(), Sampling(max_tokens=2))


def test_impossible_requests_are_explained(
    vllm_stack: rollway.Stack, served: tuple[int, Policy]
) -> None:
    with pytest.raises(RolloutError, match="context_length, limit 2048, actual 3000"):
        vllm_stack.rollouts().generate([10] * 3000, Sampling(max_tokens=4))
    with pytest.raises(UsageError, match="no token"):
        vllm_stack.rollouts().generate([])


def test_the_readme_example_runs(
    vllm_stack: rollway.Stack,
    policies: list[Policy],
    monkeypatch: pytest.MonkeyPatch,
    versions: Iterator[int],
) -> None:
    """Run it unchanged, except for the stack, which is the shared one."""
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    version, groups = next(versions), []
    monkeypatch.setattr(rollway, "up", lambda **_: rollway.attach(vllm_stack.frontend_url))
    names = {"prompt_ids": fresh_prompt(), "model": policies[1].model, "steps": 1}
    exec(example, names | {"train": lambda model, group: groups.append(group)})
    assert len(groups[0]) == 8
    assert set(vllm_stack.fleet.read_versions().values()) == {version}


def test_status_names_the_weight_version(
    vllm_stack: rollway.Stack, served: tuple[int, Policy]
) -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "rollway.cli", "status", "--json"], capture_output=True, text=True
    )
    stacks = {stack["name"]: stack for stack in json.loads(shown.stdout)["stacks"]}
    assert list(stacks["shared"]["weight_versions"].values()) == [served[0]] * 2


def test_rollouts_survive_the_death_of_the_frontend(
    vllm_stack: rollway.Stack, served: tuple[int, Policy]
) -> None:
    restarts = find_process("frontend").restarts
    with LongRollouts(vllm_stack) as running:
        kill("frontend")
    flat = running.finished()
    assert len(flat) == running.count
    assert find_process("frontend").restarts == restarts + 1
    assert {rollout.weight_version for rollout in flat} == {served[0]}
    assert worst(served[1], flat) < TOLERANCE


@pytest.mark.soak  # test_lifecycle.py does the same with light workers
def test_vllm_over_real_etcd_and_nats(
    base_model: Path, policies: list[Policy], footprint: Footprint
) -> None:
    model = {"path": str(base_model), "name": "tiny", "args": VLLM_ARGS}
    planes = {"discovery": "etcd", "event_plane": "nats", "request_plane": "nats"}
    with rollway.up({"name": "planes", "models": [model], **planes}) as stack:
        sampling = Sampling(max_tokens=8, ignore_eos=True)
        group = stack.rollouts().generate(fresh_prompt(), sampling, n=4)
        assert worst(policies[0], group) < TOLERANCE
        assert sum(rollout.cached_tokens for rollout in group) > 0
        stack.refit(1, policies[1].path)
        group = stack.rollouts().generate(fresh_prompt(), sampling, n=2)
        assert worst(policies[1], group) < TOLERANCE
    assert footprint.new() == {}


def test_real_workers_sleep_and_come_back_without_a_stale_token(
    vllm_stack: rollway.Stack, served: tuple[int, Policy], policies: list[Policy],
    versions: Iterator[int],
) -> None:  # fmt: skip
    """vLLM's engine on CPU stops and drops its cache, but keeps its memory; the report says so."""
    version, policy = served
    prompt, rollouts = fresh_prompt(), vllm_stack.rollouts()
    rollouts.generate(prompt, Sampling(max_tokens=8))
    report = vllm_stack.sleep(level=1)
    assert report.asleep == 2
    ranks = [rank for worker in report.workers for rank in worker.memory["asleep"]]
    assert all(not rank["releases"] and 0 < rank["resident"] < rank["total"] for rank in ranks)
    with pytest.raises(RolloutError, match="2 workers sleep"):
        vllm_stack.rollouts(patience=1.0).generate(prompt, Sampling(max_tokens=8))
    vllm_stack.wake()
    (rollout,) = rollouts.generate(prompt, Sampling(max_tokens=8))
    assert (rollout.weight_version, rollout.cached_tokens) == (version, 0)
    assert worst(policy, [rollout]) < TOLERANCE
    for level in (2, 1):
        vllm_stack.sleep(level=level, mode="abort")
        version = next(versions)
        policy = policies[version % len(policies)]
        refit = vllm_stack.refit(version, policy.path)
        assert [(w.state, w.proof) for w in refit.workers] == [("serving", "parameters")] * 2
        (rollout,) = rollouts.generate(prompt, Sampling(max_tokens=8))
        assert (rollout.weight_version, rollout.cached_tokens) == (version, 0)
        assert worst(policy, [rollout]) < TOLERANCE
