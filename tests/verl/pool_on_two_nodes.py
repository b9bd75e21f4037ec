"""Run a pool on two nodes: `pool_on_two_nodes.py MODEL DIRECTORY TEMP_DIR`, by verl's Python.

The trainer is a stand-in, an actor on each node; the replicas, the pool, its stacks and the weights
are real. Observations are written as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
import torch
from omegaconf import OmegaConf
from on_two_nodes import start_two_nodes
from safetensors.torch import load_file

import rollway
from rollway.integrations.verl.publish import WeightSender
from rollway.integrations.verl.replica import DynamoReplica
from rollway.integrations.verl.spec import read_options
from rollway.rollout.sampling import Sampling
from rollway.stack.state import StackState, list_stacks

PROMPT = list(range(40, 90))
SHORT = Sampling(max_tokens=8, ignore_eos=True)


@ray.remote(num_gpus=1, num_cpus=1)
class Trainer:
    """A stand-in for a rank of a trainer; a pool only asks where it is."""


def rollout_config(directory: Path) -> Any:
    options = {
        "python": os.environ["ENGINE_PYTHON"],
        "log_dir": str(directory / "logs"),
        "weights_dir": str(directory / "weights"),
    }
    fields = {
        "name": "dynamo",
        "mode": "async",
        "tensor_model_parallel_size": 1,
        "prompt_length": 64,
        "response_length": 32,
        "dtype": "float32",
        "max_num_seqs": 32,
        "free_cache_engine": False,
        "router_config_path": None,
        "engine_kwargs": {"dynamo": options},
    }
    return OmegaConf.create({"_target_": "verl.workers.config.RolloutConfig", **fields})


async def until(condition: Callable[[], Awaitable[bool]], seconds: float) -> None:
    """Wait for the condition; verl's Python cannot import the helper of the other tests."""
    deadline = time.monotonic() + seconds
    while not await condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the condition did not become true")
        await asyncio.sleep(1.0)  # between two looks at the condition


def read_stacks() -> tuple[StackState, StackState]:
    """Return the pool's stack and the other node's."""
    first, second = sorted(list_stacks(), key=lambda state: len(state.name))
    return first, second


async def probe(name: str) -> tuple[set[int | None], set[int | None]]:
    """Return the versions of all workers, and which workers answered a few requests."""
    async with rollway.attach(name, watch=False) as stack:
        versions = set((await stack.fleet.read_versions()).values())
        client = stack.rollouts()
        groups = await asyncio.gather(
            *(client.generate([n, *PROMPT], SHORT, group=f"g{n}") for n in range(1, 13))
        )
    return versions, {span.worker_id for (rollout,) in groups for span in rollout.spans}


async def generate(pool: Any) -> Any:
    params = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprobs": True, "max_tokens": 8}
    return await pool.generate.remote(prompt_ids=PROMPT, sampling_params=params, request_id="r")


async def all_serve(count: int, version: int) -> bool:
    async with rollway.attach(read_stacks()[0].name, watch=False) as stack:
        return list((await stack.fleet.read_versions()).values()) == [version] * count


async def run(model: Path, directory: Path) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    group = SimpleNamespace(workers=[Trainer.remote() for _ in range(2)], world_size=2)
    config = rollout_config(directory)
    model_config = SimpleNamespace(path=str(model), local_path=str(model), trust_remote_code=False)
    replicas = [DynamoReplica(rank, config, model_config, gpus_per_node=1) for rank in range(2)]
    began = time.monotonic()
    await asyncio.gather(*(replica.init_hybrid(group) for replica in replicas))
    seen["start_seconds"] = round(time.monotonic() - began, 1)
    seen["addresses"] = [replica.server_address for replica in replicas]
    pool = replicas[0].server_handle
    first, second = read_stacks()
    seen["roles"] = [[process.role for process in stack.processes] for stack in (first, second)]

    versions, workers = await probe(first.name)
    seen["before"] = {"versions": sorted(versions, key=str), "workers": len(workers)}
    seen["step_before"] = (await generate(pool)).extra_fields["global_steps"]

    generator = torch.Generator().manual_seed(1)
    weights = {
        name: tensor + 0.02 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in load_file(model / "model.safetensors").items()
    }
    options = read_options(config.engine_kwargs)
    sender = WeightSender(options, 1 << 20)  # its versions end with it
    seen["refit"] = await sender.send(weights.items(), pool, 7)
    versions, workers = await probe(first.name)
    seen["after"] = {"versions": sorted(versions, key=str), "workers": len(workers)}
    seen["step_after"] = (await generate(pool)).extra_fields["global_steps"]

    (process,) = second.processes
    os.kill(process.pid or 0, signal.SIGKILL)
    began = time.monotonic()
    seen["step_without_it"] = (await generate(pool)).extra_fields["global_steps"]

    async def is_back() -> bool:
        return read_stacks()[1].processes[0].restarts == 1 and await all_serve(2, 1)

    await until(is_back, 200)
    seen["healed_seconds"] = round(time.monotonic() - began, 1)

    os.kill(_parent(second.supervisor_pid), signal.SIGKILL)
    began = time.monotonic()

    async def fails() -> bool:
        try:
            await generate(pool)
        except ray.exceptions.RayTaskError as error:
            seen["cause"] = str(error).splitlines()[-1]
            return True
        return False

    await until(fails, 60)
    seen["failed_seconds"] = round(time.monotonic() - began, 1)
    return seen


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def main() -> None:
    model, directory = Path(sys.argv[1]), Path(sys.argv[2])
    cluster = start_two_nodes(sys.argv[3])
    ray.init(address=cluster.address, log_to_driver=True)
    try:
        seen = asyncio.run(run(model, directory))
        (directory / "seen.json").write_text(json.dumps(seen))
        print(json.dumps(seen, indent=1))
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
