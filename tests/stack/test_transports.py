"""Every transport into real vLLM workers: what is served afterwards is the published policy."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

import rollway
from rollway.errors import UsageError
from rollway.fleet.updates import Offered, stage
from rollway.fleet.workers import Worker
from rollway.stack.state import StackDir
from rollway.weights.megatron.geometry import Topology
from rollway.weights.transports.collective import CollectivePublisher
from rollway.weights.transports.delta import DeltaPublisher
from rollway.weights.transports.files import FilesPublisher
from rollway.weights.transports.nixl import NixlPublisher
from rollway.weights.transports.shm import ShmPublisher, join_offers
from tests.stack.policies import Policy
from tests.stack.serving import assert_serves, kill, read_state, tensors
from tests.unit.weights.megatron_shards import held_by_ranks
from tests.waiting import wait_until_async

pytestmark = pytest.mark.stack


@pytest.fixture
def shm(tmp_path: Path) -> Iterator[ShmPublisher]:
    with ShmPublisher() as publisher:
        yield publisher


def test_shared_memory(
    vllm_stack: rollway.Stack, policies: list[Policy], shm: ShmPublisher, versions: Iterator[int]
) -> None:
    for policy in (policies[1], policies[2], policies[0]):
        version = next(versions)
        report = vllm_stack.refit(version, shm.publish(version, tensors(policy).items()))
        assert {worker.proof for worker in report.workers} == {"parameters"}
        assert_serves(vllm_stack, policy, version)


def test_files(
    vllm_stack: rollway.Stack, policies: list[Policy], tmp_path: Path, versions: Iterator[int]
) -> None:
    publisher = FilesPublisher(tmp_path / "versions", policies[0].path, keep_recent=2)
    for policy in (policies[1], policies[2]):
        version = next(versions)
        report = vllm_stack.refit(version, publisher.publish(version, tensors(policy).items()))
        assert {worker.proof for worker in report.workers} == {"parameters"}
        assert_serves(vllm_stack, policy, version)


def test_deltas(
    vllm_stack: rollway.Stack, policies: list[Policy], tmp_path: Path, versions: Iterator[int]
) -> None:
    publisher = DeltaPublisher(tmp_path / "deltas", snapshot_every=3)
    for policy in (policies[1], policies[2], policies[0], policies[1]):
        version = next(versions)
        vllm_stack.refit(version, publisher.publish(version, tensors(policy).items()))
        assert_serves(vllm_stack, policy, version)


def test_parameters_that_were_adopted_are_not_copied_to_publish(
    vllm_stack: rollway.Stack, policies: list[Policy], shm: ShmPublisher, versions: Iterator[int]
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(policies[1].path, dtype=torch.float32)
    shm.adopt(model.named_parameters())
    for policy in (policies[1], policies[2]):
        model.load_state_dict(tensors(policy), strict=False)
        version = next(versions)
        vllm_stack.refit(version, shm.publish(version))
        assert_serves(vllm_stack, policy, version)


def test_a_broadcast(
    vllm_stack: rollway.Stack, policies: list[Policy], versions: Iterator[int]
) -> None:
    with CollectivePublisher() as publisher:
        for policy in (policies[1], policies[2]):
            version = next(versions)
            publisher.expect(2)
            offer = publisher.publish(version, tensors(policy).items())
            vllm_stack.refit(version, offer)
            publisher.wait(version, 10.0)
            assert_serves(vllm_stack, policy, version)


def test_nixl(vllm_stack: rollway.Stack, policies: list[Policy], versions: Iterator[int]) -> None:
    pytest.importorskip("nixl_cu12", reason="there is no NIXL for this machine")
    with NixlPublisher(secret=vllm_stack.weights_secret) as publisher:
        for policy in (policies[1], policies[2]):
            version = next(versions)
            vllm_stack.refit(version, publisher.publish(version, tensors(policy).items()))
            assert_serves(vllm_stack, policy, version)


def test_nixl_from_worker_to_worker(
    vllm_stack: rollway.Stack, policies: list[Policy], versions: Iterator[int]
) -> None:
    """The trainer gives a version to one worker, and that one to the other."""
    pytest.importorskip("nixl_cu12", reason="there is no NIXL for this machine")
    with NixlPublisher(secret=vllm_stack.weights_secret, fanout=True) as publisher:
        for policy in (policies[1], policies[2]):
            version = next(versions)
            vllm_stack.refit(version, publisher.publish(version, tensors(policy).items()))
            assert_serves(vllm_stack, policy, version)
            line = re.compile(rf"version {version} over nixl: .* from (trainer|receiver)")
            logs = "".join(path.read_text() for path in StackDir("shared").logs.glob("*.log"))
            assert sorted(line.findall(logs)) == ["receiver", "trainer"]


@pytest.mark.parametrize("topology", [Topology(tp=2, pp=2), Topology(tp=4)])
def test_shards_of_a_megatron_trainer(
    vllm_stack: rollway.Stack, policies: list[Policy], topology: Topology, versions: Iterator[int]
) -> None:
    """Every rank publishes what it owns; nothing is gathered on the trainer's side."""
    version, policy = next(versions), policies[1]
    with ExitStack() as cleanup:
        offers = [
            cleanup.enter_context(ShmPublisher()).publish(version, held)
            for held in held_by_ranks(policy.path, tensors(policy), topology)
        ]
        vllm_stack.refit(version, join_offers(offers))
        assert_serves(vllm_stack, policy, version)


