"""Play prime-rl's orchestrator with the released `verifiers` and `renderers`.

Run by the interpreter of .venv-prime-rl: orchestrate.py SETTINGS.json

It samples a batch, writes it to `rollouts/step_N/rank_0.bin` as prime-rl does (msgpack, the first
nine fields of its `MicroBatch`), waits for `broadcasts/step_N` and updates the workers. Rewards go
to `metrics.jsonl`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import msgpack
import verifiers.v1 as vf

POLL_SECONDS = 0.05


async def main(settings: dict[str, Any]) -> None:
    output_dir = Path(settings["output_dir"])
    async with AsyncExitStack() as cleanup:
        http = await cleanup.enter_async_context(
            httpx.AsyncClient(
                base_url=settings["admin_url"],
                headers={"Authorization": f"Bearer {os.environ['VLLM_API_KEY']}"},
                timeout=300.0,
            )
        )
        envs: dict[str, tuple[Any, Iterator[Any]]] = {}
        for name, config in settings["envs"].items():
            env = vf.SingleAgentEnv(vf.SingleAgentEnvConfig.model_validate(config))
            await cleanup.enter_async_context(env.serving())
            envs[name] = env, iter(env.taskset)
        if join := settings.get("broadcaster"):
            await post(http, "/init_broadcaster", {**join, "rank_offset": 0})
        await update(http, output_dir, 0, settings.get("lora"))
        for step in range(1, settings["steps"] + 1):
            context = make_context(settings, step - 1)
            parts = [
                sample(env, tasks, context, settings["groups"], settings["group_size"], name)
                for name, (env, tasks) in envs.items()
            ]
            groups = list(itertools.chain(*await asyncio.gather(*parts)))
            ship(output_dir, step, groups)
            await update(http, output_dir, step, settings.get("lora"))


def make_context(settings: dict[str, Any], version: int) -> Any:
    client = vf.TrainClientConfig(
        base_url=settings["url"],
        api_key_var="VLLM_API_KEY",
        renderer=settings["renderer"],
        renderer_model_name=settings["model"],  # as prime-rl does
    )
    sampling = vf.SamplingConfig(
        temperature=1.0,
        top_p=1.0,
        max_completion_tokens=settings["max_tokens"],
        top_k=-1,
        min_p=0.0,
        return_token_ids=True,
        cache_salt=str(version),
    )
    model = settings.get("lora") or settings["model"]
    return vf.ModelContext(model=model, client=client, sampling=sampling)


async def sample(
    env: Any, tasks: Iterator[Any], context: Any, groups: int, size: int, name: str
) -> list[tuple[str, list[Any]]]:
    """Return groups of traces of the same task, with the name of their environment."""
    slots = [env.slots(next(tasks), size) for _ in range(groups)]
    runs = [env.run_slot(slot, context) for group in slots for slot in group]
    episodes = await asyncio.gather(*runs)
    for episode in episodes:
        assert episode.ok, [*episode.errors, *(t.last_error for t in episode.traces)]
    traces = [episode.traces[0] for episode in episodes]
    return [(name, traces[i : i + size]) for i in range(0, len(traces), size)]


def ship(output_dir: Path, step: int, groups: list[tuple[str, list[Any]]]) -> None:
    """Write the samples of a step, with GRPO's advantages, and its mean reward."""
    batches = []
    for name, traces in groups:
        mean = sum(trace.reward for trace in traces) / len(traces)
        for trace in traces:
            (branch,) = trace.branches
            ids, mask = branch.token_ids, branch.sampled_mask
            advantages = [(trace.reward - mean) * is_sampled for is_sampled in mask]
            length = len(ids)
            fields = [ids, mask, advantages, branch.logprobs, list(range(length)), [length]]
            batches.append([*fields, [1.0] * length, [name] * length, [length]])
    rewards = [trace.reward for _, traces in groups for trace in traces]
    turns = [trace.num_turns for _, traces in groups for trace in traces]
    row = {"step": step, "reward": sum(rewards) / len(rewards), "turns": sum(turns) / len(turns)}
    with (output_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    directory = output_dir / "rollouts" / f"step_{step}"
    directory.mkdir(parents=True)
    (directory / "rank_0.bin.tmp").write_bytes(msgpack.packb(batches))
    (directory / "rank_0.bin.tmp").rename(directory / "rank_0.bin")


async def update(http: httpx.AsyncClient, output_dir: Path, step: int, lora: str | None) -> None:
    """Wait for a broadcast, and make the workers serve it."""
    directory = output_dir / "broadcasts" / f"step_{step}"
    while not (directory / "STABLE").exists():
        await asyncio.sleep(POLL_SECONDS)
    if lora is not None:
        await post(http, "/load_lora_adapter", {"lora_name": lora, "lora_path": str(directory)})
        return
    await post(http, "/pause?mode=keep&clear_cache=false")
    (directory / "NCCL_READY").touch()
    await post(http, "/update_weights", {"weight_dir": str(directory)})
    await post(http, "/resume")


async def post(http: httpx.AsyncClient, path: str, body: dict[str, Any] | None = None) -> None:
    answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text


if __name__ == "__main__":
    asyncio.run(main(json.loads(Path(sys.argv[1]).read_text())))
