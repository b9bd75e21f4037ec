"""Sample groups of rollouts, round after round: the load that makes Dynamo's planner add workers.

python load.py dgd://NAMESPACE/NAME --prompts 32 --rollouts 8 --tokens 2048 --rounds 20
"""

import argparse

import rollway


def make_prompts(count: int, length: int = 64) -> list[list[int]]:
    """Return prompts of different token ids, so that no two share a prefix."""
    return [[100 + (7 * prompt + step) % 1000 for step in range(length)] for prompt in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("address", help="dgd://NAMESPACE/NAME, or the URL of a frontend")
    parser.add_argument("--model", help="the served name, where there are several")
    parser.add_argument("--prompts", type=int, default=32, help="in each round")
    parser.add_argument("--rollouts", type=int, default=8, help="of each prompt")
    parser.add_argument("--tokens", type=int, default=64, help="of each rollout")
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    sampling = rollway.Sampling(max_tokens=options.tokens)
    with rollway.attach(options.address) as stack:
        rollouts = stack.rollouts(options.model)
        for number in range(options.rounds):
            groups = rollouts.generate_batch(
                make_prompts(options.prompts), sampling, n=options.rollouts
            )
            tokens = sum(len(rollout.token_ids) for group in groups for rollout in group)
            print(f"round {number}: {len(groups)} groups, {tokens} tokens", flush=True)


if __name__ == "__main__":
    main()
