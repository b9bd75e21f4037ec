"""When a worker counts as ready: the warm-up requests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollway.errors import RequestFailed, RolloutError, StartError, Unreachable
from rollway.model_spec import PlacedWorker
from rollway.stack import ready
from rollway.stack.plan import ProcessPlan, StackPlan


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
    worker = SimpleNamespace(name="m-1", model="m", engine="vllm", worker_role="")
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


async def test_a_worker_whose_requests_the_frontend_keeps_refusing_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A joiner with another max-model-len is listed, and every request for it gets a 400."""

    class Refusing:
        async def post(self, url: str, body: Any, **_: Any) -> dict[str, Any]:
            raise RequestFailed("HTTP 400: no instance 7", status=400)

    monkeypatch.setattr(ready, "REFUSED_SECONDS", 0.01)
    with pytest.raises(StartError, match=r"refuses every request for it: HTTP 400.*max-model-len"):
        await warm_up(Refusing(), monkeypatch)  # type: ignore[arg-type]


class RankZero:
    """A stand-in for rank 0 of a replica, whose label is set after some calls."""

    def __init__(self, versions: list[int | None]) -> None:
        self.versions = versions
        self.urls: list[str] = []

    async def post(self, url: str, body: Any, **_: Any) -> dict[str, Any]:
        self.urls.append(url)
        if not self.versions:
            raise Unreachable("it has died")
        return {"status": "ok", "version": self.versions.pop(0)}


async def wait_for_headless(rank_zero: RankZero, admin_port: int) -> list[str]:
    placed = PlacedWorker(
        model="m", replica=0, nodes=2, node_rank=1, master="10.0.0.1:2", admin_port=admin_port
    )
    worker = ProcessPlan("m-0-rank1", "worker", [], {}, Path("log"), model="m", placed=placed)
    states: list[str] = []
    check = ready.ServingCheck(
        rank_zero,  # type: ignore[arg-type]
        StackPlan("http://127.0.0.1:1", "http://127.0.0.1:1", [worker], {}),
        lambda _, state, __: states.append(state),
        warm_up=True,
    )
    assert await check.wait([worker], set(), on_lost=lambda _: None) == {}
    return states


async def test_a_headless_rank_is_ready_when_its_rank_zero_has_a_label(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ready, "_POLL_SECONDS", 0.0)
    rank_zero = RankZero([None, None, 0])
    assert await wait_for_headless(rank_zero, 20500) == ["waiting for rank 0", "ready"]
    assert set(rank_zero.urls) == {"http://10.0.0.1:20500/engine/get_weight_version"}
    assert not rank_zero.versions


async def test_a_headless_rank_that_knows_no_rank_zero_is_ready_at_once() -> None:
    assert await wait_for_headless(RankZero([]), 0) == ["ready"]


class Starting:
    """A stand-in for a frontend with two workers. The second serves its admin routes after some
    questions; a listing has both from then on."""

    def __init__(self, questions: int) -> None:
        self.questions = questions
        self.listings = 0
        self.labels: dict[str, int] = {}

    async def post(self, url: str, body: Any, **_: Any) -> dict[str, Any]:
        server, _, route = url.removeprefix("http://").partition("/engine/")
        if route == "get_weight_version":
            if server.endswith("2"):
                self.questions -= 1
                if self.questions >= 0:
                    raise Unreachable("it is not here yet")
            return {"status": "ok", "version": self.labels.get(server), "version_declared": True}
        if route == "set_weight_version":
            self.labels[server] = int(body["weight_version"])
        return {"status": "ok"}

    async def get(self, url: str, **_: Any) -> dict[str, Any]:
        if url.endswith("/v1/models"):
            return {"data": [{"id": "m"}]}
        self.listings += 1
        ports = [20001] if self.questions > 0 else [20001, 20002]
        routes = ["pause_generation", "resume_generation", "get_weight_version"]
        routes += ["set_weight_version", "model_taints"]
        return {
            "workers": [
                {"instance_id": n, "system_url": f"http://127.0.0.1:{n}", "routes": routes}
                for n in ports
            ]
        }

    @asynccontextmanager
    async def pin(self) -> AsyncIterator[Starting]:
        yield self


@pytest.mark.parametrize(("seconds", "listings"), [(3.0, 1), (0.0, 2)])
async def test_workers_are_listed_only_when_one_that_is_missing_answers(
    monkeypatch: pytest.MonkeyPatch, seconds: float, listings: int
) -> None:
    """A listing asks all workers of a stack, and several supervisors may wait for theirs. So it
    waits for the last worker, but not for long."""
    monkeypatch.setattr(ready, "_POLL_SECONDS", 0.0)
    monkeypatch.setattr(ready, "_LISTING_SECONDS", seconds)
    frontend = Starting(questions=50)
    workers = [
        ProcessPlan(
            f"m-{n}", "worker", [], {}, Path("log"), model="m", engine="vllm",
            admin_url=f"http://127.0.0.1:2000{n}", ports={"system": 20000 + n},
        )
        for n in (1, 2)
    ]  # fmt: skip
    check = ready.ServingCheck(
        frontend,  # type: ignore[arg-type]
        StackPlan("http://127.0.0.1:1", "http://127.0.0.1:1", workers, {}),
        lambda *_: None,
        warm_up=False,
    )
    ids = await check.wait(workers, set(), on_lost=lambda _: pytest.fail("it is not lost"))
    assert ids == {"m-1": 20001, "m-2": 20002}
    assert frontend.labels == {"127.0.0.1:20001": 0, "127.0.0.1:20002": 0}
    assert frontend.listings == listings
