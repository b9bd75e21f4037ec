"""Run the batches of `rollway bench verl` in verl's environment: verl's own servers, client and
agent loops, without a trainer.

    python -m rollway.bench.verl_driver JOB.json

The job has overrides of verl's config, and batches with their affinities. The pool logs every
answer to a file; after each batch the file is renamed to the batch's name.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray
from hydra import compose, initialize_config_module
from verl.experimental.agent_loop import AgentLoopManager
from verl.protocol import DataProto
from verl.workers.rollout.llm_server import LLMServerManager

from rollway.bench.verl import Batch, Load


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose(config_name="ppo_trainer", overrides=job["overrides"])
    ray.init(**job["ray"])
    try:
        asyncio.run(run_batches(config, job))
    finally:
        ray.shutdown()


async def run_batches(config: Any, job: dict[str, Any]) -> None:
    log, results = Path(job["request_log"]), Path(job["results"])
    servers = await LLMServerManager.create(config=config)
    agents = await AgentLoopManager.create(config=config, llm_client=servers.get_client())
    replica = servers.get_replicas()[0]  # all replicas are one pool
    try:
        for run in job["batches"]:
            batch = Batch(Load(**run["load"]), run["number"])
            await replica.servers[0].set_affinity.remote(run["affinity"])
            await replica.clear_kv_cache()  # as verl does for each step's weights
            start = time.monotonic()
            await agents.generate_sequences(make_prompts(batch))
            seconds = time.monotonic() - start
            log.rename(results / f"{run['name']}.jsonl")
            (results / f"{run['name']}.seconds").write_text(str(seconds))
    finally:
        await replica.servers[0].shutdown.remote()


def make_prompts(batch: Batch) -> DataProto:
    messages = batch.messages()
    prompts = np.empty(len(messages), dtype=object)
    prompts[:] = messages
    return DataProto(
        non_tensor_batch={
            "raw_prompt": prompts,
            "agent_name": np.array(["tool_agent"] * len(messages), dtype=object),
        }
    )


if __name__ == "__main__":
    main()
