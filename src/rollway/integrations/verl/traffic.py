"""What verl asked for, and how much of it the engines had cached: a line for each step of the
trainer, and a file with a line for each answer where the user wants one (`request_log`)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Answer:
    """One request, after it was answered."""

    group: str | None
    """Of all rollouts of a prompt."""
    trajectory: str | None
    worker: int | None
    prompt_tokens: int
    cached_tokens: int
    """Of the prompt: as the engine that answered counted them."""
    output_tokens: int
    seconds: float


class Traffic:
    """Sums since the last summary."""

    def __init__(self, log: Path | None) -> None:
        self._log = log
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
        self._reset()

    def _reset(self) -> None:
        self._requests = self._prompt_tokens = self._cached_tokens = 0

    def add(self, answer: Answer) -> None:
        self._requests += 1
        self._prompt_tokens += answer.prompt_tokens
        self._cached_tokens += answer.cached_tokens
        if self._log is not None:
            with self._log.open("a") as file:
                file.write(json.dumps(asdict(answer)) + "\n")

    def summary(self) -> str | None:
        """None when nothing was asked; what it tells of is not told again."""
        if not self._requests:
            return None
        hits = self._cached_tokens / self._prompt_tokens
        words = f"{self._requests} requests, {hits:.1%} of {self._prompt_tokens} prompt tokens"
        self._reset()
        return f"{words} from cache"


def read_log(path: Path) -> list[Answer]:
    return [Answer(**json.loads(line)) for line in path.read_text().splitlines()]
