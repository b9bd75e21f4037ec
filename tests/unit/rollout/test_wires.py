"""Every wire returns a consistent rollout or raises a typed error, whatever the server answers."""

from __future__ import annotations

import copy
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollway.errors import RolloutError, UsageError
from rollway.gateway.upstream import CHAT
from rollway.rollout.sampling import Sampling
from rollway.rollout.sender import events
from rollway.rollout.teacher import flatten
from rollway.rollout.wire import COMPLETIONS, VLLM, Wire, get_wire
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
WIRES = [COMPLETIONS, VLLM, CHAT]
for_every_wire = pytest.mark.parametrize("wire", WIRES, ids=[wire.name for wire in WIRES])


def read_answer(wire: Wire, body: Any) -> Any:
    assembly = wire.assembly(SAMPLING, 3)
    assembly.add(body)
    return assembly.finish()


@for_every_wire
def test_a_good_answer_is_read(wire: Wire) -> None:
    completion = read_answer(wire, GOOD[wire.name])
    assert (completion.token_ids, completion.logprobs) == ([5, 6], [-0.5, -1.0])
    assert completion.finish_reason == "length"
    assert completion.worker_id == (2**63 + 1 if wire.routed else None)


@for_every_wire
@given(JSON)
def test_arbitrary_json_is_refused(wire: Wire, body: Any) -> None:
    with pytest.raises(RolloutError):
        read_answer(wire, body)


def iterate_paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value inside a JSON value."""
    if path:
        yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from iterate_paths(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from iterate_paths(inner, (*path, index))


@for_every_wire
@given(st.data())
def test_an_answer_with_one_arbitrary_value_is_read_or_refused(
    wire: Wire, data: st.DataObject
) -> None:
    """Replace, remove or repeat one value of a valid answer."""
    body = copy.deepcopy(GOOD[wire.name])
    *parents, last = data.draw(st.sampled_from(list(iterate_paths(body))))
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
        completion = read_answer(wire, body)
    except RolloutError:
        return
    assert all(type(token) is int for token in completion.token_ids)
    assert len(completion.logprobs) == len(completion.token_ids)
    assert all(isinstance(logprob, float) for logprob in completion.logprobs)


@for_every_wire
def test_logprobs_of_other_tokens_are_refused(wire: Wire) -> None:
    text = json.dumps(GOOD[wire.name])
    changed = text.replace('"token_id": 6', '"token_id": 7')
    if changed == text:
        pytest.skip("this wire does not name the tokens of its log-probs")
    with pytest.raises(RolloutError, match="other tokens"):
        read_answer(wire, json.loads(changed))


async def read_stream(raw: bytes) -> list[Any]:
    async def lines() -> AsyncIterator[bytes]:
        for line in raw.splitlines(keepends=True):
            yield line

    return [event async for event in events(lines())]


async def test_a_stream_is_read_to_its_end() -> None:
    event = b'data: {"choices": []}\n\n'
    assert len(await read_stream(event * 3 + b": ping\n\ndata: [DONE]\n")) == 3
    long = b'data: {"choices": [], "x": "' + b"a" * 2**20 + b'"}\n'
    assert len(await read_stream(long + b"data: [DONE]\n")) == 1
    for broken in (event, b"data: {", event + b'data: {"error": "no"}\n', b"data: [1, 2\n"):
        with pytest.raises(RolloutError):
            await read_stream(broken)


@given(st.binary(max_size=200))
def test_a_stream_of_arbitrary_bytes_is_read_or_refused(raw: bytes) -> None:
    import asyncio

    try:
        asyncio.run(read_stream(raw))
    except RolloutError:
        return


def test_the_score_is_that_of_the_token_and_not_of_the_first_entry() -> None:
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


PLACES: dict[str, tuple[str | int, ...]] = {
    COMPLETIONS.name: ("nvext",),
    VLLM.name: ("choices", 0),
}


@pytest.mark.parametrize("wire", [COMPLETIONS, VLLM], ids=list(PLACES))
@given(JSON, JSON)
def test_arbitrary_scores_are_read_or_refused(wire: Wire, raw: Any, entry: Any) -> None:
    for scores in (raw, [None, entry], [None, {"5": -0.5}]):
        body = copy.deepcopy(GOOD[wire.name])
        place: Any = body
        for key in PLACES[wire.name]:
            place = place[key]
        place["prompt_logprobs"] = scores
        try:
            logprobs = flatten(read_answer(wire, body).prompt_logprobs, [4, 5])
        except RolloutError:
            continue
        assert logprobs[0] is None and isinstance(logprobs[1], float)
    assert logprobs == [None, -0.5]


def test_the_error_names_an_unknown_wire() -> None:
    with pytest.raises(UsageError, match="no wire `carrier pigeon`"):
        get_wire("carrier pigeon")
