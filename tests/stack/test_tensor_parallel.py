"""A real vLLM worker of two tensor-parallel ranks: every rank receives its part, and verifies it.

Two ranks take both cores of a small machine for a minute; so it is asked for:
ROLLWAY_TEST_TP=1 pytest tests/stack/test_tensor_parallel.py
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import pytest
import torch

import rollway
from rollway.fleet.fleet import Fleet
from rollway.fleet.report import RefitMode
from rollway.stack.state import StackDir
from rollway.weights.offer import Offer
from rollway.weights.transports.files import FilesPublisher
from rollway.weights.transports.nixl import NixlPublisher
from rollway.weights.transports.shm import ShmPublisher
from tests.stack import brake, failing_rank
from tests.stack.faults import assert_exact
from tests.stack.moe import build_moe
from tests.stack.policies import Policy, perturbed
from tests.stack.serving import LongRollouts, assert_serves, tensors
from tests.stack.stacks import VLLM_ARGS

pytestmark = [
    pytest.mark.stack,
    pytest.mark.slow,
    pytest.mark.skipif(
        os.environ.get("ROLLWAY_TEST_TP") != "1",
        reason="takes all cores of a small machine; ROLLWAY_TEST_TP=1 runs it",
    ),
]
_versions = count(1)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tp-home")


@pytest.fixture(scope="module")
def stack(home: Path, base_model: Path) -> Iterator[rollway.Stack]:
    env = {**brake.environment(home / "brake"), failing_rank.VARIABLE: str(home / "failing")}
    args = {**VLLM_ARGS, **brake.ARGS, **failing_rank.ARGS}
    model = {"path": str(base_model), "name": "tiny", "tensor_parallel": 2, "args": args}
    model["env"] = env
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLWAY_HOME", str(home))
        opening = rollway.up({"name": "ranks", "models": [model]})
        running = opening.__enter__()
    yield running
    opening.__exit__(None, None, None)


@pytest.fixture(autouse=True)
def seen(home: Path, monkeypatch: pytest.MonkeyPatch, own_home: Path) -> None:
    """Tests see the home that the stack runs in."""
    monkeypatch.setenv("ROLLWAY_HOME", str(home))


def test_files(stack: rollway.Stack, policies: list[Policy], tmp_path: Path) -> None:
    publisher = FilesPublisher(tmp_path / "versions", policies[0].path, keep_recent=2)
    for policy in (policies[1], policies[2]):
        version = next(_versions)
        report = stack.refit(version, publisher.publish(version, tensors(policy).items()))
        assert {worker.proof for worker in report.workers} == {"parameters"}
        assert_serves(stack, policy, version)


def test_shared_memory(stack: rollway.Stack, policies: list[Policy]) -> None:
    with ShmPublisher() as publisher:
        for policy in (policies[1], policies[2]):
            version = next(_versions)
            report = stack.refit(version, publisher.publish(version, tensors(policy).items()))
            assert {worker.proof for worker in report.workers} == {"parameters"}
            assert_serves(stack, policy, version)


def publish(publisher: ShmPublisher, policies: list[Policy]) -> tuple[int, Offer]:
    """Publish the next version; its number tells which policy it is."""
    version = next(_versions)
    policy = policies[version % len(policies)]
    return version, publisher.publish(version, tensors(policy).items())


@pytest.mark.parametrize("mode", ["pause-all", "in-flight", "keep"])
def test_one_order_moves_all_ranks(
    stack: rollway.Stack, home: Path, policies: list[Policy], mode: RefitMode
) -> None:
    with ShmPublisher() as publisher, brake.slowed(home / "brake"):
        version, offer = publish(publisher, policies)
        stack.refit(version, offer)
        with LongRollouts(stack) as rollouts:
            version, offer = publish(publisher, policies)
            (worker,) = stack.refit(version, offer, mode=mode).workers
    assert (worker.state, worker.proof, worker.calls) == ("serving", "parameters", 2)
    assert "order.engine.swap" in worker.steps
    assert rollouts.failures() == []
    for rollout in rollouts.finished():
        assert_exact(policies, rollout)
    if mode != "pause-all":
        spans = [[span.version for span in r.spans] for r in rollouts.finished()]
        assert [version - 1, version] in spans
    assert_serves(stack, policies[version % len(policies)], version)


def test_a_refused_offer_leaves_no_answer_of_a_rank_behind(
    stack: rollway.Stack, policies: list[Policy]
) -> None:
    """vLLM reads one rank's error and leaves the others' in their queues, for the next call."""
    with ShmPublisher() as publisher:
        wrong = {name: torch.zeros(3) for name in tensors(policies[0])}
        for _ in range(2):
            with pytest.raises(rollway.UsageError, match="does not fit the model"):
                stack.refit(publisher.publish(next(_versions), wrong.items()))
        version, offer = publish(publisher, policies)
        stack.refit(version, offer)
        assert_serves(stack, policies[version % len(policies)], version)


async def test_a_rank_that_fails_in_the_swap_keeps_the_worker_out(
    stack: rollway.Stack, home: Path, policies: list[Policy]
) -> None:
    async with rollway.aio.attach("ranks") as client:
        fleet = Fleet(
            client._http, client.fleet.membership.source, secret=client.weights_secret
        )  # without a supervisor, which would replace the worker
        fleet.versions.tainted = True
        await client.unwatch()
        with ShmPublisher() as publisher:
            version, offer = publish(publisher, policies)
            (home / "failing").touch()
            with pytest.raises(rollway.RefitError, match="the second rank fails"):
                await fleet.refit(version, offer)
            (home / "failing").unlink()
            (label,) = (await fleet.read_versions()).values()
            assert label is not None and label < 0
            version, offer = publish(publisher, policies)
            (worker,) = (await fleet.refit(version, offer)).workers
            assert worker.state == "serving"
        await client.fleet.read_versions()
    assert_serves(stack, policies[version % len(policies)], version)


def test_nixl(stack: rollway.Stack, policies: list[Policy]) -> None:
    """Every rank takes its own part and nothing else."""
    pytest.importorskip("nixl_cu12", reason="there is no NIXL for this machine")
    with NixlPublisher(secret=stack.weights_secret, engine_ranks=2) as publisher:
        for policy in (policies[1], policies[2], policies[0]):
            version = next(_versions)
            offer = publisher.publish(version, tensors(policy).items())
            report = stack.refit(version, offer)
            assert {worker.proof for worker in report.workers} == {"parameters"}
            assert_serves(stack, policy, version)
            moved = read_moved(version)
            print(f"version {version}: {offer.nbytes} bytes offered, moved {moved}")
            assert len(moved) == 2
            assert sum(moved) - offer.nbytes == norms(policy)  # what every rank holds whole


def test_nixl_with_tensors_received_whole(stack: rollway.Stack, policies: list[Policy]) -> None:
    """Parts could not be verified, so the tensors are received whole; that is correct as well."""
    pytest.importorskip("nixl_cu12", reason="there is no NIXL for this machine")
    with NixlPublisher(secret=stack.weights_secret) as publisher:
        version = next(_versions)
        offer = publisher.publish(version, tensors(policies[1]).items())
        stack.refit(version, offer)
        assert_serves(stack, policies[1], version)
        assert read_moved(version) == [offer.nbytes] * 2


def test_experts_and_a_replicated_head(base_model: Path, tmp_path: Path) -> None:
    """One head of keys and values. Experts are cut: vLLM's CPU kernel for experts that are owned
    by one rank each (0.31) crashes in its first forward."""
    pytest.importorskip("nixl_cu12", reason="there is no NIXL for this machine")
    first = build_moe(base_model, tmp_path / "moe", kv_heads=1)
    policies = [Policy(perturbed(first, tmp_path / f"moe{seed}", seed)) for seed in (1, 2)]
    args = {**VLLM_ARGS, "max-model-len": 512}
    model = {"path": str(first), "name": "tiny", "tensor_parallel": 2, "args": args}
    with rollway.up({"name": "experts", "models": [model]}) as stack, ExitStack() as cleanup:
        shm = cleanup.enter_context(ShmPublisher())
        nixl = cleanup.enter_context(NixlPublisher(secret=stack.weights_secret, engine_ranks=2))
        version = 0
        for policy in policies:
            for publisher in (shm, nixl):
                version += 1
                offer = publisher.publish(version, tensors(policy).items())
                report = stack.refit(version, offer)
                assert {worker.proof for worker in report.workers} == {"parameters"}
                assert_serves(stack, policy, version)
            moved = read_moved(version, "experts")
            print(f"version {version}: {offer.nbytes} bytes offered, moved {moved}")
            assert len(moved) == 2
            assert all(count < 0.7 * offer.nbytes for count in moved)


def read_moved(version: int, name: str = "ranks") -> list[int]:
    """Return the bytes that each rank read, as the worker's log has it."""
    line = re.compile(rf"version {version} over nixl: (\d+) bytes moved")
    text = "".join(path.read_text() for path in StackDir(name).logs.glob("*.log"))
    return [int(count) for count in line.findall(text)]


def norms(policy: Policy) -> int:
    return sum(tensor.nbytes for name, tensor in tensors(policy).items() if "norm" in name)
