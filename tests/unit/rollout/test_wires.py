"""Whatever a server answers, on whichever wire: a rollout that adds up, or a typed error."""

from __future__ import annotations

import copy
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollway.errors import RequestFailed, RolloutError, UsageError
from rollway.gateway.upstream import CHAT
from rollway.http import Http
from rollway.rollout.client import Rollouts, events
from rollway.rollout.sampling import Sampling
from rollway.rollout.teacher import _read, flatten
from rollway.rollout.wire import COMPLETIONS, GENERATE, VLLM, Wire, wire_named
from rollway.versions import FleetVersions
from tests.unit.rollout.headers import JSON

SAMPLING = Sampling(max_tokens=4)
USAGE = {"prompt_tokens": 3, "completion_tokens": 2}
NVEXT = {
    "completion_token_ids": [5, 6],
    "worker_id": {"decode_worker_id": 2**63 + 1},
    "detailed_finish_reason": "length",
}
GOOD: dict[str, Any] = {
    COMPLETIONS.name: {
        "choices": [{"finish_reason": "length", "logprobs": {"token_logprobs": [-0.5, -1.0]}}],
        "nvext": NVEXT,
        "usage": USAGE,
    },
    VLLM.name: {
        "choices": [
            {
                "finish_reason": "length",
                "token_ids": [5, 6],
                "logprobs": {"token_logprobs": [-0.5, -1.0]},
            }
        ],
        "usage": USAGE,
    },
    GENERATE.name: {
        "choices": [
            {
                "finish_reason": "length",
                "token_ids": [5, 6],
                "logprobs": {
                    "content": [
                        {"token": "token_id:5", "logprob": -0.5},
                        {"token": "token_id:6", "logprob": -1.0},
                    ]
                },
            }
        ]
    },
    CHAT.name: {
        "choices": [
            {
                "finish_reason": "length",
                "logprobs": {
                    "content": [
                        {"token_id": 5, "logprob": -0.5},
                        {"token_id": 6, "logprob": -1.0},
                    ]
                },
            }
        ],
        "nvext": NVEXT,
        "usage": USAGE,
    },
}
WIRES = [COMPLETIONS, VLLM, GENERATE, CHAT]
each_wire = pytest.mark.parametrize("wire", WIRES, ids=[wire.name for wire in WIRES])


def read(wire: Wire, body: Any) -> Any:
    assembly = wire.assembly(SAMPLING, 3)
    assembly.add(body)
    return assembly.finish()


@each_wire
def test_a_good_answer_is_read(wire: Wire) -> None:
    found = read(wire, GOOD[wire.name])
    assert (found.token_ids, found.logprobs) == ([5, 6], [-0.5, -1.0])
    assert found.finish_reason == "length"
    assert found.worker_id == (2**63 + 1 if wire.routed else None)


@each_wire
@given(JSON)
def test_any_json_is_refused(wire: Wire, body: Any) -> None:
    with pytest.raises(RolloutError):
        read(wire, body)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value."""
    if path:
        yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from places(inner, (*path, index))


@each_wire
@given(st.data())
def test_any_place_may_hold_anything(wire: Wire, data: st.DataObject) -> None:
    """Nulls, floats for ids, wrong lengths, other types: in one place of a good answer."""
    body = copy.deepcopy(GOOD[wire.name])
    *parents, last = data.draw(st.sampled_from(list(places(body))))
    target: Any = body
    for parent in parents:
        target = target[parent]
    if data.draw(st.booleans()):
        target[last] = data.draw(JSON)
    elif isinstance(target, dict):
        del target[last]
    else:
        target.append(target[last])
    try:
        found = read(wire, body)
    except RolloutError:
        return
    assert all(type(token) is int for token in found.token_ids)
    assert len(found.logprobs) == len(found.token_ids)
    assert all(isinstance(logprob, float) for logprob in found.logprobs)


@each_wire
def test_logprobs_of_other_tokens_are_refused(wire: Wire) -> None:
    text = json.dumps(GOOD[wire.name])
    other = text.replace("token_id:6", "token_id:7").replace('"token_id": 6', '"token_id": 7')
    if other == text:
        pytest.skip("this wire does not name them")
    with pytest.raises(RolloutError, match="other tokens"):
        read(wire, json.loads(other))


async def streamed(raw: bytes) -> list[Any]:
    async def lines() -> AsyncIterator[bytes]:
        for line in raw.splitlines(keepends=True):
            yield line

    return [event async for event in events(lines())]


async def test_a_stream_is_read_to_its_end() -> None:
    event = b'data: {"choices": []}\n\n'
    assert len(await streamed(event * 3 + b": ping\n\ndata: [DONE]\n")) == 3
    long = b'data: {"choices": [], "x": "' + b"a" * 2**20 + b'"}\n'
    assert len(await streamed(long + b"data: [DONE]\n")) == 1
    for broken in (event, b"data: {", event + b'data: {"error": "no"}\n', b"data: [1, 2\n"):
        with pytest.raises(RolloutError):
            await streamed(broken)


@given(st.binary(max_size=200))
def test_a_stream_of_anything_is_read_or_refused(raw: bytes) -> None:
    import asyncio

    try:
        asyncio.run(streamed(raw))
    except RolloutError:
        return


def test_the_token_itself_is_scored_and_never_the_first_entry() -> None:
    raw = [None, {"9": {"logprob": -0.1, "rank": 1}, "5": {"logprob": -3.0}}, {6: -2.0}, -1.5]
    assert flatten(raw, [4, 5, 6, 7]) == [None, -3.0, -2.0, -1.5]
    for wrong in (
        [None, {"9": {"logprob": -0.1}}],
        [None, None],
        [None],
        None,
        [None, {"5": {"logprob": float("nan")}}],
        [None, {"5": {"logprob": True}}],
        [None, {"5": {}}],
    ):
        with pytest.raises(RolloutError):
            flatten(wrong, [4, 5])


@given(JSON, JSON)
def test_any_scores_are_read_or_refused(raw: Any, entry: Any) -> None:
    for body in (raw, {"prompt_logprobs": raw}, {"nvext": {"prompt_logprobs": [None, entry]}}):
        try:
            found = flatten(_read(body)[0], [4, 5])
        except RolloutError:
            continue
        assert found[0] is None and isinstance(found[1], float)


def test_a_wire_that_does_not_exist_is_named() -> None:
    with pytest.raises(UsageError, match="no wire `carrier pigeon`"):
        wire_named("carrier pigeon")


async def test_a_route_that_is_not_there_is_said_at_once() -> None:
    class Missing(Http):
        async def post(self, url: str, body: Any, **_: Any) -> Any:
            raise RequestFailed("no such route", status=404)

    rollouts = Rollouts(Missing(), "http://f", "m", FleetVersions(), wire=GENERATE)
    with pytest.raises(RolloutError, match="has no route") as refused:
        await rollouts.generate([1])
    assert "DYN_VLLM_ENABLE_INFERENCE_V1_GENERATE" in refused.value.hint
