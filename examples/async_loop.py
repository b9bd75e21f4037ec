"""An asynchronous loop: the next groups are sampled while the trainer learns from the last.

python examples/async_loop.py /models/policy
"""

import asyncio
import sys

import torch
from transformers import AutoModelForCausalLM

import rollway

PROMPTS = [[72, 105], [72, 111], [72, 101, 121]]


async def train(stack: rollway.aio.Stack, path: str, versions: range) -> list[rollway.Rollout]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters())
    rollouts, sampling, used = stack.rollouts(), rollway.Sampling(max_tokens=16), []
    async with stack.publisher() as weights, asyncio.TaskGroup() as tasks:
        sampled = tasks.create_task(rollouts.generate_batch(PROMPTS, sampling, n=4))
        for version in versions:
            groups = await sampled
            sampled = tasks.create_task(rollouts.generate_batch(PROMPTS, sampling, n=4))
            await asyncio.to_thread(optimizer.step)  # here a trainer learns from the groups
            offer = await weights.publish(version, model.named_parameters())
            # Running rollouts are interrupted, and resume on the new weights.
            await stack.refit(offer, mode="in-flight")
            used += [rollout for group in groups for rollout in group]
    return used


async def main() -> None:
    async with rollway.up(model=sys.argv[1], workers=2) as stack:
        print(await train(stack, sys.argv[1], range(1, 11)))


if __name__ == "__main__":
    asyncio.run(main())
