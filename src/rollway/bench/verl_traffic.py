"""What `rollway bench verl` has verl's agents ask, said once for both of its environments.

Rollouts of a prompt share all of it, prompts share a system prompt. The tokenizer has one token per
byte, so characters are tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from rollway.demo.task import INSTRUCTION

ROLLOUTS = 8
"""Of each prompt."""
TURNS = 4
SYSTEM_TOKENS = 256
QUESTION_TOKENS = 384
"""Before the instruction, which has 137."""
OBSERVATION_TOKENS = 96
TOOL = "look_up"
TOOL_SECONDS = 0.25
"""On average."""
LONGEST_PROMPT = 832
LONGEST_RESPONSE = 1024
"""Of all turns and observations; a turn has 9 tokens on average, now and then 60."""


@dataclass(frozen=True, slots=True)
class Load:
    """So many prompts at once, a batch of the trainer."""

    name: str
    prompts: int


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch of a load. Each has prompts of its own, as the steps of a trainer have, and every
    arm gets the same ones."""

    load: Load
    number: int

    @property
    def name(self) -> str:
        return f"{self.load.name}-{self.number}"

    def messages(self) -> list[list[dict[str, str]]]:
        """A conversation's beginning for each rollout, those of a prompt one after the other."""
        return [
            _messages(f"{self.name}/{prompt}", start=prompt % 10)
            for prompt in range(self.load.prompts)
            for _ in range(ROLLOUTS)
        ]


def _messages(name: str, start: int) -> list[dict[str, str]]:
    question = f"{words(name, QUESTION_TOKENS)}\n{INSTRUCTION}{start}"
    return [
        {"role": "system", "content": words("system", SYSTEM_TOKENS - 1) + "\n"},
        {"role": "user", "content": question},
    ]


def words(seed: str, length: int) -> str:
    """Text of so many characters, always the same for a seed."""
    rng = Random(seed)
    text = ""
    while len(text) < length:
        text += "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randrange(2, 9))) + " "
    return text[:length]
