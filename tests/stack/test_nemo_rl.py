"""NeMo-RL's generation interface on light workers: batches, copies in other processes, the end."""

from __future__ import annotations

import asyncio
import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rollway.errors import Unreachable, UsageError
from rollway.integrations.nemo_rl.generation import Generation
from tests.footprint import Footprint
from tests.light.spec import light
from tests.stack.nemo_rl import Batch, collect, make_batch, make_config
from tests.stack.policies import Policy

pytestmark = pytest.mark.stack


@pytest.fixture(scope="module")
def generation(base_model: Path) -> Iterator[Generation]:
    spec = light(base_model, "nemo", LIGHT_STEP_SECONDS="0.005")
    opened = Generation(None, make_config(spec["models"][0]["name"], stack=spec))
    yield opened
    opened.shutdown()


def refit(generation: Generation, version: int, weights: Policy) -> None:
    connection = generation.connection
    connection.run(connection.stack.refit(version, weights.path))


def test_a_batch_comes_back_in_its_order(generation: Generation) -> None:
    batch = make_batch([1, 2, 3], [4, 5, 6, 7])
    output = generation.generate(batch)
    assert isinstance(output, Batch)
    assert output["output_ids"][0, :3].tolist() == [1, 2, 3]
    assert output["output_ids"][1, :4].tolist() == [4, 5, 6, 7]
    assert output["generation_lengths"].tolist() == [8, 8]
    assert output["unpadded_sequence_lengths"].tolist() == [11, 12]
    assert output["output_ids"][0, 11:].tolist() == [0]  # right-padded
    assert not output["logprobs"][0, :3].any() and not output["logprobs"][0, 11:].any()
    assert (output["logprobs"][0, 3:11] < 0).all()
    assert output["truncated"].tolist() == [True, True]


async def test_single_samples_are_those_of_the_batch(generation: Generation) -> None:
    batch = make_batch([1, 2, 3], [4, 5, 6, 7])
    outputs = await collect(generation, batch, greedy=True)
    whole = await asyncio.to_thread(generation.generate, batch, True)
    for index, length in enumerate((11, 12)):
        alone = outputs[index]["output_ids"][0].tolist()
        assert alone == whole["output_ids"][index, :length].tolist()
    assert not [pair async for pair in generation.generate_async(make_batch([1]).copy() | EMPTY)]


EMPTY = {"input_ids": torch.zeros((0, 1), dtype=torch.long), "input_lengths": torch.zeros(0)}


def test_a_copy_generates_and_flushes_and_follows_the_drivers_refits(
    generation: Generation, policies: tuple[Policy, Policy]
) -> None:
    copy: Generation = pickle.loads(pickle.dumps(generation))
    try:
        before = asyncio.run(collect(copy, make_batch([1, 2, 3])))
        refit(generation, 1, policies[1])
        after = asyncio.run(collect(copy, make_batch([1, 2, 3])))
        assert before[0]["weight_versions"].tolist() == [[0, 0]]
        assert after[0]["weight_versions"].tolist() == [[1, 1]]
        assert copy.invalidate_kv_cache()
        assert copy.weight_synchronizer is None
    finally:
        copy.shutdown()
    assert generation.get_inference_world_size() == 2  # it stopped nothing


def test_requests_wait_while_generation_is_paused(generation: Generation) -> None:
    async def run() -> None:
        assert await asyncio.to_thread(generation.pause_generation, clear_cache=True)
        task = asyncio.create_task(collect(generation, make_batch([1, 2])))
        done, _ = await asyncio.wait([task], timeout=0.3)
        assert not done
        assert await asyncio.to_thread(generation.resume_generation)
        assert (await task)[0]["generation_lengths"].tolist() == [8]

    asyncio.run(run())


def test_a_running_stack_is_used_and_left_alone(generation: Generation) -> None:
    url = generation.frontend_url
    # Its home is another one, so nothing but the addresses leads to the stack.
    where = {"frontend_url": url, "rl_url": generation.connection.stack.rl_url}
    other = Generation(None, make_config(generation.cfg["model_name"], **where))
    assert other.generate(make_batch([1, 2]))["generation_lengths"].tolist() == [8]
    other.shutdown()
    assert generation.generate(make_batch([1, 2]))["generation_lengths"].tolist() == [8]
    with pytest.raises(UsageError, match="to the byte"):
        Generation(None, make_config("Tiny", **where))
    with pytest.raises(Unreachable, match="rl_url"):
        Generation(None, make_config(generation.cfg["model_name"], frontend_url=url))


def test_a_prompt_that_fills_the_context_is_refused(generation: Generation) -> None:
    length = generation.connection.run(generation.connection.stack.context_length())
    with pytest.raises(UsageError, match="max_model_len"):
        generation.generate(make_batch([1] * length))


DRIVER = """
import json, sys, time
from rollway.integrations.nemo_rl.generation import Generation
generation = Generation(None, json.loads(sys.argv[1]))
print("ready", flush=True)
time.sleep(600)
"""


def test_the_stack_dies_with_its_driver(base_model: Path, footprint: Footprint) -> None:
    spec = light(base_model, "doomed")
    config = make_config(spec["models"][0]["name"], stack=spec)
    command = [sys.executable, "-c", DRIVER, json.dumps(config)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "ready\n"
        driver.kill()
    assert footprint.settle(20.0) == {}
