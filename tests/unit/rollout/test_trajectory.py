"""Rollouts assembled from legs: continuations, spans, seeds, and rollouts that cannot continue."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollway.errors import RequestFailed, RolloutError
from rollway.http import Http
from rollway.rollout.client import Rollouts
from rollway.rollout.completion import Completion
from rollway.rollout.sampling import Sampling
from rollway.rollout.sender import SESSION_HEADER
from rollway.rollout.trajectory import Rollout, Trajectory
from rollway.versions import FleetVersions
from tests.waiting import stays_async


def make_leg(count: int, reason: Any = "aborted", start: int = 0, worker: int = 1) -> Completion:
    ids = list(range(start, start + count))
    return Completion(ids, [-0.5] * count, reason, worker, 0)


@given(st.lists(st.integers(0, 20), max_size=6), st.integers(1, 20))
def test_legs_are_joined_into_one_rollout(cuts: list[int], last: int) -> None:
    total = sum(cuts) + last
    trajectory = Trajectory([9, 9], Sampling(max_tokens=total, min_tokens=total, seed=5))
    seeds = set()
    for version, cut in enumerate(cuts):
        prompt, sampling = trajectory.next_leg()
        assert list(prompt) == [9, 9, *trajectory.token_ids]
        assert sampling.max_tokens == total - len(trajectory.token_ids)
        seeds.add((sampling.seed, len(trajectory.token_ids)))
        trajectory.add(make_leg(cut, start=len(trajectory.token_ids)), version)
    trajectory.add(make_leg(last, "length", start=len(trajectory.token_ids)), len(cuts))
    rollout = trajectory.rollout("length", len(cuts))
    assert rollout.token_ids == list(range(total)) and len(rollout.logprobs or []) == total
    covered = [place for span in rollout.spans for place in range(span.start, span.end)]
    assert covered == list(range(total))
    assert [span.version for span in rollout.spans] == [v for v, c in enumerate([*cuts, last]) if c]
    used = [seed for seed, tokens in seeds if tokens]
    assert len(set(used)) == len(used)  # no two continuations share a random stream


def test_a_rollout_with_penalties_starts_again_after_a_cut() -> None:
    trajectory = Trajectory([1], Sampling(max_tokens=8, presence_penalty=0.5))
    trajectory.add(make_leg(3), 1)
    trajectory.cut()
    assert trajectory.token_ids == [] and trajectory.next_leg()[0] == [1]
    plain = Trajectory([1], Sampling(max_tokens=8))
    plain.add(make_leg(3), 1)
    plain.cut()
    assert plain.next_leg()[0] == [1, 0, 1, 2]


def test_a_rollout_without_tokens_has_its_version() -> None:
    trajectory = Trajectory([1], Sampling())
    trajectory.add(make_leg(0), 3)
    rollout = trajectory.rollout("aborted", 3)
    assert rollout.weight_version == 3 and rollout.token_ids == []


class Scripted(Http):
    """A frontend that plays a script of answers and errors."""

    def __init__(self, *script: Any) -> None:
        super().__init__()
        self.script = list(script)
        self.bodies: list[dict[str, Any]] = []
        self.sessions: list[str | None] = []

    async def post(
        self, url: str, body: Any, *, headers: Mapping[str, str] | None = None, **_: Any
    ) -> Any:
        self.bodies.append(body)
        self.sessions.append((headers or {}).get(SESSION_HEADER))
        step = self.script.pop(0)
        if callable(step):
            step = step()
        if isinstance(step, Exception):
            raise step
        return step


def make_answer(
    ids: list[int],
    prompt: int,
    detailed: str = "length",
    extra: int = 0,
    *,
    version: int | None = 1,
    worker: int = 1,
) -> dict[str, Any]:
    """Return an answer that its worker has stamped with a version; without one it has not."""
    stamps = {} if version is None else {"engine_data": {"rollway_versions": [(0, version)]}}
    return {
        "choices": [{"finish_reason": "stop", "logprobs": {"token_logprobs": [-0.1] * len(ids)}}],
        "nvext": {
            "completion_token_ids": ids,
            "worker_id": {"decode_worker_id": worker},
            "detailed_finish_reason": detailed,
            **stamps,
        },
        "usage": {"prompt_tokens": prompt + extra, "completion_tokens": len(ids)},
    }


def make_versions(version: int = 1, *, tainted: bool = True) -> FleetVersions:
    versions = FleetVersions()
    versions.learn({1: version})
    versions.tainted = tainted
    return versions


async def test_a_rollout_cut_by_a_refit_resumes_with_the_new_weights() -> None:
    versions = make_versions()

    def cut() -> Any:
        versions.learn({1: 2})  # the refit ended before the answer arrived
        return make_answer([5, 6], 3, "cancelled")

    http = Scripted(cut, make_answer([7, 8, 9], 5, version=2))
    (rollout,) = await Rollouts(http, "http://f", "m", versions).generate(
        [1, 2, 3], Sampling(max_tokens=5)
    )
    assert rollout.token_ids == [5, 6, 7, 8, 9] and rollout.finish_reason == "length"
    assert [(s.start, s.end, s.version) for s in rollout.spans] == [(0, 2, 1), (2, 5, 2)]
    assert rollout.weight_version == 1
    first, second = http.bodies
    assert first["nvext"]["routing_constraints"] == {"required_taints": ["rollway-v1"]}
    assert second["nvext"]["routing_constraints"] == {"required_taints": ["rollway-v2"]}
    assert second["nvext"]["token_data"] == [1, 2, 3, 5, 6] and second["max_tokens"] == 3
    assert second["nvext"]["cache_salt"] == "v2"


async def test_an_abort_is_returned_as_such_only_to_a_caller_that_wants_it() -> None:
    http = Scripted(make_answer([5], 3, "cancelled"), make_answer([6], 4))
    rollouts = Rollouts(http, "http://f", "m", make_versions())
    (rollout,) = await rollouts.generate([1, 2, 3], Sampling(max_tokens=2))
    assert rollout.finish_reason == "length" and rollout.token_ids == [5, 6]
    http.script = [make_answer([5], 3, "cancelled")]
    rollouts.resumes = False
    (rollout,) = await rollouts.generate([1, 2, 3], Sampling(max_tokens=2))
    assert rollout.finish_reason == "aborted" and rollout.token_ids == [5]


async def test_a_rollout_that_is_aborted_whenever_it_is_sent_fails_when_patience_ends() -> None:
    http = Scripted(make_answer([5], 3, "cancelled"), *[make_answer([], 4, "cancelled")] * 50)
    rollouts = Rollouts(http, "http://f", "m", make_versions(), patience=0.5)
    with pytest.raises(RolloutError, match="abort this rollout whenever"):
        await rollouts.generate([1, 2, 3])
    assert 2 < len(http.bodies) < 10


class Streaming(Scripted):
    """A scripted frontend that streams its answers line by line."""

    @asynccontextmanager
    async def stream_lines(
        self, url: str, body: Any, **_: Any
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        step = await self.post(url, body)

        async def lines() -> AsyncIterator[bytes]:
            yield b"data: " + json.dumps(step).encode()
            yield b"data: [DONE]"

        yield lines()


async def test_a_stream_refused_before_it_begins_is_retried() -> None:
    refused = RequestFailed("answered 500: Failed to generate completions", status=500)
    http = Streaming(refused, make_answer([5, 6, 7], 3))
    stream = Rollouts(http, "http://f", "m", make_versions()).stream(
        [1, 2, 3], Sampling(max_tokens=3)
    )
    *tokens, rollout = [part async for part in stream]
    assert tokens == [[5, 6, 7]] and isinstance(rollout, Rollout)
    assert len(http.bodies) == 2
    http = Streaming(RequestFailed("answered 400", status=400))
    with pytest.raises(RolloutError, match="answered 400"):
        await anext(Rollouts(http, "http://f", "m", make_versions()).stream([1, 2, 3]))


async def test_a_stream_that_is_aborted_continues_within_its_patience() -> None:
    nothing = make_answer([], 4, "cancelled")
    http = Streaming(make_answer([5], 3, "cancelled"), nothing, make_answer([6], 4))
    rollouts = Rollouts(http, "http://f", "m", make_versions(), patience=0.5)
    stream = rollouts.stream([1, 2, 3], Sampling(max_tokens=2))
    *tokens, rollout = [part async for part in stream]
    assert tokens == [[5], [6]] and isinstance(rollout, Rollout)
    assert rollout.finish_reason == "length"
    http.script = [make_answer([], 3, "cancelled")] * 50
    with pytest.raises(RolloutError, match="abort this rollout whenever"):
        await anext(rollouts.stream([1, 2, 3]))
    assert len(http.bodies) < 13


async def test_a_rollout_is_in_flight_from_its_request_to_its_result() -> None:
    """A caller that cancels only rollouts that are not in flight loses no token."""
    seen: list[int] = []

    def respond() -> Any:
        seen.append(rollouts.in_flight)
        return make_answer([5], 3, version=None)  # so that its worker is asked

    async def still_serves(*_: Any) -> bool:
        seen.append(rollouts.in_flight)
        return True

    versions = make_versions()
    rollouts = Rollouts(Scripted(respond), "http://f", "m", versions, still_serves=still_serves)
    versions.close()
    waiting = asyncio.create_task(rollouts.generate([1, 2, 3]))
    assert await stays_async(lambda: rollouts.in_flight == 0, 0.01)
    versions.open()
    await waiting
    assert seen == [1, 1] and rollouts.in_flight == 0


# --- which answers count ----------------------------------------------------------------------


async def sample_until_stamped(versions: FleetVersions, first: dict[str, Any]) -> int | None:
    """Sample from a fleet that gives this answer first, and then one that is stamped. Return the
    worker whose answer was used."""
    http = Scripted(first, make_answer([8, 9, 9], 3, worker=99))
    (rollout,) = await Rollouts(http, "http://f", "m", versions).generate([1, 2, 3])
    assert rollout.weight_version == 1
    return rollout.worker_id


async def test_an_answer_of_a_managed_worker_counts_only_with_a_stamp() -> None:
    """Its engine had no label, so it admitted any version, whatever the worker says of itself."""
    versions = make_versions()
    assert await sample_until_stamped(versions, make_answer([5, 6, 7], 3)) == 1
    assert await sample_until_stamped(versions, make_answer([5, 6, 7], 3, version=None)) == 99


async def test_an_answer_of_an_unknown_worker_counts_only_with_a_stamp() -> None:
    """It has joined a moment ago, and may have had other weights."""
    for is_foreign in (False, True):
        versions = make_versions()
        versions.note_facts(7, is_foreign=is_foreign)
        unstamped = make_answer([5, 6, 7], 3, version=None, worker=7)
        assert await sample_until_stamped(versions, unstamped) == 99
        assert await sample_until_stamped(versions, make_answer([5, 6, 7], 3, worker=7)) == 7


async def test_an_answer_of_a_foreign_worker_counts_while_it_serves_the_version() -> None:
    versions = make_versions()
    versions.note_facts(1, is_foreign=True)
    unstamped = make_answer([5, 6, 7], 3, version=None)
    assert await sample_until_stamped(versions, unstamped) == 1

    def refit() -> Any:
        versions.mark_issued(1)
        versions.mark_serving(1, 1)
        return unstamped

    http = Scripted(refit, unstamped)
    (rollout,) = await Rollouts(http, "http://f", "m", versions).generate([1, 2, 3])
    assert rollout.worker_id == 1 and len(http.bodies) == 2


@pytest.mark.parametrize("is_foreign", [True, False])
@pytest.mark.parametrize("version", [1, None])
async def test_an_answer_that_migrated_does_not_count(
    is_foreign: bool, version: int | None
) -> None:
    """Only the last worker's part may have been stamped. That worker counts the tokens of the dead
    one as prompt."""
    versions = make_versions()
    versions.note_facts(1, is_foreign=is_foreign)
    migrated = make_answer([5, 6, 7], 3, extra=2, version=version)
    assert await sample_until_stamped(versions, migrated) == 99


async def test_rollouts_without_stamps_fail_when_patience_ends() -> None:
    http = Scripted(*[make_answer([5], 3, version=None)] * 50)
    rollouts = Rollouts(http, "http://f", "m", make_versions(), patience=0.5)
    with pytest.raises(RolloutError, match="attributed to one weight version"):
        await rollouts.generate([1, 2, 3])


@pytest.mark.parametrize("answer", [{"version": None}, {"extra": 2}])
async def test_a_stream_without_a_certain_version_raises(answer: dict[str, Any]) -> None:
    """Its caller has seen the tokens, so they cannot be sampled again."""
    http = Streaming(make_answer([5, 6, 7], 3, **answer))
    stream = Rollouts(http, "http://f", "m", make_versions()).stream([1, 2, 3])
    assert await anext(stream) == [5, 6, 7]
    with pytest.raises(RolloutError, match="its version is not certain"):
        await anext(stream)


async def test_only_workers_that_may_stamp_are_asked_to() -> None:
    versions = make_versions()
    for is_foreign in (False, True):
        versions.note_facts(1, is_foreign=is_foreign)
        http = Scripted(make_answer([5], 3))
        await Rollouts(http, "http://f", "m", versions).generate([1, 2, 3])
        fields = http.bodies[0]["nvext"]["extra_fields"]
        assert ("rollway_versions" in fields) is not is_foreign


async def test_an_answer_to_another_prompt_is_refused() -> None:
    http = Scripted(make_answer([5], 3, extra=2))
    with pytest.raises(RolloutError, match="counted 5 prompt tokens, not 3"):
        await Rollouts(http, "http://f", "m", make_versions()).generate([1, 2, 3])


async def test_the_last_error_is_raised_when_patience_ends() -> None:
    no_worker = RequestFailed("answered 500: no worker", status=500)
    http = Scripted(*[no_worker] * 50)
    with pytest.raises(RolloutError, match="answered 500"):
        await Rollouts(http, "http://f", "m", make_versions(), patience=0.5).generate([1])
    assert 1 < len(http.bodies) < 10


async def test_a_version_that_no_worker_serves_is_refused() -> None:
    rollouts = Rollouts(Scripted(), "http://f", "m", make_versions(), patience=0.1)
    with pytest.raises(RolloutError, match="No worker serves weight version 7: the fleet's is 1"):
        await rollouts.generate([1], version=7)


def encode_experts(rows: int, first: int) -> dict[str, Any]:
    """Encode one layer and one expert per token, counted from `first` to tell the legs apart."""
    data = bytes(first + row for row in range(rows))
    return {"data": base64.b64encode(data).decode(), "shape": [rows, 1, 1], "start": 0}


async def test_experts_of_an_earlier_leg_are_kept() -> None:
    """After a cut the engine reports the whole prompt again; the first leg keeps its own record."""
    versions = make_versions()

    def cut() -> Any:
        versions.learn({1: 2})
        body = make_answer([5, 6], 3, "cancelled")
        body["nvext"]["routed_experts"] = encode_experts(4, 10)  # 3 + 2 tokens; the last has no row
        return body

    second = make_answer([7], 5, version=2)
    second["nvext"]["routed_experts"] = encode_experts(5, 50)
    http = Scripted(cut, second)
    sampling = Sampling(max_tokens=3, routed_experts=True)
    (rollout,) = await Rollouts(http, "http://f", "m", versions).generate([1, 2, 3], sampling)
    assert rollout.routed_experts is not None
    assert rollout.routed_experts.ids.flatten().tolist() == [10, 11, 12, 13, 54]
    assert "routed_experts" in http.bodies[0]["nvext"]["extra_fields"]

    for wrong in (None, encode_experts(1, 0)):
        body = make_answer([5], 3)
        body["nvext"]["routed_experts"] = wrong
        with pytest.raises(RolloutError, match="outed experts"):
            await Rollouts(Scripted(body), "http://f", "m", make_versions()).generate(
                [1, 2, 3], sampling
            )


async def test_experts_that_the_kernel_did_not_report_are_refused() -> None:
    """Zeros are an expert, too: a trainer that replays them would train expert 0 alone."""
    zeros = {"data": base64.b64encode(bytes(3 * 2 * 2)).decode(), "shape": [3, 2, 2]}
    one_row = bytes([1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0])
    partly = {"data": base64.b64encode(one_row).decode(), "shape": [3, 2, 2]}
    sampling = Sampling(max_tokens=3, routed_experts=True)
    for wrong, message in ((zeros, "all 0"), (partly, r"1 of 3 rows .* \[0, 0\] at position 2")):
        body = make_answer([5], 3)
        body["nvext"]["routed_experts"] = wrong
        with pytest.raises(RolloutError, match=message + ".*moe-backend: triton"):
            await Rollouts(Scripted(body), "http://f", "m", make_versions()).generate(
                [1, 2, 3], sampling
            )
    # The only expert, or the first of several that the router chose: with top-1, 0 may be right.
    body = make_answer([5], 3)
    body["nvext"]["routed_experts"] = {**zeros, "shape": [3, 4, 1]}
    client = Rollouts(Scripted(body), "http://f", "m", make_versions())
    (rollout,) = await client.generate([1, 2, 3], sampling)
    assert rollout.routed_experts is not None and not rollout.routed_experts.ids.any()


async def test_only_groups_have_a_session() -> None:
    """The frontend holds so many: a session that no second request has would take a place."""
    http = Scripted(*(make_answer([5], 3) for _ in range(4)))
    rollouts = Rollouts(http, "http://f", "m", make_versions())
    await rollouts.generate([1, 2, 3], Sampling(max_tokens=1))
    await rollouts.generate([1, 2, 3], Sampling(max_tokens=1), group="mine")
    await rollouts.generate([1, 2, 3], Sampling(max_tokens=1), n=2)
    first, second, *both = http.sessions
    assert (first, second) == (None, "mine")
    assert None not in both and len(set(both)) == 1


async def test_a_frontend_that_is_full_of_sessions_gets_none_for_a_while() -> None:
    full = RequestFailed("Service temporarily overloaded", status=529)
    http = Scripted(full, *(make_answer([5], 3) for _ in range(2)))
    # Without patience: a wait before the second request would be an error.
    rollouts = Rollouts(http, "http://f", "m", make_versions(), patience=0.0)
    for _ in range(2):
        (rollout,) = await rollouts.generate([1, 2, 3], Sampling(max_tokens=1), group="mine")
        assert rollout.token_ids == [5]
    assert http.sessions == ["mine", None, None]
    http.script = [full]
    with pytest.raises(RolloutError, match="overloaded"):
        await rollouts.generate([1, 2, 3], Sampling(max_tokens=1), group="mine")
