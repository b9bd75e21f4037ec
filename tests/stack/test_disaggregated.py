"""One prefill and one decode vLLM worker on CPU, with NIXL between them, behind a real frontend."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import rollway
from rollway.errors import RolloutError, UsageError
from rollway.fleet.dynamo_admin import DynamoAdmin
from rollway.fleet.workers import Worker
from rollway.http import Http
from rollway.observe.read import Run
from rollway.rollout.client import Rollout
from rollway.rollout.sampling import Sampling
from rollway.rollout.wire import completion_request
from rollway.stack.preset import has_nixl
from rollway.stack.state import StackDir, find_record_dir, secret_file
from rollway.versions import taint_of
from rollway.weights.transports.shm import ShmPublisher
from tests.conftest import Cli
from tests.stack.policies import Policy, write_adapter
from tests.stack.serving import TOLERANCE, fresh_prompt, read_state
from tests.stack.stacks import VLLM_ARGS
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.stack,
    pytest.mark.skipif(not has_nixl(), reason="needs the module nixl: make setup"),
]

GREEDY = Sampling(max_tokens=16, temperature=0.0, ignore_eos=True)
NAME = "apart"
LEASE_SECONDS = 30.0
"""For which vLLM's prefill workers hold blocks that nobody fetches."""


@pytest.fixture(scope="module")
def apart(session_home: Path, base_model: Path) -> Iterator[rollway.Stack]:
    """A stack with prefill and decode apart, shared by the tests of this file."""
    model = {"path": str(base_model), "name": "tiny", "args": VLLM_ARGS}
    model |= {"serving": "disaggregated", "prefill": {}, "decode": {"args": {"max-num-seqs": 32}}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLWAY_HOME", str(session_home))
        opening = rollway.up({"name": NAME, "models": [model]})
        stack = opening.__enter__()
    yield stack
    opening.__exit__(None, None, None)


@pytest.fixture(autouse=True)
def shared_home(monkeypatch: pytest.MonkeyPatch, own_home: Path, session_home: Path) -> None:
    monkeypatch.setenv("ROLLWAY_HOME", str(session_home))


@pytest.fixture(scope="module")
def numbers() -> Iterator[int]:
    """Versions of this stack, each used once."""
    return itertools.count(1)


def find_worker(stack: rollway.Stack, role: str) -> Worker:
    return next(worker for worker in stack.fleet.workers() if worker.role == role)


def check_versions(rollouts: list[Rollout], policies: dict[int, Policy]) -> float:
    """Return the largest distance of a log-prob from torch's, each by the version of its token."""
    distances = [0.0]
    for rollout in rollouts:
        for span in rollout.spans:
            assert span.version is not None and rollout.logprobs is not None
            before = rollout.prompt_ids + rollout.token_ids[: span.start]
            tokens = rollout.token_ids[span.start : span.end]
            logprobs = rollout.logprobs[span.start : span.end]
            distances.append(policies[span.version].distance(before, tokens, logprobs))
    return max(distances)


def test_both_roles_are_listed_and_shown(apart: rollway.Stack, cli: Cli) -> None:
    assert sorted(worker.role for worker in apart.fleet.workers()) == ["decode", "prefill"]
    listing = json.loads(cli("fleet", "ls", NAME, "--json").stdout)
    assert {row["role"] for row in listing["workers"]} == {"prefill", "decode"}
    assert "tiny-prefill-0  prefill  ready" in cli("status", NAME).stdout


def test_tokens_and_logprobs_equal_the_aggregated_stack(
    apart: rollway.Stack,
    vllm_stack: rollway.Stack,
    policies: list[Policy],
    versions: Iterator[int],
    numbers: Iterator[int],
) -> None:
    policy = policies[1]
    apart.refit(next(numbers), policy.path)
    vllm_stack.refit(next(versions), policy.path)
    prompts = [fresh_prompt(length) for length in (3, 31, 32, 33, 100, 257)]
    split = [group[0] for group in apart.rollouts().generate_batch(prompts, GREEDY)]
    whole = [group[0] for group in vllm_stack.rollouts().generate_batch(prompts, GREEDY)]
    for mine, theirs in zip(split, whole, strict=True):
        assert mine.token_ids == theirs.token_ids
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)
        assert theirs.prefill_worker_id is None


