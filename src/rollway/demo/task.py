"""A verifiable task for the demo: count upward from the digit at the end of the prompt.

The prompt is a fixed instruction followed by one start digit; ``Start:7`` is answered by
``89012345...``, one digit per token, going back to 0 after 9. The reward is the fraction of
positions that hold the right digit, so it is graded from the first step on and needs no judge.

Three properties make it an honest test of a rollout backend:

* The answer depends on the prompt. Start digits are dealt evenly, and at each position the
  ten starts have ten different answers, so a policy that ignores the prompt earns 0.1.
* Every position is checked against the *start*, not against its neighbour: one wrong step
  makes the rest wrong as well, unless the policy recovers.
* All prompts share a long prefix, several KV blocks of 32 tokens, so prefix-cache hits and
  cache-aware routing have something to show.

Completions have a **fixed length**: requests are sent with ``ignore_eos`` and ``max_tokens``.
That keeps the amount of work per step equal, and, unlike ``min_tokens``, it leaves the logits
alone: the log-probs stay those of the unmodified policy. Nothing breaks without
``ignore_eos``: the reward always counts ``max_tokens`` positions, so stopping early only
forfeits the missing ones, and an end-of-sequence token is a wrong digit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# With one token per byte these are a little more than four KV blocks of 32 tokens.
INSTRUCTION = (
    "Count upward from the start digit, one digit at a time, and go back to 0 after 9. "
    "Write the digits only: no spaces, no words.\n"
    "Start:"
)


@dataclass(frozen=True)
class CountingPrompt:
    """One question, with the token ids to send and the ones a perfect answer holds."""

    token_ids: list[int]
    start: int
    answer_ids: list[int]


class CountingTask:
    """Deals counting prompts and grades the sampled token ids."""

    max_tokens = 12

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.digit_ids = tokenizer.encode("0123456789", add_special_tokens=False)
        self._prompts = [self._build_prompt(tokenizer, start) for start in range(10)]

    def prompts(self, n: int, rng: Random) -> list[CountingPrompt]:
        """Return ``n`` prompts for one training step, in random order.

        Starts are dealt like cards, each digit once before any digit again, so that no step
        neglects part of the task by chance. The cards left over go to a random choice of digits.
        """
        starts: list[int] = []
        while len(starts) < n:
            deck = list(range(10))
            rng.shuffle(deck)
            starts.extend(deck[: n - len(starts)])
        rng.shuffle(starts)
        return [self._prompts[start] for start in starts]

    def reward(self, prompt: CountingPrompt, token_ids: Sequence[int]) -> float:
        """Return the fraction of positions that are right, in [0, 1].

        Positions that are missing count as wrong, and so do surplus ones: neither a short nor
        a long completion can score better than it counts.
        """
        right = sum(
            sampled == expected
            for sampled, expected in zip(token_ids, prompt.answer_ids, strict=False)
        )
        return right / max(self.max_tokens, len(token_ids))

    def _build_prompt(self, tokenizer: PreTrainedTokenizerBase, start: int) -> CountingPrompt:
        return CountingPrompt(
            token_ids=tokenizer.encode(f"{INSTRUCTION}{start}", add_special_tokens=False),
            start=start,
            answer_ids=[self.digit_ids[(start + 1 + i) % 10] for i in range(self.max_tokens)],
        )
