"""A training loop of one's own: sample a group, learn from it, publish, refit.

python examples/own_loop.py /models/policy
"""

import sys

import torch
from transformers import AutoModelForCausalLM

import rollway

PROMPT = [72, 101, 108, 108, 111]  # token ids; a real trainer has a tokenizer and a dataset


def reward(token_ids: list[int]) -> float:
    return sum(token % 2 for token in token_ids) / len(token_ids)


def train(stack: rollway.Stack, path: str, steps: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with stack.publisher() as weights:  # chooses how weights reach the workers
        for _ in range(steps):
            group = stack.rollouts().generate(PROMPT, rollway.Sampling(max_tokens=16), n=8)
            rewards = torch.tensor([reward(rollout.token_ids) for rollout in group])
            optimizer.zero_grad()
            for rollout, advantage in zip(group, rewards - rewards.mean(), strict=True):
                ids = torch.tensor([rollout.prompt_ids + rollout.token_ids])
                logprobs = model(ids).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
                sampled = logprobs.gather(-1, ids[0, len(PROMPT) :, None])
                (-advantage * sampled.mean()).backward()
            optimizer.step()
            stack.refit(weights.publish(stack.next_version, model.named_parameters()))
            print(f"version {stack.version}: mean reward {rewards.mean():.3f}")


if __name__ == "__main__":
    with rollway.up(model=sys.argv[1], workers=2) as running:
        train(running, sys.argv[1], steps=10)