def test_a_rollout_names_both_workers_and_the_prefill_workers_prefix_hits(
    apart: rollway.Stack,
) -> None:
    prompt, rollouts = fresh_prompt(), apart.rollouts()
    (first,), (again,) = rollouts.generate(prompt, GREEDY), rollouts.generate(prompt, GREEDY)
    assert first.worker_id == find_worker(apart, "decode").instance_id
    assert first.prefill_worker_id == find_worker(apart, "prefill").instance_id
    assert (first.cached_tokens, again.cached_tokens) == (0, 96)  # whole blocks of 32


@pytest.mark.parametrize("mode", ["pause-all", "in-flight", "rolling"])
def test_no_token_is_of_two_versions_when_a_refit_comes_between(
    apart: rollway.Stack, policies: list[Policy], numbers: Iterator[int], mode: Any
) -> None:
    before, after = next(numbers), next(numbers)
    apart.refit(before, policies[0].path)
    sampling, is_over = Sampling(max_tokens=120, ignore_eos=True), threading.Event()
    rollouts, sampled = apart.rollouts(timeout=240.0), list[Rollout]()

    def sample() -> None:
        is_last = False
        while not is_last:
            is_last = is_over.is_set()  # one begins after the refit
            sampled.extend(rollouts.generate(fresh_prompt(), sampling))

    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(sample) for _ in range(8)]
        try:
            wait_until(lambda: sampled, 120.0)
            report = apart.refit(after, policies[2].path, mode=mode)
        finally:
            is_over.set()
        for future in futures:
            future.result()
    assert [worker.proof for worker in report.workers] == ["parameters"] * 2
    assert {r.spans[-1].version for r in sampled} == {before, after}
    assert check_versions(sampled, {before: policies[0], after: policies[2]}) < TOLERANCE


def test_running_requests_cannot_be_kept(
    apart: rollway.Stack, policies: list[Policy], numbers: Iterator[int]
) -> None:
    with pytest.raises(UsageError, match="prefill and decode apart"):
        apart.refit(next(numbers), policies[1].path, mode="keep")


def test_a_teacher_scores_as_torch_does(
    apart: rollway.Stack, policies: list[Policy], numbers: Iterator[int]
) -> None:
    """The decode worker computes these prompts itself; the prefill worker's blocks are freed."""
    version = next(numbers)
    apart.refit(version, policies[2].path)
    sequences = [fresh_prompt(length) for length in (2, 33, 100)]
    for scores, ids in zip(apart.teacher().score(sequences), sequences, strict=True):
        logprobs = [logprob for logprob in scores.logprobs[1:] if logprob is not None]
        assert scores.weight_version == version
        assert policies[2].distance(ids[:1], ids[1:], logprobs) < TOLERANCE
    began = time.monotonic()
    apart.refit(next(numbers), policies[1].path)
    assert time.monotonic() - began < LEASE_SECONDS / 2  # it waits for blocks that are held