def test_weights_that_change_after_they_were_published_are_refused(
    vllm_stack: rollway.Stack, policies: list[Policy], shm: ShmPublisher, versions: Iterator[int]
) -> None:
    """A trainer that steps too early, or a byte that flips: nothing of it is served."""
    served = vllm_stack.fleet.read_versions()
    version = next(versions)
    offer = shm.publish(version, tensors(policies[1]).items())
    slot = Path("/dev/shm") / offer.where["ranks"][0]["slot"]
    with slot.open("r+b") as file:
        file.seek(1000)
        byte = file.read(1)
        file.seek(1000)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(UsageError, match="changed while they were read"):
        vllm_stack.refit(version, offer)
    assert vllm_stack.fleet.read_versions() == served


async def test_a_worker_that_dies_while_receiving_weights_is_recovered(
    vllm_stack: rollway.Stack, policies: list[Policy], shm: ShmPublisher, versions: Iterator[int]
) -> None:
    """The others get the version; the one that takes its place gets it as well."""
    version = next(versions)
    async with rollway.attach(vllm_stack.frontend_url) as stack:
        killed = False

        async def die(step: str, worker: Worker) -> None:
            nonlocal killed
            if step == "preflight" and not killed:
                killed = True
                (victim,) = [p for p in read_state().processes if p.instance == worker.instance_id]
                kill(victim.name)

        stack.fleet.observer = die
        offer = shm.publish(version, tensors(policies[1]).items())
        report = await stack.refit(version, offer)
        assert sorted(worker.state for worker in report.workers) == ["gone", "serving"]

        async def all_serve() -> bool:
            return list((await stack.fleet.read_versions()).values()) == [version, version]

        await wait_until_async(all_serve, 120.0, every=0.5)  # this process watches, with the offer
    assert_serves(vllm_stack, policies[1], version)


async def test_staging_does_not_change_the_serving_weights(
    vllm_stack: rollway.Stack, policies: list[Policy], shm: ShmPublisher, versions: Iterator[int]
) -> None:
    """The memory that one version was loaded into is used for the next."""
    async with rollway.attach("shared") as stack:
        for served, staged in ((1, 2), (2, 0)):
            version, next_version = next(versions), next(versions)
            offer = shm.publish(version, tensors(policies[served]).items())
            await stack.refit(version, offer)
            coming = shm.publish(next_version, tensors(policies[staged]).items())
            for worker in await stack.fleet.workers():
                await stage(stack.fleet.admin, worker, coming.sign(stack.weights_secret))
            await asyncio.to_thread(assert_serves, vllm_stack, policies[served], version)


async def test_a_dead_publisher_leaves_the_fleet_unchanged(
    vllm_stack: rollway.Stack, policies: list[Policy], versions: Iterator[int]
) -> None:
    served, version = vllm_stack.fleet.read_versions(), next(versions)
    with ShmPublisher() as publisher:
        offer = publisher.publish(version, tensors(policies[2]).items())
    with pytest.raises(UsageError, match="not in the publisher's memory any more"):
        vllm_stack.refit(version, offer)
    assert vllm_stack.fleet.read_versions() == served


async def test_an_unsigned_offer_is_refused(
    vllm_stack: rollway.Stack, policies: list[Policy], shm: ShmPublisher, versions: Iterator[int]
) -> None:
    served, version = vllm_stack.fleet.read_versions(), next(versions)
    offer = shm.publish(version, tensors(policies[2]).items())
    with pytest.raises(UsageError, match="not signed with this stack's secret"):
        vllm_stack.refit(version, Offered(offer, secret="guessed"))
    assert vllm_stack.fleet.read_versions() == served
