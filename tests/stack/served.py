"""A real gateway in front of a real stack, and a check of what it records."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai

import rollway
from rollway.rollout.sequence import TokenSequence
from tests.stack.policies import Policy
from tests.stack.serving import TOLERANCE


@dataclass
class Served:
    """A gateway in a process of its own."""

    stack: rollway.Stack
    journal: Path
    env: dict[str, str]
    name: str = "tools"
    process: subprocess.Popen[str] | None = None
    url: str = ""

    def start(self, *options: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rollway.cli", "gateway", self.name, "--port", "0",
             "--journal", str(self.journal), *options],
            env={**os.environ, **self.env}, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().split(" ")[0]
        assert self.url.startswith("http"), "the gateway did not start"

    def end(self, *, kill: bool = False) -> None:
        assert self.process is not None
        (self.process.kill if kill else self.process.terminate)()
        assert self.process.wait(20) == (-9 if kill else 0)

    def get(self, path: str, token: str = "") -> Any:
        request = urllib.request.Request(f"{self.url}{path}")
        if token:
            request.add_header("authorization", f"Bearer {token}")
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def trajectories(self, session: str) -> list[TokenSequence]:
        trajectories = self.get(f"/rollway/trajectories/{session}")["trajectories"]
        return [TokenSequence.from_json(trajectory) for trajectory in trajectories]

    def client(self, session: str, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url, api_key=session, max_retries=0, **options)


def check(sequence: TokenSequence, stack: rollway.Stack, policy: Policy) -> None:
    """The engine's log-probs, of a whole trajectory, are those of a fresh look at its tokens."""
    sampled = [i for i, bit in enumerate(sequence.loss_mask) if bit]
    (scores,) = stack.teacher().score([sequence.token_ids])
    by_torch = [None, *policy.logprobs(sequence.token_ids[:1], sequence.token_ids[1:])]
    for other in (scores.logprobs, by_torch):
        apart = [abs(sequence.logprobs[i] - (other[i] or 0.0)) for i in sampled]
        assert max(apart) < TOLERANCE