@pytest.mark.soak
def test_an_adapter_is_on_both_workers(
    base_model: Path, policies: list[Policy], tmp_path: Path
) -> None:
    base, prompt = policies[0], fresh_prompt()
    adapted = write_adapter(tmp_path / "adapter", base, seed=1)
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    args = {**VLLM_ARGS, "enable-lora": True, "max-lora-rank": 8, "max-cpu-loras": 4}
    model = {"path": str(base_model), "name": "tiny", "args": args}
    model |= {"env": {"DYN_LORA_ENABLED": "true"}}
    model |= {"serving": "disaggregated", "prefill": {}, "decode": {}}
    with rollway.up({"name": "adapted", "models": [model]}) as stack:
        workers = {worker.instance_id for worker in stack.fleet.workers()}
        with ShmPublisher() as publisher:
            offer = publisher.publish(1, tensors.items())
            assert stack.fleet.load_adapter("style", 1, offer, config) == "style@1"
        for _ in range(2):  # the prompt of the first is cached for the second
            (rollout,) = stack.rollouts(adapter="style").generate(prompt, GREEDY)
            assert {rollout.worker_id, rollout.prefill_worker_id} == workers
            assert adapted.distance(prompt, rollout.token_ids, rollout.logprobs or []) < TOLERANCE
            assert base.distance(prompt, rollout.token_ids, rollout.logprobs or []) > 0.01
        (rollout,) = stack.rollouts().generate(prompt, GREEDY)
        assert base.distance(prompt, rollout.token_ids, rollout.logprobs or []) < TOLERANCE
        with pytest.raises(RolloutError, match=r"not while an adapter is loaded"):
            stack.teacher().score([prompt])
        assert {worker.instance_id for worker in stack.fleet.workers()} == workers


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_version_that_one_pool_has_is_refused_and_not_mixed(
    apart: rollway.Stack, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, version = find_worker(apart, role), 990
    own = [taint_of(v) for v in apart.fleet.read_versions().values() if v is not None][:1]
    _set_taints(worker, [*own, taint_of(version)])
    try:
        body = completion_request("tiny", fresh_prompt(), GREEDY, required_taint=taint_of(version))
        request = urllib.request.Request(
            f"{apart.frontend_url}/v1/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with pytest.raises(urllib.error.HTTPError) as refusal:
            urllib.request.urlopen(request, timeout=60)
        assert refusal.value.code in (500, 503)
    finally:
        _set_taints(worker, own)
    assert apart.rollouts().generate(fresh_prompt(), GREEDY)[0].token_ids


def _set_taints(worker: Worker, taints: list[str]) -> None:
    async def call() -> None:
        secret = Path(secret_file(read_state(NAME))).read_text().strip()
        async with Http() as http, DynamoAdmin(http, secret=secret).pin() as admin:
            await admin.set_taints(worker, taints)

    asyncio.run(call())


@pytest.mark.soak
def test_a_killed_prefill_worker_is_healed_and_admitted(
    apart: rollway.Stack, policies: list[Policy], numbers: Iterator[int]
) -> None:
    """It restarts with the base checkpoint; its pool serves the version again once it has it."""
    version = next(numbers)
    apart.refit(version, policies[1].path)
    old = find_worker(apart, "prefill").instance_id
    process = next(p for p in read_state(NAME).processes if p.worker_role == "prefill")
    os.kill(process.pid or 0, signal.SIGKILL)
    wait_until(
        lambda: (
            list(apart.fleet.read_versions().values()) == [version] * 2
            and find_worker(apart, "prefill").instance_id != old
        ),
        240.0,
        every=0.5,
        what="the new prefill worker on the version",
    )
    (rollout,) = apart.rollouts().generate(fresh_prompt(), GREEDY)
    assert rollout.prefill_worker_id != old
    assert check_versions([rollout], {version: policies[1]}) < TOLERANCE


def test_its_workers_exit_by_themselves(apart: rollway.Stack, cli: Cli) -> None:
    """The last test of this file: it stops the stack."""
    record = find_record_dir(read_state(NAME))
    assert record is not None
    assert cli("down", NAME).returncode == 0
    directory = StackDir(NAME)
    assert [entry for entry in Run(record).read() if entry.get("event") == "killed"] == []
    for role in ("prefill", "decode"):
        log = (directory.logs / f"tiny-{role}-0.log").read_text()
        assert "EngineCore: exiting busy loop" in log and "force killing" not in log
