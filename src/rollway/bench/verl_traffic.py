"""The prompts of `rollway bench verl`, for both of its environments.

Rollouts of a prompt share all of it; prompts share a system prompt. The tokenizer has one token per
byte, so characters are tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from rollway.demo.task import INSTRUCTION

ROLLOUTS = 8
"""Rollouts of each prompt."""
TURNS = 4
SYSTEM_TOKENS = 256
QUESTION_TOKENS = 384
"""Tokens before the instruction, which has 137."""
OBSERVATION_TOKENS = 96
TOOL = "look_up"
TOOL_SECONDS = 0.25
"""Average duration of a call."""
LONGEST_PROMPT = 832
LONGEST_RESPONSE = 1024
"""Of all turns and observations; a turn has 9 tokens on average, and sometimes 60."""


@dataclass(frozen=True, slots=True)
class Load:
    """The number of prompts in a batch."""

    name: str
    prompts: int


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch of a load. Its prompts differ from those of other batches, and every arm gets the
    same ones."""

    load: Load
    number: int

    @property
    def name(self) -> str:
        return f"{self.load.name}-{self.number}"

    def messages(self) -> list[list[dict[str, str]]]:
        """Return the first messages of each rollout; rollouts of a prompt are adjacent."""
        return [
            _make_messages(f"{self.name}/{prompt}", start=prompt % 10)
            for prompt in range(self.load.prompts)
            for _ in range(ROLLOUTS)
        ]


def _make_messages(name: str, start: int) -> list[dict[str, str]]:
    question = f"{make_text(name, QUESTION_TOKENS)}\n{INSTRUCTION}{start}"
    return [
        {"role": "system", "content": make_text("system", SYSTEM_TOKENS - 1) + "\n"},
        {"role": "user", "content": question},
    ]


def make_text(seed: str, length: int) -> str:
    """Return text of this length, always the same for a seed."""
    rng = Random(seed)
    text = ""
    while len(text) < length:
        text += "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randrange(2, 9))) + " "
    return text[:length]
