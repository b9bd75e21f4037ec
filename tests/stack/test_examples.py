"""The examples run as they are shown, and one line publishes by every transport."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rollway
from rollway.weights.megatron.geometry import Topology
from tests.stack.policies import Policy
from tests.stack.served import Served
from tests.stack.serving import tensors
from tests.unit.weights.megatron_shards import held_by_ranks

pytestmark = pytest.mark.stack

EXAMPLES = Path(__file__).parents[2] / "examples"
SHORT = rollway.Sampling(max_tokens=8, ignore_eos=True)
TOLERANCE = 1e-4


def load_example(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module(name)


def use_two(versions: Iterator[int]) -> range:
    first, last = next(versions), next(versions)
    return range(first, last + 1)


def assert_serves(stack: rollway.Stack, policy: Policy, version: int) -> None:
    for rollout in stack.rollouts().generate([version + 40, 50, 60], SHORT, n=2):
        assert rollout.weight_version == version
        assert rollout.logprobs is not None
        assert policy.distance(rollout.prompt_ids, rollout.token_ids, rollout.logprobs) < TOLERANCE


def test_a_custom_loop(
    vllm_stack: rollway.Stack,
    base_model: Path,
    versions: Iterator[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numbers = use_two(versions)
    load_example("own_loop", monkeypatch).train(vllm_stack, str(base_model), len(numbers))
    (rollout,) = vllm_stack.rollouts().generate([40, 50, 60], SHORT)
    assert rollout.weight_version == numbers[-1]


async def test_an_async_loop(
    vllm_stack: rollway.Stack,
    base_model: Path,
    versions: Iterator[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numbers = use_two(versions)
    example = load_example("async_loop", monkeypatch)
    async with rollway.attach(vllm_stack.name, watch=False) as stack:
        rollouts = await example.train(stack, str(base_model), numbers)
    assert len(rollouts) == len(numbers) * len(example.PROMPTS) * 4
    assert set(vllm_stack.fleet.read_versions().values()) == {numbers[-1]}


def test_an_agent_through_the_gateway(
    tool_stack: rollway.Stack, session_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = load_example("agent_gateway", monkeypatch)
    gateway = Served(tool_stack, tmp_path / "gateway.sqlite", {"ROLLWAY_HOME": str(session_home)})
    gateway.start()
    try:
        example.run_agent(gateway.url, "example", "add 2 3")
        sequences = example.read_sequences(gateway.url, "example")
    finally:
        gateway.end()
    assert sequences and all(any(sequence.loss_mask) for sequence in sequences)


def test_shards_of_megatron_ranks(
    vllm_stack: rollway.Stack,
    policies: list[Policy],
    versions: Iterator[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Threads stand in for ranks; each has a store and a publisher."""
    example = load_example("megatron_shards", monkeypatch)
    version, policy = next(versions), policies[1]
    ranks = held_by_ranks(policy.path, tensors(policy), Topology(tp=2))

    def run(rank: int) -> None:
        store = torch.distributed.FileStore(str(tmp_path / "store"), len(ranks))
        example.refit(vllm_stack, weights[rank], version, ranks[rank], store, rank, len(ranks))

    weights = [vllm_stack.publisher("shm") for _ in ranks]
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for publisher in weights:
        publisher.close()
    assert_serves(vllm_stack, policy, version)


@pytest.mark.parametrize("transport", ["auto", "files", "delta", "collective"])
def test_one_line_publishes_by_every_transport(
    vllm_stack: rollway.Stack, policies: list[Policy], versions: Iterator[int], transport: Any
) -> None:
    with vllm_stack.publisher(transport) as weights:
        for policy in (policies[1], policies[2]):
            version = next(versions)
            vllm_stack.refit(version, weights.publish(version, tensors(policy).items()))
            assert_serves(vllm_stack, policy, version)


async def test_a_publisher_for_async_code(
    vllm_stack: rollway.Stack, policies: list[Policy], versions: Iterator[int]
) -> None:
    """A broadcast, in which the trainer takes part while the loop counts its receivers."""
    version = next(versions)
    async with (
        rollway.attach(vllm_stack.name, watch=False) as stack,
        stack.publisher("collective") as weights,
    ):
        offer = await weights.publish(version, tensors(policies[1]).items())
        await stack.refit(version, offer)
    assert_serves(vllm_stack, policies[1], version)
