"""Counts of verl's requests and their cache hits: a line per trainer step, and, if the user sets
`request_log`, a file with a line per request."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request that was answered."""

    group: str | None
    """The id that all rollouts of a prompt share."""
    trajectory: str | None
    worker: int | None
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that the engine had cached, by its own count."""
    output_tokens: int
    seconds: float


class RequestLog:
    """Sums over the requests since the last summary."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        self._requests = self._prompt_tokens = self._cached_tokens = 0

    def add(self, record: RequestRecord) -> None:
        self._requests += 1
        self._prompt_tokens += record.prompt_tokens
        self._cached_tokens += record.cached_tokens
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(asdict(record)) + "\n")

    def summarize(self) -> str | None:
        """Describe the requests and reset the sums; return None if there were no requests."""
        if not self._requests:
            return None
        hits = self._cached_tokens / self._prompt_tokens
        summary = (
            f"{self._requests} requests, {hits:.1%} of {self._prompt_tokens} prompt tokens from "
            "cache"
        )
        self._requests = self._prompt_tokens = self._cached_tokens = 0
        return summary


def read_log(path: Path) -> list[RequestRecord]:
    return [RequestRecord(**json.loads(line)) for line in path.read_text().splitlines()]
