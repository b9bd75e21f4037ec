"""When a worker counts as ready: the warm-up requests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rollway.errors import RolloutError
from rollway.stack import ready


class Frontend:
    """A stand-in that answers warm-ups, the first `wrong` of them with a log-prob of null. A real
    engine does this too rarely for a test."""

    def __init__(self, wrong: int) -> None:
        self.wrong = wrong
        self.requests = 0

    async def post(self, url: str, body: Any, **_: Any) -> dict[str, Any]:
        self.requests += 1
        is_right = self.requests > self.wrong
        return {
            "choices": [
                {
                    "finish_reason": "length",
                    "logprobs": {"token_logprobs": [-1.0, -1.0 if is_right else None]},
                }
            ],
            "nvext": {"completion_token_ids": [1, 2], "worker_id": {"decode_worker_id": 7}},
            "usage": {"prompt_tokens": 8, "completion_tokens": 2},
        }


async def warm_up(frontend: Frontend, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(ready, "_POLL_SECONDS", 0.0)
    plan = SimpleNamespace(frontend_url="http://127.0.0.1:1")
    worker = SimpleNamespace(model="m", engine="vllm", worker_role="")
    details: list[str] = []

    def report(worker: Any, state: str, detail: str) -> None:
        details.append(detail)

    check = ready.ServingCheck(frontend, plan, report, warm_up=True)  # type: ignore[arg-type]
    await check.warm_up(worker, 7)  # type: ignore[arg-type]
    return details


async def test_a_first_answer_that_cannot_be_trusted_is_requested_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    frontend = Frontend(wrong=2)
    details = await warm_up(frontend, monkeypatch)
    assert frontend.requests == 4 and len(details) == 2 and "log-prob" in details[0]


async def test_a_worker_whose_answers_stay_wrong_does_not_become_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(RolloutError, match="log-prob"):
        await warm_up(Frontend(wrong=100), monkeypatch)
