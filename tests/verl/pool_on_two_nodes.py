"""Run a pool on two nodes: `pool_on_two_nodes.py MODEL DIRECTORY TEMP_DIR RANKS`, by verl's Python.

RANKS is the tensor parallelism: with 1, each node has a replica; with 2, one replica has a rank on
each. The trainer is a stand-in, an actor on each node; the replicas, the pool, its stack and the
weights are real. Observations are written as JSON.
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
from transformers import AutoModelForCausalLM

import rollway
from rollway.errors import NoWorkers
from rollway.integrations.verl.replica import DynamoReplica
from rollway.integrations.verl.spec import read_options
from rollway.integrations.verl.weights import WeightSender
from rollway.rollout.sampling import Sampling
from rollway.stack.ray.cluster import list_heads
from rollway.stack.state import ProcessState, StackState, list_stacks

PROMPT = list(range(40, 90))
SHORT = Sampling(max_tokens=8, ignore_eos=True)


@ray.remote(num_gpus=1, num_cpus=1)
class Trainer:
    """A stand-in for a rank of a trainer; a pool only asks where it is."""


def rollout_config(directory: Path, ranks: int) -> Any:
    options = {
        "python": os.environ["ENGINE_PYTHON"],
        "log_dir": str(directory / "logs"),
        "weights_dir": str(directory / "weights"),
    }
    fields = {
        "name": "dynamo",
        "mode": "async",
        "tensor_model_parallel_size": ranks,
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


def read_parts() -> list[StackState]:
    """Return what the supervisors of the stack have: first the pool's node, then the others."""
    return sorted(list_stacks(), key=lambda state: int(state.name.rpartition("-")[2]))


def get_stack_name() -> str:
    ((_, name),) = list_heads()
    return name


async def probe() -> tuple[set[int | None], set[int | None]]:
    """Return the versions of all workers, and which workers answered a few requests."""
    async with rollway.attach(get_stack_name(), watch=False) as stack:
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
    async with rollway.attach(get_stack_name(), watch=False) as stack:
        try:
            versions = await stack.fleet.read_versions()
        except NoWorkers:  # the only one restarts
            return False
        return list(versions.values()) == [version] * count


REPLICAS: list[DynamoReplica] = []
"""As verl keeps them. The pool lives as long as the replica that created it, and which of them is
first is a matter of chance. The handles of the others do not hold it."""


async def start(model: Path, directory: Path, ranks: int, seen: dict[str, Any]) -> Any:
    """Start the pool as verl would, and return it."""
    group = SimpleNamespace(workers=[Trainer.remote() for _ in range(2)], world_size=2)
    config = rollout_config(directory, ranks)
    model_config = SimpleNamespace(path=str(model), local_path=str(model), trust_remote_code=False)
    replicas = [
        DynamoReplica(rank, config, model_config, gpus_per_node=1) for rank in range(2 // ranks)
    ]
    began = time.monotonic()
    await asyncio.gather(*(replica.init_hybrid(group) for replica in replicas))
    seen["start_seconds"] = round(time.monotonic() - began, 1)
    seen["addresses"] = [replica.server_address for replica in replicas]
    seen["roles"] = [[process.role for process in part.processes] for part in read_parts()]
    REPLICAS.extend(replicas)
    return replicas[0].server_handle


async def refit(
    model: Path, directory: Path, ranks: int, pool: Any, seen: dict[str, Any]
) -> tuple[WeightSender, dict[str, torch.Tensor]]:
    """Send new weights to the pool, and return them with their sender, with which they end."""
    versions, workers = await probe()
    seen["before"] = {"versions": sorted(versions, key=str), "workers": len(workers)}
    seen["step_before"] = (await generate(pool)).extra_fields["global_steps"]
    generator = torch.Generator().manual_seed(1)
    weights = {
        name: tensor + 0.02 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in load_file(model / "model.safetensors").items()
    }
    sender = WeightSender(read_options(rollout_config(directory, ranks).engine_kwargs), 1 << 20)
    seen["refit"] = await sender.send(weights.items(), pool, 7)
    versions, workers = await probe()
    seen["after"] = {"versions": sorted(versions, key=str), "workers": len(workers)}
    seen["step_after"] = (await generate(pool)).extra_fields["global_steps"]
    return sender, weights


async def kill_worker(process: ProcessState, count: int, seen: dict[str, Any]) -> None:
    """Kill a process, and wait until `count` workers serve the current version again."""
    os.kill(process.pid or 0, signal.SIGKILL)
    began = time.monotonic()

    async def is_back() -> bool:
        processes = [p for part in read_parts() for p in part.processes]
        restarts = next((p.restarts for p in processes if p.name == process.name), 0)
        return restarts == 1 and await all_serve(count, 1)

    await until(is_back, 200)
    seen["healed_seconds"] = round(time.monotonic() - began, 1)


async def run_two_replicas(model: Path, directory: Path) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    pool = await start(model, directory, 1, seen)
    sender, _ = await refit(model, directory, 1, pool, seen)
    _, second = read_parts()
    healing = asyncio.create_task(kill_worker(second.processes[0], 2, seen))
    seen["step_without_it"] = (await generate(pool)).extra_fields["global_steps"]
    await healing

    # Between the Keeper and its supervisor is a shell.
    os.kill(_parent(_parent(second.supervisor_pid)), signal.SIGKILL)
    began = time.monotonic()

    async def fails() -> bool:
        try:
            await generate(pool)
        except ray.exceptions.RayTaskError as error:
            seen["cause"] = str(error).splitlines()[-1]
            return "no longer runs" in seen["cause"]
        return False

    await until(fails, 60)
    seen["failed_seconds"] = round(time.monotonic() - began, 1)
    del sender
    return seen


async def run_one_replica(model: Path, directory: Path) -> dict[str, Any]:
    """Kill the rank without an endpoint; both must come back, with the weights of the trainer."""
    seen: dict[str, Any] = {}
    pool = await start(model, directory, 2, seen)
    sender, weights = await refit(model, directory, 2, pool, seen)
    seen["error"] = compare(model, weights, await generate(pool))
    *_, last = read_parts()
    await kill_worker(last.processes[0], 1, seen)
    output = await generate(pool)
    seen["step_healed"], seen["error_healed"] = (
        output.extra_fields["global_steps"],
        compare(model, weights, output),
    )
    del sender
    return seen


def compare(model: Path, weights: dict[str, torch.Tensor], output: Any) -> float:
    """Return how far the engine's log-probs are from torch's with these weights."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    policy.load_state_dict(weights, strict=False)
    ids = torch.tensor([*PROMPT, *output.token_ids])
    with torch.no_grad():
        scores = policy(ids[None]).logits[0].log_softmax(-1)
    exact = scores[len(PROMPT) - 1 : -1].gather(1, ids[len(PROMPT) :, None])[:, 0]
    return float((exact - torch.tensor(output.log_probs)).abs().max())


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def main() -> None:
    model, directory, ranks = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[4])
    cluster = start_two_nodes(sys.argv[3])
    ray.init(address=cluster.address, log_to_driver=True)
    try:
        run = run_two_replicas if ranks == 1 else run_one_replica
        seen = asyncio.run(run(model, directory))
        (directory / "seen.json").write_text(json.dumps(seen))
        print(json.dumps(seen, indent=1))
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
